"""Flow matching samplers by Euler's and Heun's methods.

As in diffusers, x is ``(1 - sigma) sample + sigma noise`` and the model predicts ``noise - sample`` from sigma times
num_train_timesteps. A model of tau from 0 to 1 and ``sample - noise`` is ``lambda x, t: -model(x, 1000 - t)``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from jaxmodels.errors import InputError
from jaxmodels.ranges import POSITIVE, check_fields
from jaxmodels.samplers.diffusion import TIMESTEPS, Sample
from jaxmodels.samplers.sampling import Predict, check_prediction, first_noise, make_partial, run_steps

SPACINGS = ("linspace", "uniform")
ADVICE = "the shape of the sample"


class FlowRow(NamedTuple):
    """Coefficients of one evaluation and the step to `next_sigma`, or with a leading axis of all evaluations.

    `is_correction` marks Heun's second evaluation, at the end of the step.
    """

    timestep: Float[Any, "..."]
    sigma: Float[Any, "..."]
    next_sigma: Float[Any, "..."]
    is_correction: Bool[Any, "..."]


@dataclass(frozen=True)
class FlowSchedule:
    """Sigmas of flow matching, with defaults of diffusers' `FlowMatchEulerDiscreteScheduler`.

    Attributes:
        shift: above 1, more steps are close to the noise.
        spacing: linspace: sigmas from 1 to 1 / num_train_timesteps as in diffusers, with a short last step.
            uniform: equal steps, as in Flux, which suits few steps better.

    Raises:
        ConfigError: a field makes no sense.

    Example:
        >>> FlowSchedule(spacing="uniform").euler_rows(4).sigma.tolist()
        [1.0, 0.75, 0.5, 0.25]
    """

    num_train_timesteps: Annotated[int, TIMESTEPS] = 1000
    shift: Annotated[float, POSITIVE] = 1.0
    spacing: Literal["linspace", "uniform"] = "linspace"

    def __post_init__(self) -> None:
        check_fields(self, "flow schedule", {"spacing": SPACINGS})

    def shifted(self, sigma: Any) -> Any:
        """Return sigmas shifted towards the noise; a trainer draws ``shifted(uniform)``."""
        return self.shift * sigma / (1 + (self.shift - 1) * sigma)

    def euler_rows(self, steps: int) -> FlowRow:
        """Return the coefficients of Euler's method, with one evaluation per step.

        Raises:
            InputError: steps is less than 1.
        """
        if steps < 1:
            raise InputError(f"steps is {steps}; wanted 1 or more")
        if self.spacing == "linspace":
            # As in diffusers, the smallest sigma is shifted twice.
            sigmas = np.linspace(1.0, self.shifted(1 / self.num_train_timesteps), steps)
        else:
            sigmas = np.linspace(1.0, 1 / steps, steps)
        sigmas = self.shifted(sigmas).astype(np.float32)
        timesteps = sigmas * np.float32(self.num_train_timesteps)
        return FlowRow(timesteps, sigmas, np.append(sigmas[1:], np.float32(0)), np.zeros(steps, bool))

    def heun_rows(self, steps: int) -> FlowRow:
        """Return the coefficients of Heun's method: 2 steps - 1 evaluations, because the last step is Euler's."""
        rows = self.euler_rows(steps)
        corrections = FlowRow(rows.timestep[1:], rows.sigma[:-1], rows.sigma[1:], np.ones(steps - 1, bool))
        table = FlowRow(*(np.zeros(2 * steps - 1, column.dtype) for column in rows))
        for column, first, second in zip(table, rows, corrections, strict=True):
            column[::2], column[1::2] = first, second
        return table

    def add_noise(
        self, sample: Float[Array, "b *x"], noise: Float[Array, "b *x"], sigma: Float[Array, " b"]
    ) -> Float[Array, "b *x"]:
        """Mix `sample` with noise at a sigma for each element, for training."""
        return between(sample, noise, sigma.reshape(-1, *(1,) * (sample.ndim - 1)))

    def target(self, sample: Sample, noise: Sample) -> Sample:
        """Return the training target for ``add_noise(sample, noise, sigma)``: the velocity."""
        return noise - sample


def between(sample: Sample, noise: Sample, sigma: Float[Any, "..."]) -> Sample:
    """Return the point at sigma on the straight line from sample (sigma 0) to noise (sigma 1)."""
    return sigma * noise + (1 - sigma) * sample


def euler_step(velocity: Sample, x: Sample, row: FlowRow) -> Sample:
    """Take one step of Euler's method along the velocity.

    Example:
        >>> row = FlowRow(timestep=500.0, sigma=0.5, next_sigma=0.0, is_correction=False)
        >>> euler_step(jnp.float32([2.0]), jnp.float32([1.0]), row).tolist()
        [0.0]
    """
    return x + (row.next_sigma - row.sigma) * velocity


def flow_euler(
    predict: Predict,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    schedule: FlowSchedule,
    *,
    steps: int,
    extras: Any = None,
    start: Any = None,
) -> Float[Array, "..."]:
    """Sample with Euler's method in one compiled program, compiled again only for other shapes, schedules or steps.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)``, to the velocity ``noise - sample``; t is a scalar float32. Give a
            `jax.tree_util.Partial` over weights and conditioning, so that they are arguments of the program.
        shape: shape of the sample.
        key: source of the first noise.
        extras: a pytree with a leading axis of ``schedule.euler_rows(steps).timestep``.
        start: first noise; drawn when None.

    Returns:
        The sample, float32.

    Raises:
        InputError: steps, start, extras or the prediction do not fit.

    Example:
        >>> def predict(x, t):  # The velocity from the sample 0 to x.
        ...     return x * 1000 / t
        >>> schedule = FlowSchedule(spacing="uniform")
        >>> flow_euler(predict, (1, 2), jax.random.key(0), schedule, steps=4).tolist()
        [[0.0, 0.0]]
    """
    return _sample(make_partial(predict), start, key, extras, shape, schedule, steps, "euler")


def flow_heun(
    predict: Predict,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    schedule: FlowSchedule,
    *,
    steps: int,
    extras: Any = None,
    start: Any = None,
) -> Float[Array, "..."]:
    """Sample with Heun's method: each step uses the mean of the velocities at its two ends.

    Arguments, result and errors as in `flow_euler`; the model is evaluated ``2 steps - 1`` times, and `extras` have a
    leading axis of ``schedule.heun_rows(steps).timestep``.

    Example:
        >>> def predict(x, t):  # A constant velocity.
        ...     return jnp.ones_like(x)
        >>> schedule = FlowSchedule(spacing="uniform")
        >>> flow_heun(predict, (1, 1), jax.random.key(0), schedule, steps=2, start=jnp.ones((1, 1))).tolist()
        [[0.0]]
    """
    return _sample(make_partial(predict), start, key, extras, shape, schedule, steps, "heun")


@partial(jax.jit, static_argnames=("shape", "schedule", "steps", "method"))
def _sample(
    predict: Predict,
    start: Any,
    key: PRNGKeyArray,
    extras: Any,
    shape: tuple[int, ...],
    schedule: FlowSchedule,
    steps: int,
    method: str,
) -> Float[Array, "..."]:
    first = first_noise(start, shape, key)

    def straight(velocity: Array, state: tuple[Array], row: FlowRow) -> tuple[Array]:
        check_prediction(velocity, shape, ADVICE)
        return (euler_step(velocity, state[0], row),)

    def corrected(velocity: Array, state: tuple[Array, ...], row: FlowRow) -> tuple[Array, ...]:
        check_prediction(velocity, shape, ADVICE)
        x, origin, velocity_there = state
        origin = jnp.where(row.is_correction, origin, x)
        mean = jnp.where(row.is_correction, 0.5 * (velocity_there + velocity), velocity)
        return euler_step(mean, origin, row), origin, velocity

    if method == "euler":
        rows = schedule.euler_rows(steps)
        return run_steps(predict, straight, (first,), rows, extras)[0]
    rows = schedule.heun_rows(steps)
    return run_steps(predict, corrected, (first, first, jnp.zeros_like(first)), rows, extras)[0]
