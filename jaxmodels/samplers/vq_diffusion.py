"""VQ-Diffusion: tokens that turn into other classes or into the masked one over time, and the way back.

Source: https://arxiv.org/abs/2111.14822; the same numbers as diffusers' `VQDiffusionScheduler`.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxmodels.samplers.classes import LOWEST, Tokens, check_known, draw, first_tokens, normalized, of_class, truncate
from jaxmodels.samplers.loop import Predict, check_prediction, run_steps, with_operands
from jaxmodels.samplers.vq_schedule import Rates, VQRow, VQSchedule, of_elements

NEVER = math.log(1e-30)  # that a masked token becomes a class, in the forward direction; diffusers' number


def posterior(
    schedule: VQSchedule, log_probabilities: Float[Array, "b v n"], tokens: Int[Array, "b n"], row: VQRow
) -> Float[Array, "b v2 n"]:
    """Log-probabilities of all classes, the masked one last, at the earlier time of a row (formula 11).

    Args:
        log_probabilities: of the clean sample's classes, above -inf.
        tokens: at the row's timestep.
        row: for all elements, or (from ``schedule.row``) one for each.
    """
    whole, before, between = (of_elements(rates) for rates in row[1:])
    is_masked = (tokens == schedule.mask)[:, None]
    is_own = jnp.arange(schedule.mask)[None, :, None] == tokens[:, None]

    def to_tokens(rates: Rates) -> Array:
        """Log-probability of becoming what the token is, from each class."""
        kept = jnp.logaddexp(rates.keep, rates.change)
        return jnp.where(is_masked, rates.mask, jnp.where(is_own, kept, rates.change))

    clean = log_probabilities - to_tokens(whole)
    total = jax.nn.logsumexp(clean, axis=1, keepdims=True)
    at_before = jnp.logaddexp(clean - total + before.keep, before.change)
    from_classes = at_before + to_tokens(between)
    from_mask = jnp.broadcast_to(before.mask, is_masked.shape) + jnp.where(is_masked, 0.0, NEVER)
    return jnp.concatenate((from_classes, from_mask), axis=1) + total


def vq_step(
    schedule: VQSchedule,
    log_probabilities: Float[Array, "b v n"],
    tokens: Int[Array, "b n"],
    row: VQRow,
    gumbel: Float[Array, "b v2 n"],
) -> Int[Array, "b n"]:
    """One step back: tokens drawn from the posterior; at timestep 0 from the clean sample's classes alone.

    Args:
        log_probabilities: of every class but the masked one, above -inf.
        row: one row of ``schedule.rows(steps)``.
        gumbel: standard Gumbel noise for all classes, the masked one too.
    """
    log_earlier = posterior(schedule, log_probabilities, tokens, row)
    clean = jnp.pad(log_probabilities, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
    is_last = row.before.keep >= 0  # the earlier time is the clean sample: log 1
    return draw(jnp.where(is_last, clean, log_earlier), gumbel)


def vq_diffusion(
    predict: Predict,
    shape: tuple[int, int],
    key: PRNGKeyArray,
    schedule: VQSchedule,
    *,
    steps: int,
    truncation: Any = None,
    extras: Any = None,
    known: Any = None,
) -> Tokens:
    """Samples tokens in one compiled program, which only other shapes, schedules or steps compile again.

    Args:
        predict: ``(ids, t)``, or ``(ids, t, extra)``, to log-probabilities (b, classes - 1, n) of the clean sample;
            t is a scalar int32. Give a `jax.tree_util.Partial` over weights and conditioning, so that they are
            arguments of the program.
        shape: (b, n).
        key: where all random numbers come from.
        truncation: draw only from the likeliest classes that hold this share of the probability; see `truncate`.
        extras: a pytree with a leading axis of steps, one for each of ``schedule.timesteps(steps)``.
        known: tokens (b, n) to keep, and the masked class where one is to be sampled.

    Raises:
        InputError: steps, extras, known tokens or the prediction do not fit.
    """
    check_known(known, schedule.mask)
    return _sample(with_operands(predict), key, truncation, extras, known, shape, schedule, steps)


@partial(jax.jit, static_argnames=("shape", "schedule", "steps"))
def _sample(
    predict: Predict,
    key: PRNGKeyArray,
    truncation: Any,
    extras: Any,
    known: Any,
    shape: tuple[int, int],
    schedule: VQSchedule,
    steps: int,
) -> Tokens:
    first = first_tokens(known, shape, schedule.mask)
    is_known = first != schedule.mask
    wanted = (shape[0], schedule.mask, shape[1])

    def step(prediction: Array, state: tuple[Array, Array], row: VQRow) -> tuple[Array, Array]:
        check_prediction(prediction, wanted, "log-probabilities of every class but the masked one")
        log_probabilities = normalized(prediction)
        if truncation is not None:
            log_probabilities = jnp.maximum(truncate(log_probabilities, truncation), LOWEST)
        noise_shape = (shape[0], schedule.num_vec_classes, shape[1])
        gumbel = jax.random.gumbel(jax.random.fold_in(key, row.timestep), noise_shape, jnp.float32)
        tokens = vq_step(schedule, log_probabilities, state[0], row, gumbel)
        tokens = jnp.where(is_known, first, tokens)
        sure = of_class(log_probabilities, jnp.minimum(tokens, schedule.mask - 1))
        return tokens, jnp.where(is_known, 0, sure)

    return Tokens(*run_steps(predict, step, (first, jnp.zeros(shape, jnp.float32)), schedule.rows(steps), extras))
