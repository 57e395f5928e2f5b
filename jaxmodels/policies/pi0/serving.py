"""pi0 and pi0.5 for serving: what is seen and said once per chunk, then a velocity for each step of the flow."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import Pi0Model, PiModel, StepInputs
from jaxmodels.samplers import begin_with, continuing, flow_euler, given
from jaxmodels.types import Observation
from jaxmodels.vlm.gemma import PrefixCache
from jaxmodels.weights import blueprint


def act(
    config: Pi0Config,
    weights: Mapping[str, Array],
    observation: Observation,
    *,
    network: type[PiModel] = Pi0Model,
) -> Float[Array, "b t a"]:
    """A normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    model = blueprint(lambda rngs: network(config, rngs=rngs)).assemble(weights)
    prefix = encode(model, observation)
    schedule, steps, action = config.schedule, config.num_inference_steps, config.action.shape[0]
    key, noise = jax.random.key(config.noise_seed), observation.noise
    shape = (prefix.is_valid.shape[0], *config.noise)
    if noise is None:
        noise = jnp.broadcast_to(jax.random.normal(key, config.noise, jnp.float32), shape)
    predict = Partial(denoise, model, prefix, model.embed_state(observation.state))
    plan = observation.prefix
    if plan is not None and config.trained_delay:
        # Beyond what it was trained to begin with, a policy never saw anything like it.
        width = config.max_action_dim - plan.actions.shape[-1]
        padded = jnp.pad(plan.actions.astype(jnp.float32), ((0, 0), (0, 0), (0, width)))
        begun = plan._replace(actions=padded, delay=jnp.minimum(plan.delay, config.trained_delay))
        still = jax.tree.map(lambda array: array[0], model.prepare_steps(np.zeros(1, np.float32)))
        predict = given(Partial(denoise_behind, model, prefix, still), begun, schedule)
    elif plan is not None:
        predict = continuing(predict, plan, schedule)
    extras = model.prepare_steps(schedule.euler_rows(steps).sigma)
    chunk = flow_euler(predict, shape, key, schedule, steps=steps, extras=extras, start=noise)[..., :action]
    return chunk if plan is None else begin_with(plan, chunk)


def encode(model: PiModel, observation: Observation) -> PrefixCache:
    """Keys and values of images and words: once per chunk."""
    return model.encode(observation)


def denoise(
    model: PiModel,
    prefix: PrefixCache,
    state: Float[Array, "b 1 d"] | None,
    x: Float[Array, "b t a"],
    t: Any,
    step: StepInputs,
) -> Float[Array, "b t a"]:
    """The velocity of a noisy chunk at one step."""
    del t  # is in step
    return model.denoise(prefix, state, x, step)


def denoise_behind(
    model: PiModel,
    prefix: PrefixCache,
    still: StepInputs,
    x: Float[Array, "b t a"],
    t: Float[Array, "b t"],
    step: StepInputs,
) -> Float[Array, "b t a"]:
    """The velocity of a chunk some of whose actions are without noise, as pi0.5 may be trained.

    Args:
        still: what time 0 contributes, which is theirs.
    """
    is_still = (t == 0)[..., None]
    step = jax.tree.map(lambda noisy, clean: jnp.where(is_still, clean, noisy), step, still)
    return model.denoise(prefix, None, x, step)
