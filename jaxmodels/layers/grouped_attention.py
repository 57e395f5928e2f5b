"""Grouped-query attention with rotary positions, optionally over cached keys and values, and its masks.

Sources: https://arxiv.org/abs/2305.13245 (grouped queries), https://arxiv.org/abs/2104.09864 (rotary positions).
"""

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.layers.attention import compute_exponents
from jaxmodels.layers.feed_forward import Linear

ROTARY_BASE = 10_000.0
# Score of a masked key; not -inf, because rows of padding without keys must not become NaN.
LOWEST = float(np.finfo(np.float32).min)


class Rotation(NamedTuple):
    """Cosines and sines of the angles of rotary positions, (b, n, 1, k / 2) float32 each."""

    cos: Float[Array, "b n 1 k2"]
    sin: Float[Array, "b n 1 k2"]


# Rotated keys, then values, of some tokens: (2, b, m, kv, k). One array, because a GPU then appends with one kernel.
KeyValues: TypeAlias = Float[Array, "2 _ _ _ _"]


def compute_rotation(positions: Int[Array, "b n"], head_width: int) -> Rotation:
    """Return the angles of each position, float32: ``position / base^(2 i / head_width)`` for pair i of channels."""
    exponent = np.arange(head_width // 2, dtype=np.float32) * np.float32(2.0 / head_width)
    timescale = np.power(np.float32(ROTARY_BASE), exponent)
    angle = (positions[..., None].astype(jnp.float32) / timescale)[:, :, None]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "b n h k"], rotation: Rotation) -> Float[Array, "b n h k"]:
    """Rotate pairs of channels, from the first and the second half, by their angles; in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def count_positions(is_valid: Bool[Array, "b n"]) -> Int[Array, "b n"]:
    """Return each token's position among the valid tokens; a masked token has the previous position, or -1."""
    return jnp.cumsum(is_valid, axis=1, dtype=jnp.int32) - 1


def mask_blocks(is_valid: Bool[Array, "b n"], starts: Bool[np.ndarray, " n"]) -> Bool[Array, "b n n"]:
    """Return which keys (last axis) each query sees: valid keys up to its block; `starts` begin blocks."""
    block = np.cumsum(starts)
    return jnp.asarray(block[None, :] <= block[:, None]) & is_valid[:, None, :] & is_valid[:, :, None]


def mask_after_prefix(prefix: Bool[Array, "b m"], starts: Bool[np.ndarray, " n"]) -> Bool[Array, "b #n m_n"]:
    """Return what tokens after a prefix see: all valid tokens of the prefix, and each other as in `mask_blocks`.

    The mask of a single block is the same for all queries, (b, 1, m_n).
    """
    batch, count = prefix.shape[0], len(starts)
    if not starts[1:].any():
        return jnp.pad(prefix, ((0, 0), (0, count)), constant_values=True)[:, None]
    own = mask_blocks(jnp.ones((batch, count), bool), starts)
    before = jnp.broadcast_to(prefix[:, None], (batch, count, prefix.shape[1]))
    return jnp.concatenate((before, own), axis=-1)


def append(cache: KeyValues, own: KeyValues) -> KeyValues:
    """Return keys and values of the cache, followed by `own`."""
    return jnp.concatenate((cache, own), axis=2)


# Number of keys in half precision: whole tiles of a product on a GPU.
ALIGNED = 64


def pad_keys(cache: KeyValues, behind: int = 0, length: int = 0) -> KeyValues:
    """Append zeros to keys and values up to a `length`, if they are shorter; `pad_mask` pads the mask.

    Unless float32, they then are a multiple of `ALIGNED` together with `behind` tokens that will follow. Otherwise XLA
    copies them at every use.
    """
    length = max(length, cache.shape[2])
    if cache.dtype != jnp.float32:
        length += -(length + behind) % ALIGNED
    return jnp.pad(cache, ((0, 0), (0, 0), (0, length - cache.shape[2]), (0, 0), (0, 0)))


def pad_mask(is_valid: Bool[Array, "b m"], cache: KeyValues) -> Bool[Array, "b m2"]:
    """Return which tokens of a padded cache count."""
    return jnp.pad(is_valid, ((0, 0), (0, cache.shape[2] - is_valid.shape[1])))


def attend_grouped(
    query: Float[Array, "b n h k"], seen: KeyValues, mask: Bool[Array, "b #n m"] | None = None
) -> Float[Array, "b n h k"]:
    """Softmax attention, in float32; query head h looks at head ``h // (h_total / kv)`` of keys and values.

    Args:
        mask: which keys a query sees; None for all. A query without keys gets the mean of all values.
    """
    heads, width = query.shape[2:]
    key, value = seen
    groups = heads // key.shape[2]
    # Stack all queries of one key head, for few large products instead of many small products.
    queries = rearrange(query, "b n (kv g) k -> b kv (n g) k", g=groups)
    scores = jnp.einsum("bvqk,bmvk->bvqm", queries, key, preferred_element_type=jnp.float32) * width**-0.5
    if mask is not None:
        each = mask if mask.shape[1] == 1 else jnp.repeat(mask, groups, axis=1)
        scores = jnp.where(each[:, None], scores, LOWEST)
    powers, total = compute_exponents(scores)
    mixed = jnp.einsum("bvqm,bmvk->bvqk", powers.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return rearrange((mixed / total).astype(query.dtype), "b kv (n g) k -> b n (kv g) k", g=groups)


class KeyValueProjection(nnx.Module):
    """Keys and values, in `heads` heads, of tokens of `width` channels; without biases."""

    def __init__(self, width: int, heads: int, head_width: int, *, rngs: nnx.Rngs):
        self.kv_heads = heads
        self.key = Linear(width, heads * head_width, rngs=rngs)
        self.value = Linear(width, heads * head_width, rngs=rngs)

    def project_keys(self, x: Float[Array, "b m c"], rotation: Rotation) -> KeyValues:
        """Return rotated keys, and values, of tokens."""
        split = "b m (kv k) -> b m kv k"
        key = rearrange(self.key(x), split, kv=self.kv_heads)
        return jnp.stack((rotate(key, rotation), rearrange(self.value(x), split, kv=self.kv_heads)))

    def project_again(self, cache: KeyValues) -> KeyValues:
        """Project another model's keys and values to own keys and values, without rotation."""
        key, value = rearrange(cache, "two b m kv k -> two b m (kv k)")
        both = jnp.stack((self.key(key), self.value(value)))
        return rearrange(both, "two b m (kv k) -> two b m kv k", kv=self.kv_heads)


class GroupedQueryAttention(KeyValueProjection):
    """Parts of grouped-query attention without biases.

    Args:
        width: width of queries' tokens and of the output.
        heads: heads of queries.
        kv_heads: heads of keys and values, a divisor of `heads`.
        context_width: width of the tokens of keys and values; `width` when None.
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
        """Return attention, projected to the width of the tokens."""
        return self.out(rearrange(attend_grouped(query, seen, mask), "b n h k -> b n (h k)"))
