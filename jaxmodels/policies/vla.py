"""Acting and stages of policies with a vision-language model and an expert that follows a flow: pi0, pi0.5, SmolVLA."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies import ActStage
from jaxmodels.policies.config import VlaConfig
from jaxmodels.samplers import begin_with, continuing, flow_euler, given
from jaxmodels.types import Observation
from jaxmodels.vlm.decoder import PrefixCache
from jaxmodels.weights import blueprint_of

Chunk: TypeAlias = Float[Array, "b t a"]


class VlaModel(nnx.Module):
    """Base network: images and words become keys and values once per chunk, and an expert denoises the actions."""

    def embed_images(self, observation: Observation) -> Any:
        """Return tokens of the present cameras' images."""
        raise NotImplementedError

    def encode(self, observation: Observation, seen: Any = None) -> PrefixCache:
        """Return keys and values of an observation, once per chunk; `seen` is `embed_images`' result, if known."""
        raise NotImplementedError

    def embed_state(self, state: Float[Array, "b s"]) -> Float[Array, "b 1 d"] | None:
        """Return the token of a normalised state for the expert; None if the expert reads none."""
        del state

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> Any:
        """Return the terms of times, for all steps of a sampler at once."""
        raise NotImplementedError

    def denoise(self, prefix: PrefixCache, state: Float[Array, "b 1 d"] | None, x: Chunk, step: Any) -> Chunk:
        """Return the velocity (noise - actions), float32, of a noisy chunk at one step of `prepare_steps`."""
        raise NotImplementedError


def read_linear(linear: nnx.Linear) -> tuple[Float[Array, "d e"], Float[Array, " e"]]:
    """Return kernel and bias in float32."""
    bias = linear.bias
    assert bias is not None
    return linear.kernel[...].astype(jnp.float32), bias[...].astype(jnp.float32)


def apply_linear(linear: nnx.Linear, x: Float[Array, "... d"]) -> Float[Array, "... e"]:
    """Apply a linear layer in float32."""
    kernel, bias = read_linear(linear)
    return x.astype(jnp.float32) @ kernel + bias


def act(network: type[VlaModel], config: VlaConfig, weights: Mapping[str, Array], observation: Observation) -> Chunk:
    """Return a normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    model = _assemble(network, config, weights)
    prefix = model.encode(observation)
    schedule, steps = config.schedule, config.num_inference_steps
    key, noise, plan = jax.random.key(config.noise_seed), config.make_noise(observation), observation.prefix
    predict = Partial(_denoise, model, prefix, model.embed_state(observation.state))
    if plan is not None and config.trained_delay:
        # Longer delays do not occur in training.
        width = config.max_action_dim - plan.actions.shape[-1]
        padded = jnp.pad(plan.actions.astype(jnp.float32), ((0, 0), (0, 0), (0, width)))
        begun = plan._replace(actions=padded, delay=jnp.minimum(plan.delay, config.trained_delay))
        still = jax.tree.map(lambda array: array[0], model.prepare_steps(np.zeros(1, np.float32)))
        predict = given(Partial(_denoise_behind, model, prefix, still), begun, schedule)
    elif plan is not None:
        predict = continuing(predict, plan, schedule, bound=config.prefix_bound)
    extras = model.prepare_steps(schedule.euler_rows(steps).sigma)
    chunk = flow_euler(predict, noise.shape, key, schedule, steps=steps, extras=extras, start=noise)
    chunk = chunk[..., : config.action.shape[0]]
    return chunk if plan is None else begin_with(plan, chunk)


def _assemble(network: type[VlaModel], config: VlaConfig, weights: Mapping[str, Array]) -> VlaModel:
    return blueprint_of(network, config).assemble(weights)


def _denoise(
    model: VlaModel, prefix: PrefixCache, state: Float[Array, "b 1 d"] | None, x: Chunk, t: Any, step: Any
) -> Chunk:
    del t  # `step` contains the time.
    return model.denoise(prefix, state, x, step)


def _denoise_behind(
    model: VlaModel, prefix: PrefixCache, still: Any, x: Chunk, t: Float[Array, "b t"], step: Any
) -> Chunk:
    """Return the velocity of a chunk of pi0.5 whose first actions have no noise; `still` are the terms of time 0."""
    step = jax.tree.map(
        lambda noisy, clean: jnp.where((t == 0).reshape(*t.shape, *(1,) * noisy.ndim), clean, noisy), step, still
    )
    return model.denoise(prefix, None, x, step)


def list_stages(network: type[VlaModel]) -> tuple[ActStage, ...]:
    """Return the parts of `act` that can be timed separately."""
    return (
        ActStage("vision", partial(_look, network)),
        ActStage("prefix", partial(_read, network)),
        ActStage("denoise", partial(_take_step, network), count=lambda config: config.num_inference_steps),
    )


def _look(network: type[VlaModel], config: Any, weights: Any, observation: Observation, given: None) -> Any:
    return _assemble(network, config, weights).embed_images(observation)


def _read(network: type[VlaModel], config: Any, weights: Any, observation: Observation, given: Any) -> PrefixCache:
    return _assemble(network, config, weights).encode(observation, given)


def _take_step(
    network: type[VlaModel], config: Any, weights: Any, observation: Observation, given: PrefixCache
) -> Chunk:
    model = _assemble(network, config, weights)
    times = config.schedule.euler_rows(config.num_inference_steps).sigma[:1]
    step = jax.tree.map(lambda rows: rows[0], model.prepare_steps(times))
    return model.denoise(given, model.embed_state(observation.state), config.make_noise(observation), step)
