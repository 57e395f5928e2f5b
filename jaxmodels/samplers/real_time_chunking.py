"""Real-time chunking: sampling of chunks that continue the plan that is being executed.

Guidance needs no training: at every step a gradient pulls the expected clean chunk towards the plan, most where the
robot will have moved before the chunk arrives. Source: https://arxiv.org/abs/2506.07339 (formulas 2 to 5 and algorithm
1), pseudo-inverse guidance (https://openreview.net/forum?id=9_gsMA8MRKQ) for flow matching with soft masking and a
bound. With sigma = 1 - tau and velocity = noise - sample::

    sample_hat = x - sigma velocity(x)                                # the model's expected sample
    error      = mask (plan - sample_hat)                             # `soft_mask`
    guided     = velocity - weight(sigma) error . d sample_hat / dx   # `pull`

Training: the first actions of a chunk have no noise, and each action has its own timestep (b, t).
Source: https://arxiv.org/abs/2512.05964 (its timestep 1 is sigma 0 here).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.errors import ConfigError, InputError
from jaxmodels.samplers.diffusion import NoiseSchedule
from jaxmodels.samplers.flow import FlowSchedule, between
from jaxmodels.samplers.sampling import Predict, make_partial
from jaxmodels.types import Prefix

BOUND = 5.0  # Maximum of the pull, the paper's beta.


def soft_mask(delay: Int[Array, " b"], length: Int[Array, " b"], chunk: int) -> Float[Array, "b {chunk}"]:
    """Return the weight of each action of a new chunk in the guidance towards the plan (formula 5 of the paper).

    It is 1 for the first `delay` actions, then ``c (e^c - 1) / (e - 1)`` with c falling linearly to 0 at `length`, the
    end of the overlap (the paper's H - s).

    Example:
        >>> soft_mask(jnp.int32([1]), jnp.int32([2]), chunk=3).round(2).tolist()
        [[1.0, 0.1899999976158142, 0.0]]
    """
    length = jnp.clip(length, 0, chunk)[:, None]
    delay = jnp.clip(delay[:, None], 0, length)
    index = jnp.arange(chunk)[None]
    left = (length - index).astype(jnp.float32) / (length - delay + 1).astype(jnp.float32)
    fading = left * jnp.expm1(left) / jnp.expm1(1.0)
    return jnp.where(index < delay, 1.0, jnp.where(index < length, fading, 0.0)).astype(jnp.float32)


def pull(sigma: Float[Any, "..."], bound: float = BOUND) -> Float[Array, "..."]:
    """Return the guidance's weight, ``(1 - tau) / (tau r^2)`` with ``r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2)``.

    The bound limits it at both ends, where few steps could not follow it.

    Example:
        >>> pull(jnp.float32([0.5, 1.0])).tolist()
        [2.0, 5.0]
    """
    other = 1 - sigma
    inside = sigma * other
    weight = (sigma**2 + other**2) / jnp.where(inside > 0, inside, 1)
    return jnp.where(inside > 0, jnp.minimum(weight, bound), bound)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Way:
    """Static arguments of a guided program."""

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
    """Return a `predict` guided to continue a plan, for any sampler over chunks (b, t, a) with this schedule.

    One compiled program serves all delays and lengths. Members without a plan (length 0) are not guided.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)``, to a prediction shaped like x, with independent members. With a
            diffusion schedule the model is guided as the equivalent flow (``sigma = noise / (signal + noise)``).
        prefix: the plan, normalised like the samples. Its actions may be narrower than padded samples.
        bound: maximum of `pull`, the paper's beta. A larger bound holds the plan more firmly but needs more steps.
        through_model: take the gradient through the model, which costs about two more forward passes a step. Without
            it, as in lerobot 0.4.4, the plan does not influence the actions after it.

    Raises:
        ConfigError: the bound is not more than 0.
        InputError: plan and samples have different shapes (when traced).

    Example:
        >>> from jaxmodels.samplers import flow_euler
        >>> def predict(x, t):  # The velocity from the sample 0 to x.
        ...     return x * 1000 / t
        >>> plan = Prefix(actions=jnp.ones((1, 4, 1)), delay=jnp.int32([2]), length=jnp.int32([4]))
        >>> schedule = FlowSchedule(spacing="uniform")
        >>> chunk = flow_euler(continuing(predict, plan, schedule), (1, 4, 1), jax.random.key(0), schedule, steps=4)
        >>> chunk.shape
        (1, 4, 1)
    """
    if not bound > 0:
        raise ConfigError(f"bound of the guidance is {bound}; wanted more than 0, e.g. {BOUND}")
    return Partial(_guided, make_partial(predict), prefix, _Way(schedule, float(bound), through_model))


def begin_with(prefix: Prefix, chunk: Float[Array, "b t a"]) -> Float[Array, "b t a"]:
    """Replace the first actions of `chunk` by the plan's actions, which guidance only approximates.

    Example:
        >>> plan = Prefix(actions=jnp.ones((1, 3, 1)), delay=jnp.int32([2]), length=jnp.int32([3]))
        >>> begin_with(plan, jnp.zeros((1, 3, 1)))[0, :, 0].tolist()
        [1.0, 1.0, 0.0]
    """
    steps = jnp.arange(chunk.shape[1])[None]
    is_past = steps < jnp.minimum(prefix.delay, prefix.length)[:, None]
    return jnp.where(is_past[..., None], prefix.actions.astype(chunk.dtype), chunk)


def _guided(predict: Predict, prefix: Prefix, way: _Way, x: Array, t: Any, *rest: Any) -> Array:
    *spans, width = jnp.shape(prefix.actions)
    if (*spans,) != x.shape[:-1] or width > x.shape[-1]:
        raise InputError(f"prefix has actions of {[*spans, width]}; wanted {list(x.shape)}, as samples")

    def expected(x: Array) -> tuple[Array, Array]:
        prediction = jnp.asarray(predict(x, t, *rest), jnp.float32)
        return _clean(way.schedule, prediction, x, t), prediction

    if way.through_model:
        sample, back, prediction = jax.vjp(expected, x, has_aux=True)
    else:
        (sample, prediction), back = expected(x), lambda error: (error,)
    mask = soft_mask(prefix.delay, prefix.length, x.shape[1])[..., None]
    error = jnp.where(mask > 0, mask * (prefix.actions - sample[..., :width]), 0)
    error = jnp.pad(error, ((0, 0), (0, 0), (0, x.shape[-1] - width)))
    return _corrected(way, prediction, back(error)[0], t)


def _clean(schedule: FlowSchedule | NoiseSchedule, prediction: Array, x: Array, t: Any) -> Array:
    """Return the clean sample of a prediction."""
    if isinstance(schedule, FlowSchedule):
        return x - t / schedule.num_train_timesteps * prediction
    # A clipped sample would have no gradient.
    return replace(schedule, clip_sample=False).split(prediction, x, jnp.asarray(schedule.alphas)[t])[0]


def _corrected(way: _Way, prediction: Array, gradient: Array, t: Any) -> Array:
    """Return the prediction with its sample pulled along the gradient (by x)."""
    schedule = way.schedule
    if isinstance(schedule, FlowSchedule):
        return prediction - pull(t / schedule.num_train_timesteps, way.bound) * gradient
    alpha = jnp.asarray(schedule.alphas)[t]
    signal, noise = jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
    # The flow's x is x / (signal + noise), so its gradient is (signal + noise) times the gradient by x.
    step = pull(noise / (signal + noise), way.bound) * gradient
    if schedule.prediction_type == "epsilon":
        return prediction - signal * step
    return prediction + noise * step if schedule.prediction_type == "sample" else prediction - step


class Example(NamedTuple):
    """Training example for a model with a timestep for each action.

    Attributes:
        x: (b, t, a), with noise except in the first actions.
        timestep: (b, t), 0 without noise.
        target: (b, t, a), the velocity.
        counts: (b, t), whether the loss includes the action.

    Example:
        >>> noisy = example(FlowSchedule(), jnp.ones((1, 2, 1)), jnp.zeros((1, 2, 1)), jnp.ones(1), jnp.int32([1]))
        >>> noisy.timestep.tolist(), noisy.counts.tolist()
        ([[0.0, 1000.0]], [[False, True]])
    """

    x: Float[Array, "b t a"]
    timestep: Float[Array, "b t"]
    target: Float[Array, "b t a"]
    counts: Bool[Array, "b t"]


def draw_delays(key: PRNGKeyArray, batch: int, largest: int, decay: float = 0.0) -> Int[Array, " {batch}"]:
    """Draw random delays of 0 to `largest` for training, each ``exp(-decay)`` as frequent as the previous delay.

    Example:
        >>> draw_delays(jax.random.key(0), batch=3, largest=0).tolist()
        [0, 0, 0]
    """
    return jax.random.categorical(key, -decay * jnp.arange(largest + 1, dtype=jnp.float32), shape=(batch,))


def example(
    schedule: FlowSchedule,
    actions: Float[Array, "b t a"],
    noise: Float[Array, "b t a"],
    sigma: Float[Array, " b"],
    delay: Int[Array, " b"],
) -> Example:
    """Return a training example: `actions` with noise except in the first `delay` actions of each chunk.

    Example:
        >>> actions, noise = jnp.ones((1, 3, 1)), jnp.zeros((1, 3, 1))
        >>> example(FlowSchedule(), actions, noise, sigma=jnp.float32([0.5]), delay=jnp.int32([1])).x[0, :, 0].tolist()
        [1.0, 0.5, 0.5]
    """
    counts = jnp.arange(actions.shape[1])[None] >= delay[:, None]
    sigmas = jnp.where(counts, sigma[:, None], 0)
    x = between(actions, noise, sigmas[..., None])
    return Example(x, sigmas * schedule.num_train_timesteps, schedule.target(actions, noise), counts)


def given(predict: Predict, prefix: Prefix, schedule: FlowSchedule) -> Partial:
    """Return a `predict` that continues a plan in a flow sampler, for a model that was trained with `example`.

    The first `delay` actions have no noise. `predict` takes ``(x, t)``, or ``(x, t, extra)``, with t (b, t).

    Example:
        >>> from jaxmodels.samplers import flow_euler
        >>> def predict(x, t):  # A constant velocity.
        ...     return jnp.ones_like(x)
        >>> plan = Prefix(actions=jnp.ones((1, 2, 1)), delay=jnp.int32([1]), length=jnp.int32([2]))
        >>> schedule = FlowSchedule(spacing="uniform")
        >>> start = jnp.zeros((1, 2, 1))
        >>> chunk = flow_euler(
        ...     given(predict, plan, schedule), start.shape, jax.random.key(0), schedule, steps=2, start=start
        ... )
        >>> chunk[0, :, 0].tolist()
        [1.0, -1.0]
    """
    return Partial(_given, make_partial(predict), prefix, jnp.float32(schedule.num_train_timesteps))


def _given(predict: Predict, prefix: Prefix, total: Array, x: Array, t: Any, *rest: Any) -> Array:
    past = jnp.arange(x.shape[1])[None] < jnp.minimum(prefix.delay, prefix.length)[:, None]
    clamped = jnp.where(past[..., None], prefix.actions, x)
    velocity = jnp.asarray(predict(clamped, jnp.where(past, 0, t), *rest), jnp.float32)
    # The velocity leads straight from x to the plan.
    return jnp.where(past[..., None], (x - prefix.actions) * (total / t), velocity)
