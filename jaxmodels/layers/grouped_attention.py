"""Grouped-query attention with rotary positions, over keys and values that may come from a cache; and its masks.

Sources: https://arxiv.org/abs/2305.13245 (grouped queries), https://arxiv.org/abs/2104.09864 (rotary positions).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.layers.attention_kernels import compute_exponents
from jaxmodels.layers.linear import Linear

ROTARY_BASE = 10_000.0
# Of scores that are left out. Not -inf: rows of padding that see nothing must not become NaN.
LOWEST = float(np.finfo(np.float32).min)


class Rotation(NamedTuple):
    """Cosines and sines of the angles of rotary positions, (b, n, 1, k / 2) float32 each."""

    cos: Float[Array, "b n 1 k2"]
    sin: Float[Array, "b n 1 k2"]


class KeyValues(NamedTuple):
    """Keys (rotated already) and values of some tokens."""

    key: Float[Array, "b m kv k"]
    value: Float[Array, "b m kv k"]


def compute_rotation(positions: Int[Array, "b n"], head_width: int, base: float = ROTARY_BASE) -> Rotation:
    """Angles of each position, in float32: pair i of channels turns by ``position / base^(2 i / head_width)``."""
    exponent = np.arange(head_width // 2, dtype=np.float32) * np.float32(2.0 / head_width)
    timescale = np.power(np.float32(base), exponent)
    angle = (positions[..., None].astype(jnp.float32) / timescale)[:, :, None]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "b n h k"], rotation: Rotation) -> Float[Array, "b n h k"]:
    """Turn each pair of channels, one of the first half and one of the second, by its angle; in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def count_positions(is_valid: Bool[Array, "b n"]) -> Int[Array, "b n"]:
    """Position of each token among the valid ones; a masked one has that of the last valid one before it, or -1."""
    return jnp.cumsum(is_valid, axis=1, dtype=jnp.int32) - 1


def mask_blocks(is_valid: Bool[Array, "b n"], starts: Bool[np.ndarray, " n"]) -> Bool[Array, "b n n"]:
    """Which keys (last axis) each query may see: valid ones of its block or an earlier one; `starts` begin blocks."""
    block = np.cumsum(starts)
    return jnp.asarray(block[None, :] <= block[:, None]) & is_valid[:, None, :] & is_valid[:, :, None]


def mask_after_prefix(prefix: Bool[Array, "b m"], starts: Bool[np.ndarray, " n"]) -> Bool[Array, "b n m_n"]:
    """What tokens behind a prefix may see: every valid token of it, and of their own as in `mask_blocks`."""
    batch, count = prefix.shape[0], len(starts)
    own = mask_blocks(jnp.ones((batch, count), bool), starts)
    before = jnp.broadcast_to(prefix[:, None], (batch, count, prefix.shape[1]))
    return jnp.concatenate((before, own), axis=-1)


def append(cache: KeyValues, own: KeyValues) -> KeyValues:
    """Keys and values of the cache, then the own ones."""
    return KeyValues(jnp.concatenate((cache.key, own.key), axis=1), jnp.concatenate((cache.value, own.value), axis=1))


# Keys in half precision: whole tiles of a product that XLA shares out over a GPU by its sum.
ALIGNED = 64


def pad_keys(cache: KeyValues, behind: int = 0) -> KeyValues:
    """Add zeros behind keys and values: with `behind` more tokens they are a multiple of `ALIGNED`; see `pad_mask`.

    Otherwise XLA copies them at every use: 6 % of a step of pi0.5 on an H200. float32 inputs stay as they are.
    """
    count = -(cache.key.shape[1] + behind) % ALIGNED
    if cache.key.dtype == jnp.float32 or count == 0:
        return cache
    return KeyValues(*(jnp.pad(array, ((0, 0), (0, count), (0, 0), (0, 0))) for array in cache))


