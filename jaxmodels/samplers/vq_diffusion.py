"""VQ-Diffusion sampler and its schedule.

Source: https://arxiv.org/abs/2111.14822; the same numbers as diffusers' `VQDiffusionScheduler`.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.ranges import SHARE, Range, check_numbers
from jaxmodels.samplers.sampling import (
    CLASSES,
    LOWEST,
    Predict,
    Tokens,
    check_known,
    check_prediction,
    draw,
    first_tokens,
    make_partial,
    normalized,
    run_steps,
    select_class,
    truncate,
)


class Rates(NamedTuple):
    """Log-probabilities of a token's transitions between two times.

    Attributes:
        keep: it stays what it is.
        change: it becomes one certain class, maybe its own.
        mask: it becomes the masked class, and stays it.
    """

    keep: Float[Any, "..."]
    change: Float[Any, "..."]
    mask: Float[Any, "..."]


class VQRow(NamedTuple):
    """Rates of one step to an earlier timestep; with a leading axis, of all steps.

    Attributes:
        timestep: what the model is told.
        whole: from the clean sample to the timestep.
        before: from the clean sample to the earlier one; where that is the clean sample itself, nothing happens.
        between: from the earlier one to the timestep.
    """

    timestep: Int[Any, "..."]
    whole: Rates
    before: Rates
    between: Rates


@dataclass(frozen=True)
class VQSchedule:
    """Transition rates of VQ-Diffusion, with fields and defaults of diffusers' `VQDiffusionScheduler`.

    Attributes:
        num_vec_classes: with the masked class, which is the last (num_vector_embeds).
        alpha_cum_start, alpha_cum_end: share of tokens that kept their class, at the first and at the last timestep.
        gamma_cum_start, gamma_cum_end: share of masked tokens. What is left changed to any class; it must be more
            than nothing, for else no class could have become another (for masks alone there is MaskGIT).

    Raises:
        ConfigError: the shares make no sense together.
    """

    num_vec_classes: Annotated[int, CLASSES]
    num_train_timesteps: Annotated[int, Range(2, 100_000)] = 100
    alpha_cum_start: Annotated[float, SHARE] = 0.99999
    alpha_cum_end: Annotated[float, SHARE] = 0.000009
    gamma_cum_start: Annotated[float, SHARE] = 0.000009
    gamma_cum_end: Annotated[float, SHARE] = 0.99999

    def __post_init__(self) -> None:
        check_numbers(self, "VQ schedule (num_vec_classes with the masked class)")
        alpha, gamma = self._shares
        if min(alpha[-1], gamma[0]) <= 0 or (np.diff(alpha) >= 0).any() or (np.diff(gamma) <= 0).any():
            raise ConfigError(
                f"alpha_cum goes from {self.alpha_cum_start} to {self.alpha_cum_end} and gamma_cum from "
                f"{self.gamma_cum_start} to {self.gamma_cum_end}; wanted alpha to fall and gamma to rise, both above 0"
            )
        times = np.arange(self.num_train_timesteps)
        if min(self._change(times, np.full_like(times, -1)).min(), self._change(times, times - 1).min()) <= 0:
            raise ConfigError(
                "alpha_cum and gamma_cum leave no chance for a token to change its class; lower one of them a little"
            )

    @property
    def mask(self) -> int:
        """Class of the masked token."""
        return self.num_vec_classes - 1

    def timesteps(self, steps: int) -> Int[np.ndarray, " k"]:
        """Timesteps that a sampler with this many steps visits, noisiest first.

        With fewer steps than num_train_timesteps they are spread over all of them, and each step goes to the next
        one. (diffusers would begin in the middle, where a model has never seen everything masked.)

        Raises:
            InputError: there are fewer timesteps than steps.
        """
        total = self.num_train_timesteps
        if not 1 <= steps <= total:
            raise InputError(f"steps is {steps}; wanted 1 to {total} (num_train_timesteps)")
        return np.linspace(total - 1, 0, steps).round().astype(np.int32)

    def rows(self, steps: int) -> VQRow:
        """Rates of all steps."""
        times = self.timesteps(steps)
        return self._rows(times, np.append(times[1:], -1))

    def row(self, timestep: Int[Array, "*b"]) -> VQRow:
        """Rates of the step to the timestep before, for each of these; a trainer needs them for `posterior`."""
        times = np.arange(self.num_train_timesteps)
        return jax.tree.map(lambda table: jnp.asarray(table)[timestep], self._rows(times, times - 1))

    def add_noise(
        self, tokens: Int[Array, "b n"], timestep: Int[Array, " b"], gumbel: Float[Array, "b v n"]
    ) -> Int[Array, "b n"]:
        """Corrupt tokens at a timestep for each element, for training.

        Args:
            gumbel: standard Gumbel noise for all classes, the masked one too.
        """
        rates = expand_elements(self.row(timestep).whole)
        unmasked = jnp.logaddexp(rates.keep, rates.change)
        is_own = jnp.arange(self.num_vec_classes)[None, :, None] == tokens[:, None]
        log_probabilities = jnp.where(is_own, unmasked, rates.change).at[:, -1].set(rates.mask[:, 0])
        return draw(log_probabilities, gumbel)

    @cached_property
    def _shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Shares that kept their class and that are masked, at each timestep and, last (so -1), at no noise."""
        line = np.arange(self.num_train_timesteps) / (self.num_train_timesteps - 1)
        alpha = line * (self.alpha_cum_end - self.alpha_cum_start) + self.alpha_cum_start
        gamma = line * (self.gamma_cum_end - self.gamma_cum_start) + self.gamma_cum_start
        return alpha, gamma

    def _at(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shares at these timesteps; -1 is the clean sample."""
        alpha, gamma = self._shares
        return np.append(alpha, 1.0)[times], np.append(gamma, 0.0)[times]

    def _change(self, times: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        (alpha, gamma), (alpha0, gamma0) = self._at(times), self._at(earlier)
        return ((1 - gamma) / (1 - gamma0) - alpha / alpha0) / self.mask

    def _rates(self, times: np.ndarray, earlier: np.ndarray) -> Rates:
        (alpha, gamma), (alpha0, gamma0) = self._at(times), self._at(earlier)
        shares = alpha / alpha0, self._change(times, earlier), 1 - (1 - gamma) / (1 - gamma0)
        with np.errstate(divide="ignore"):  # nothing happens between the clean sample and itself
            logs = [np.maximum(np.log(share), LOWEST).astype(np.float32) for share in shares]
        return Rates(*logs)

    def _rows(self, times: np.ndarray, earlier: np.ndarray) -> VQRow:
        clean = np.full_like(times, -1)
        return VQRow(
            times.astype(np.int32), self._rates(times, clean), self._rates(earlier, clean), self._rates(times, earlier)
        )


def expand_elements(rates: Rates) -> Rates:
    """Rates in a shape to compute with (b v n): two more axes where each element has its own."""
    return Rates(*(jnp.asarray(rate).reshape(*jnp.shape(rate), *(1, 1) * (jnp.ndim(rate) > 0)) for rate in rates))


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
    whole, before, between = (expand_elements(rates) for rates in row[1:])
    is_masked = (tokens == schedule.mask)[:, None]
    is_own = jnp.arange(schedule.mask)[None, :, None] == tokens[:, None]

    def to_tokens(rates: Rates) -> Array:
        """Log-probability of becoming what the token is, from each class."""
        unmasked = jnp.logaddexp(rates.keep, rates.change)
        return jnp.where(is_masked, rates.mask, jnp.where(is_own, unmasked, rates.change))

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
    """One step: draw tokens from the posterior; at timestep 0 from the clean sample's classes alone.

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
    """Sample with VQ-Diffusion in one compiled program, compiled again only for other shapes, schedules or steps.

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
    return _sample(make_partial(predict), key, truncation, extras, known, shape, schedule, steps)


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
    expected = (shape[0], schedule.mask, shape[1])

    def step(prediction: Array, state: tuple[Array, Array], row: VQRow) -> tuple[Array, Array]:
        check_prediction(prediction, expected, "log-probabilities of every class but the masked one")
        log_probabilities = normalized(prediction)
        if truncation is not None:
            log_probabilities = jnp.maximum(truncate(log_probabilities, truncation), LOWEST)
        noise_shape = (shape[0], schedule.num_vec_classes, shape[1])
        gumbel = jax.random.gumbel(jax.random.fold_in(key, row.timestep), noise_shape, jnp.float32)
        tokens = vq_step(schedule, log_probabilities, state[0], row, gumbel)
        tokens = jnp.where(is_known, first, tokens)
        sure = select_class(log_probabilities, jnp.minimum(tokens, schedule.mask - 1))
        return tokens, jnp.where(is_known, 0, sure)

    return Tokens(*run_steps(predict, step, (first, jnp.zeros(shape, jnp.float32)), schedule.rows(steps), extras))
