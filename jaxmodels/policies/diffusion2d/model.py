"""The denoiser: what is seen as tokens, a noisy chunk as an image, and a 2D transformer between them.

The chunk (b, t, a) is an image of `a` channels, `t` high and 1 wide, each action a patch with a position of its own:
the path of PixArt. (The path for whole images would normalise the scale of the actions away.)
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.noising import noisy
from jaxmodels.policies.transformer2d_policy import Transformer2dPolicy
from jaxmodels.transformer2d import Conditioning, Modulations, Transformer2DModel
from jaxmodels.transformer2d.block import Seen
from jaxmodels.types import Observation


class Diffusion2d(Transformer2dPolicy):
    """Velocity (flow), or noise, chunk or velocity (diffusion), of a normalised chunk for a normalised observation."""

    def __init__(self, config: Diffusion2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config = config
        self.transformer = Transformer2DModel(**config.transformer.to_json(), dtype=dtype, rngs=rngs)
        begin_plain(self.transformer)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """The mean squared error of what the model predicts about chunks with noise, and its parts.

        With `do_mask_loss_for_padding` errors of padded steps count as zero and are divided by all steps, as LeRobot
        does; and nothing looks at those steps. What a plan has told already (`trained_prefix`) is no part of the mean.

        Args:
            rngs: streams ``noise`` and ``dropout``; None evaluates: no dropout, and always the same noise and times.
        """
        config, transformer = self.config, self.transformer
        dropout = rngs if config.dropout else None
        tokens, mask = self.observation_tokens(observation, dropout)
        example = noisy(config, actions, rngs)
        prediction = predict(
            transformer,
            transformer.prepare_context(tokens),
            mask,
            example.x,
            example.timestep,
            modulations_at(transformer, example.timestep),
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


def begin_plain(transformer: Transformer2DModel) -> None:
    """First weights for training from nothing: no answer yet, and blocks that time does not modulate.

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


def modulations_at(transformer: Transformer2DModel, timestep: Float[Array, "b *t"] | Int[Array, "b *t"]) -> Modulations:
    """What times do to the transformer: one for each element, or one for each of its actions."""
    made = transformer.prepare_modulations(timestep.reshape(-1).astype(jnp.float32))
    if timestep.ndim == 1:
        return made
    return jax.tree.map(lambda part: part.reshape(*part.shape[:-3], *timestep.shape, part.shape[-1]), made)


def predict(
    transformer: Transformer2DModel,
    context: Seen,
    mask: Bool[Array, "b n"] | None,
    x: Float[Array, "b t a"],
    t: Array,
    modulations: Modulations,
    *,
    is_real: Bool[Array, "b t"] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Float[Array, "b t a"]:
    """The transformer's answer to a noisy chunk.

    Args:
        context: of the transformer's ``prepare_context``.
        mask: which tokens of the context count; all when None.
        modulations: of `modulations_at` for `t`.
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
