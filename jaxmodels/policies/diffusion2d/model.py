"""The denoiser: what is seen as tokens, a noisy chunk as an image, and a 2D transformer between them.

The chunk (b, t, a) is an image of `a` channels, `t` high and 1 wide, each action a patch with a position of its own:
the path of PixArt. (The path for whole images would normalise the scale of the actions away.)
"""

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmodels.layers.embeddings import sinusoidal_2d
from jaxmodels.layers.resnet import RESNETS, ResNet
from jaxmodels.layers.small_cnn import SmallCnn
from jaxmodels.policies.diffusion2d.config import Diffusion2dConfig
from jaxmodels.transformer2d import Conditioning, Modulations, Transformer2DModel
from jaxmodels.transformer2d.block import Seen
from jaxmodels.types import Observation

_embedding_init = nnx.initializers.normal(0.02)


class Diffusion2d(nnx.Module):
    """Velocity (flow) or noise (diffusion) of a normalised chunk, for a normalised observation."""

    def __init__(self, config: Diffusion2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        width, action = config.dim_model, config.action.shape[0]
        self.config = config
        if config.cameras:
            name = config.vision_backbone
            self.backbone = ResNet(name, rngs=rngs) if name in RESNETS else SmallCnn(rngs=rngs)
            self.image_in = nnx.Linear(self.backbone.width, width, rngs=rngs)
            self.camera_embeddings = nnx.Param(_embedding_init(rngs.params(), (len(config.cameras), width)))
        if config.state is not None:
            self.state_in = nnx.Linear(config.state.shape[0], width, rngs=rngs)
        if config.environment_state is not None:
            self.environment_in = nnx.Linear(config.environment_state.shape[0], width, rngs=rngs)
        self.transformer = Transformer2DModel(
            num_attention_heads=config.n_heads,
            attention_head_dim=width // config.n_heads,
            in_channels=action,
            out_channels=action,
            num_layers=config.n_layers,
            dropout=config.dropout,
            cross_attention_dim=width,
            attention_bias=True,
            sample_size=config.chunk_size,
            patch_size=1,
            activation_fn="gelu-approximate",
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            interpolation_scale=1,
            use_additional_conditions=False,
            dtype=dtype,
            rngs=rngs,
        )

    def tokens(self, observation: Observation) -> Float[Array, "b n d"]:
        """What the transformer looks at: state, environment state, then each camera's feature map, row by row."""
        tokens = []
        if self.config.state is not None:
            tokens.append(self.state_in(observation.state)[:, None])
        if self.config.environment_state is not None:
            tokens.append(self.environment_in(observation.environment_state)[:, None])
        for camera, image in enumerate(observation.images):
            features = self.image_in(self.backbone(image))
            height, width = features.shape[1:3]
            table = jnp.asarray(sinusoidal_2d(height, width, self.config.dim_model), features.dtype)
            placed = features + table + self.camera_embeddings[camera]
            tokens.append(rearrange(placed, "b h w d -> b (h w) d"))
        return jnp.concatenate(tokens, axis=1)


def predict(
    transformer: Transformer2DModel, context: Seen, x: Float[Array, "b t a"], t: Array, modulations: Modulations
) -> Float[Array, "b t a"]:
    """The transformer's answer to a noisy chunk.

    Args:
        context, modulations: of the transformer's ``prepare_context`` and ``prepare_modulations``, the latter for `t`.
    """
    del t
    image = rearrange(x, "b t a -> b a t 1").astype(transformer.dtype)
    (answer,) = transformer(image, conditioning=Conditioning(context, modulations), return_dict=False)
    return rearrange(answer, "b a t 1 -> b t a").astype(jnp.float32)
