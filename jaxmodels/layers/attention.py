"""Multi-head self- and cross-attention."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers import attention_kernels
from jaxmodels.layers.attention_kernels import Bias, Keys, Queries

# torch.nn.MultiheadAttention's default: Xavier over the joint query-key-value matrix, whose fan_out is three widths.
_joint_init = nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform")
_xavier_init = nnx.initializers.xavier_uniform()


def attend(
    query: Queries,
    key: Keys,
    value: Keys,
    bias: Bias | None = None,
    rate: float = 0.0,
    rngs: nnx.Rngs | None = None,
    *,
    scale: float | None = None,
) -> Queries:
    """Softmax attention by the kernel that is fastest for these shapes on the platform it is lowered for.

    The softmax is in float32. Without dropout, many scores are never in memory at once.

    Args:
        bias: added to the scores (-inf excludes a key); a constant without a gradient.
        rate: share of the probabilities that is dropped if `rngs` is given; all scores are then in memory at once.
        scale: factor of the scores; 1 / sqrt(k) when None.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if scale != 1.0:
        query = query * jnp.asarray(scale, query.dtype)
    if bias is not None:
        bias = lax.stop_gradient(bias)  # cuDNN has no gradient for a bias that is broadcast.
    if rngs is not None and rate > 0.0:
        return attention_kernels.attend_whole(query, key, value, bias, rate, rngs)
    own: dict[str, Callable[..., Array]] = {"cpu": attention_kernels.attend_blocked}
    if attention_kernels.is_cudnn_supported(query, key, bias):
        own["cuda"] = attention_kernels.attend_cudnn
    if attention_kernels.is_flash_supported(query, key, bias):
        own["tpu"] = attention_kernels.attend_flash
    return lax.platform_dependent(query, key, value, bias, default=attention_kernels.attend_in_parts, **own)


class Attention(nnx.Module):
    """Multi-head attention over `width` channels (a multiple of `heads`); `rate` is the dropout of probabilities."""

    def __init__(self, width: int, heads: int, *, rate: float = 0.0, rngs: nnx.Rngs):
        self.heads = heads
        self.rate = rate
        self.query = nnx.Linear(width, width, kernel_init=_joint_init, rngs=rngs)
        self.key = nnx.Linear(width, width, kernel_init=_joint_init, rngs=rngs)
        self.value = nnx.Linear(width, width, kernel_init=_joint_init, rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=_xavier_init, rngs=rngs)

    def __call__(
        self,
        query: Float[Array, "b n d"],
        key: Float[Array, "b m d"],
        value: Float[Array, "b m d"],
        bias: Bias | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        split = "b n (h k) -> b n h k"
        mixed = attend(
            rearrange(self.query(query), split, h=self.heads),
            rearrange(self.key(key), split, h=self.heads),
            rearrange(self.value(value), split, h=self.heads),
            bias,
            self.rate,
            rngs,
        )
        return self.out(rearrange(mixed, "b n h k -> b n (h k)"))
