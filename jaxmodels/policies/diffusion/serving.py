"""Diffusion Policy for serving: from a normalised observation to the part of a chunk that is to be executed."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies import Stage
from jaxmodels.policies.diffusion.config import DiffusionConfig
from jaxmodels.policies.diffusion.model import DiffusionPolicyModel, UNet
from jaxmodels.samplers import ddim, ddpm
from jaxmodels.samplers.sampling import draw_for_each
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint_of


def act(config: DiffusionConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """A normalised chunk for a normalised observation; each member's depends on nothing but its own."""
    model = assemble(config, weights)
    of_steps, of_condition = encode(config, model, observation)
    schedule, steps = config.schedule, config.steps
    key, noise, step_noise = jax.random.key(config.noise_seed), observation.noise, observation.step_noise
    first, each = jax.random.split(key)
    if noise is None:
        noise = draw_for_each(first, config.noise, of_condition[0].shape[0])
    shape = noise.shape
    predict = Partial(_predict, model.unet, of_condition)
    options: dict[str, Any] = {"steps": steps, "start": noise, "extras": of_steps}
    if config.noise_scheduler_type == "DDIM":
        chunk = ddim(predict, shape, key, schedule, **options)
    else:
        if step_noise is None and steps > 1:
            step_noise = jax.random.normal(each, (steps - 1, 1, *config.noise), jnp.float32)
        chunk = ddpm(predict, shape, key, schedule, noise=step_noise, **options)
    start = config.n_obs_steps - 1
    return chunk[:, start : start + config.n_action_steps]


def assemble(config: DiffusionConfig, weights: Mapping[str, Array]) -> DiffusionPolicyModel:
    """The network over serving weights."""
    return blueprint_of(DiffusionPolicyModel, config).assemble(weights)


def encode(
    config: DiffusionConfig, model: DiffusionPolicyModel, observation: Observation
) -> tuple[list[Float[Array, "n _"]], list[Float[Array, "b _"]]]:
    """What all steps, and what is seen, add in each block of the U-Net: once per chunk."""
    timesteps = jnp.asarray(config.schedule.timesteps(config.steps))
    return model.unet.prepare(timesteps, model.condition(observation))


def _encode(config: DiffusionConfig, weights: Mapping[str, Array], observation: Observation, given: None) -> Any:
    return encode(config, assemble(config, weights), observation)


def _denoise(
    config: DiffusionConfig, weights: Mapping[str, Array], observation: Observation, given: Any
) -> Float[Array, "b t a"]:
    of_steps, of_condition = given
    x = observation.noise
    if x is None:
        x = draw_for_each(jax.random.key(config.noise_seed), config.noise, of_condition[0].shape[0])
    return _predict(assemble(config, weights).unet, of_condition, x, None, [rows[0] for rows in of_steps])


STAGES = (Stage("encode", _encode), Stage("denoise", _denoise, count=lambda config: config.steps))


def _predict(
    unet: UNet,
    of_condition: list[Float[Array, "b _"]],
    x: Float[Array, "b t a"],
    t: Any,
    of_step: list[Float[Array, " _"]],
) -> Float[Array, "b t a"]:
    """What the U-Net answers to a noisy chunk at the step of ``of_step``."""
    del t  # is in of_step
    films = [step + condition for step, condition in zip(of_step, of_condition, strict=True)]
    return unet(x.astype(films[0].dtype), films)
