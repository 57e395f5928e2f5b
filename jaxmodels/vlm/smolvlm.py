"""SmolVLM2: SigLIP's tower, a connector that joins several patches to a token, and a Llama over all tokens.

Sources: https://arxiv.org/abs/2504.05299; transformers/models/smolvlm.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.errors import ConfigError
from jaxmodels.layers.grouped_attention import (
    KeyValueProjection,
    KeyValues,
    Rotation,
    compute_rotation,
    count_positions,
    mask_blocks,
)
from jaxmodels.layers.norm import RMSNorm
from jaxmodels.ranges import WIDTH, Range, find_number_errors, is_number, shorten_value
from jaxmodels.vlm.decoder import DecoderLayer, DecoderSizes
from jaxmodels.vlm.siglip import VisionSizes, VisionTower

# Special tokens around an image and before it.
AROUND_IMAGE, BEFORE_IMAGE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class SmolVlmSizes:
    """Sizes of the vision-language model, as transformers' ``config.json`` of a SmolVLM has them.

    Attributes:
        text: sizes of the language model, with all of its layers.
        vocabulary: number of tokens.
        scale_factor: patches along each side that become one token.
        around_image, before_image: tokens of `AROUND_IMAGE` and `BEFORE_IMAGE`; None if unknown.
        source: file of the sizes, as JSON; empty for models in `VLMS`.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    vision: VisionSizes
    text: DecoderSizes
    vocabulary: Annotated[int, Range(1, 1 << 24)]
    scale_factor: Annotated[int, Range(1, 64)]
    around_image: Annotated[int | None, Range(0, 1 << 24)] = None
    before_image: Annotated[int | None, Range(0, 1 << 24)] = None
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        parts = {"": self, "text_config: ": self.text, "vision_config: ": self.vision}
        wrong = [where + error for where, part in parts.items() for error in find_number_errors(part)]
        if wrong:
            raise ConfigError("config.json of the vision-language model: " + "; ".join(wrong))
        if self.text.heads % self.text.kv_heads:
            wrong.append(f"{self.text.heads} heads are not a multiple of {self.text.kv_heads} heads of keys and values")
        if self.text.head_width % 2:
            wrong.append(f"head_dim is {self.text.head_width}; wanted an even number, because positions rotate pairs")
        if self.vision.width % self.vision.heads:
            wrong.append(
                f"vision_config: hidden_size {self.vision.width} is not a multiple of {self.vision.heads} heads"
            )
        if self.vision.side < 1:
            wrong.append(f"vision_config: image_size is {self.vision.image_size}, less than one patch")
        for token in (self.around_image, self.before_image):
            if (token or 0) >= self.vocabulary:
                wrong.append(f"the tokenizer has a token {token}, and the model {self.vocabulary} of them")
        if wrong:
            raise ConfigError("config.json of the vision-language model: " + "; ".join(wrong))

    def count_image_tokens(self, height: int, width: int) -> int | None:
        """Return the number of an image's tokens; None if its patches make no square of whole tokens."""
        rows, columns = self.vision.grid(height, width)
        side = isqrt(rows * columns)
        if side**2 != rows * columns or side == 0 or side % self.scale_factor:
            return None
        return (side // self.scale_factor) ** 2

    @classmethod
    def from_json(cls, values: Any, tokens: Mapping[str, int] | None = None) -> "SmolVlmSizes":
        """Read a SmolVLM's parsed ``config.json``; missing values have transformers' defaults.

        Args:
            tokens: numbers of `AROUND_IMAGE` and `BEFORE_IMAGE` in the tokenizer.

        Raises:
            ConfigError: the model is of another kind, or values make no sense.
        """
        where = "config.json of the vision-language model"
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {shorten_value(values)}; wanted an object")
        text, vision = values.get("text_config", {}), values.get("vision_config", {})
        if not isinstance(text, Mapping) or not isinstance(vision, Mapping) or not text:
            raise ConfigError(f"{where}: has no text_config and vision_config; wanted the config of a SmolVLM")
        wrong = [
            f"{name} is {shorten_value(part[key])}; wanted {' or '.join(map(str, known))}"
            for name, part, key, known in (
                ("model_type", values, "model_type", ("smolvlm", "idefics3")),
                ("text_config.hidden_act", text, "hidden_act", ("silu",)),
                ("text_config.attention_bias", text, "attention_bias", (False,)),
                ("text_config.mlp_bias", text, "mlp_bias", (False,)),
                ("vision_config.hidden_act", vision, "hidden_act", ("gelu_pytorch_tanh",)),
                ("vision_config.num_channels", vision, "num_channels", (3,)),
            )
            if key in part and part[key] not in known
        ]
        if wrong:
            raise ConfigError(f"{where}: " + "; ".join(wrong))
        width, heads = text.get("hidden_size", 4096), text.get("num_attention_heads", 32)
        for name, value in (("hidden_size", width), ("num_attention_heads", heads)):
            if not is_number(value, Range(1, WIDTH), integer=True):
                raise ConfigError(f"{where}: text_config.{name} is {shorten_value(value)}; wanted an integer above 0")
        kv_heads, head_width = text.get("num_key_value_heads"), text.get("head_dim")
        tokens = tokens or {}
        return cls(
            vision=VisionSizes(
                width=vision.get("hidden_size", 1152),
                hidden=vision.get("intermediate_size", 3072),
                layers=vision.get("num_hidden_layers", 12),
                heads=vision.get("num_attention_heads", 16),
                image_size=vision.get("image_size", 224),
                patch_size=vision.get("patch_size", 32),
                epsilon=vision.get("layer_norm_eps", 1e-6),
            ),
            text=DecoderSizes(
                width=width,
                hidden=text.get("intermediate_size", 11_008),
                layers=text.get("num_hidden_layers", 32),
                heads=heads,
                kv_heads=heads if kv_heads is None else kv_heads,
                head_width=width // heads if head_width is None else head_width,
                epsilon=text.get("rms_norm_eps", 1e-6),
            ),
            vocabulary=text.get("vocab_size", 32_000),
            scale_factor=values.get("scale_factor", 2),
            around_image=tokens.get(AROUND_IMAGE),
            before_image=tokens.get(BEFORE_IMAGE),
            source=json.dumps(values),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file of the sizes; empty for models in `VLMS`."""
        return json.loads(self.source) if self.source else {}


SMOLVLM2_500M = SmolVlmSizes(
    vision=VisionSizes(width=768, hidden=3072, layers=12, heads=12, image_size=512, patch_size=16),
    text=DecoderSizes(width=960, hidden=2560, layers=32, heads=15, kv_heads=5, head_width=64),
    vocabulary=49_280,
    scale_factor=4,
    around_image=49_189,
    before_image=49_152,
)
VLMS: Mapping[str, SmolVlmSizes] = {"HuggingFaceTB/SmolVLM2-500M-Video-Instruct": SMOLVLM2_500M}


class PrefixTokens(NamedTuple):
    """Input tokens of the language model, and which tokens count."""

    values: Float[Array, "b m d"]
    is_valid: Bool[Array, "b m"]


class LastLayer(nnx.Module):
    """Keys and values of the last layer of the language model that the action expert attends to."""

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(sizes.width, epsilon=sizes.epsilon)
        self.attention = KeyValueProjection(sizes.width, sizes.kv_heads, sizes.head_width, rngs=rngs)

    def __call__(self, x: Float[Array, "b m d"], rotation: Rotation) -> KeyValues:
        return self.attention.project_keys(self.attention_norm(x), rotation)


class SmolVlm(nnx.Module):
    """SmolVLM2: a vision tower, and `layers` of a language model, the last of which has only keys and values."""

    def __init__(self, sizes: SmolVlmSizes, layers: int, *, rngs: nnx.Rngs):
        text = sizes.text
        self.sizes = sizes
        self.vision = VisionTower(sizes.vision, rngs=rngs)
        patches = sizes.vision.width * sizes.scale_factor**2
        self.connector = nnx.Linear(patches, text.width, use_bias=False, rngs=rngs)
        init = nnx.initializers.normal(text.width**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (sizes.vocabulary, text.width), jnp.float32))
        self.layers = nnx.List([DecoderLayer(text, rngs=rngs) for _ in range(layers - 1)])
        self.last = LastLayer(text, rngs=rngs)

    def embed_images(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Return tokens of images, pixels in [-1, 1], with `scale_factor` patches along each side of a token."""
        patches, factor = self.vision(images), self.sizes.scale_factor
        side = round(patches.shape[1] ** 0.5) // factor
        together = rearrange(patches, "b (y v x u) d -> b (y x) (v u d)", y=side, v=factor, x=side, u=factor)
        return self.connector(together) * self.sizes.text.width**0.5

    def embed_words(self, tokens: Int[Array, "*b n"]) -> Float[Array, "*b n d"]:
        """Return the unscaled embedding of each token."""
        return self.embedding[...][tokens]

    def compute_cache(self, tokens: PrefixTokens, starts: Bool[np.ndarray, " m"]) -> list[KeyValues]:
        """Return keys and values of each layer; tokens before a new block in `starts` do not see it."""
        rotation = compute_rotation(count_positions(tokens.is_valid), self.sizes.text.head_width)
        mask, x, kept = mask_blocks(tokens.is_valid, starts), tokens.values, []
        for layer in self.layers:
            x, own = layer(x, rotation, mask)
            kept.append(own)
        return [*kept, self.last(x, rotation)]
