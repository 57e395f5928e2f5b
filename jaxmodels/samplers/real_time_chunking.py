"""Real-time chunking: sampling of chunks that continue the plan that is being executed.

Guidance: at every step the gradient of the expected clean chunk pulls it towards the plan, firmly where the robot will
have moved before the chunk arrives, less after that. It needs no training and works with any sampler. Source:
https://arxiv.org/abs/2506.07339 (formulas 2 to 5 and algorithm 1), pseudo-inverse guidance
(https://openreview.net/forum?id=9_gsMA8MRKQ) for flow matching with soft masking and a bound. With sigma = 1 - tau and
velocity = noise - sample::

    sample_hat = x - sigma velocity(x)                                # what the model expects
    error      = mask (plan - sample_hat)                             # `soft_mask`
    guided     = velocity - weight(sigma) error . d sample_hat / dx   # `pull`

Trained: the first actions of a chunk have no noise in training, and each action has a timestep of its own (b, t).
Source: https://arxiv.org/abs/2512.05964 (its timestep 1 is sigma 0 here).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.samplers.diffusion import NoiseSchedule
from jaxmodels.samplers.flow import FlowSchedule, between
from jaxmodels.samplers.sampling import Predict, make_partial
from jaxmodels.types import Prefix

BOUND = 5.0  # of the pull; the paper's beta


def soft_mask(delay: Int[Array, " b"], length: Int[Array, " b"], chunk: int) -> Float[Array, "b {chunk}"]:
    """Weight of each action of a new chunk in the guidance towards the plan (formula 5 of the paper).

    1 for the first `delay` actions; then ``c (e^c - 1) / (e - 1)`` with c falling linearly, so that it would be 1 one
    action earlier and is 0 at `length`, the end of the overlap (the paper's H - s); 0 from there on.
    """
    length = jnp.clip(length, 0, chunk)[:, None]
    delay = jnp.clip(delay[:, None], 0, length)
    index = jnp.arange(chunk)[None]
    left = (length - index).astype(jnp.float32) / (length - delay + 1).astype(jnp.float32)
    fading = left * jnp.expm1(left) / jnp.expm1(1.0)
    return jnp.where(index < delay, 1.0, jnp.where(index < length, fading, 0.0)).astype(jnp.float32)


def pull(sigma: Float[Any, "..."], bound: float = BOUND) -> Float[Array, "..."]:
    """Return the guidance's weight, ``(1 - tau) / (tau r^2)`` with ``r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2)``.

    It is 2 half way; the bound limits it at both ends, where few steps could not follow it.
    """
    other = 1 - sigma
    inside = sigma * other
    weight = (sigma**2 + other**2) / jnp.where(inside > 0, inside, 1)
    return jnp.where(inside > 0, jnp.minimum(weight, bound), bound)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Way:
    """Static arguments of a guided program, besides its arrays."""

    schedule: FlowSchedule | NoiseSchedule
    bound: float
    through_model: bool


def continuing(
    predict: Predict,
    prefix: Prefix,
    schedule: FlowSchedule | NoiseSchedule,
    *,
    bound: float = BOUND,
    through_model: bool = True,
) -> Partial:
    """A `predict` guided to continue a plan, for any sampler over chunks (b, t, a) with this schedule.

    Delays and lengths are arrays: one compiled program serves all of them, each member of a batch with its own. Without
    a plan (length 0) a member's samples are those of `predict`; when nobody in the batch has one, no gradient is
    computed at all.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)``, to a prediction shaped like x, with members that do not depend on
            each other. For a diffusion schedule the prediction is read as its `prediction_type`: the model is guided as
            the flow that it amounts to (``sigma = noise / (signal + noise)``), where the weight without bound is that
            of https://openreview.net/forum?id=9_gsMA8MRKQ.
        prefix: the plan, normalised as the samples are. Its actions may have fewer numbers than those of the samples,
            whose others are padding and not pulled.
        bound: the most that `pull` may be: the paper's beta. More holds the plan more firmly; few steps want less.
        through_model: take the gradient through the model, which costs about two more forward passes a step. Without it
            the expected sample counts as if it moved with x one to one, as in lerobot 0.4.4, whose gradient does not
            reach the model: cheaper, but actions without a plan are not told of those with one.

    Raises:
        ConfigError: the bound is not more than 0.
        InputError: the plan has another shape than the samples (when traced).
    """
    if not bound > 0:
        raise ConfigError(f"bound of the guidance is {bound}; wanted more than 0, e.g. {BOUND}")
    return Partial(_guided, make_partial(predict), prefix, _Way(schedule, float(bound), through_model))


def begin_with(prefix: Prefix, chunk: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
    """Replace the first actions of `chunk` by those of the plan; guidance alone only comes close to them."""
    steps = jnp.arange(chunk.shape[1])[None]
    is_past = steps < jnp.minimum(prefix.delay, prefix.length)[:, None]
    return jnp.where(is_past[..., None], prefix.actions.astype(chunk.dtype), chunk)


def _guided(predict: Predict, prefix: Prefix, way: _Way, x: Array, t: Any, *rest: Any) -> Array:
    *spans, width = jnp.shape(prefix.actions)
    if (*spans,) != x.shape[:-1] or width > x.shape[-1]:
        raise InputError(f"prefix has actions of {[*spans, width]}; wanted {list(x.shape)}, as samples")

    def plain(x: Array) -> Array:
        return jnp.asarray(predict(x, t, *rest), jnp.float32)

    def expected(x: Array) -> tuple[Array, Array]:
        prediction = plain(x)
        return _clean(way.schedule, prediction, x, t), prediction

    def guided(x: Array) -> Array:
        if way.through_model:
            sample, back, prediction = jax.vjp(expected, x, has_aux=True)
        else:
            (sample, prediction), back = expected(x), lambda error: (error,)
        mask = soft_mask(prefix.delay, prefix.length, x.shape[1])[..., None]
        error = jnp.where(mask > 0, mask * (prefix.actions - sample[..., :width]), 0)
        error = jnp.pad(error, ((0, 0), (0, 0), (0, x.shape[-1] - width)))
        return _corrected(way, prediction, back(error)[0], t)

    return lax.cond(jnp.any(prefix.length > 0), guided, plain, x)


def _clean(schedule: FlowSchedule | NoiseSchedule, prediction: Array, x: Array, t: Any) -> Array:
    """The sample that a prediction amounts to."""
    if isinstance(schedule, FlowSchedule):
        return x - t / schedule.num_train_timesteps * prediction
    # not clipped: where it is, it has no gradient
    return replace(schedule, clip_sample=False).split(prediction, x, jnp.asarray(schedule.alphas)[t])[0]


def _corrected(way: _Way, prediction: Array, gradient: Array, t: Any) -> Array:
    """The prediction whose sample is pulled along the gradient (by x), and whose noise makes up for it."""
    schedule = way.schedule
    if isinstance(schedule, FlowSchedule):
        return prediction - pull(t / schedule.num_train_timesteps, way.bound) * gradient
    alpha = jnp.asarray(schedule.alphas)[t]
    signal, noise = jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
    # x / (signal + noise) is the flow's x, and its gradient is (signal + noise) times that by x
    step = pull(noise / (signal + noise), way.bound) * gradient
    if schedule.prediction_type == "epsilon":
        return prediction - signal * step
    return prediction + noise * step if schedule.prediction_type == "sample" else prediction - step


class Example(NamedTuple):
    """Training example for a model with a timestep for each action.

    Attributes:
        x: (b, t, a), noisy but for the first actions.
        timestep: (b, t), 0 where there is no noise.
        target: (b, t, a), the velocity.
        counts: (b, t), true where the loss counts: the mean is over these.
    """

    x: Float[Array, "b t a"]
    timestep: Float[Array, "b t"]
    target: Float[Array, "b t a"]
    counts: Bool[Array, "b t"]


def draw_delays(key: PRNGKeyArray, batch: int, largest: int, decay: float = 0.0) -> Int[Array, " {batch}"]:
    """Draw random delays of 0 to `largest` (included, less than a chunk) for training.

    Each delay is ``exp(-decay)`` as frequent as the one before: short delays leave more actions to learn from.
    """
    return jax.random.categorical(key, -decay * jnp.arange(largest + 1, dtype=jnp.float32), shape=(batch,))


def example(
    schedule: FlowSchedule,
    actions: Float[Array, "b t a"],
    noise: Float[Array, "b t a"],
    sigma: Float[Array, " b"],
    delay: Int[Array, " b"],
) -> Example:
    """Training example: `actions` with noise, all but the first `delay` of each chunk."""
    counts = jnp.arange(actions.shape[1])[None] >= delay[:, None]
    sigmas = jnp.where(counts, sigma[:, None], 0)
    x = between(actions, noise, sigmas[..., None])
    return Example(x, sigmas * schedule.num_train_timesteps, schedule.target(actions, noise), counts)


def given(predict: Predict, prefix: Prefix, schedule: FlowSchedule) -> Partial:
    """Return a `predict` that continues a plan in a flow sampler, for a model that was trained with `example`.

    The first `delay` actions stay without noise. The plan beyond them is not used, because the model never saw any.
    `predict` takes ``(x, t)``, or ``(x, t, extra)``, with t (b, t).
    """
    return Partial(_given, make_partial(predict), prefix, jnp.float32(schedule.num_train_timesteps))


def _given(predict: Predict, prefix: Prefix, total: Array, x: Array, t: Any, *rest: Any) -> Array:
    past = jnp.arange(x.shape[1])[None] < jnp.minimum(prefix.delay, prefix.length)[:, None]
    clamped = jnp.where(past[..., None], prefix.actions, x)
    velocity = jnp.asarray(predict(clamped, jnp.where(past, 0, t), *rest), jnp.float32)
    # straight to the plan from wherever x is, which began as noise
    return jnp.where(past[..., None], (x - prefix.actions) * (total / t), velocity)
