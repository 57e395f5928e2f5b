"""PaliGemma, from images and words to keys and values of every layer, and a Gemma of actions that attends to them.

Sources: https://arxiv.org/abs/2407.07726 (PaliGemma), https://arxiv.org/abs/2410.24164 (pi0: two Gemmas of one depth,
layer by layer in one attention), openpi/models/gemma.py (pi0.5: the time modulates the expert's norms).
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.checkpoints.tensor_layouts import Tensor, module_tensor
from jaxmodels.layers.feed_forward import GatedFeedForward, tanh_gelu
from jaxmodels.layers.grouped_attention import (
    GroupedQueryAttention,
    KeyValues,
    Rotation,
    append,
    compute_rotation,
    count_positions,
    mask_after_prefix,
    pad_keys,
    pad_mask,
)
from jaxmodels.layers.norm import AdaptiveRMSNorm, Modulation, RMSNorm
from jaxmodels.vlm.decoder import DecoderLayer, DecoderSizes, PrefixCache, decoder_tensor
from jaxmodels.vlm.siglip import VisionSizes, VisionTower

EPSILON = 1e-6  # Epsilon of every norm of Gemma.
OFFSET = 1.0  # Offset of the norms' scales, because files have scale - 1.


class PaliGemma(nnx.Module):
    """Images and words to keys and values of every layer."""

    def __init__(self, vision: VisionSizes, sizes: DecoderSizes, vocabulary: int, *, rngs: nnx.Rngs):
        self.head_width = sizes.head_width
        self.vision = VisionTower(vision, rngs=rngs)
        self.projector = nnx.Linear(vision.width, sizes.width, rngs=rngs)
        init = nnx.initializers.normal(sizes.width**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (vocabulary, sizes.width), jnp.float32))
        self.layers = nnx.List(
            [DecoderLayer(sizes, activation=tanh_gelu, offset=OFFSET, rngs=rngs) for _ in range(sizes.layers)]
        )

    def embed_images(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b n d"]:
        """Return tokens of images, pixels in [-1, 1], which unlike words are not scaled."""
        return self.projector(self.vision(images))

    def embed_words(self, tokens: Int[Array, "b n"]) -> Float[Array, "b n d"]:
        embedding = self.embedding[...]
        return embedding[tokens] * embedding.shape[1] ** 0.5

    def compute_cache(
        self, tokens: Float[Array, "b m d"], is_valid: Bool[Array, "b m"], behind: int = 0, length: int = 0
    ) -> PrefixCache:
        """Return keys and values of tokens with full attention, padded to a `length` by `pad_keys` for `behind`."""
        rotation, mask = compute_rotation(count_positions(is_valid), self.head_width), is_valid[:, None]
        tokens = tokens.astype(jnp.float32)  # The residual is float32.
        kept = []
        for layer in self.layers[:-1]:
            tokens, own = layer(tokens, rotation, mask)
            kept.append(own)
        kept.append(self.layers[-1].compute_key_values(tokens, rotation))
        layers = tuple(pad_keys(own, behind, length) for own in kept)
        return PrefixCache(layers, pad_mask(is_valid, layers[0]))


class AdaptiveLayer(nnx.Module):
    """A Gemma layer with two norms and gates that a condition modulates."""

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        width = sizes.width
        self.attention_norm = AdaptiveRMSNorm(width, width, epsilon=sizes.epsilon, rngs=rngs)
        self.attention = GroupedQueryAttention(width, sizes.heads, sizes.kv_heads, sizes.head_width, rngs=rngs)
        self.feed_forward_norm = AdaptiveRMSNorm(width, width, epsilon=sizes.epsilon, rngs=rngs)
        self.feed_forward = GatedFeedForward(width, sizes.hidden, tanh_gelu, rngs=rngs)

    def modulate(self, condition: Float[Array, "*s d"]) -> tuple[Modulation, Modulation]:
        """Return the modulations of both norms."""
        return self.attention_norm.modulate(condition), self.feed_forward_norm.modulate(condition)

    def __call__(
        self,
        x: Float[Array, "b n d"],
        modulations: tuple[Modulation, Modulation],
        rotation: Rotation,
        mask: Bool[Array, "b #n m"],
        cache: KeyValues,
    ) -> Float[Array, "b n d"]:
        first, second = modulations
        dtype = self.attention.query.weight.dtype
        normal = self.attention_norm(x, first).astype(dtype)
        seen = append(cache, self.attention.project_keys(normal, rotation))
        mixed = self.attention.mix(self.attention.project_query(normal, rotation), seen, mask)
        x = x + mixed.astype(x.dtype) * first.gate.astype(x.dtype)
        added = self.feed_forward(self.feed_forward_norm(x, second).astype(dtype))
        return x + added.astype(x.dtype) * second.gate.astype(x.dtype)


class Expert(nnx.Module):
    """A Gemma over states and actions, whose layers attend to PaliGemma's keys and values and to their own."""

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        self.head_width = sizes.head_width
        self.norm = RMSNorm(sizes.width, epsilon=sizes.epsilon, offset=OFFSET)
        self.layers = nnx.List(
            [DecoderLayer(sizes, activation=tanh_gelu, offset=OFFSET, rngs=rngs) for _ in range(sizes.layers)]
        )

    def __call__(
        self, x: Float[Array, "b n d"], prefix: PrefixCache, starts: Bool[np.ndarray, " n"]
    ) -> Float[Array, "b n d"]:
        """Run tokens after a prefix; `starts` begin blocks, which earlier tokens do not see."""
        rotation, mask = locate_suffix(prefix, starts, self.head_width)
        for layer, seen in zip(self.layers, prefix.layers, strict=True):
            x, _ = layer(x, rotation, mask, seen)
        return self.norm(x)


