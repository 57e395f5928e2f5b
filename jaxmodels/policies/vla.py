"""Acting and stages of policies with a vision-language model and an expert that follows a flow: pi0, pi0.5, SmolVLA."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.devices import use_exact_products
from jaxmodels.policies import CONSTANTS, ActStage
from jaxmodels.policies.config import VlaConfig
from jaxmodels.samplers import begin_with, continuing, flow_euler, given
from jaxmodels.types import Observation
from jaxmodels.vlm.decoder import PrefixCache
from jaxmodels.weights import blueprint_of

Chunk: TypeAlias = Float[Array, "b t a"]
Terms: TypeAlias = Mapping[str, Array]
# Fields of an observation that the stages read.
IMAGES, SAMPLING = ("images", "image_masks"), ("state", "prefix", "noise")


class VlaModel(nnx.Module):
    """Base network: images and words become keys and values once per chunk, and an expert denoises the actions.

    Attributes:
        only_for_times: parts of the names of weights that only `prepare_steps` reads.
    """

    only_for_times: ClassVar[tuple[str, ...]] = ()

    def embed_images(self, observation: Observation) -> Any:
        """Return tokens of the present cameras' images."""
        raise NotImplementedError

    def encode(self, observation: Observation, seen: Any) -> PrefixCache:
        """Return keys and values of an observation, once per chunk; `seen` is the result of `embed_images`."""
        raise NotImplementedError

    def embed_state(self, state: Float[Array, "b s"]) -> Float[Array, "b 1 d"] | None:
        """Return the token of a normalised state for the expert; None if the expert reads none."""
        del state

    def prepare_steps(self, times: Float[np.ndarray, " s"]) -> Terms:
        """Return by name the terms (s, ...) of all times of a sampler."""
        raise NotImplementedError

    def denoise(self, prefix: PrefixCache, state: Float[Array, "b 1 d"] | None, x: Chunk, step: Terms) -> Chunk:
        """Return the velocity (noise - actions), float32, of a noisy chunk at one time of `prepare_steps`."""
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


def prepare(network: type[VlaModel], config: VlaConfig, weights: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return serving weights: terms of the sampler's times are constants of a checkpoint, and computed here."""
    del platform
    times = _list_times(config)
    with use_exact_products(np.float32):  # `jit` leaves out the weights that are not read.
        terms = jax.jit(lambda arrays: _assemble(network, config, arrays).prepare_steps(times))(dict(weights))
    needed = {
        name: array for name, array in weights.items() if not any(part in name for part in network.only_for_times)
    }
    if "time_in.kernel" in needed:  # The rows that multiply actions; the others multiply times.
        needed["time_in.kernel"] = needed["time_in.kernel"][: needed["time_in.kernel"].shape[1]]
    return needed | {f"{CONSTANTS}{name}": term.astype(np.float32) for name, term in terms.items()}


def _list_times(config: VlaConfig) -> Float[np.ndarray, " s"]:
    """Return the times of the sampler's steps, and last the time of actions without noise."""
    return np.append(config.schedule.euler_rows(config.num_inference_steps).sigma, np.float32(0))


def _see(network: type[VlaModel], config: VlaConfig, weights: Any, observation: Observation, given: None) -> Any:
    return _assemble(network, config, weights).embed_images(observation)


def _encode(network: type[VlaModel], config: VlaConfig, weights: Any, observation: Observation, given: Any) -> Any:
    return _assemble(network, config, weights).encode(observation, given)


def sample(
    network: type[VlaModel],
    config: VlaConfig,
    weights: Mapping[str, Array],
    observation: Observation,
    prefix: PrefixCache,
) -> Chunk:
    """Return a normalised chunk for the keys and values of a normalised observation."""
    model = _assemble(network, config, weights)
    schedule, steps = config.schedule, config.num_inference_steps
    key, noise, plan = jax.random.key(config.noise_seed), config.make_noise(observation), observation.prefix
    terms = {name.removeprefix(CONSTANTS): term for name, term in weights.items() if name.startswith(CONSTANTS)}
    terms = terms or model.prepare_steps(_list_times(config))
    predict = Partial(_denoise, model, prefix, model.embed_state(observation.state))
    if plan is not None and config.trained_delay:
        # Longer delays do not occur in training.
        width = config.max_action_dim - plan.actions.shape[-1]
        padded = jnp.pad(plan.actions.astype(jnp.float32), ((0, 0), (0, 0), (0, width)))
        begun = plan._replace(actions=padded, delay=jnp.minimum(plan.delay, config.trained_delay))
        still = {name: term[-1] for name, term in terms.items()}
        predict = given(Partial(_denoise_behind, model, prefix, still), begun, schedule)
    elif plan is not None:
        predict = continuing(predict, plan, schedule, bound=config.prefix_bound)
    extras = {name: term[:-1] for name, term in terms.items()}
    chunk = flow_euler(predict, noise.shape, key, schedule, steps=steps, extras=extras, start=noise)
    chunk = chunk[..., : config.action.shape[0]]
    return chunk if plan is None else begin_with(plan, chunk)


def _assemble(network: type[VlaModel], config: VlaConfig, weights: Mapping[str, Array]) -> VlaModel:
    return blueprint_of(network, config).assemble(weights)


def _denoise(
    model: VlaModel, prefix: PrefixCache, state: Float[Array, "b 1 d"] | None, x: Chunk, t: Any, step: Terms
) -> Chunk:
    del t  # `step` contains the time.
    # Without the barrier, XLA's GPU compiler selects a step's terms again in a kernel of each layer.
    return model.denoise(prefix, state, x, lax.optimization_barrier(step))


def _denoise_behind(
    model: VlaModel, prefix: PrefixCache, still: Terms, x: Chunk, t: Float[Array, "b t"], step: Terms
) -> Chunk:
    """Return the velocity of a chunk of pi0.5 whose first actions have no noise; `still` are the terms of time 0."""
    is_clean = {name: (t == 0).reshape(*t.shape, *(1,) * term.ndim) for name, term in step.items()}
    step = {name: jnp.where(is_clean[name], still[name], term) for name, term in step.items()}
    return model.denoise(prefix, None, x, step)


def list_stages(network: type[VlaModel], sample: Callable[..., Chunk] = sample) -> tuple[ActStage, ...]:
    """Return the stages of a policy with this network; `sample` is called as `sample` of this module."""
    return (
        ActStage("vision", partial(_see, network), IMAGES),
        ActStage("prefix", partial(_encode, network), (*IMAGES, "state", "language")),
        ActStage("denoise", partial(sample, network), SAMPLING, count=lambda config: config.num_inference_steps),
    )
