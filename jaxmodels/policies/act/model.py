"""ACT's network (encoder over observation tokens, decoder over action queries, VAE latent) and its ensembling.

Training and serving run the same forward pass. Training adds the encoder of the VAE and dropout. Tokens have the order
of LeRobot's files: latent, state, environment state, then the feature map of each camera, row by row.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmodels.errors import ConfigError, ObservationError
from jaxmodels.layers.attention import Attention
from jaxmodels.layers.embeddings import sinusoidal, sinusoidal_2d
from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS, FeedForward, dropout
from jaxmodels.layers.norm import Buffer, LayerNorm
from jaxmodels.layers.vision import ResNet, SmallCnn, assemble_resnets
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.policies.config import SMALL_CNN
from jaxmodels.types import Observation
from jaxmodels.weights import blueprint_of

Tokens: TypeAlias = Float[Array, "b n d"]
Positions: TypeAlias = Float[Array, "#b n d"]
Actions: TypeAlias = Float[Array, "b t d"]
Queries: TypeAlias = Float[Array, "#b t d"]
Bias: TypeAlias = Float[Array, "#b #heads #n n"]


class ResidualLayer(nnx.Module):
    """Base of both layers, with skip connections; norms are before each part (`pre_norm`) or after it."""

    def __init__(self, config: ActConfig):
        self.pre_norm = config.pre_norm
        self.rate = config.dropout

    def add_residual(
        self, compute: Callable[[Tokens], Tokens], norm: LayerNorm, x: Tokens, rngs: nnx.Rngs | None
    ) -> Tokens:
        """Return `x` plus the result of `compute`, with dropout."""
        x = x + dropout(compute(norm(x) if self.pre_norm else x), self.rate, rngs)
        return x if self.pre_norm else norm(x)


def make_feed_forward(config: ActConfig, rngs: nnx.Rngs) -> FeedForward:
    """Build the feed-forward part of a layer."""
    activation = LEROBOT_ACTIVATIONS[config.feedforward_activation]
    return FeedForward(config.dim_model, config.dim_feedforward, activation, rate=config.dropout, rngs=rngs)


class EncoderLayer(ResidualLayer):
    """Encoder layer: self-attention and feed-forward."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        super().__init__(config)
        self.attention = Attention(config.dim_model, config.n_heads, rate=config.dropout, rngs=rngs)
        self.feed_forward = make_feed_forward(config, rngs)
        self.norm1 = LayerNorm(config.dim_model)
        self.norm2 = LayerNorm(config.dim_model)

    def __call__(
        self, x: Tokens, positions: Positions, bias: Bias | None = None, rngs: nnx.Rngs | None = None
    ) -> Tokens:
        def attend(x: Tokens) -> Tokens:
            positioned = x + positions
            return self.attention(positioned, positioned, x, bias, rngs)

        x = self.add_residual(attend, self.norm1, x, rngs)
        return self.add_residual(partial(self.feed_forward, rngs=rngs), self.norm2, x, rngs)


class Encoder(nnx.Module):
    """Stack of encoder layers; with `pre_norm` a norm at the end."""

    def __init__(self, config: ActConfig, layers: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(layers)])
        self.norm = LayerNorm(config.dim_model) if config.pre_norm else None

    def __call__(
        self, x: Tokens, positions: Positions, bias: Bias | None = None, rngs: nnx.Rngs | None = None
    ) -> Tokens:
        for layer in self.layers:
            x = layer(x, positions, bias, rngs)
        return x if self.norm is None else self.norm(x)


