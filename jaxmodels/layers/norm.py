"""Normalisation layers with the constants and the order of operations that PyTorch uses."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

EPSILON = 1e-5  # PyTorch's default for LayerNorm, GroupNorm and torchvision's FrozenBatchNorm2d


class Buffer(nnx.Variable):
    """A tensor of a checkpoint that no optimizer may change."""


def layer_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # The fast variance E[x^2] - E[x]^2 loses digits where the mean is large; PyTorch does not use it.
    return nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)


def group_norm(width: int, groups: int, *, rngs: nnx.Rngs) -> nnx.GroupNorm:
    return nnx.GroupNorm(width, groups, epsilon=EPSILON, rngs=rngs)


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
