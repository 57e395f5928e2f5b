"""A chunk out of noise, sampled in one program; when there is a plan, one that continues it."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.checkpoints.layouts import SAME, Tensor
from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.model import Diffusion2d, predict
from jaxmodels.samplers import FlowSchedule, begin_with, continuing, ddim, flow_euler, flow_heun
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint

# Fields that neither a program nor its weights depend on; normalisation only where it says whether samples are clipped.
INDIFFERENT = ("device", "dropout", "n_action_steps")


def tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """LeRobot has no such policy: its file has our names and layouts, under ``model`` as all of LeRobot's."""
    return tuple(Tensor(f"model.{name}", (name,), SAME) for name in names)


def architecture(config: Diffusion2dConfig) -> Diffusion2dConfig:
    """The config with every indifferent field at its default: equal ones share programs."""
    defaults = {field.name: field.default for field in fields(Diffusion2dConfig) if field.name in INDIFFERENT}
    modes = tuple((kind, mode) for kind, mode in config.normalization_mapping if kind == "ACTION")
    return replace(config, **{**defaults, "n_action_steps": 1, "normalization_mapping": modes})


def prepare(config: Diffusion2dConfig, weights: Mapping[str, np.ndarray], platform: str) -> dict[str, np.ndarray]:
    """The weights as they are."""
    del config, platform
    return dict(weights)


def act(config: Diffusion2dConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """A normalised chunk for a normalised observation; each member's depends on nothing but its own."""
    dtype = next(iter(weights.values())).dtype
    model = blueprint(lambda: Diffusion2d(config, dtype=dtype, rngs=nnx.Rngs(0))).assemble(weights)
    tokens = model.tokens(observation)
    shape = (tokens.shape[0], config.chunk_size, config.action.shape[0])
    key = jax.random.key(config.noise_seed)
    noise = jnp.broadcast_to(jax.random.normal(key, shape[1:], jnp.float32), shape)
    denoise = Partial(predict, model.transformer, model.transformer.prepare_context(tokens))
    prefix, schedule, steps = observation.prefix, config.schedule, config.num_inference_steps
    if prefix is not None:
        denoise = continuing(
            denoise, prefix, schedule, bound=config.prefix_bound, through_model=config.prefix_through_model
        )
    options: dict[str, Any] = {"steps": steps, "start": noise}
    modulate = jax.vmap(model.transformer.prepare_modulations)
    if not isinstance(schedule, FlowSchedule):
        times = jnp.asarray(schedule.timesteps(steps), jnp.float32)
        chunk = ddim(denoise, shape, key, schedule, extras=modulate(times), **options)
    elif config.flow_solver == "heun":
        times = jnp.asarray(schedule.heun_rows(steps).timestep)
        chunk = flow_heun(denoise, shape, key, schedule, extras=modulate(times), **options)
    else:
        times = jnp.asarray(schedule.euler_rows(steps).timestep)
        chunk = flow_euler(denoise, shape, key, schedule, extras=modulate(times), **options)
    return chunk if prefix is None else begin_with(prefix, chunk)
