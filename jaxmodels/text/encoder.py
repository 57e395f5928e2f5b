"""Transformer text encoder and its config."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.errors import ConfigError
from jaxmodels.layers.attention import Attention
from jaxmodels.layers.feed_forward import Activation, FeedForward, exact_gelu, sigmoid_gelu
from jaxmodels.layers.norm import LayerNorm
from jaxmodels.ranges import (
    HEADS,
    LAYERS_WRITTEN_OUT,
    WIDTH,
    Range,
    check_unknown_fields,
    find_choice_errors,
    find_number_errors,
    find_value_errors,
    list_numbers,
    shorten_value,
)

SMALL, CLIP = "small", "clip"
KINDS = (SMALL, CLIP)
TEXT_ACTIVATIONS = ("gelu", "quick_gelu")
BYTES = 257  # Every byte, and a start token.


@dataclass(frozen=True)
class TextConfig:
    """Config of a transformer over the tokens of a text; by default a small one for instructions of up to 95 bytes.

    Attributes:
        kind: ``small``, trained with the policy on the bytes of a text; ``clip``, CLIP's text tower.
        length: n, tokens of a text, including padding and, for ``small``, the start token.
        width: d, width of each token.
        hidden: width within the feed-forward layers.
        vocabulary: number of different tokens.
        activation: activation of the feed-forward layers; ``quick_gelu`` is the sigmoid form of the first CLIP models.
        is_frozen: whether training leaves its weights as they are.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    kind: str = SMALL
    length: Annotated[int, Range(2, 4096)] = 96
    width: Annotated[int, Range(1, WIDTH)] = 128
    n_layers: Annotated[int, Range(1, LAYERS_WRITTEN_OUT)] = 2
    n_heads: Annotated[int, Range(1, HEADS)] = 4
    hidden: Annotated[int, Range(1, 4 * WIDTH)] = 512
    vocabulary: Annotated[int, Range(1, 1 << 20)] = BYTES
    activation: str = "gelu"
    is_frozen: bool = False

    def __post_init__(self) -> None:
        wrong = find_number_errors(self)
        wrong += find_choice_errors(self, {"kind": KINDS, "activation": TEXT_ACTIVATIONS})
        if not isinstance(self.is_frozen, bool):
            wrong.append(f"is_frozen is {shorten_value(self.is_frozen)}; wanted true or false")
        if not wrong and self.width % self.n_heads:
            wrong.append(f"width {self.width} is not a multiple of n_heads {self.n_heads}")
        if not wrong and self.kind == SMALL and self.vocabulary != BYTES:
            wrong.append(f"vocabulary is {self.vocabulary}; {SMALL} reads bytes, wanted {BYTES}")
        if wrong:
            raise ConfigError("text encoder: " + "; ".join(wrong))

    @classmethod
    def clip(cls) -> "TextConfig":
        """Return the config of the text encoder of CLIP ViT-B/32 (https://huggingface.co/openai/clip-vit-base-patch32)."""
        return cls(CLIP, 77, 512, 12, 8, 2048, 49408, "quick_gelu", is_frozen=True)

    @classmethod
    def from_json(cls, values: Any) -> "TextConfig":
        """Read a config's ``text_encoder``; raises ConfigError for unknown fields that are on or wrong values."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"text_encoder is {shorten_value(values)}; wanted an object, e.g. {cls().to_json()}, or null"
            )
        known = [field.name for field in fields(cls)]
        unknown = {str(name): value for name, value in values.items() if name not in known}
        check_unknown_fields("text encoder", unknown, f"known: {', '.join(known)}")
        values = {name: value for name, value in values.items() if name in known}
        if wrong := find_value_errors(list_numbers(cls), values):
            raise ConfigError("text encoder: " + "; ".join(wrong))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the object ``text_encoder`` of a policy's ``config.json``."""
        return asdict(self)


ACTIVATIONS = {"gelu": Activation(exact_gelu, 1), "quick_gelu": Activation(sigmoid_gelu, 1)}
# As large as the layers' outputs; with 0.02, a policy would barely distinguish similar instructions.
_embedding_init = nnx.initializers.normal(1.0)


class Layer(nnx.Module):
    """Transformer layer: self-attention and feed-forward, each after a norm and with a skip connection."""

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
    """Transformer over the tokens of a text, with full attention, or causal as in CLIP; output has `width` channels.

    Source of the latter: transformers/models/clip/modeling_clip.py, CLIPTextModel's ``last_hidden_state``.
    """

    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs):
        self.width = config.width
        self.is_causal = config.kind == CLIP
        self.tokens = nnx.Param(_embedding_init(rngs.params(), (config.vocabulary, config.width)))
        self.positions = nnx.Param(_embedding_init(rngs.params(), (config.length, config.width)))
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.n_layers)])
        self.norm = LayerNorm(config.width)

    def __call__(self, ids: Int[Array, "b n"], mask: Bool[Array, "b n"]) -> Float[Array, "b n d"]:
        """Encode each token without attending to masked ones; the first token of every text must be valid."""
        length = ids.shape[1]
        x = self.tokens[...][ids] + self.positions[...][None, :length]
        attended = mask[:, None, None, :]
        if self.is_causal:
            attended = attended & jnp.tril(jnp.ones((length, length), bool))[None, None]
        bias = jnp.where(attended, 0.0, -jnp.inf)
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)
