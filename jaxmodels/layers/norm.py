"""Normalisation layers with the constants and the order of operations that PyTorch uses."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

EPSILON = 1e-5  # PyTorch's default for LayerNorm, GroupNorm and torchvision's FrozenBatchNorm2d


class Buffer(nnx.Variable):
    """A tensor of a checkpoint that no optimizer may change."""


def layer_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The fast variance E[x^2] - E[x]^2 loses digits where the mean is large; PyTorch does not use it.
    return nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)


class GroupNorm(nnx.Module):
    """Normalisation over pixels and neighbouring channels, in float32 whatever comes in."""

    def __init__(self, width: int, groups: int):
        self.groups = groups
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        wide = x.astype(jnp.float32)
        centred = wide - self._mean(wide)
        normal = centred * lax.rsqrt(self._mean(jnp.square(centred)) + EPSILON)
        return normal.astype(x.dtype) * self.scale[...] + self.bias[...]

    def _mean(self, x: Float[Array, "b h w c"]) -> Float[Array, "b 1 1 c"]:
        """The group's mean at each of its channels; pixels first, which keeps the large array in its layout."""
        groups = rearrange(x.mean(axis=(1, 2)), "b (g c) -> b g c", g=self.groups).mean(axis=-1)
        return jnp.repeat(groups, x.shape[-1] // self.groups, axis=-1)[:, None, None]


class FrozenBatchNorm(nnx.Module):
    """Batch norm whose statistics and weights are fixed: one multiply-add per channel.

    Source: torchvision/ops/misc.py, FrozenBatchNorm2d.
    """

    def __init__(self, width: int):
        self.scale = Buffer(jnp.ones(width))
        self.bias = Buffer(jnp.zeros(width))
        self.mean = Buffer(jnp.zeros(width))
        self.variance = Buffer(jnp.ones(width))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        scale = self.scale[...] * lax.rsqrt(self.variance[...] + EPSILON)
        return x * scale + (self.bias[...] - self.mean[...] * scale)
