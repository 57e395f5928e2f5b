"""The noise that chunks are made from, and chunks on their way to noise: what the denoiser is trained on."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.samplers import Example, FlowSchedule, draw_delays, example

BETA = 1.5  # of Beta(1.5, 1), openpi's; lerobot/policies/pi0/modeling_pi0.py
LEAST_SIGMA = 0.001  # a flow's time is never quite 0, where there is nothing to learn; as there
EVALUATION = 0  # seed of the noise of an evaluation
SLOW, MOST = 3, 0.25  # waves of the first noise that are held to so many standard deviations


def first_noise(config: Diffusion2dConfig) -> Float[Array, "t a"]:
    """What every chunk is made from: noise whose slowest waves along time are small.

    It is the same for all observations. A wave as slow as the chunk moves all of it to one side, and whatever the model
    is not sure of, e.g. how far it is to the cube, it would always answer too far to that side: after 2,000 steps of
    training, the demo's policy was wrong by 1.6 degrees with plain noise and by 0.8 like this. They are not 0, so that
    there is a side when two ways are equally good.
    """
    shape = (config.chunk_size, config.action.shape[0])
    noise = jax.random.normal(jax.random.key(config.noise_seed), shape, jnp.float32)
    waves = jnp.asarray(slow_waves(config.chunk_size))
    strength = waves @ noise
    return noise + waves.T @ (jnp.clip(strength, -MOST, MOST) - strength)


def slow_waves(steps: int) -> Float[np.ndarray, "k {steps}"]:
    """The `SLOW` slowest cosines over so many steps, the constant among them; orthogonal, of length 1."""
    time, wave = np.arange(steps) + 0.5, np.arange(min(SLOW, steps))
    cosines = np.cos(np.pi * wave[:, None] * time / steps)
    return (cosines / np.linalg.norm(cosines, axis=1, keepdims=True)).astype(np.float32)


def noisy(config: Diffusion2dConfig, actions: Float[Array, "b t a"], rngs: nnx.Rngs | None) -> Example:
    """Normalised actions with noise, each chunk at a time of its own, and what to answer to them.

    Args:
        rngs: stream ``noise``; None takes the same noise and times in every call.

    Returns:
        The example. Its `timestep` is (b,) unless a prefix is trained: then each action has its own (b, t).
    """
    key = jax.random.key(EVALUATION) if rngs is None else rngs.noise()
    first, noise_key, delay_key = jax.random.split(key, 3)
    batch, schedule = actions.shape[0], config.schedule
    noise = jax.random.normal(noise_key, actions.shape, jnp.float32)
    # Spread evenly over the batch from a random place on, so that one batch's loss differs less from another's:
    # https://arxiv.org/abs/2107.00630, appendix I.1
    start = jnp.float32(0.5 / batch) if rngs is None else jax.random.uniform(first)
    share = (start + jnp.arange(batch, dtype=jnp.float32) / batch) % 1
    if not isinstance(schedule, FlowSchedule):
        timestep = jnp.floor(share * schedule.num_train_timesteps).astype(jnp.int32)
        x, target = schedule.add_noise(actions, noise, timestep), schedule.target(actions, noise, timestep)
        return Example(x, timestep, target, jnp.ones(actions.shape[:2], bool))
    if config.timestep_sampling_strategy == "beta":
        share = share ** (1 / BETA)  # the inverse of its distribution function
    sigma = LEAST_SIGMA + (1 - LEAST_SIGMA) * share
    if config.trained_prefix:
        delay = draw_delays(delay_key, batch, config.trained_prefix, config.trained_prefix_decay)
        return example(schedule, actions, noise, sigma, delay)
    return Example(
        schedule.add_noise(actions, noise, sigma),
        sigma * schedule.num_train_timesteps,
        schedule.target(actions, noise),
        jnp.ones(actions.shape[:2], bool),
    )
