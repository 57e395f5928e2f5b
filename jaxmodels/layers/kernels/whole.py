"""Attention with all its scores in memory at once: small shapes, dropout, and where nothing better is known."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jaxmodels.layers.dropout import dropout


def attend(
    query: Float[Array, "b n heads k"],
    key: Float[Array, "b m heads k"],
    value: Float[Array, "b m heads k"],
    bias: Float[Array, "#b #heads #n m"] | None,
    rate: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> Float[Array, "b n heads k"]:
    """Attention with the scale already in the queries; `rate` drops probabilities where there are `rngs`."""
    scores = jnp.einsum("bnhk,bmhk->bhnm", query, key, preferred_element_type=jnp.float32)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    # A constant shift changes no softmax, so neither its gradient. The division comes last, on the smaller array.
    powers = jnp.exp(scores - lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = powers.sum(axis=-1, keepdims=True)
    kept = dropout(powers, rate, rngs).astype(value.dtype)
    mixed = jnp.einsum("bhnm,bmhk->bhnk", kept, value, preferred_element_type=jnp.float32) / total
    return jnp.swapaxes(mixed, 1, 2).astype(query.dtype)
