"""DDPM and DDIM: from noise to a sample by taking away what a model says is noise."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxmodels.samplers.loop import Known, Predict, check_prediction, first_noise, run_steps, with_operands
from jaxmodels.samplers.noise_schedule import DiffusionRow, NoiseSchedule, diffuse

ADVICE = "the shape of the sample; of a model that predicts a variance too, give the first half of its channels"


def ddim_step(
    schedule: NoiseSchedule,
    prediction: Float[Array, "*x"],
    x: Float[Array, "*x"],
    row: DiffusionRow,
    noise: Float[Array, "*x"] | None = None,
    eta: Any = 0.0,
) -> Float[Array, "*x"]:
    """One step of DDIM, formula 12 of https://arxiv.org/abs/2010.02502.

    Args:
        row: one row of ``schedule.ddim_rows(steps)``.
        noise: standard normal; without it no noise is added, whatever `eta`.
        eta: share of DDPM's noise; 0 is deterministic.
    """
    sample, epsilon = schedule.split(prediction, x, row.alpha)
    if noise is None:
        return diffuse(sample, epsilon, row.next_alpha)
    variance = (1 - row.next_alpha) / (1 - row.alpha) * (1 - row.alpha / row.next_alpha)
    deviation = eta * jnp.sqrt(variance)
    # With eta 1 what is left can round to less than nothing, and its root to NaN.
    left = jnp.maximum(1 - row.next_alpha - deviation**2, 0)
    return jnp.sqrt(row.next_alpha) * sample + jnp.sqrt(left) * epsilon + deviation * noise


def ddpm_step(
    schedule: NoiseSchedule,
    prediction: Float[Array, "*x"],
    x: Float[Array, "*x"],
    row: DiffusionRow,
    noise: Float[Array, "*x"],
) -> Float[Array, "*x"]:
    """One step of DDPM, formula 7 of https://arxiv.org/abs/2006.11239; at timestep 0 no noise is added.

    Args:
        row: one row of ``schedule.ddpm_rows(steps)``.
        noise: standard normal.
    """
    sample, _ = schedule.split(prediction, x, row.alpha)
    kept = row.alpha / row.next_alpha
    share_of_sample = jnp.sqrt(row.next_alpha) * (1 - kept) / (1 - row.alpha)
    share_of_x = jnp.sqrt(kept) * (1 - row.next_alpha) / (1 - row.alpha)
    variance = 1 - kept
    if schedule.variance_type == "fixed_small":
        variance = jnp.maximum((1 - row.next_alpha) / (1 - row.alpha) * variance, 1e-20)
    deviation = jnp.where(row.timestep > 0, jnp.sqrt(variance), 0)
    return share_of_sample * sample + share_of_x * x + deviation * noise


def ddim(
    predict: Predict,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    schedule: NoiseSchedule,
    *,
    steps: int,
    eta: Any = 0.0,
    extras: Any = None,
    known: Known | None = None,
    start: Any = None,
) -> Float[Array, "..."]:
    """Samples by DDIM in one compiled program, which only other shapes, schedules or steps compile again.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)``, to a prediction shaped like x; t is a scalar int32. Give a
            `jax.tree_util.Partial` over weights and conditioning, so that they are arguments of the program.
        shape: of the sample.
        key: where all random numbers come from.
        eta: share of DDPM's noise, 0 to 1; 0 is deterministic after the first noise.
        extras: a pytree with a leading axis of steps, one for each of ``schedule.timesteps(steps)``.
        known: what the sample must contain. Those places follow their own diffusion, so that the rest fits in.
        start: the first noise, instead of drawing it.

    Returns:
        The sample, float32.

    Raises:
        InputError: steps, start, extras or the prediction do not fit.
    """
    is_random = isinstance(eta, jax.Array) or eta > 0
    return _sample(
        with_operands(predict), start, key, eta if is_random else None, extras, known, shape, schedule, steps, "ddim"
    )


def ddpm(
    predict: Predict,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    schedule: NoiseSchedule,
    *,
    steps: int,
    extras: Any = None,
    known: Known | None = None,
    start: Any = None,
) -> Float[Array, "..."]:
    """Samples by DDPM, with fresh noise in each step; arguments, result and errors as of `ddim`."""
    return _sample(with_operands(predict), start, key, None, extras, known, shape, schedule, steps, "ddpm")


@partial(jax.jit, static_argnames=("shape", "schedule", "steps", "method"))
def _sample(
    predict: Predict,
    start: Any,
    key: PRNGKeyArray,
    eta: Any,
    extras: Any,
    known: Known | None,
    shape: tuple[int, ...],
    schedule: NoiseSchedule,
    steps: int,
    method: str,
) -> Float[Array, "..."]:
    first_key, step_key = jax.random.split(key)
    first = first_noise(start, shape, first_key)
    fixed = None if known is None else known.spread(shape)
    rows = schedule.ddpm_rows(steps) if method == "ddpm" else schedule.ddim_rows(steps)

    def with_known(x: Array, alpha: Any) -> Array:
        return x if fixed is None else fixed.put(x, diffuse(fixed.value, first, alpha))

    def step(prediction: Array, state: tuple[Array], row: DiffusionRow) -> tuple[Array]:
        (x,) = state
        check_prediction(prediction, shape, ADVICE)

        def fresh() -> Array:
            return jax.random.normal(jax.random.fold_in(step_key, row.timestep), shape, jnp.float32)

        if method == "ddpm":
            x = ddpm_step(schedule, prediction, x, row, fresh())
        else:
            x = ddim_step(schedule, prediction, x, row, None if eta is None else fresh(), eta)
        return (with_known(x, row.next_alpha),)

    (x,) = run_steps(predict, step, (with_known(first, rows.alpha[0]),), rows, extras)
    return x if fixed is None else fixed.put(x, fixed.value)
