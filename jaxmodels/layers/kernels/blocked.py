"""Attention for CPUs: one head and one block of queries at a time, in two-dimensional products.

Scores stand with a key in each row and a query in each column: that way both products run along the rows of their
arrays, and the maximum and the sum over the keys add whole rows.
"""

import math

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

# Scores per block: 4 MB of float32, which is still in the cache when the second product reads it.
SCORES = 1 << 20
LANES = 16


def block_of(queries: int, keys: int) -> tuple[int, int]:
    """How many blocks, and how many queries in each: equal ones, as few as leave no more than `SCORES` scores each."""
    largest = max(LANES, SCORES // keys)
    count = math.ceil(queries / largest)
    return count, math.ceil(queries / count)


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None,
) -> Float[Array, "b n heads k"]:
    """Attention with the scale already in the queries; memory for the scores of one block, backwards too."""
    batch, length, heads, _ = query.shape
    count, block = block_of(length, key.shape[1])
    padded = jnp.pad(query, ((0, 0), (0, count * block - length), (0, 0), (0, 0)))
    queries = rearrange(padded, "b (i n) h k -> (b h) i k n", i=count)
    keys = rearrange(key, "b m h k -> (b h) m k")
    values = rearrange(value, "b m h k -> (b h) k m")
    biases = None if bias is None else _bias_blocks(bias, count, block)

    def head(inputs: tuple[Array, Array, Array, Array]) -> Array:
        place, blocks, key, value = inputs
        own = None if biases is None else biases[place // heads % biases.shape[0], place % heads % biases.shape[1]]

        @jax.checkpoint
        def one(index: Array, query: Array) -> Array:
            return _attend_block(query, key, value, None if own is None else own[index % own.shape[0]])

        return lax.map(lambda given: one(*given), (jnp.arange(count), blocks))

    mixed = lax.map(head, (jnp.arange(batch * heads), queries, keys, values))
    return rearrange(mixed, "(b h) i k n -> b (i n) h k", b=batch)[:, :length].astype(query.dtype)


def _attend_block(
    query: Float[Array, "k n"], key: Float[Array, "m k"], value: Float[Array, "k m"], bias: Float[Array, "m #n"] | None
) -> Float[Array, "k n"]:
    scores = jnp.matmul(key, query, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias
    # A constant shift changes no softmax, so neither its gradient.
    powers = jnp.exp(scores - lax.stop_gradient(scores.max(axis=0, keepdims=True)))
    mixed = jnp.matmul(value, powers.astype(value.dtype), preferred_element_type=jnp.float32)
    return mixed / powers.sum(axis=0, keepdims=True)


def _bias_blocks(bias: Float[Array, "b heads n m"], count: int, block: int) -> Float[Array, "b heads i m block"]:
    """One block of biases per block of queries, or one for all where the bias is the same for every query."""
    wide = bias.astype(jnp.float32)
    if wide.shape[2] == 1:
        return rearrange(wide, "b h n m -> b h 1 m n")
    padded = jnp.pad(wide, ((0, 0), (0, 0), (0, count * block - wide.shape[2]), (0, 0)))
    return rearrange(padded, "b h (i n) m -> b h i m n", i=count)
