"""Layers of a language model (Llama, Gemma) over tokens of images, words and actions, with keys and values to keep."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxmodels.checkpoints.tensor_layouts import Tensor, module_tensor
from jaxmodels.layers.feed_forward import GatedFeedForward
from jaxmodels.layers.grouped_attention import GroupedQueryAttention, KeyValues, Rotation, append
from jaxmodels.layers.norm import EPSILON, RMSNorm
from jaxmodels.ranges import HEADS, LAYERS_WRITTEN_OUT, WIDTH, Range


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a stack of layers: widths of tokens, feed-forward layers and heads, and the norms' `epsilon`."""

    width: Annotated[int, Range(1, WIDTH)]
    hidden: Annotated[int, Range(1, WIDTH)]
    layers: Annotated[int, Range(1, LAYERS_WRITTEN_OUT)]
    heads: Annotated[int, Range(1, HEADS)]
    kv_heads: Annotated[int, Range(1, HEADS)]
    head_width: Annotated[int, Range(2, WIDTH)]
    epsilon: Annotated[float, Range(0, 1, above=True, below=True)] = EPSILON


class PrefixCache(NamedTuple):
    """Keys and values of an observation for each layer, perhaps padded (`pad_keys`), and which tokens count."""

    layers: tuple[KeyValues, ...]
    is_valid: Bool[Array, "b m"]


class DecoderLayer(nnx.Module):
    """Grouped-query attention and a gated feed-forward layer, each behind a root-mean-square norm; no biases.

    `offset` is of the norms' scales (`RMSNorm`); keys and values are made of `context_width` channels.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        activation: Callable[[Array], Array] = jax.nn.silu,
        offset: float = 0.0,
        context_width: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = RMSNorm(sizes.width, epsilon=sizes.epsilon, offset=offset)
        self.attention = GroupedQueryAttention(
            sizes.width, sizes.heads, sizes.kv_heads, sizes.head_width, context_width=context_width, rngs=rngs
        )
        self.feed_forward_norm = RMSNorm(sizes.width, epsilon=sizes.epsilon, offset=offset)
        self.feed_forward = GatedFeedForward(sizes.width, sizes.hidden, activation, rngs=rngs)

    def compute_key_values(self, x: Float[Array, "b n d"], rotation: Rotation) -> KeyValues:
        """Return keys and values of tokens, which suffice for the last layer of a prefix."""
        return self.attention.project_keys(self._normalize(self.attention_norm, x), rotation)

    def __call__(
        self, x: Float[Array, "b n d"], rotation: Rotation, mask: Bool[Array, "b #n m"], cache: KeyValues | None = None
    ) -> tuple[Float[Array, "b n d"], KeyValues]:
        """Attend to a cache and to the tokens (`mask`: cache first); returns tokens and their keys and values."""
        normal = self._normalize(self.attention_norm, x)
        own = self.attention.project_keys(normal, rotation)
        seen = own if cache is None else append(cache, own)
        mixed = self.attention.mix(self.attention.project_query(normal, rotation), seen, mask)
        return self.forward(x + mixed.astype(x.dtype)), own

    def cross_attend(
        self, x: Float[Array, "b n d"], rotation: Rotation, seen: KeyValues, mask: Bool[Array, "b #n m"]
    ) -> Float[Array, "b n d"]:
        """Attend only to other tokens."""
        query = self.attention.project_query(self._normalize(self.attention_norm, x), rotation)
        return self.forward(x + self.attention.mix(query, seen, mask).astype(x.dtype))

    def forward(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Apply the feed-forward layer and its residual."""
        return x + self.feed_forward(self._normalize(self.feed_forward_norm, x)).astype(x.dtype)

    def _normalize(self, norm: RMSNorm, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        """Normalize tokens to the dtype of the weights, because the residual may be float32."""
        return norm(x).astype(self.attention.query.weight.dtype)


_PARTS = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def decoder_tensor(inside: str, *, ours: str, theirs: str) -> Tensor:
    """Return transformers' name of a `DecoderLayer`'s weight `inside`, with prefix `theirs` in place of `ours`."""
    return module_tensor(f"{theirs}{_PARTS[inside.rpartition('.')[0]]}", f"{ours}{inside}")
