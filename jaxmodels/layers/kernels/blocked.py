"""Attention for CPUs: where there is much of it, one head and one block of queries at a time.

In two-dimensional products, which XLA joins with the softmax to few and fast passes; and a block's scores stay in the
cache between the first product and the second. The limits below were measured with 16 to 4096 queries and keys, on
two cores with 1 MB of cache each.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers.kernels.whole import attend as attend_whole
from jaxmodels.layers.kernels.whole import exponents, split_queries

# Up to so many scores per head, or in all heads: one batched product, because less time goes into starting products.
BATCHED_PER_HEAD = 1 << 16
BATCHED = 1 << 22
# Up to so many scores per head and so many heads: these are written out one by one, without a loop's copies.
WRITTEN_OUT_PER_HEAD = 1 << 19
WRITTEN_OUT_HEADS = 16
# Scores in a block of a loop, unless that makes it shorter than so many queries: products of few rows are slow.
SCORES = 1 << 19
QUERIES = 256


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None,
) -> Float[Array, "b n heads k"]:
    """Attention that holds the scores of one block in memory, and computes them again on the way back."""
    batch, length, heads, _ = query.shape
    scores = length * key.shape[1]
    if scores <= BATCHED_PER_HEAD:
        return attend_whole(query, key, value, bias)
    if scores <= WRITTEN_OUT_PER_HEAD and batch * heads <= WRITTEN_OUT_HEADS:
        return _attend_head_by_head(query, key, value, bias)
    if batch * heads * scores <= BATCHED:
        return attend_whole(query, key, value, bias)
    return _attend_in_loops(query, key, value, bias)


def _attend_in_loops(query: Array, key: Array, value: Array, bias: Array | None) -> Array:
    """Over the heads, and within over blocks of queries."""
    batch, length, heads, _ = query.shape
    count = math.ceil(length / max(QUERIES, SCORES // key.shape[1]))
    queries, keys, values = (jnp.swapaxes(x, 1, 2).reshape(batch * heads, -1, x.shape[-1]) for x in (query, key, value))

    def head(inputs: tuple[Array, Array, Array, Array]) -> Array:
        place, query, key, value = inputs
        own = None if bias is None else bias[place // heads % bias.shape[0], place % heads % bias.shape[1]]
        blocks = split_queries(query, 0, count)
        biases = None if own is None or len(own) == 1 else split_queries(own, 0, count)

        def block(part: tuple[Array, Array | None]) -> Array:
            return _attend_block(part[0], key, value, own if part[1] is None else part[1])

        return lax.map(block, (blocks, biases)).reshape(-1, query.shape[-1])[:length]

    mixed = lax.map(head, (jnp.arange(batch * heads), queries, keys, values))
    return jnp.swapaxes(mixed.reshape(batch, heads, length, -1), 1, 2)


def _attend_head_by_head(query: Array, key: Array, value: Array, bias: Array | None) -> Array:
    def head(i: int, j: int) -> Array:
        own = None if bias is None else bias[i % bias.shape[0], j % bias.shape[1]]
        return _attend_block(query[i, :, j], key[i, :, j], value[i, :, j], own)

    batch, _, heads, _ = query.shape
    return jnp.stack([jnp.stack([head(i, j) for j in range(heads)], axis=1) for i in range(batch)])


@jax.checkpoint
def _attend_block(
    query: Float[Array, "n k"], key: Float[Array, "m k"], value: Float[Array, "m k"], bias: Float[Array, "#n m"] | None
) -> Float[Array, "n k"]:
    scores = jnp.matmul(query, key.T, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    powers, total = exponents(scores)
    mixed = jnp.matmul(powers.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return (mixed / total).astype(query.dtype)
