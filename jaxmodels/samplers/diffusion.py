"""DDPM and DDIM samplers and their noise schedules."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.ranges import POSITIVE, Range, find_choice_errors, find_number_errors
from jaxmodels.samplers.sampling import Predict, check_prediction, first_noise, make_partial, run_steps

BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
SPACINGS = ("leading", "trailing", "linspace")
VARIANCE_TYPES = ("fixed_small", "fixed_large")
TIMESTEPS = Range(1, 100_000)  # Timesteps of the training, each an entry of a table.
Sample: TypeAlias = Float[Array, "*x"]
_BETA = Range(0, 1, above=True, below=True)


class DiffusionRow(NamedTuple):
    """Coefficients of one sampling step, or with a leading axis of all steps.

    `alpha` and `next_alpha` are the clean sample's shares of the variance before and after it (alphas_cumprod).
    """

    timestep: Int[Any, "..."]
    alpha: Float[Any, "..."]
    next_alpha: Float[Any, "..."]


@dataclass(frozen=True)
class NoiseSchedule:
    """Noise schedule of DDPM and DDIM, with fields and defaults of diffusers' `DDPMScheduler` and `DDIMScheduler`.

    Attributes:
        prediction_type: prediction of the model: the noise, the clean sample, or the velocity of both.
        timestep_spacing: choice of the timesteps (Table 2 of https://arxiv.org/abs/2305.08891).
        steps_offset: added to the timesteps of leading spacing.
        clip_sample: clip the predicted clean sample to +-clip_sample_range; only for data in [-1, 1].
        set_alpha_to_one: whether DDIM ends without noise, instead of with the noise of timestep 0. DDPM always ends
            without noise.
        variance_type: DDPM's noise: the smaller or the larger bound of https://arxiv.org/abs/2006.11239.
        rescale_betas_zero_snr: whether the last timestep is noise alone; not with epsilon.

    Raises:
        ConfigError: a field makes no sense.

    Example:
        >>> schedule = NoiseSchedule(num_train_timesteps=100, timestep_spacing="trailing")
        >>> schedule.timesteps(4).tolist()
        [99, 74, 49, 24]
    """

    num_train_timesteps: Annotated[int, TIMESTEPS] = 1000
    beta_start: Annotated[float, _BETA] = 0.0001
    beta_end: Annotated[float, _BETA] = 0.02
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    prediction_type: Literal["epsilon", "sample", "v_prediction"] = "epsilon"
    timestep_spacing: Literal["leading", "trailing", "linspace"] = "leading"
    steps_offset: Annotated[int, Range(0, 100_000)] = 0
    clip_sample: bool = True
    clip_sample_range: Annotated[float, POSITIVE] = 1.0
    set_alpha_to_one: bool = True
    variance_type: Literal["fixed_small", "fixed_large"] = "fixed_small"
    rescale_betas_zero_snr: bool = False

    def __post_init__(self) -> None:
        choices = {
            "beta_schedule": BETA_SCHEDULES,
            "prediction_type": PREDICTION_TYPES,
            "timestep_spacing": SPACINGS,
            "variance_type": VARIANCE_TYPES,
        }
        numbers = find_number_errors(self)
        wrong = find_choice_errors(self, choices) + numbers
        if not numbers and not self.beta_start <= self.beta_end:
            wrong.append(f"betas go from {self.beta_start} to {self.beta_end}; wanted 0 < beta_start <= beta_end < 1")
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            wrong.append(
                "rescale_betas_zero_snr leaves nothing of the sample at the last timestep, so that the noise does not "
                "determine it; train with v_prediction or sample"
            )
        if wrong:
            raise ConfigError("; ".join(wrong))

    @cached_property
    def alphas(self) -> Float[np.ndarray, " T"]:
        """Share of the clean sample's variance at each timestep (diffusers' alphas_cumprod), float32."""
        betas = _betas(self)
        if self.rescale_betas_zero_snr:
            betas = _without_remainder(betas)
        # diffusers rounds betas and 1 - betas to float32 and accumulates the product in double.
        return np.cumprod(1 - betas, dtype=np.float64).astype(np.float32)

    def timesteps(self, steps: int) -> Int[np.ndarray, " k"]:
        """Return the timesteps of a sampler with this number of steps, noisiest first.

        Raises:
            InputError: there are fewer timesteps than steps, or an offset leads beyond the last one.
        """
        total = self.num_train_timesteps
        if not 1 <= steps <= total:
            raise InputError(f"steps is {steps}; wanted 1 to {total} (num_train_timesteps)")
        if self.timestep_spacing == "linspace":
            times = np.linspace(0, total - 1, steps).round()[::-1]
        elif self.timestep_spacing == "leading":
            times = (np.arange(steps) * (total // steps))[::-1] + self.steps_offset
        else:
            times = np.round(np.arange(total, 0, -total / steps))[:steps] - 1
        if times[0] >= total:
            raise InputError(
                f"{steps} steps with steps_offset {self.steps_offset} begin at timestep {int(times[0])}; the last is "
                f"{total - 1}; take fewer steps"
            )
        return times.astype(np.int32)

    def ddim_rows(self, steps: int) -> DiffusionRow:
        """Return the coefficients of all DDIM steps; as in diffusers, timesteps always fall by T // steps."""
        times = self.timesteps(steps)
        following = times - self.num_train_timesteps // steps
        last = np.float32(1) if self.set_alpha_to_one else self.alphas[0]
        return DiffusionRow(times, self.alphas[times], np.where(following >= 0, self.alphas[following], last))

    def ddpm_rows(self, steps: int) -> DiffusionRow:
        """Return the coefficients of all DDPM steps; the last step removes all noise."""
        times = self.timesteps(steps)
        alphas = self.alphas[times]
        return DiffusionRow(times, alphas, np.append(alphas[1:], np.float32(1)))

    def add_noise(
        self, sample: Float[Array, "b *x"], noise: Float[Array, "b *x"], timestep: Int[Array, " b"]
    ) -> Float[Array, "b *x"]:
        """Add noise to `sample` at a timestep for each element, for training."""
        return diffuse(sample, noise, self._alpha(timestep, sample.ndim))

    def target(
        self, sample: Float[Array, "b *x"], noise: Float[Array, "b *x"], timestep: Int[Array, " b"]
    ) -> Float[Array, "b *x"]:
        """Return the training target of this prediction_type for ``add_noise(sample, noise, timestep)``."""
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return sample
        alpha = self._alpha(timestep, sample.ndim)
        return jnp.sqrt(alpha) * noise - jnp.sqrt(1 - alpha) * sample

    def split(self, prediction: Sample, x: Sample, alpha: Float[Any, ""]) -> tuple[Sample, Sample]:
        """Return clean sample and noise from a prediction for `x`; the sample is clipped if the schedule says so."""
        signal, noise = jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
        if self.prediction_type == "epsilon":
            sample, epsilon = (x - noise * prediction) / signal, prediction
        elif self.prediction_type == "sample":
            sample, epsilon = prediction, (x - signal * prediction) / noise
        else:
            sample, epsilon = signal * x - noise * prediction, signal * prediction + noise * x
        if self.clip_sample:
            sample = jnp.clip(sample, -self.clip_sample_range, self.clip_sample_range)
        return sample, epsilon

    def _alpha(self, timestep: Int[Array, " b"], rank: int) -> Float[Array, "b ..."]:
        return jnp.asarray(self.alphas)[timestep].reshape(-1, *(1,) * (rank - 1))