class ActDecoderLayer(ResidualLayer):
    """Decoder layer: self-attention of the action queries, attention to the encoder's tokens, feed-forward."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        super().__init__(config)
        width = config.dim_model
        self.self_attention = Attention(width, config.n_heads, rate=config.dropout, rngs=rngs)
        self.cross_attention = Attention(width, config.n_heads, rate=config.dropout, rngs=rngs)
        self.feed_forward = make_feed_forward(config, rngs)
        self.norm1 = LayerNorm(width)
        self.norm2 = LayerNorm(width)
        self.norm3 = LayerNorm(width)

    def __call__(
        self,
        x: Actions,
        memory: Tokens,
        queries: Queries,
        positions: Positions,
        rngs: nnx.Rngs | None = None,
        *,
        has_equal_rows: bool = False,
    ) -> Actions:
        """Run the layer.

        Args:
            has_equal_rows: whether all rows of `x` are equal. A mean of equal values is the value, so the layer then
                computes its self-attention for one row, without queries and keys.
        """

        def attend(x: Actions) -> Float[Array, "b #t d"]:
            if has_equal_rows:
                return self.self_attention.out(self.self_attention.value(x[:, :1]))
            positioned = x + queries
            return self.self_attention(positioned, positioned, x, rngs=rngs)

        def attend_memory(x: Actions) -> Actions:
            return self.cross_attention(x + queries, memory + positions, memory, rngs=rngs)

        x = self.add_residual(attend, self.norm1, x, rngs)
        x = self.add_residual(attend_memory, self.norm2, x, rngs)
        return self.add_residual(partial(self.feed_forward, rngs=rngs), self.norm3, x, rngs)


class Decoder(nnx.Module):
    """Stack of decoder layers, which starts from zeros, and a norm at the end."""

    def __init__(self, config: ActConfig, *, rngs: nnx.Rngs):
        self.layers = nnx.List([ActDecoderLayer(config, rngs=rngs) for _ in range(config.n_decoder_layers)])
        self.norm = LayerNorm(config.dim_model)

    def __call__(self, memory: Tokens, queries: Queries, positions: Positions, rngs: nnx.Rngs | None = None) -> Actions:
        x = jnp.zeros((memory.shape[0], *queries.shape[1:]), memory.dtype)
        for i, layer in enumerate(self.layers):
            # This saves 3 % of the time of a chunk with two 224x224 cameras (AMD EPYC, 2 cores).
            has_equal_rows = i == 0 and rngs is None
            x = layer(x, memory, queries, positions, rngs, has_equal_rows=has_equal_rows)
        return self.norm(x)


_embedding_init = nnx.initializers.normal(1.0)
_linear_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # torch.nn.Linear's default.


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Return a linear layer with LeRobot's initial weights."""
    return nnx.Linear(inputs, outputs, kernel_init=_linear_init, rngs=rngs)


class Posterior(NamedTuple):
    """Distribution of the latent given a demonstration: a diagonal Gaussian."""

    mean: Float[Array, "b z"]
    log_variance: Float[Array, "b z"]

    def at(self, noise: Float[Array, "b z"]) -> Float[Array, "b z"]:
        """Return the latent sampled with this standard normal noise."""
        return self.mean + jnp.exp(self.log_variance / 2) * noise

    def divergence(self) -> Float[Array, ""]:
        """Return the Kullback-Leibler divergence from a standard normal: sum over the latent, mean over the batch."""
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


STACKED_PIXELS = 480 * 640  # Most pixels of the cameras that a CPU processes in one batch.


