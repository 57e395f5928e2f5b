"""Diffusion Policy for serving: from a normalised observation to the part of a chunk that is to be executed."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float

from jaxmodels.policies.diffusion.config import DiffusionConfig
from jaxmodels.policies.diffusion.model import DiffusionPolicyModel, UNet
from jaxmodels.samplers import ddim, ddpm
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint


def act(config: DiffusionConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """A normalised chunk for a normalised observation; each member's depends on nothing but its own."""
    model = blueprint(lambda rngs: DiffusionPolicyModel(config, rngs=rngs)).assemble(weights)
    condition = model.condition(observation)
    schedule, steps, batch = config.schedule, config.steps, condition.shape[0]
    of_steps, of_condition = model.unet.prepare(jnp.asarray(schedule.timesteps(steps)), condition)
    shape = (batch, *config.noise)
    key = jax.random.key(config.noise_seed)
    first, each = jax.random.split(key)
    noise, step_noise = observation.noise, observation.step_noise
    if noise is None:
        noise = jnp.broadcast_to(jax.random.normal(first, config.noise, jnp.float32), shape)
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
