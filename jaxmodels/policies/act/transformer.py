"""The encoder and decoder of ACT: positions are added to queries and keys of every layer, never to values."""

from flax import nnx
from jaxtyping import Array, Float

from jaxmodels.layers.attention import Attention
from jaxmodels.layers.dropout import dropout
from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS, FeedForward
from jaxmodels.layers.norm import LayerNorm
from jaxmodels.policies.act.config import ActConfig


class EncoderLayer(nnx.Module):
    """Self-attention and feed-forward, each with a skip; norms before (`pre_norm`) or after the sum."""

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
        placed = x + positions
        x = skip + dropout(self.attention(placed, placed, x, bias, rngs), self.rate, rngs)
        if not self.pre_norm:
            x = self.norm1(x)
        skip = x
        if self.pre_norm:
            x = self.norm2(x)
        x = skip + dropout(self.feed_forward(x, rngs), self.rate, rngs)
        return x if self.pre_norm else self.norm2(x)


class Encoder(nnx.Module):
    """Encoder layers; only with `pre_norm` is there a norm at the end."""

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
    """Self-attention among the action queries, attention to the encoder's tokens, feed-forward."""

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
        placed = x + queries
        x = skip + dropout(self.self_attention(placed, placed, x, rngs=rngs), self.rate, rngs)
        if not self.pre_norm:
            x = self.norm1(x)
        skip = x
        if self.pre_norm:
            x = self.norm2(x)
        looked = self.cross_attention(x + queries, memory + positions, memory, rngs=rngs)
        x = skip + dropout(looked, self.rate, rngs)
        if not self.pre_norm:
            x = self.norm2(x)
        skip = x
        if self.pre_norm:
            x = self.norm3(x)
        x = skip + dropout(self.feed_forward(x, rngs), self.rate, rngs)
        return x if self.pre_norm else self.norm3(x)


class Decoder(nnx.Module):
    """Decoder layers and a norm at the end, with `pre_norm` or without."""

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
