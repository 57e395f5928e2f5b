"""Masks in every form diffusers takes, as what is added to the scores of an attention."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

DISCARD = -10000.0  # added for a key that a two-dimensional mask discards; not -inf, so that no row is ever NaN
NEVER = -1e30  # added where a boolean mask of three or four dimensions says no


def to_bias(mask: Float[Array, "..."] | Bool[Array, "..."], batch: int, heads: int) -> Float[Array, "#b #heads #n m"]:
    """A (batch, keys) mask keeps with 1 and discards with 0, and may be fractional; others are added as they are."""
    if mask.ndim == 2:
        return ((1 - mask.astype(jnp.float32)) * DISCARD)[:, None, None]
    bias = jnp.where(mask, 0.0, NEVER).astype(jnp.float32) if mask.dtype == bool else mask
    if bias.ndim == 4:
        return bias
    per_head = bias.shape[0] not in (1, batch)
    return bias.reshape(batch, heads, *bias.shape[1:]) if per_head else bias[:, None]
