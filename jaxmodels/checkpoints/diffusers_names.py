"""diffusers' names for the weights of a 2D transformer, and the place of each in our arrays.

Files keep every layer, and queries, keys and values, apart; here layers are stacked and projections of the same tokens
are one matrix, so that each tensor of theirs is a slice of an array of ours.
Source: diffusers 0.42.1, models/transformers/transformer_2d.py, models/attention.py, models/normalization.py.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from jaxmodels.checkpoints.layouts import CONVOLUTION, EVERY, LINEAR, POINTWISE, Layout, Place
from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS
from jaxmodels.transformer2d.config import TIME_CHANNELS, Transformer2DConfig

BLOCKS = "transformer_blocks"


def places(config: Transformer2DConfig) -> tuple[Place, ...]:
    """Every tensor of a model; total in both directions: each element of our arrays belongs to exactly one."""
    return (*_inputs(config), *_blocks(config), *_outputs(config))


def count_parameters(config: Transformer2DConfig, *, blocks_only: bool = False) -> int:
    """Numbers in the weights of a model, or of its blocks alone, from the names of one block: whatever the layers."""

    def count(places: Iterator[Place]) -> int:
        return sum(math.prod(place.shape) for place in places)

    blocks = config.num_layers * count(_block(config))
    return blocks if blocks_only else blocks + count(_inputs(config)) + count(_outputs(config))


def _inputs(config: Transformer2DConfig) -> Iterator[Place]:
    width, channels, patch = config.inner_dim, config.in_channels or 0, config.patch_size or 1
    if config.kind == "continuous":
        yield from _norm("norm", channels)
        yield from _linear("proj_in", channels, width, layout=LINEAR if config.use_linear_projection else POINTWISE)
    elif config.kind == "discrete":
        side = config.sample_size or 0
        yield from _table("latent_image_embedding.emb", config.num_vector_embeds or 0, width)
        yield from _table("latent_image_embedding.height_emb", side, width)
        yield from _table("latent_image_embedding.width_emb", side, width)
    else:
        yield Place("pos_embed.proj.weight", "pos_embed.proj.kernel", (patch, patch, channels, width), (), CONVOLUTION)
        yield Place("pos_embed.proj.bias", "pos_embed.proj.bias", (width,))
        if config.norm_type == "ada_norm_single":
            yield from _mlp("adaln_single.emb.timestep_embedder", TIME_CHANNELS, width)
            for condition in ("resolution", "aspect_ratio") if config.has_conditions else ():
                yield from _mlp(f"adaln_single.emb.{condition}_embedder", TIME_CHANNELS, width // 3)
            yield from _linear("adaln_single.linear", width, 6 * width)
        if config.caption_channels is not None:
            yield from _mlp("caption_projection", config.caption_channels, width)


def _outputs(config: Transformer2DConfig) -> Iterator[Place]:
    width, channels = config.inner_dim, config.outputs or 0
    pixels = (config.patch_size or 1) ** 2 * channels
    if config.kind == "continuous":
        yield from _linear("proj_out", width, channels, layout=LINEAR if config.use_linear_projection else POINTWISE)
    elif config.kind == "discrete":
        yield from _norm("norm_out", width)
        yield from _linear("out", width, (config.num_vector_embeds or 0) - 1)
    elif config.norm_type == "ada_norm_single":
        yield Place("scale_shift_table", "scale_shift_table", (2, width))
        yield from _linear("proj_out", width, pixels)
    else:
        yield from _linear("proj_out_1", width, 2 * width)
        yield from _linear("proj_out_2", width, pixels)


def _blocks(config: Transformer2DConfig) -> Iterator[Place]:
    layers = config.num_layers
    block = tuple(_block(config))
    for layer in range(layers):
        for place in block:
            yield replace(
                place,
                theirs=f"{BLOCKS}.{layer}.{place.theirs}",
                ours=f"{BLOCKS}.{place.ours}",
                whole=(layers, *place.whole),
                index=(layer, *place.index),
            )


def _block(config: Transformer2DConfig) -> Iterator[Place]:
    width, norm, affine = config.inner_dim, config.block_norm, config.norm_elementwise_affine
    embeddings, is_single = config.num_embeds_ada_norm or 0, norm == "ada_norm_single"
    plain = (lambda name: _norm(name, width)) if affine else (lambda name: iter(()))
    if norm == "ada_norm":
        yield from _time_norm("norm1", embeddings, width)
    elif norm == "ada_norm_zero":
        yield from _mlp("norm1.emb.timestep_embedder", TIME_CHANNELS, width)
        yield from _table("norm1.emb.class_embedder.embedding_table", embeddings + 1, width)
        yield from _linear("norm1.linear", width, 6 * width)
    else:
        yield from plain("norm1")
    yield from _attention("attn1", width, config.first_context, bias=config.attention_bias)
    if config.has_cross_attention and norm == "ada_norm":
        yield from _time_norm("norm2", embeddings, width)
    elif config.has_cross_attention or is_single:
        yield from plain("norm2")
    if config.has_cross_attention:
        yield from _attention("attn2", width, config.second_context, bias=config.attention_bias)
    if not is_single:
        yield from plain("norm3")
    yield from _feed_forward("ff", width, DIFFUSERS_ACTIVATIONS[config.activation_fn].inputs)
    if is_single:
        yield Place("scale_shift_table", "scale_shift_table", (6, width))
    if config.has_fuser:
        yield Place("fuser.alpha_attn", "fuser.alpha_attn", ())
        yield Place("fuser.alpha_dense", "fuser.alpha_dense", ())
        yield from _linear("fuser.linear", config.cross_attention_dim or 0, width)
        yield from _attention("fuser.attn", width, None, bias=False)
        yield from _feed_forward("fuser.ff", width, DIFFUSERS_ACTIVATIONS["geglu"].inputs)
        yield from _norm("fuser.norm1", width)
        yield from _norm("fuser.norm2", width)


def _attention(name: str, width: int, context: int | None, *, bias: bool) -> Iterator[Place]:
    """`context` is the width of other tokens that keys and values are made of; None when they are the same tokens."""
    if context is None:
        yield from _joint(name, "to_qkv", ("to_q", "to_k", "to_v"), width, width, bias=bias)
    else:
        yield from _linear(f"{name}.to_q", width, width, bias=bias)
        yield from _joint(name, "to_kv", ("to_k", "to_v"), context, width, bias=bias)
    yield from _linear(f"{name}.to_out.0", width, width, ours=f"{name}.to_out")


def _joint(name: str, ours: str, parts: tuple[str, ...], inputs: int, width: int, *, bias: bool) -> Iterator[Place]:
    whole = (inputs, len(parts), width)
    for part, theirs in enumerate(parts):
        yield Place(f"{name}.{theirs}.weight", f"{name}.{ours}.kernel", whole, (EVERY, part), LINEAR)
        if bias:
            yield Place(f"{name}.{theirs}.bias", f"{name}.{ours}.bias", whole[1:], (part,))


def _feed_forward(name: str, width: int, inputs: int) -> Iterator[Place]:
    yield from _linear(f"{name}.net.0.proj", width, 4 * width * inputs, ours=f"{name}.up")
    yield from _linear(f"{name}.net.2", 4 * width, width, ours=f"{name}.down")


def _time_norm(name: str, embeddings: int, width: int) -> Iterator[Place]:
    yield from _table(f"{name}.emb", embeddings, width)
    yield from _linear(f"{name}.linear", width, 2 * width)


def _mlp(name: str, inputs: int, width: int) -> Iterator[Place]:
    yield from _linear(f"{name}.linear_1", inputs, width)
    yield from _linear(f"{name}.linear_2", width, width)


def _linear(
    theirs: str, inputs: int, outputs: int, *, ours: str | None = None, bias: bool = True, layout: Layout = LINEAR
) -> Iterator[Place]:
    ours = theirs if ours is None else ours
    yield Place(f"{theirs}.weight", f"{ours}.kernel", (inputs, outputs), (), layout)
    if bias:
        yield Place(f"{theirs}.bias", f"{ours}.bias", (outputs,))


def _norm(name: str, width: int) -> Iterator[Place]:
    yield Place(f"{name}.weight", f"{name}.scale", (width,))
    yield Place(f"{name}.bias", f"{name}.bias", (width,))


def _table(name: str, rows: int, width: int) -> Iterator[Place]:
    yield Place(f"{name}.weight", f"{name}.embedding", (rows, width))