class Act(nnx.Module):
    """Action Chunking Transformer (ACT) over arrays that jaxmodels/normalization.py normalised."""

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
        self, observation: Observation, latent: Float[Array, "b z"] | None = None, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "b t a"]:
        """Return a normalised action chunk for a normalised observation.

        Args:
            latent: zeros when None, as in serving.
            rngs: enables dropout; its stream ``dropout`` is used.
        """
        tokens, positions = self.embed(observation, latent)
        memory = self.encoder(tokens, positions, rngs=rngs)
        queries = self.action_queries[...][None]
        return self.action_out(self.decoder(memory, queries, positions, rngs))

    def embed(
        self, observation: Observation, latent: Float[Array, "b z"] | None = None
    ) -> tuple[Tokens, Float[Array, "1 n d"]]:
        """Return tokens for the encoder, and their positions."""
        first = observation.images[0] if observation.images else observation.environment_state
        assert self.latent_in.bias is not None
        latent_token = self.latent_in.bias[...] if latent is None else self.latent_in(latent)[:, None]
        tokens = [jnp.broadcast_to(latent_token, (first.shape[0], 1, self.config.dim_model))]
        if self.config.state is not None:
            tokens.append(self.state_in(observation.state)[:, None])
        if self.config.environment_state is not None:
            tokens.append(self.environment_in(observation.environment_state)[:, None])
        positions = [self.vector_positions[...]]
        for features in self.embed_images(observation.images):
            height, width = features.shape[1:3]
            table = sinusoidal_2d(height, width, self.config.dim_model)
            positions.append(jnp.asarray(table.reshape(height * width, -1), features.dtype))
            tokens.append(rearrange(features, "b h w d -> b (h w) d"))
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(positions)[None]

    def embed_images(self, images: tuple[Float[Array, "b _ _ 3"], ...]) -> list[Float[Array, "b _ _ d"]]:
        """Return the projected feature map of each camera.

        Cameras with frames of one size go through the backbone as one batch. A CPU processes large frames in a loop,
        because the intermediates of a batch do not fit into its cache.
        """

        def together(stack: Float[Array, "k b h w 3"]) -> Float[Array, "k b h2 w2 c"]:
            # The batch is the major axis, because a training may divide it between devices.
            features = self.backbone(rearrange(stack, "k b h w c -> (b k) h w c"))
            return rearrange(features, "(b k) h w c -> k b h w c", b=stack.shape[1])

        def one_by_one(stack: Float[Array, "k b h w 3"]) -> Float[Array, "k b h2 w2 c"]:
            return lax.map(self.backbone, stack)

        maps: dict[int, Array] = {}
        for shape in dict.fromkeys(image.shape for image in images):
            cameras = [i for i, image in enumerate(images) if image.shape == shape]
            stack = jnp.stack([images[i] for i in cameras])
            if len(cameras) * shape[1] * shape[2] <= STACKED_PIXELS:
                features = together(stack)
            else:
                features = lax.platform_dependent(stack, cpu=one_by_one, default=together)
            maps |= dict(zip(cameras, self.image_in(features), strict=True))
        return [maps[i] for i in range(len(images))]

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
        *,
        noise: Float[Array, "b z"] | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return LeRobot's training loss and its parts.

        The absolute error counts padded steps as zero but divides by all steps. With `use_vae`, `kl_weight` times the
        latent's divergence is added.

        Args:
            rngs: the streams ``dropout`` and ``latent``; None evaluates: no dropout, latent 0, no divergence.
            noise: standard normal noise of the latent; drawn from ``latent`` when None.
        """
        latent, posterior = None, None
        if self.config.use_vae and rngs is not None:
            # The model computes in the dtype of its weights; the loss is float32.
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


def act(config: ActConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """Return a normalised action chunk for a normalised observation, with weights of `prepare`."""
    return assemble_resnets(blueprint_of(Act, config), weights)(observation)


class TemporalEnsembler:
    """Weighted running mean of the predictions of all action chunks for each future step.

    The policy predicts a chunk at each step. The weight of the i-th chunk that predicts a step is ``exp(-coeff * i)``,
    so a positive `coeff` prefers the oldest prediction.
    Source: ACTTemporalEnsembler in LeRobot's modeling_act.py; algorithm 2 of https://arxiv.org/abs/2304.13705.

    Args:
        coeff: decay of the weights. LeRobot's default is 0.01.
        chunk: steps in a chunk.

    Raises:
        ConfigError: `coeff` is not finite.

    Example:
        >>> import numpy as np
        >>> from jaxmodels import TemporalEnsembler
        >>> ensembler = TemporalEnsembler(coeff=0.0, chunk=2)
        >>> ensembler.update(np.array([[[1.0], [2.0]]])).tolist()
        [[1.0]]
        >>> ensembler.update(np.array([[[4.0], [6.0]]])).tolist()  # The mean of 2 and 4.
        [[3.0]]
    """

    def __init__(self, coeff: float, chunk: int):
        if not np.isfinite(coeff):
            raise ConfigError(f"temporal ensembling: coeff is {coeff}; wanted a finite number, e.g. 0.01")
        self._chunk = chunk
        self._weights = np.exp(-np.float32(coeff) * np.arange(chunk, dtype=np.float32))
        self._sums = np.cumsum(self._weights, dtype=np.float32)
        self.reset()

    def reset(self) -> None:
        """Drop all chunks before a new episode."""
        self._actions: np.ndarray | None = None
        self._counts = np.ones((self._chunk, 1), np.int64)  # Number of chunks in the mean of each future step.

    def update(self, chunk: Float[np.ndarray, "b c a"]) -> Float[np.ndarray, "b a"]:
        """Add the newest chunk and return the action of the current step.

        Args:
            chunk: un-normalised actions, beginning with the current step.

        Raises:
            ObservationError: the shape differs from that of earlier chunks.
        """
        chunk = np.asarray(chunk, np.float32)
        if chunk.ndim != 3 or chunk.shape[1] != self._chunk:
            raise ObservationError(f"ensembled chunk has shape {chunk.shape}; wanted (batch, {self._chunk}, action)")
        counts = self._counts
        if self._actions is None:
            actions = chunk.copy()
        elif self._actions.shape[::2] != chunk.shape[::2]:
            raise ObservationError(f"ensembled chunk has shape {chunk.shape}; reset() before changing batch or action")
        else:
            mean = self._actions * self._sums[counts - 1]
            mean = mean + chunk[:, :-1] * self._weights[counts]
            mean = mean / self._sums[counts]
            counts = np.minimum(counts + 1, self._chunk)
            actions = np.concatenate((mean, chunk[:, -1:]), axis=1)
            counts = np.concatenate((counts, np.ones((1, 1), np.int64)))
        self._actions, self._counts = actions[:, 1:], counts[1:]
        return actions[:, 0]
