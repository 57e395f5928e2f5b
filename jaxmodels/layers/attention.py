"""Multi-head attention, over the same tokens or over others."""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.layers.dropout import dropout

# Xavier over the joint query-key-value matrix, as torch.nn.MultiheadAttention starts: fan_out is three widths.
_joint_init = nnx.initializers.variance_scaling(0.5, "fan_avg", "uniform")
_xavier_init = nnx.initializers.xavier_uniform()


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None = None,
    rate: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> Float[Array, "b n heads k"]:
    """Softmax attention; `bias` is added to the scores (-inf leaves a key out), `rate` drops probabilities."""
    scores = jnp.einsum("bnhk,bmhk->bhnm", query / math.sqrt(query.shape[-1]), key)
    if bias is not None:
        scores = scores + bias
    # Softmax in float32: with bfloat16 scores the sum over hundreds of keys loses too much.
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(value.dtype)
    return jnp.einsum("bhnm,bmhk->bnhk", dropout(weights, rate, rngs), value)


class Attention(nnx.Module):
    """Projections to queries, keys and values, attention, and the projection back.

    Args:
        width: d, the width of the queries' tokens and of what comes out.
        heads: number of heads.
        head_width: channels per head; `width / heads` when None.
        context_width: width of the tokens that keys and values are made of; `width` when None.
        bias: whether query, key and value projections have a bias (the way out always has one).
        rate: share of attention probabilities dropped in training.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int | None = None,
        context_width: int | None = None,
        bias: bool = True,
        rate: float = 0.0,
        rngs: nnx.Rngs,
    ):
        inner = heads * (head_width or width // heads)
        context = context_width or width
        self.heads = heads
        self.rate = rate
        self.query = nnx.Linear(width, inner, use_bias=bias, kernel_init=_joint_init, rngs=rngs)
        self.key = nnx.Linear(context, inner, use_bias=bias, kernel_init=_joint_init, rngs=rngs)
        self.value = nnx.Linear(context, inner, use_bias=bias, kernel_init=_joint_init, rngs=rngs)
        self.out = nnx.Linear(inner, width, kernel_init=_xavier_init, rngs=rngs)

    def __call__(
        self,
        query: Float[Array, "b n d"],
        key: Float[Array, "b m c"],
        value: Float[Array, "b m c"],
        bias: Float[Array, "#b #heads #n m"] | None = None,
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
