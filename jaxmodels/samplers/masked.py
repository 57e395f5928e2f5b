"""MaskGIT: all tokens begin masked; each step draws them all, and keeps those the model is surest of.

Source: https://arxiv.org/abs/2202.04200; the same numbers as diffusers' `AmusedScheduler`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.samplers.classes import Tokens, check_known, draw, first_tokens, normalized, of_class
from jaxmodels.samplers.loop import Predict, check_prediction, run_steps, with_operands

MASKINGS = ("cosine", "linear")
LEAST = -46.051702  # log(1e-20): diffusers' floor of a confidence


class MaskRow(NamedTuple):
    """One step; with a leading axis, all of them.

    Attributes:
        timestep: what the model is told: how many steps come after this one.
        share: of the tokens that were masked at first, how many are masked again after the step.
        temperature: how much chance there is in which tokens are kept.
    """

    timestep: Int[Any, "..."]
    share: Float[Any, "..."]
    temperature: Float[Any, "..."]


@dataclass(frozen=True)
class MaskSchedule:
    """How many tokens stay masked after each step.

    Attributes:
        num_classes: with the masked class, which is the last (num_vector_embeds).
        masking: cosine keeps few tokens in the first steps; linear the same number in each.
        temperature: of the choice of tokens, at the first and at the last step. 0 keeps the surest ones, which is
            greedy and prefers what is common; diffusers goes from 2 to 0.

    Raises:
        ConfigError: a field makes no sense.
    """

    num_classes: int
    masking: Literal["cosine", "linear"] = "cosine"
    temperature: tuple[float, float] = (2.0, 0.0)

    def __post_init__(self) -> None:
        if self.num_classes < 2 or self.masking not in MASKINGS or min(self.temperature) < 0:
            raise ConfigError(
                f"num_classes is {self.num_classes}, masking {self.masking!r}, temperature {self.temperature}; wanted "
                f"2 or more with the masked class, one of {', '.join(MASKINGS)}, and nothing below 0"
            )

    @property
    def mask(self) -> int:
        """The masked class."""
        return self.num_classes - 1

    def share(self, progress: Any) -> Any:
        """Share of masked tokens, 1 at progress 0 and 0 at 1; a trainer draws ``share(uniform)``."""
        xp = np if isinstance(progress, np.ndarray) else jnp
        return xp.cos(progress * (np.pi / 2)) if self.masking == "cosine" else 1 - progress

    def rows(self, steps: int) -> MaskRow:
        """The sampler's table.

        Raises:
            InputError: steps is less than 1.
        """
        if steps < 1:
            raise InputError(f"steps is {steps}; wanted 1 or more")
        # float32 as in diffusers: where a share times the tokens is a whole number, its floor hangs on the rounding
        progress = np.arange(1, steps + 1).astype(np.float32) / np.float32(steps)
        temperature = np.linspace(*self.temperature, steps).astype(np.float32)
        return MaskRow(np.arange(steps)[::-1].astype(np.int32), self.share(progress), temperature)

    def add_noise(
        self, tokens: Int[Array, "b n"], share: Float[Array, " b"], uniform: Float[Array, "b n"]
    ) -> Int[Array, "b n"]:
        """Tokens of which a share is masked, at least one of each element: what a model is trained on.

        Args:
            uniform: random numbers; the lowest ones say which tokens.
        """
        count = jnp.maximum(jnp.ceil(share * tokens.shape[1]), 1).astype(jnp.int32)
        return jnp.where(ranks(uniform) < count[:, None], self.mask, tokens)


def ranks(x: Float[Array, "b n"]) -> Int[Array, "b n"]:
    """How many of an element's numbers are lower than each; equal ones in the order of their places."""
    return jnp.argsort(jnp.argsort(x, axis=1), axis=1)


