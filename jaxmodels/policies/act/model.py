"""ACT's network: encoder over observation tokens, decoder over action queries, CVAE latent.

The order of the encoder's tokens is that of the checkpoints: latent, state, environment state, then each camera's
feature map, row by row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxmodels.layers.attention import Attention
from jaxmodels.layers.embeddings import sinusoidal, sinusoidal_2d
from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS, FeedForward, dropout
from jaxmodels.layers.norm import Buffer, LayerNorm
from jaxmodels.layers.vision import ResNet, SmallCnn
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.config import SMALL_CNN
from jaxmodels.types import Observation


class EncoderLayer(nnx.Module):
    """Encoder layer: self-attention and feed-forward with skip connections; norms before (`pre_norm`) or after each."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        width = config.dim_model
        self.pre_norm = config.pre_norm
        self.rate = config.dropout
        self.attention = Attention(width, config.n_heads, rate=config.dropout, rngs=rngs)
        self.feed_forward = FeedForward(
            width,
            config.dim_feedforward,
            LEROBOT_ACTIVATIONS[config.feedforward_activation],
            rate=config.dropout,
            rngs=rngs,
        )
        self.norm1 = LayerNorm(width)
        self.norm2 = LayerNorm(width)

    def __call__(
        self,
        x: Float[Array, "b n d"],
        positions: Float[Array, "#b n d"],
        bias: Float[Array, "#b #heads #n n"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        skip = x
        if self.pre_norm:
            x = self.norm1(x)
        positioned = x + positions
        x = skip + dropout(self.attention(positioned, positioned, x, bias, rngs), self.rate, rngs)
        if not self.pre_norm:
            x = self.norm1(x)
        skip = x
        if self.pre_norm:
            x = self.norm2(x)
        x = skip + dropout(self.feed_forward(x, rngs), self.rate, rngs)
        return x if self.pre_norm else self.norm2(x)


class Encoder(nnx.Module):
    """Stack of encoder layers; with `pre_norm` a norm at the end."""

    def __init__(self, config: ActConfig, layers: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(layers)])
        self.norm = LayerNorm(config.dim_model) if config.pre_norm else None

    def __call__(
        self,
        x: Float[Array, "b n d"],
        positions: Float[Array, "#b n d"],
        bias: Float[Array, "#b #heads #n n"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        for layer in self.layers:
            x = layer(x, positions, bias, rngs)
        return x if self.norm is None else self.norm(x)


class DecoderLayer(nnx.Module):
    """Decoder layer: self-attention of the action queries, attention to the encoder's tokens, feed-forward."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        width = config.dim_model
        self.pre_norm = config.pre_norm
        self.rate = config.dropout
        self.self_attention = Attention(width, config.n_heads, rate=config.dropout, rngs=rngs)
        self.cross_attention = Attention(width, config.n_heads, rate=config.dropout, rngs=rngs)
        self.feed_forward = FeedForward(
            width,
            config.dim_feedforward,
            LEROBOT_ACTIVATIONS[config.feedforward_activation],
            rate=config.dropout,
            rngs=rngs,
        )
        self.norm1 = LayerNorm(width)
        self.norm2 = LayerNorm(width)
        self.norm3 = LayerNorm(width)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        memory: Float[Array, "b n d"],
        queries: Float[Array, "#b t d"],
        positions: Float[Array, "#b n d"],
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b t d"]:
        skip = x
        if self.pre_norm:
            x = self.norm1(x)
        positioned = x + queries
        x = skip + dropout(self.self_attention(positioned, positioned, x, rngs=rngs), self.rate, rngs)
        if not self.pre_norm:
            x = self.norm1(x)
        skip = x
        if self.pre_norm:
            x = self.norm2(x)
        attended = self.cross_attention(x + queries, memory + positions, memory, rngs=rngs)
        x = skip + dropout(attended, self.rate, rngs)
        if not self.pre_norm:
            x = self.norm2(x)
        skip = x
        if self.pre_norm:
            x = self.norm3(x)
        x = skip + dropout(self.feed_forward(x, rngs), self.rate, rngs)
        return x if self.pre_norm else self.norm3(x)


class Decoder(nnx.Module):
    """Stack of decoder layers and a norm at the end."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.n_decoder_layers)])
        self.norm = LayerNorm(config.dim_model)

    def __call__(
        self,
        x: Float[Array, "b t d"],
        memory: Float[Array, "b n d"],
        queries: Float[Array, "#b t d"],
        positions: Float[Array, "#b n d"],
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b t d"]:
        for layer in self.layers:
            x = layer(x, memory, queries, positions, rngs)
        return self.norm(x)


_embedding_init = nnx.initializers.normal(1.0)
_linear_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # torch.nn.Linear starts so


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, kernel_init=_linear_init, rngs=rngs)


class Posterior(NamedTuple):
    """Distribution of the latent given a demonstration: a diagonal Gaussian."""

    mean: Float[Array, "b z"]
    log_variance: Float[Array, "b z"]

    def at(self, noise: Float[Array, "b z"]) -> Float[Array, "b z"]:
        """The latent sampled with this standard normal noise."""
        return self.mean + jnp.exp(self.log_variance / 2) * noise

    def divergence(self) -> Float[Array, ""]:
        """Kullback-Leibler divergence from the standard normal: summed over the latent, mean over the batch."""
        terms = 1 + self.log_variance - jnp.square(self.mean) - jnp.exp(self.log_variance)
        return (-0.5 * terms).sum(axis=-1).mean()


class LatentEncoder(nnx.Module):
    """Encoder of the VAE, for training only: [class token, state, actions] to the latent's distribution."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        width = config.dim_model
        self.encoder = Encoder(config, config.n_vae_encoder_layers, rngs=rngs)
        self.class_token = nnx.Param(_embedding_init(rngs.params(), (1, width)))
        self.state_in = None if config.state is None else linear(config.state.shape[0], width, rngs)
        self.action_in = linear(config.action.shape[0], width, rngs)
        self.latent_out = linear(width, 2 * config.latent_dim, rngs)
        tokens = 1 + (config.state is not None) + config.chunk_size
        self.positions = Buffer(jnp.asarray(sinusoidal(tokens, width))[None])

    def __call__(
        self,
        state: Float[Array, "b s"] | None,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> Posterior:
        batch = actions.shape[0]
        first = [jnp.broadcast_to(self.class_token[...], (batch, *self.class_token.shape))]
        if self.state_in is not None and state is not None:
            first.append(self.state_in(state)[:, None])
        tokens = jnp.concatenate((*first, self.action_in(actions)), axis=1)
        is_out = jnp.concatenate((jnp.zeros((batch, len(first)), bool), is_pad), axis=1)
        bias = jnp.where(is_out, -jnp.inf, 0.0).astype(tokens.dtype)[:, None, None, :]
        out = self.latent_out(self.encoder(tokens, self.positions[...], bias, rngs)[:, 0])
        return Posterior(*jnp.split(out, 2, axis=-1))


class Act(nnx.Module):
    """Action Chunking Transformer (ACT) over normalised arrays.

    Normalisation lives outside (jaxmodels/normalization.py), so that the same model trains and serves.
    """

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        width = config.dim_model
        self.config = config
        if config.use_vae:
            self.latent_encoder = LatentEncoder(config, rngs=rngs)
        if config.cameras:
            self.backbone = (
                SmallCnn(rngs=rngs)
                if config.vision_backbone == SMALL_CNN
                else ResNet(config.vision_backbone, dilate_last=config.replace_final_stride_with_dilation, rngs=rngs)
            )
            self.image_in = linear(self.backbone.width, width, rngs)
        self.latent_in = linear(config.latent_dim, width, rngs)
        vectors = 1
        if config.state is not None:
            self.state_in = linear(config.state.shape[0], width, rngs)
            vectors += 1
        if config.environment_state is not None:
            self.environment_in = linear(config.environment_state.shape[0], width, rngs)
            vectors += 1
        self.vector_positions = nnx.Param(_embedding_init(rngs.params(), (vectors, width)))
        self.encoder = Encoder(config, config.n_encoder_layers, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.action_queries = nnx.Param(_embedding_init(rngs.params(), (config.chunk_size, width)))
        self.action_out = linear(width, config.action.shape[0], rngs)

    def __call__(
        self,
        observation: Observation,
        latent: Float[Array, "b z"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b t a"]:
        """A normalised chunk for a normalised observation.

        Args:
            latent: the latent's value; zeros when None, as at inference.
            rngs: streams for dropout; None switches it off.
        """
        tokens, positions = self.tokens(observation, latent)
        memory = self.encoder(tokens, positions, rngs=rngs)
        queries = self.action_queries[...][None]
        start = jnp.zeros((tokens.shape[0], *queries.shape[1:]), tokens.dtype)
        return self.action_out(self.decoder(start, memory, queries, positions, rngs))

    def tokens(
        self, observation: Observation, latent: Float[Array, "b z"] | None = None
    ) -> tuple[Float[Array, "b n d"], Float[Array, "1 n d"]]:
        """Tokens for the encoder, and their positions."""
        first = observation.images[0] if observation.images else observation.environment_state
        if latent is None:
            latent = jnp.zeros((first.shape[0], self.config.latent_dim), first.dtype)
        tokens = [self.latent_in(latent)[:, None]]
        if self.config.state is not None:
            tokens.append(self.state_in(observation.state)[:, None])
        if self.config.environment_state is not None:
            tokens.append(self.environment_in(observation.environment_state)[:, None])
        positions = [self.vector_positions[...]]
        for image in observation.images:
            features = self.image_in(self.backbone(image))
            height, width = features.shape[1:3]
            table = sinusoidal_2d(height, width, self.config.dim_model)
            positions.append(jnp.asarray(table.reshape(height * width, -1), features.dtype))
            tokens.append(rearrange(features, "b h w d -> b (h w) d"))
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(positions)[None]

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
        *,
        noise: Float[Array, "b z"] | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Training loss as LeRobot computes it, and its parts.

        The absolute error counts padded steps as zero but divides by all steps. With `use_vae` the divergence of
        the latent is added, `kl_weight` times.

        Args:
            rngs: the streams ``dropout`` and ``latent``; None evaluates: no dropout, latent 0, no divergence.
            noise: of the latent, standard normal; drawn from ``latent`` when None.
        """
        latent, posterior = None, None
        if self.config.use_vae and rngs is not None:
            # The model computes in the dtype of its weights; what is measured stays float32.
            dtype = self.action_queries[...].dtype
            encoded = self.latent_encoder(observation.state, actions.astype(dtype), is_pad, rngs)
            posterior = Posterior(*(part.astype(jnp.float32) for part in encoded))
            if noise is None:
                noise = jax.random.normal(rngs.latent(), posterior.mean.shape, posterior.mean.dtype)
            latent = posterior.at(noise).astype(dtype)
        error = jnp.abs(self(observation, latent, rngs).astype(actions.dtype) - actions)
        l1 = jnp.where(is_pad[..., None], 0.0, error).mean()
        if posterior is None:
            return l1, {"l1": l1}
        kl = posterior.divergence()
        return l1 + self.config.kl_weight * kl, {"l1": l1, "kl": kl}
