"""Attention by batched products over all heads: dropout, small shapes, and processors without a kernel of their own."""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers.dropout import dropout

# Scores in memory at once: 1 GiB of float32.
SCORES = 1 << 28


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None,
    rate: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> Float[Array, "b n heads k"]:
    """Attention with all scores in memory at once; `rate` drops probabilities where there are `rngs`."""
    scores = jnp.einsum("bnhk,bmhk->bhnm", query, key, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    powers, total = exponents(scores)
    kept = dropout(powers, rate, rngs).astype(value.dtype)
    mixed = jnp.einsum("bhnm,bmhk->bhnk", kept, value, preferred_element_type=jnp.float32) / total
    return jnp.swapaxes(mixed, 1, 2).astype(query.dtype)


def exponents(scores: Float[Array, "... n m"]) -> tuple[Float[Array, "... n m"], Float[Array, "... n 1"]]:
    """A softmax before its division, which costs less once the values are mixed; and what to divide by."""
    # The same shift for a whole row changes no softmax, and so no gradient either.
    powers = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    return powers, powers.sum(axis=-1, keepdims=True)


def attend_in_parts(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None,
) -> Float[Array, "b n heads k"]:
    """Attention for some queries after the other, so that no more than `SCORES` scores are in memory at once."""
    batch, length, heads, _ = query.shape
    parts = min(length, math.ceil(batch * heads * length * key.shape[1] / SCORES))
    if parts == 1:
        return attend(query, key, value, bias)
    queries = split_queries(query, 1, parts)
    biases = None if bias is None or bias.shape[2] == 1 else split_queries(bias, 2, parts)

    @jax.checkpoint
    def one(part: tuple[Array, Array | None]) -> Array:
        return attend(part[0], key, value, bias if part[1] is None else part[1])

    return rearrange(lax.map(one, (queries, biases)), "i b n h k -> b (i n) h k")[:, :length]


def split_queries(x: Float[Array, "..."], axis: int, parts: int) -> Float[Array, "parts ..."]:
    """`x` in equal parts along one axis, in front; zeros fill up the last."""
    size = math.ceil(x.shape[axis] / parts)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, parts * size - x.shape[axis])
    shape = (*x.shape[:axis], parts, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.pad(x, padding).reshape(shape), axis, 0)