def maskgit_step(
    schedule: MaskSchedule,
    prediction: Float[Array, "b v n"],
    tokens: Int[Array, "b n"],
    row: MaskRow,
    masked_at_first: Int[Array, " b"],
    class_gumbel: Float[Array, "b v n"],
    order_gumbel: Float[Array, "b n"],
) -> tuple[Int[Array, "b n"], Bool[Array, "b n"], Float[Array, "b n"]]:
    """One step: draw every masked token, and mask again those the model is least sure of.

    Args:
        prediction: log-probabilities (or logits) of all classes but the masked one.
        row: one row of ``schedule.rows(steps)``; timestep 0 masks nothing again.
        masked_at_first: masked tokens before the first step.
        class_gumbel, order_gumbel: standard Gumbel noise, for the classes and for the order.

    Returns:
        The tokens, which of them were revealed in this step, and the log-probability of each token's class.
    """
    log_probabilities = normalized(prediction)
    is_masked = tokens == schedule.mask
    drawn = jnp.where(is_masked, draw(log_probabilities, class_gumbel), tokens)
    sure = of_class(log_probabilities, drawn)
    order = jnp.where(is_masked, jnp.maximum(sure, LEAST) + row.temperature * order_gumbel, jnp.inf)
    count = jnp.floor(masked_at_first.astype(jnp.float32) * row.share).astype(jnp.int32)
    count = jnp.maximum(jnp.minimum(count, jnp.sum(is_masked, axis=1) - 1), 1)
    is_masked_again = is_masked & (ranks(order) < count[:, None]) & (row.timestep > 0)
    return jnp.where(is_masked_again, schedule.mask, drawn), is_masked & ~is_masked_again, sure


def maskgit(
    predict: Predict,
    shape: tuple[int, int],
    key: PRNGKeyArray,
    schedule: MaskSchedule,
    *,
    steps: int,
    extras: Any = None,
    known: Any = None,
) -> Tokens:
    """Samples tokens in one compiled program, which only other shapes, schedules or steps compile again.

    Args:
        predict: ``(ids, t)``, or ``(ids, t, extra)``, to log-probabilities (b, classes - 1, n); t is a scalar int32,
            from steps - 1 down to 0. Give a `jax.tree_util.Partial` over weights and conditioning, so that they are
            arguments of the program.
        shape: (b, n).
        key: where all random numbers come from.
        extras: a pytree with a leading axis of steps, one for each of ``schedule.rows(steps).timestep``.
        known: tokens (b, n) to keep, and the masked class where one is to be sampled.

    Raises:
        InputError: steps, extras, known tokens or the prediction do not fit.
    """
    check_known(known, schedule.mask)
    return _sample(with_operands(predict), key, extras, known, shape, schedule, steps)


@partial(jax.jit, static_argnames=("shape", "schedule", "steps"))
def _sample(
    predict: Predict,
    key: PRNGKeyArray,
    extras: Any,
    known: Any,
    shape: tuple[int, int],
    schedule: MaskSchedule,
    steps: int,
) -> Tokens:
    first = first_tokens(known, shape, schedule.mask)
    masked_at_first = jnp.sum(first == schedule.mask, axis=1)
    wanted = (shape[0], schedule.mask, shape[1])

    def step(prediction: Array, state: tuple[Array, Array], row: MaskRow) -> tuple[Array, Array]:
        check_prediction(prediction, wanted, "log-probabilities of every class but the masked one")
        tokens, surety = state
        # One draw, as random numbers are much of what there is to compile: the masked class's row is for the order.
        noise_shape = (shape[0], schedule.num_classes, shape[1])
        gumbel = jax.random.gumbel(jax.random.fold_in(key, row.timestep), noise_shape, jnp.float32)
        tokens, is_new, sure = maskgit_step(
            schedule, prediction, tokens, row, masked_at_first, gumbel[:, :-1], gumbel[:, -1]
        )
        return tokens, jnp.where(is_new, sure, surety)

    return Tokens(*run_steps(predict, step, (first, jnp.zeros(shape, jnp.float32)), schedule.rows(steps), extras))
