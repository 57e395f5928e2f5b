"""pi0 and pi0.5 for serving: what is seen and said once per chunk, then a velocity for each step of the flow."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies import Stage
from jaxmodels.policies.pi0.config import Pi0Config
from jaxmodels.policies.pi0.model import Pi0Model, PiModel, StepInputs
from jaxmodels.samplers import begin_with, continuing, flow_euler, given
from jaxmodels.samplers.sampling import draw_for_each
from jaxmodels.types import Observation
from jaxmodels.vlm.gemma import PrefixCache
from jaxmodels.weights import blueprint_of


def act(
    config: Pi0Config,
    weights: Mapping[str, Array],
    observation: Observation,
    *,
    network: type[PiModel] = Pi0Model,
) -> Float[Array, "b t a"]:
    """A normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    model = assemble(network, config, weights)
    prefix = encode(model, observation)
    schedule, steps, action = config.schedule, config.num_inference_steps, config.action.shape[0]
    key, noise = jax.random.key(config.noise_seed), make_noise(config, observation)
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
    chunk = flow_euler(predict, noise.shape, key, schedule, steps=steps, extras=extras, start=noise)[..., :action]
    return chunk if plan is None else begin_with(plan, chunk)


def assemble(network: type[PiModel], config: Pi0Config, weights: Mapping[str, Array]) -> PiModel:
    """The network over serving weights."""
    return blueprint_of(network, config).assemble(weights)


def make_noise(config: Pi0Config, observation: Observation) -> Float[Array, "b t a"]:
    """What a chunk is made of: what is given, or the policy's own, the same for each member."""
    if observation.noise is not None:
        return observation.noise
    return draw_for_each(jax.random.key(config.noise_seed), config.noise, observation.state.shape[0])


def encode(model: PiModel, observation: Observation, seen: Float[Array, "n m d"] | None = None) -> PrefixCache:
    """Keys and values of images and words: once per chunk."""
    return model.encode(observation, seen)


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


def list_stages(network: type[PiModel] = Pi0Model) -> tuple[Stage, ...]:
    """Parts of `act` that can be timed apart."""

    def look(
        config: Pi0Config, weights: Mapping[str, Array], observation: Observation, given: None
    ) -> Float[Array, "n m d"]:
        return assemble(network, config, weights).embed_images(observation)

    def read(
        config: Pi0Config, weights: Mapping[str, Array], observation: Observation, given: Float[Array, "n m d"]
    ) -> PrefixCache:
        return encode(assemble(network, config, weights), observation, given)

    def take_step(
        config: Pi0Config, weights: Mapping[str, Array], observation: Observation, given: PrefixCache
    ) -> Float[Array, "b t a"]:
        model = assemble(network, config, weights)
        times = config.schedule.euler_rows(config.num_inference_steps).sigma[:1]
        step = jax.tree.map(lambda rows: rows[0], model.prepare_steps(times))
        return denoise(model, given, model.embed_state(observation.state), make_noise(config, observation), None, step)

    return (
        Stage("vision", look),
        Stage("prefix", read),
        Stage("denoise", take_step, count=lambda config: config.num_inference_steps),
    )


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
    step = jax.tree.map(
        lambda noisy, clean: jnp.where((t == 0).reshape(*t.shape, *(1,) * noisy.ndim), clean, noisy), step, still
    )
    return model.denoise(prefix, None, x, step)
