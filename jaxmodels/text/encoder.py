"""Tokens of a text to what a policy attends to: a transformer with learned positions, and a norm at its end."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.layers.attention import Attention
from jaxmodels.layers.feed_forward import Activation, FeedForward, exact_gelu, sigmoid_gelu
from jaxmodels.layers.norm import LayerNorm
from jaxmodels.text.config import CLIP, TextConfig

ACTIVATIONS = {"gelu": Activation(exact_gelu, 1), "quick_gelu": Activation(sigmoid_gelu, 1)}
# As large as what layers add to it: with 0.02, two instructions that differ in a word are nearly the same to a policy.
_embedding_init = nnx.initializers.normal(1.0)


class Layer(nnx.Module):
    """Self-attention and feed-forward, each after a norm and with a skip."""

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(config.width)
        self.attention = Attention(config.width, config.n_heads, rngs=rngs)
        self.norm2 = LayerNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.hidden, ACTIVATIONS[config.activation], rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"], bias: Float[Array, "b 1 #n n"]) -> Float[Array, "b n d"]:
        normal = self.norm1(x)
        x = x + self.attention(normal, normal, normal, bias)
        return x + self.feed_forward(self.norm2(x))


class TextEncoder(nnx.Module):
    """What the tokens of a text say, each seen with all the others, or with those before it (CLIP).

    Source of the latter: transformers/models/clip/modeling_clip.py, CLIPTextModel, whose ``last_hidden_state`` it is.

    Attributes:
        width: d, of what it gives.
    """

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs):
        self.width = config.width
        self.is_causal = config.kind == CLIP
        self.tokens = nnx.Param(_embedding_init(rngs.params(), (config.vocabulary, config.width)))
        self.positions = nnx.Param(_embedding_init(rngs.params(), (config.length, config.width)))
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = LayerNorm(config.width)

    def __call__(self, ids: Int[Array, "b n"], mask: Bool[Array, "b n"]) -> Float[Array, "b n d"]:
        """What is said at each token; those that `mask` leaves out are looked at by none.

        The first token of every text must be in: with nothing to look at there is no answer.
        """
        length = ids.shape[1]
        x = self.tokens[...][ids] + self.positions[...][None, :length]
        seen = mask[:, None, None, :]
        if self.is_causal:
            seen = seen & jnp.tril(jnp.ones((length, length), bool))[None, None]
        bias = jnp.where(seen, 0.0, -jnp.inf)
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)


def text_encoder(config: TextConfig, *, rngs: nnx.Rngs) -> TextEncoder:
    """The encoder of a config, with random weights."""
    return TextEncoder(config, rngs=rngs)