def diffuse(sample: Sample, noise: Sample, alpha: Float[Any, "..."]) -> Sample:
    """Mix a sample with noise, `alpha` being the sample's share of the variance."""
    return jnp.sqrt(alpha) * sample + jnp.sqrt(1 - alpha) * noise


def _betas(schedule: NoiseSchedule) -> Float[np.ndarray, " T"]:
    first, last, total = schedule.beta_start, schedule.beta_end, schedule.num_train_timesteps
    if schedule.beta_schedule == "linear":
        return np.linspace(first, last, total).astype(np.float32)
    if schedule.beta_schedule == "scaled_linear":
        return np.linspace(first**0.5, last**0.5, total).astype(np.float32) ** 2
    share = np.cos((np.arange(total + 1) / total + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - share[1:] / share[:-1], 0.999).astype(np.float32)


def _without_remainder(betas: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    """Return betas whose last timestep is noise alone (algorithm 1 of https://arxiv.org/abs/2305.08891)."""
    roots = np.sqrt(np.cumprod(1 - betas, dtype=np.float64).astype(np.float32))
    shifted = (roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))
    shares = shifted**2
    return 1 - np.append(shares[:1], shares[1:] / shares[:-1])


ADVICE = "the shape of the sample; of a model that predicts a variance too, give the first half of its channels"


def ddim_step(
    schedule: NoiseSchedule,
    prediction: Sample,
    x: Sample,
    row: DiffusionRow,
    noise: Sample | None = None,
    eta: Any = 0.0,
) -> Sample:
    """Take one step of DDIM, formula 12 of https://arxiv.org/abs/2010.02502.

    Args:
        row: row of ``schedule.ddim_rows(steps)``.
        noise: standard normal noise; None adds no noise.
        eta: share of DDPM's noise; 0 is deterministic.

    Example:
        >>> schedule = NoiseSchedule(prediction_type="sample")
        >>> rows = schedule.ddim_rows(2)
        >>> last = DiffusionRow(*(column[-1] for column in rows))
        >>> ddim_step(schedule, jnp.float32([0.5]), jnp.float32([2.0]), last).tolist()
        [0.5]
    """
    sample, epsilon = schedule.split(prediction, x, row.alpha)
    if noise is None:
        return diffuse(sample, epsilon, row.next_alpha)
    variance = (1 - row.next_alpha) / (1 - row.alpha) * (1 - row.alpha / row.next_alpha)
    deviation = eta * jnp.sqrt(variance)
    # With eta 1 the rest can round below 0, and its root to NaN.
    left = jnp.maximum(1 - row.next_alpha - deviation**2, 0)
    return jnp.sqrt(row.next_alpha) * sample + jnp.sqrt(left) * epsilon + deviation * noise


def ddpm_step(schedule: NoiseSchedule, prediction: Sample, x: Sample, row: DiffusionRow, noise: Sample) -> Sample:
    """Take one step of DDPM, formula 7 of https://arxiv.org/abs/2006.11239; timestep 0 adds no noise.

    Args:
        row: row of ``schedule.ddpm_rows(steps)``.
        noise: standard normal noise.

    Example:
        >>> schedule = NoiseSchedule(prediction_type="sample")
        >>> rows = schedule.ddpm_rows(2)
        >>> last = DiffusionRow(*(column[-1] for column in rows))
        >>> ddpm_step(schedule, jnp.float32([0.5]), jnp.float32([2.0]), last, jnp.float32([1.0])).tolist()
        [0.5]
    """
    sample, _ = schedule.split(prediction, x, row.alpha)
    remaining = row.alpha / row.next_alpha
    share_of_sample = jnp.sqrt(row.next_alpha) * (1 - remaining) / (1 - row.alpha)
    share_of_x = jnp.sqrt(remaining) * (1 - row.next_alpha) / (1 - row.alpha)
    variance = 1 - remaining
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
    start: Any = None,
) -> Float[Array, "..."]:
    """Sample with DDIM in one compiled program, compiled again only for other shapes, schedules or steps.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)``, to a prediction shaped like x; t is a scalar int32. Give a
            `jax.tree_util.Partial` over weights and conditioning, so that they are arguments of the program.
        shape: shape of the sample.
        key: source of all random numbers.
        eta: share of DDPM's noise, 0 to 1; 0 is deterministic after the first noise.
        extras: a pytree with a leading axis of ``schedule.timesteps(steps)``.
        start: first noise; drawn when None.

    Returns:
        The sample, float32.

    Raises:
        InputError: steps, start, extras or the prediction do not fit.

    Example:
        >>> def predict(x, t):  # A network that always predicts the sample 0.5.
        ...     return jnp.full_like(x, 0.5)
        >>> schedule = NoiseSchedule(prediction_type="sample")
        >>> ddim(predict, (1, 2), jax.random.key(0), schedule, steps=4).tolist()
        [[0.5, 0.5]]
    """
    eta = eta if isinstance(eta, jax.Array) or eta > 0 else None
    return _sample(make_partial(predict), start, key, eta, extras, shape, schedule, steps, "ddim")


