"""MaskGIT sampler, which decodes masked tokens by confidence; the last class is the masked class.

Source: https://arxiv.org/abs/2202.04200; the same numbers as diffusers' `AmusedScheduler`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.errors import InputError
from jaxmodels.ranges import NOT_NEGATIVE, Range, check_fields
from jaxmodels.samplers.sampling import Predict, check_prediction, make_partial, run_steps

CLASSES = Range(2, 1 << 20)  # Including the masked class.
MASKINGS = ("cosine", "linear")
LOWEST = -70.0  # Smallest log-probability, so that differences of log-probabilities stay finite.
MIN_LOG_CONFIDENCE = -46.051702  # log(1e-20), diffusers' minimum of a confidence.


class MaskedTokens(NamedTuple):
    """Result of a discrete sampler: tokens and their probabilities; a pytree.

    Attributes:
        ids: classes, never the masked class.
        log_probability: the model's log-probability of the class when it was chosen; 0 for known tokens.
        distribution: log-probabilities of all classes at that time, zeros for known tokens; None unless requested.

    Example:
        >>> result = MaskedTokens(ids=jnp.int32([[1, 0]]), log_probability=jnp.float32([[0, 0]]))
        >>> result.ids.shape, result.distribution
        ((1, 2), None)
    """

    ids: Int[Array, "b n"]
    log_probability: Float[Array, "b n"]
    distribution: Float[Array, "b v n"] | None = None


def normalized(prediction: Float[Array, "b v n"]) -> Float[Array, "b v n"]:
    """Return log-probabilities from logits or log-probabilities, without infinities."""
    return jnp.maximum(jax.nn.log_softmax(prediction.astype(jnp.float32), axis=1), LOWEST)


class MaskRow(NamedTuple):
    """Coefficients of one decoding step, or with a leading axis of all steps.

    Attributes:
        share: share of the initially masked tokens that are masked after the step.
        temperature: randomness in the choice of the kept tokens.
    """

    timestep: Int[Any, "..."]
    share: Float[Any, "..."]
    temperature: Float[Any, "..."]


@dataclass(frozen=True)
class MaskSchedule:
    """Number of tokens that stay masked after each step.

    Attributes:
        num_classes: number of classes including the masked class (num_vector_embeds).
        masking: cosine keeps few tokens in the first steps; linear the same number in each step.
        temperature: randomness of the choice of tokens, at the first and at the last step; 0 keeps the most confident
            tokens. diffusers goes from 2 to 0.
        class_temperature: randomness of the classes: 1 draws from the model's distribution, 0 takes the most likely.
        remasking: whether tokens of earlier steps with less confidence may be masked again; not in diffusers.
        begins_with_one: whether the first step keeps only one token; not in diffusers.

    Raises:
        ConfigError: a field makes no sense.

    Example:
        >>> schedule = MaskSchedule(num_classes=3, masking="linear")
        >>> schedule.mask, schedule.rows(4).share.tolist()
        (2, [0.75, 0.5, 0.25, 0.0])
    """

    num_classes: Annotated[int, CLASSES]
    masking: Literal["cosine", "linear"] = "cosine"
    temperature: Annotated[tuple[float, float], NOT_NEGATIVE] = (2.0, 0.0)
    class_temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    remasking: bool = False
    begins_with_one: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "mask schedule (num_classes with the masked class)", {"masking": MASKINGS})

    @property
    def is_greedy(self) -> bool:
        """Whether decoding has no randomness."""
        return not any((*self.temperature, self.class_temperature))

    @property
    def mask(self) -> int:
        """Class of the masked token."""
        return self.num_classes - 1

    def share(self, progress: Any) -> Any:
        """Return the share of masked tokens: 1 at progress 0 and 0 at 1; a trainer draws ``share(uniform)``."""
        xp = np if isinstance(progress, np.ndarray) else jnp
        return xp.cos(progress * (np.pi / 2)) if self.masking == "cosine" else 1 - progress

    def rows(self, steps: int) -> MaskRow:
        """Return the coefficients of all steps.

        Raises:
            InputError: steps is less than 1.
        """
        if steps < 1:
            raise InputError(f"steps is {steps}; wanted 1 or more")
        # float32 as in diffusers, because the floor of a share times the tokens depends on the rounding.
        progress = np.arange(1, steps + 1).astype(np.float32) / np.float32(steps)
        if self.begins_with_one and steps > 1:  # With a share of 1, a step keeps one token.
            progress = np.arange(steps).astype(np.float32) / np.float32(steps - 1)
        temperature = np.linspace(*self.temperature, steps).astype(np.float32)
        return MaskRow(np.arange(steps)[::-1].astype(np.int32), self.share(progress), temperature)

    def add_noise(
        self, tokens: Int[Array, "b n"], share: Float[Array, " b"], uniform: Float[Array, "b n"]
    ) -> Int[Array, "b n"]:
        """Mask a share of each element's tokens, at least one token, for training.

        Args:
            uniform: random numbers; the tokens with the lowest numbers are masked.
        """
        count = jnp.maximum(jnp.ceil(share * tokens.shape[1]), 1).astype(jnp.int32)
        return jnp.where(ranks(uniform) < count[:, None], self.mask, tokens)


def first_tokens(known: Any, shape: tuple[int, int], mask: int) -> Int[Array, "b n"]:
    """Return the first tokens: `known` tokens or the masked class.

    Raises:
        InputError: the shape, the dtype or (except of tracers) a value of `known` is wrong.
    """
    if known is None:
        return jnp.full(shape, mask, jnp.int32)
    if jnp.shape(known) != shape or not jnp.issubdtype(jnp.result_type(known), jnp.integer):
        raise InputError(
            f"known is {jnp.result_type(known)} {list(jnp.shape(known))}; wanted integers {list(shape)}, "
            f"{mask} where a token is to be sampled"
        )
    tokens = np.zeros(0) if isinstance(known, Tracer) else np.asarray(known)
    if (wrong := tokens[(tokens < 0) | (tokens > mask)]).size:
        raise InputError(f"known holds {wrong[0]}; wanted classes 0 to {mask - 1}, or {mask} for a token to be sampled")
    return jnp.asarray(known, jnp.int32)


def ranks(x: Float[Array, "b n"]) -> Int[Array, "b n"]:
    """Return the rank of each number within its element; ties are in order of position."""
    return jnp.argsort(jnp.argsort(x, axis=1), axis=1)


def maskgit_step(
    schedule: MaskSchedule,
    prediction: Float[Array, "b v n"],
    tokens: Int[Array, "b n"],
    row: MaskRow,
    masked_at_first: Int[Array, " b"],
    class_gumbel: Float[Array, "b v n"],
    order_gumbel: Float[Array, "b n"],
    surety: Float[Array, "b n"] | None = None,
) -> tuple[Int[Array, "b n"], Bool[Array, "b n"], Float[Array, "b n"]]:
    """Take one step: draw all masked tokens, and mask the least confident tokens again.

    Args:
        prediction: log-probabilities (or logits) of all classes but the masked class.
        row: row of ``schedule.rows(steps)``; timestep 0 masks nothing again.
        masked_at_first: number of masked tokens before the first step.
        class_gumbel, order_gumbel: standard Gumbel noise, for the classes and for the order.
        surety: log-probability with which each unmasked token was chosen, for remasking; infinite for tokens that must
            stay. None keeps all unmasked tokens.

    Returns:
        The tokens, which tokens were revealed in this step, and the log-probability of each token's class.

    Example:
        >>> schedule = MaskSchedule(num_classes=3)
        >>> last = MaskRow(*(column[-1] for column in schedule.rows(2)))
        >>> logits = jnp.float32([[[0, 9], [9, 0]]])  # Class 1 for the first token, class 0 for the second token.
        >>> masked, none = jnp.int32([[2, 2]]), jnp.zeros((1, 2))
        >>> tokens, _, _ = maskgit_step(schedule, logits, masked, last, jnp.int32([2]), jnp.zeros((1, 2, 2)), none)
        >>> tokens.tolist()
        [[1, 0]]
    """
    log_probabilities = normalized(prediction)
    is_masked = tokens == schedule.mask
    likeliest = jnp.argmax(log_probabilities + schedule.class_temperature * class_gumbel, axis=1).astype(jnp.int32)
    drawn = jnp.where(is_masked, likeliest, tokens)
    sure = jnp.take_along_axis(log_probabilities, drawn[:, None], axis=1)[:, 0]
    order = jnp.where(is_masked, sure, jnp.inf if surety is None else surety)
    order = jnp.maximum(order, MIN_LOG_CONFIDENCE) + row.temperature * order_gumbel
    count = jnp.floor(masked_at_first.astype(jnp.float32) * row.share).astype(jnp.int32)
    count = jnp.maximum(jnp.minimum(count, jnp.sum(is_masked, axis=1) - 1), 1)
    is_masked_again = jnp.isfinite(order) & (ranks(order) < count[:, None]) & (row.timestep > 0)
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
    alike: bool = False,
    distributions: bool = False,
) -> MaskedTokens:
    """Sample tokens with MaskGIT in one compiled program, compiled again only for other shapes, schedules or steps.

    Args:
        predict: ``(ids, t)``, or ``(ids, t, extra)``, to log-probabilities (b, classes - 1, n); t is a scalar int32,
            from steps - 1 down to 0. Give a `jax.tree_util.Partial` over weights and conditioning, so that they are
            arguments of the program.
        shape: (b, n).
        key: source of all random numbers.
        extras: a pytree with a leading axis of ``schedule.rows(steps).timestep``.
        known: tokens (b, n) to keep, and the masked class for tokens to sample.
        alike: use the same random numbers for each member of the batch.
        distributions: also return `MaskedTokens.distribution`.

    Raises:
        InputError: steps, extras, known tokens or the prediction do not fit.

    Example:
        >>> def predict(ids, t):  # Class 1 for the first token, class 0 for the second token.
        ...     return jnp.log(jnp.float32([[[0.01, 0.99], [0.99, 0.01]]]))
        >>> schedule = MaskSchedule(num_classes=3, temperature=(0.0, 0.0), class_temperature=0.0)
        >>> maskgit(predict, (1, 2), jax.random.key(0), schedule, steps=2).ids.tolist()
        [[1, 0]]
    """
    first = first_tokens(known, shape, schedule.mask)
    return _sample(make_partial(predict), key, extras, first, shape, schedule, steps, alike, distributions)


@partial(jax.jit, static_argnames=("shape", "schedule", "steps", "alike", "distributions"))
def _sample(
    predict: Predict,
    key: PRNGKeyArray,
    extras: Any,
    first: Int[Array, "b n"],
    shape: tuple[int, int],
    schedule: MaskSchedule,
    steps: int,
    alike: bool,
    distributions: bool,
) -> MaskedTokens:
    is_given = first != schedule.mask
    masked_at_first = jnp.sum(~is_given, axis=1)
    expected = (shape[0], schedule.mask, shape[1])

    def step(prediction: Array, state: MaskedTokens, row: MaskRow) -> MaskedTokens:
        check_prediction(prediction, expected, "log-probabilities of every class but the masked one")
        class_gumbel, order_gumbel = _noise(schedule, jax.random.fold_in(key, row.timestep), shape, alike)
        surety = jnp.where(is_given, jnp.inf, state.log_probability) if schedule.remasking else None
        tokens, is_new, sure = maskgit_step(
            schedule, prediction, state.ids, row, masked_at_first, class_gumbel, order_gumbel, surety
        )
        distribution = state.distribution
        if distribution is not None:
            distribution = jnp.where(is_new[:, None], normalized(prediction), distribution)
        return MaskedTokens(tokens, jnp.where(is_new, sure, state.log_probability), distribution)

    distribution = jnp.zeros(expected, jnp.float32) if distributions else None
    state = MaskedTokens(first, jnp.zeros(shape, jnp.float32), distribution)
    return run_steps(predict, step, state, schedule.rows(steps), extras)


def _noise(schedule: MaskSchedule, key: PRNGKeyArray, shape: tuple[int, int], alike: bool) -> tuple[Array, Array]:
    """Draw Gumbel noise for the classes and, from the masked class's row, for the order; zero if decoding is greedy."""
    drawn = (1 if alike else shape[0], schedule.num_classes, shape[1])
    gumbel = jnp.zeros(drawn) if schedule.is_greedy else jax.random.gumbel(key, drawn, jnp.float32)
    gumbel = jnp.broadcast_to(gumbel, (shape[0], *drawn[1:]))
    return gumbel[:, :-1], gumbel[:, -1]
