"""pi0 and pi0.5 for serving: what is seen and said once per chunk, then a velocity for each step of the flow."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import Pi0Model, PiModel, StepInputs
from jaxmodels.samplers import begin_with, continuing, flow_euler
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
    if plan is not None:
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
