"""diffusion2d's network: observation tokens, and a 2D transformer over a noisy chunk as an image.

The chunk (b, t, a) is an image of `a` channels, `t` high and 1 wide, each action a patch with a position of its own:
the path of PixArt. (The path for whole images would normalise the scale of the actions away.)
"""

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.transformer2d_policy import Transformer2dPolicy
from jaxmodels.samplers import Example, FlowSchedule, draw_delays, example
from jaxmodels.transformer2d import Conditioning, Modulations, Transformer2DModel
from jaxmodels.transformer2d.block import KeyValues
from jaxmodels.types import Observation

BETA = 1.5  # of Beta(1.5, 1), openpi's; lerobot/policies/pi0/modeling_pi0.py
MIN_SIGMA = 0.001  # a flow's time is never quite 0, where there is nothing to learn; as there
EVALUATION = 0  # seed of the noise of an evaluation
SLOW, MAX_SLOW = 3, 0.25  # waves of the first noise that are held to so many standard deviations


def make_first_noise(config: Diffusion2dConfig) -> Float[Array, "t a"]:
    """The noise that every chunk is sampled from, whose slowest waves along time are small.

    It is the same for all observations. A wave as slow as the chunk moves all of it to one side, and whatever the model
    is not sure of, e.g. how far it is to the cube, it would always answer too far to that side: after 2,000 steps of
    training, the demo's policy was wrong by 1.6 degrees with plain noise and by 0.8 like this. They are not 0, so that
    there is a side when two ways are equally good.
    """
    shape = (config.chunk_size, config.action.shape[0])
    noise = jax.random.normal(jax.random.key(config.noise_seed), shape, jnp.float32)
    waves = jnp.asarray(make_slow_waves(config.chunk_size))
    strength = waves @ noise
    return noise + waves.T @ (jnp.clip(strength, -MAX_SLOW, MAX_SLOW) - strength)


def make_slow_waves(steps: int) -> Float[np.ndarray, "k {steps}"]:
    """The `SLOW` slowest cosines over this many steps, with the constant; orthonormal."""
    time, wave = np.arange(steps) + 0.5, np.arange(min(SLOW, steps))
    cosines = np.cos(np.pi * wave[:, None] * time / steps)
    return (cosines / np.linalg.norm(cosines, axis=1, keepdims=True)).astype(np.float32)


def add_training_noise(config: Diffusion2dConfig, actions: Float[Array, "b t a"], rngs: nnx.Rngs | None) -> Example:
    """Normalised actions with noise at a random time per chunk, and the targets for them.

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
    sigma = MIN_SIGMA + (1 - MIN_SIGMA) * share
    if config.trained_prefix:
        delay = draw_delays(delay_key, batch, config.trained_prefix, config.trained_prefix_decay)
        return example(schedule, actions, noise, sigma, delay)
    return Example(
        schedule.add_noise(actions, noise, sigma),
        sigma * schedule.num_train_timesteps,
        schedule.target(actions, noise),
        jnp.ones(actions.shape[:2], bool),
    )


class Diffusion2d(Transformer2dPolicy):
    """Network that predicts velocity (flow), or noise, chunk or velocity (diffusion) of a normalised chunk."""

    def __init__(self, config: Diffusion2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config = config
        self.transformer = Transformer2DModel(**config.transformer.to_json(), dtype=dtype, rngs=rngs)
        initialize_plain(self.transformer)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Mean squared error of the predictions for noisy chunks, and its parts.

        With `do_mask_loss_for_padding` errors of padded steps count as zero and are divided by all steps, as LeRobot
        does; and nothing looks at those steps. What a plan has told already (`trained_prefix`) is no part of the mean.

        Args:
            rngs: streams ``noise`` and ``dropout``; None evaluates: no dropout, and always the same noise and times.
        """
        config, transformer = self.config, self.transformer
        dropout = rngs if config.dropout else None
        tokens, mask = self.observation_tokens(observation, dropout)
        example = add_training_noise(config, actions, rngs)
        prediction = predict(
            transformer,
            transformer.prepare_context(tokens),
            mask,
            example.x,
            example.timestep,
            prepare_modulations(transformer, example.timestep),
            is_real=~is_pad if config.do_mask_loss_for_padding else None,
            rngs=dropout,
        )
        error = jnp.square(prediction - example.target)
        if config.do_mask_loss_for_padding:
            error = jnp.where(is_pad[..., None], 0.0, error)
        # never nothing: a delay is less than a chunk
        counted = example.counts.astype(jnp.float32)[..., None]
        value = (error * counted).sum() / (counted.sum() * actions.shape[2])
        return value, {"mse": value}


def initialize_plain(transformer: Transformer2DModel) -> None:
    """Initial weights for training from scratch: outputs of zero, and blocks that time does not modulate.

    The output is 0, as in DiT and PixArt. Their gates begin (next to) closed, for the sake of many layers or of a
    model trained before; here they begin open, as in a plain transformer with a norm before each part.
    """
    for layer in (transformer.proj_out, transformer.adaln_single.linear):
        for weight in (layer.kernel, layer.bias):
            assert weight is not None  # both have a bias
            weight[...] = jnp.zeros_like(weight[...])
    head, blocks = transformer.scale_shift_table, transformer.transformer_blocks.scale_shift_table
    head[...] = jnp.zeros_like(head[...])
    shift_scale_gate = jnp.asarray([0, 0, 1, 0, 0, 1], blocks[...].dtype)[:, None]
    blocks[...] = jnp.broadcast_to(shift_scale_gate, blocks[...].shape)


def prepare_modulations(
    transformer: Transformer2DModel, timestep: Float[Array, "b *t"] | Int[Array, "b *t"]
) -> Modulations:
    """Modulations of the transformer for timesteps: one per element, or one per action."""
    modulations = transformer.prepare_modulations(timestep.reshape(-1).astype(jnp.float32))
    if timestep.ndim == 1:
        return modulations
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-3], *timestep.shape, part.shape[-1]), modulations)


def predict(
    transformer: Transformer2DModel,
    context: KeyValues,
    mask: Bool[Array, "b n"] | None,
    x: Float[Array, "b t a"],
    t: Array,
    modulations: Modulations,
    *,
    is_real: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Float[Array, "b t a"]:
    """The transformer's prediction for a noisy chunk.

    Args:
        context: of the transformer's ``prepare_context``.
        mask: which tokens of the context count; all when None.
        modulations: of `prepare_modulations` for `t`.
        is_real: which actions are looked at; all when None.
    """
    del t
    image = rearrange(x, "b t a -> b a t 1").astype(transformer.dtype)
    (answer,) = transformer(
        image,
        attention_mask=is_real,
        encoder_attention_mask=mask,
        conditioning=Conditioning(context, modulations),
        return_dict=False,
        rngs=rngs,
    )
    return rearrange(answer, "b a t 1 -> b t a").astype(jnp.float32)