class AdaptiveExpert(nnx.Module):
    """An `Expert` with norms that a condition modulates."""

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        self.head_width = sizes.head_width
        self.norm = AdaptiveRMSNorm(sizes.width, sizes.width, epsilon=sizes.epsilon, rngs=rngs)
        self.layers = nnx.List([AdaptiveLayer(sizes, rngs=rngs) for _ in range(sizes.layers)])

    def modulate(self, condition: Float[Array, "*s d"]) -> Float[Array, "*s norms 3 d"]:
        """Return the modulations of all norms by a condition, two in each layer and the last.

        They are one array, because a sampler's loop copies each of its arrays in every step.
        """
        norms = [*(modulation for layer in self.layers for modulation in layer.modulate(condition))]
        return jnp.stack([jnp.stack(each, axis=-2) for each in (*norms, self.norm.modulate(condition))], axis=-3)

    def __call__(
        self,
        x: Float[Array, "b n d"],
        prefix: PrefixCache,
        starts: Bool[np.ndarray, " n"],
        modulations: Float[Array, "*b norms 3 d"],
    ) -> Float[Array, "b n d"]:
        """Run tokens after a prefix as `Expert`; `modulations` are for all tokens, or (b, n, norms, 3, d) for each."""
        rotation, mask = locate_suffix(prefix, starts, self.head_width)
        each = [
            Modulation(*(modulations[..., norm, part, :] for part in range(3))) for norm in range(modulations.shape[-3])
        ]
        for layer, seen, first, second in zip(self.layers, prefix.layers, each[:-1:2], each[1::2], strict=True):
            x = layer(x, (first, second), rotation, mask, seen)
        return self.norm(x, each[-1])


def locate_suffix(
    prefix: PrefixCache, starts: Bool[np.ndarray, " n"], head_width: int
) -> tuple[Rotation, Bool[Array, "b #n m_n"]]:
    """Return the positions of tokens after the valid tokens of a prefix, and their mask."""
    first = jnp.sum(prefix.is_valid, axis=1, dtype=jnp.int32)[:, None]
    rotation = compute_rotation(first + jnp.arange(len(starts), dtype=jnp.int32), head_width)
    return rotation, mask_after_prefix(prefix.is_valid, starts)


def gemma_tensor(inside: str, *, ours: str, theirs: str) -> Tensor:
    """Return transformers' tensor of a weight ``layers.N.…`` or ``norm.…``; the prefixes end with a dot."""
    if ".dense." in inside:
        above, dot, norm = inside.partition(".dense.")[0].rpartition(".")
        place = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
        return module_tensor(f"{theirs}{above}{dot}{place.get(norm, norm)}.dense", f"{ours}{inside}")
    if inside == "norm.scale":
        return module_tensor(f"{theirs}norm", f"{ours}{inside}")
    stack, number, rest = inside.split(".", 2)
    layer = f"{stack}.{number}."
    return decoder_tensor(rest, ours=f"{ours}{layer}", theirs=f"{theirs}{layer}")
