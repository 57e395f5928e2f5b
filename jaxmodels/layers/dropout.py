"""Dropout that is on exactly when somebody brings random keys."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def dropout(x: Float[Array, "..."], rate: float, rngs: nnx.Rngs | None) -> Float[Array, "..."]:
    """Zeroes a share `rate` of `x` and scales the rest up; without `rngs` gives `x` back.

    A stateful dropout layer would put random keys among the weights, and serving and checkpoints would have to
    carry them; so the keys come with the call, from the stream ``dropout``.
    """
    if rngs is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rngs.dropout(), 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