def ddpm(
    predict: Predict,
    shape: tuple[int, ...],
    key: PRNGKeyArray,
    schedule: NoiseSchedule,
    *,
    steps: int,
    extras: Any = None,
    start: Any = None,
    noise: Any = None,
) -> Float[Array, "..."]:
    """Sample with DDPM, with new noise in each step; other arguments, result and errors as in `ddim`.

    Args:
        noise: (steps - 1, *shape), or broadcastable to it: noise of each step but the last; drawn when None.

    Example:
        >>> def predict(x, t):  # A network that always predicts the sample 0.5.
        ...     return jnp.full_like(x, 0.5)
        >>> schedule = NoiseSchedule(prediction_type="sample")
        >>> ddpm(predict, (1, 2), jax.random.key(0), schedule, steps=4).tolist()
        [[0.5, 0.5]]
    """
    if noise is not None and jnp.shape(noise)[:1] != (steps - 1,):
        raise InputError(
            f"noise has shape {list(jnp.shape(noise))}; wanted {[steps - 1, *shape]}, of each step but one"
        )
    return _sample(make_partial(predict), start, key, None, extras, shape, schedule, steps, "ddpm", noise)


@partial(jax.jit, static_argnames=("shape", "schedule", "steps", "method"))
def _sample(
    predict: Predict,
    start: Any,
    key: PRNGKeyArray,
    eta: Any,
    extras: Any,
    shape: tuple[int, ...],
    schedule: NoiseSchedule,
    steps: int,
    method: str,
    noises: Any = None,
) -> Float[Array, "..."]:
    first_key, step_key = jax.random.split(key)
    first = first_noise(start, shape, first_key)
    rows = schedule.ddpm_rows(steps) if method == "ddpm" else schedule.ddim_rows(steps)

    def step(prediction: Array, state: tuple[Array, Any], row: DiffusionRow) -> tuple[Array, Any]:
        x, count = state
        check_prediction(prediction, shape, ADVICE)

        def fresh() -> Array:
            if noises is not None:
                return jnp.broadcast_to(noises[jnp.minimum(count, steps - 2)], shape)  # The last step adds none.
            return jax.random.normal(jax.random.fold_in(step_key, row.timestep), shape, jnp.float32)

        if method == "ddpm":
            return ddpm_step(schedule, prediction, x, row, fresh()), count + 1
        return ddim_step(schedule, prediction, x, row, None if eta is None else fresh(), eta), count + 1

    return run_steps(predict, step, (first, jnp.int32(0)), rows, extras)[0]