def pad_mask(is_valid: Bool[Array, "b m"], cache: KeyValues) -> Bool[Array, "b m2"]:
    """Which tokens count of a cache that may have zeros behind them."""
    return jnp.pad(is_valid, ((0, 0), (0, cache.key.shape[1] - is_valid.shape[1])))


def attend_grouped(
    query: Float[Array, "b n h k"], seen: KeyValues, mask: Bool[Array, "b #n m"] | None = None
) -> Float[Array, "b n h k"]:
    """Softmax attention, in float32; query head h looks at head ``h // (h_total / kv)`` of keys and values.

    Args:
        mask: which keys a query sees; None for all. A query that sees none gets the mean of all values.
    """
    batch, length, heads, width = query.shape
    groups = heads // seen.key.shape[2]
    # All queries of one key head under each other: few large products instead of many small ones.
    queries = rearrange(query, "b n (kv g) k -> b kv (n g) k", g=groups)
    scores = jnp.einsum("bvqk,bmvk->bvqm", queries, seen.key, preferred_element_type=jnp.float32) * width**-0.5
    if mask is not None:
        each = jnp.broadcast_to(mask, (batch, length, mask.shape[2]))
        scores = jnp.where(jnp.repeat(each, groups, axis=1)[:, None], scores, LOWEST)
    powers, total = compute_exponents(scores)
    mixed = jnp.einsum(
        "bvqm,bmvk->bvqk", powers.astype(seen.value.dtype), seen.value, preferred_element_type=jnp.float32
    )
    return rearrange((mixed / total).astype(query.dtype), "b kv (n g) k -> b n (kv g) k", g=groups)


class KeyValueProjection(nnx.Module):
    """Keys and values, in `heads` heads, of tokens of `width` channels; without biases."""

    def __init__(self, width: int, heads: int, head_width: int, *, rngs: nnx.Rngs):
        self.kv_heads = heads
        self.key = Linear(width, heads * head_width, rngs=rngs)
        self.value = Linear(width, heads * head_width, rngs=rngs)

    def project_keys(self, x: Float[Array, "b m c"], rotation: Rotation) -> KeyValues:
        """Keys, rotated, and values of tokens."""
        split = "b m (kv k) -> b m kv k"
        key = rearrange(self.key(x), split, kv=self.kv_heads)
        return KeyValues(rotate(key, rotation), rearrange(self.value(x), split, kv=self.kv_heads))

    def project_again(self, cache: KeyValues) -> KeyValues:
        """Keys of another model's keys and values of its values, all heads of a token together; nothing is rotated."""
        flat, split = "b m kv k -> b m (kv k)", "b m (kv k) -> b m kv k"
        key, value = self.key(rearrange(cache.key, flat)), self.value(rearrange(cache.value, flat))
        return KeyValues(rearrange(key, split, kv=self.kv_heads), rearrange(value, split, kv=self.kv_heads))


class GroupedQueryAttention(KeyValueProjection):
    """Grouped-query attention without biases, in parts: a caller decides what is kept and what is seen.

    Args:
        width: of the tokens that queries are made of, and of what comes out.
        heads: of queries.
        kv_heads: of keys and values, a divisor of `heads`.
        context_width: of the tokens that keys and values are made of; `width` when None.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        *,
        context_width: int | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(context_width or width, kv_heads, head_width, rngs=rngs)
        self.heads = heads
        self.query = Linear(width, heads * head_width, rngs=rngs)
        self.out = Linear(heads * head_width, width, rngs=rngs)

    def project_query(self, x: Float[Array, "b n d"], rotation: Rotation) -> Float[Array, "b n h k"]:
        return rotate(rearrange(self.query(x), "b n (h k) -> b n h k", h=self.heads), rotation)

    def mix(
        self, query: Float[Array, "b n h k"], seen: KeyValues, mask: Bool[Array, "b #n m"] | None = None
    ) -> Float[Array, "b n d"]:
        """Attention and the projection back."""
        return self.out(rearrange(attend_grouped(query, seen, mask), "b n h k -> b n (h k)"))
