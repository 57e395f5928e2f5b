"""Normalization layers with PyTorch's constants and order of operations."""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

EPSILON = 1e-5  # PyTorch's default for LayerNorm, GroupNorm and torchvision's FrozenBatchNorm2d


class Buffer(nnx.Variable):
    """A variable of a checkpoint that optimizers do not change."""


def standardize(x: Float[Array, "... d"], epsilon: float) -> Float[Array, "... d"]:
    """Scale each row to mean 0 and variance 1, in float32.

    The mean is taken off before squaring: E[x^2] - E[x]^2 loses digits where the mean is large.
    """
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + epsilon)


class LayerNorm(nnx.Module):
    """Layer normalisation over the width of each token, in float32; also its output with `keeps_float32`.

    Args:
        epsilon: added to the variance.
        affine: whether there is a scale and a bias per channel.
        keeps_float32: give float32 whatever comes in, for a modulation that follows.
    """

    def __init__(
        self,
        width: int,
        *,
        epsilon: float = EPSILON,
        affine: bool = True,
        keeps_float32: bool = False,
        param_dtype: DTypeLike = jnp.float32,
    ):
        self.epsilon = epsilon
        self.keeps_float32 = keeps_float32
        self.scale = nnx.Param(jnp.ones(width, param_dtype), axes=("embed",)) if affine else None
        self.bias = nnx.Param(jnp.zeros(width, param_dtype), axes=("embed",)) if affine else None

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        normal = standardize(x, self.epsilon)
        if self.scale is not None and self.bias is not None:
            normal = normal * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return normal if self.keeps_float32 else normal.astype(x.dtype)


class GroupNorm(nnx.Module):
    """Group normalisation over pixels and neighbouring channels, in float32."""

    def __init__(self, width: int, groups: int, *, epsilon: float = EPSILON, param_dtype: DTypeLike = jnp.float32):
        self.groups = groups
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width, param_dtype), axes=("channels",))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype), axes=("channels",))

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        wide = x.astype(jnp.float32)
        centred = wide - self._mean(wide)
        normal = centred * lax.rsqrt(self._mean(jnp.square(centred)) + self.epsilon)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (normal * scale + bias).astype(x.dtype)

    def _mean(self, x: Float[Array, "b h w c"]) -> Float[Array, "b 1 1 c"]:
        """The group's mean at each of its channels; pixels first, which keeps the large array in its layout."""
        groups = rearrange(x.mean(axis=(1, 2)), "b (g c) -> b g c", g=self.groups).mean(axis=-1)
        return jnp.repeat(groups, x.shape[-1] // self.groups, axis=-1)[:, None, None]


class FrozenBatchNorm(nnx.Module):
    """Batch normalisation with fixed statistics and weights: one multiply-add per channel.

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
