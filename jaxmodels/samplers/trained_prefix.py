"""Chunks that continue a plan because the model was trained to: it sees the plan's actions as they are.

The other way to real-time chunking, without gradients when it is served: in training the first actions of a chunk are
left without noise, and each action comes with a timestep of its own that says so. Source:
https://arxiv.org/abs/2512.05964 (its timestep 1 is sigma 0 here). For models of flows that take timesteps (b, t).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.samplers.flow import FlowSchedule, between
from jaxmodels.samplers.loop import Predict, with_operands
from jaxmodels.types import Prefix


class Example(NamedTuple):
    """What a model with timesteps for each action is trained on.

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
    """Delays of 0 to `largest` (included) for training, so that one model serves all of them.

    Args:
        largest: in actions, what is to be expected of the slowest server; less than a chunk.
        decay: 0 draws all of them equally often; with more, each is ``exp(-decay)`` as frequent as the one before: more
            is learned of short delays, which leave more actions to learn from.
    """
    return jax.random.categorical(key, -decay * jnp.arange(largest + 1, dtype=jnp.float32), shape=(batch,))


def example(
    schedule: FlowSchedule,
    actions: Float[Array, "b t a"],
    noise: Float[Array, "b t a"],
    sigma: Float[Array, " b"],
    delay: Int[Array, " b"],
) -> Example:
    """A batch for training: `actions` on their way to noise, all but the first `delay` of each chunk."""
    counts = jnp.arange(actions.shape[1])[None] >= delay[:, None]
    sigmas = jnp.where(counts, sigma[:, None], 0)
    x = between(actions, noise, sigmas[..., None])
    return Example(x, sigmas * schedule.num_train_timesteps, schedule.target(actions, noise), counts)


def given(predict: Predict, prefix: Prefix, schedule: FlowSchedule) -> Partial:
    """A `predict` for a flow's sampler that continues a plan, from one that was trained with `example`.

    The first `delay` actions are seen without noise at every step, and come out as they went in. What the plan holds
    beyond its delay is not used: the model never saw anything like it.

    Args:
        predict: ``(x, t)``, or ``(x, t, extra)``, with t (b, t).
    """
    return Partial(_given, with_operands(predict), prefix, jnp.float32(schedule.num_train_timesteps))


def _given(predict: Predict, prefix: Prefix, total: Array, x: Array, t: Any, *rest: Any) -> Array:
    past = jnp.arange(x.shape[1])[None] < jnp.minimum(prefix.delay, prefix.length)[:, None]
    seen = jnp.where(past[..., None], prefix.actions, x)
    velocity = jnp.asarray(predict(seen, jnp.where(past, 0, t), *rest), jnp.float32)
    # straight to the plan from wherever x is, which began as noise
    return jnp.where(past[..., None], (x - prefix.actions) * (total / t), velocity)
