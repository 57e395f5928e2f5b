"""Classifier-free guidance: further from what a model says without its condition, towards what it says with it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.errors import InputError
from jaxmodels.samplers.loop import Predict, with_operands

# Two impossible classes would differ by NaN; the lowest finite float32 would overflow once it is scaled.
IMPOSSIBLE = -1e4


def combine(unconditional: Float[Array, "*x"], conditional: Float[Array, "*x"], scale: Any) -> Float[Array, "*x"]:
    """Guided prediction of noise, sample or velocity; scale 1 is the conditional one (formula 6 of
    https://arxiv.org/abs/2207.12598, with its w as scale - 1)."""
    return unconditional + scale * (conditional - unconditional)


def combine_log(
    unconditional: Float[Array, "b v n"], conditional: Float[Array, "b v n"], scale: Any
) -> Float[Array, "b v n"]:
    """Guided log-probabilities, made to sum to 1 over the classes (axis 1) again, as VQ-Diffusion does."""
    guided = combine(jnp.maximum(unconditional, IMPOSSIBLE), jnp.maximum(conditional, IMPOSSIBLE), scale)
    return jax.nn.log_softmax(guided, axis=1)


def guide(predict: Predict, scale: Any, *, log_probabilities: bool = False) -> Partial:
    """A guided `predict`, made of one that answers with and without the condition at once.

    Args:
        predict: gets x twice in one batch, and answers without the condition in the first half and with it in the
            second (diffusers' order): prepare its conditioning for a batch of ``2 b``.
        scale: how far to go; 1 is no guidance. An argument of compiled programs: another one does not compile again.
        log_probabilities: the predictions are log-probabilities of classes (b v n), as for a discrete sampler.
    """
    return Partial(_guided_log if log_probabilities else _guided, with_operands(predict), scale)


def _guided(predict: Predict, scale: Any, x: Array, *rest: Any) -> Array:
    return combine(*_both(predict, x, *rest), scale)


def _guided_log(predict: Predict, scale: Any, x: Array, *rest: Any) -> Array:
    return combine_log(*_both(predict, x, *rest), scale)


def _both(predict: Predict, x: Array, *rest: Any) -> tuple[Array, Array]:
    both = jnp.asarray(predict(jnp.concatenate((x, x)), *rest), jnp.float32)
    if both.shape[0] != 2 * x.shape[0]:
        raise InputError(f"predict gave a batch of {both.shape[0]}; wanted {2 * x.shape[0]}, twice that of x")
    unconditional, conditional = jnp.split(both, 2)
    return unconditional, conditional
