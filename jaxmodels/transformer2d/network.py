"""Network of the 2D transformer: embeddings, stacked blocks and output head.

Source: diffusers/models/transformers/transformer_2d.py, the _operate_on_* and _get_output_for_* methods.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxmodels.layers.embeddings import patch_positions
from jaxmodels.layers.feed_forward import tanh_gelu
from jaxmodels.layers.norm import GroupNorm, LayerNorm, standardize
from jaxmodels.transformer2d import lora
from jaxmodels.transformer2d.arguments import Arguments, Timing
from jaxmodels.transformer2d.attention import Dtypes, linear, linear_init, to_bias
from jaxmodels.transformer2d.block import (
    CLASS_DROPOUT,
    Biases,
    Block,
    BlockAffine,
    BlockKeyValues,
    BlockModulation,
    Conditioning,
    Mlp,
    Modulations,
    Table,
    TimeAndClassNorm,
    TimeNorm,
    TimeSingle,
    six_parts,
    spread_context,
)
from jaxmodels.transformer2d.config import Transformer2DConfig

CONTINUOUS_EPSILON = 1e-6  # Epsilon of the group norm of continuous input.
HEAD_EPSILON = 1e-6  # Epsilon of the norm before a patched output.


class LatentEmbedding(nnx.Module):
    """Embeddings of classes plus learned embeddings of rows and columns of the latent square."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        side, width = config.sample_size or 0, config.inner_dim
        self.emb = Table(config.num_vector_embeds or 0, width, dtypes, rngs=rngs)
        self.height_emb = Table(side, width, dtypes, rngs=rngs)
        self.width_emb = Table(side, width, dtypes, rngs=rngs)
        self.dtype = dtypes.compute

    def __call__(self, ids: Int[Array, "b n"]) -> Float[Array, "b n d"]:
        """Return tokens; fewer tokens than the square has latent pixels get its first positions, row by row."""
        rows, columns = self.height_emb.embedding[...], self.width_emb.embedding[...]
        # Only the rows in use, because for a chunk of 500 actions the whole square would take 256 MB.
        begun = -(-ids.shape[1] // columns.shape[0])
        positions = (rows[:begun, None] + columns[None]).reshape(-1, rows.shape[-1])
        return (self.emb(ids) + positions[: ids.shape[1]]).astype(self.dtype)


class PatchEmbedding(nnx.Module):
    """Patches projected to tokens, plus fixed positions. Rows and columns that fill no patch are dropped."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.base = (config.sample_size or 0) // (config.patch_size or 1)
        self.scale = config.position_scale
        self.proj = PatchProjection(config, dtypes, rngs=rngs)

    def __call__(self, x: Float[Array, "b c h w"]) -> Float[Array, "b n d"]:
        tokens = self.proj(x)
        rows, columns = (side // self.proj.size for side in x.shape[2:])
        positions = patch_positions(rows, columns, self.base, self.scale, tokens.shape[-1])
        return (tokens.astype(jnp.float32) + positions).astype(tokens.dtype)


class PatchProjection(nnx.Module):
    """Convolution whose stride is its size, as one product over the pixels of each patch."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.size = config.patch_size or 1
        self.dtype = dtypes.compute
        shape = (self.size, self.size, config.in_channels or 0, config.inner_dim)
        flat = linear_init(rngs.params(), (math.prod(shape[:3]), shape[3]), dtypes.parameters)
        self.kernel = nnx.Param(flat.reshape(shape), axes=(None, None, None, "embed"))
        self.bias = nnx.Param(jnp.zeros(shape[3], dtypes.parameters), axes=("embed",))

    def __call__(self, x: Float[Array, "b c h w"]) -> Float[Array, "b n d"]:
        p = self.size
        rows, columns = x.shape[2] // p, x.shape[3] // p
        x = x[:, :, : rows * p, : columns * p].astype(self.dtype)
        patches = rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p)
        kernel = self.kernel[...].astype(self.dtype)
        return patches @ kernel.reshape(-1, kernel.shape[-1]) + self.bias[...].astype(self.dtype)


class Execution(NamedTuple):
    """How layers are executed: `scan` compiles one block for all; `remat` recomputes blocks in the backward pass."""

    scan: bool
    remat: bool


def stack_blocks(config: Transformer2DConfig, dtypes: Dtypes, rngs: nnx.Rngs) -> Block:
    """Return blocks with random weights, stacked along a leading axis."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, dtypes, rngs=rngs)

    return build(rngs)


def run_blocks(
    blocks: Block,
    x: Float[Array, "b n d"],
    modulation: BlockModulation,
    key_values: BlockKeyValues,
    biases: Biases,
    execution: Execution,
    *,
    context: Float[Array, "b m c"] | None = None,
    objects: Float[Array, "b o c"] | None = None,
    key: PRNGKeyArray | None = None,
    layers: Sequence[Any] | None = None,
) -> Float[Array, "b n d"]:
    """Run tokens through all layers.

    Args:
        modulation, key_values: of all layers, with a leading axis.
        context: replaces `key_values`: each block computes its own keys and values.
        key: enables dropout.
        layers: each block's weights, if they are not stacked in `blocks`, which then only defines the block.
    """
    graph, stacked = nnx.split(blocks)
    count = jax.tree.leaves(stacked)[0].shape[0] if layers is None else len(layers)

    def step(x: Array, layer: tuple[Any, BlockModulation, BlockKeyValues, PRNGKeyArray | None]) -> tuple[Array, None]:
        weights, modulation, key_values, key = layer
        block = nnx.merge(graph, weights)
        key_values = key_values if context is None else block.project_context(context)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return block(x, modulation, key_values, biases, objects, rngs), None

    step = jax.checkpoint(step) if execution.remat else step
    keys = None if key is None else jax.random.split(key, count)
    if execution.scan and layers is None:
        return lax.scan(step, x, (stacked, modulation, key_values, keys))[0]
    for i in range(count):
        rest = jax.tree.map(lambda array, i=i: array[i], (modulation, key_values, keys))
        weights = jax.tree.map(lambda array, i=i: array[i], stacked) if layers is None else layers[i]
        x, _ = step(x, (weights, *rest))
    return x


def modulate_by_table(blocks: Block, parts: Float[Array, "b 6 d"]) -> BlockModulation:
    """Return ada_norm_single's modulation: the timestep's six parts plus each layer's own."""
    tables = blocks.scale_shift_table[...].astype(jnp.float32)
    return jax.vmap(lambda table: six_parts(table[None] + parts))(tables)


def embed_in_first_layer(blocks: Block, timing: Timing) -> Float[Array, "b d"]:
    """Return the first layer's embedding of timestep and class in ada_norm_zero, which the head also uses."""
    assert isinstance(blocks.norm1, TimeAndClassNorm)
    assert timing.timestep is not None
    assert timing.class_labels is not None
    graph, stacked = nnx.split(blocks.norm1)
    first = nnx.merge(graph, jax.tree.map(lambda array: array[0], stacked))
    return first.emb(timing.timestep, timing.class_labels)


def head_affine(parts: Float[Array, "b 2 d"]) -> BlockAffine:
    """Return shift and scale of a patched model's head; the parts have the shift first, as in diffusers' files."""
    shift, scale = jnp.split(parts.astype(jnp.float32), 2, axis=1)
    return BlockAffine(scale, shift)


def _for_each_layer(norm: nnx.Module, *arguments: Any) -> Any:
    graph, stacked = nnx.split(norm)

    def run(weights: Any) -> Any:
        layer: Any = nnx.merge(graph, weights)
        return layer(*arguments)

    return jax.vmap(run)(stacked)


class Network(nnx.Module):
    """Weights of the 2D transformer and its passes over checked arguments; users call `Transformer2DModel`."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, execution: Execution, *, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtypes.compute
        self.execution = execution
        self._build_input_and_output(dtypes, rngs)
        self.transformer_blocks = stack_blocks(config, dtypes, rngs)

    def _build_input_and_output(self, dtypes: Dtypes, rngs: nnx.Rngs) -> None:
        config, width = self.config, self.config.inner_dim
        if config.kind == "continuous":
            channels, groups = config.in_channels or 0, config.norm_num_groups
            self.norm = GroupNorm(channels, groups, epsilon=CONTINUOUS_EPSILON, param_dtype=dtypes.parameters)
            self.proj_in = linear(channels, width, ("channels", "embed"), dtypes, rngs=rngs)
            self.proj_out = linear(width, config.outputs or 0, ("embed", "channels"), dtypes, rngs=rngs)
        elif config.kind == "discrete":
            self.latent_image_embedding = LatentEmbedding(config, dtypes, rngs=rngs)
            self.norm_out = LayerNorm(width, param_dtype=dtypes.parameters)
            classes = (config.num_vector_embeds or 0) - 1
            self.out = linear(width, classes, ("embed", "vocabulary"), dtypes, rngs=rngs)
        else:
            self._build_patches(dtypes, rngs)

    def _build_patches(self, dtypes: Dtypes, rngs: nnx.Rngs) -> None:
        config, width = self.config, self.config.inner_dim
        pixels = (config.patch_size or 1) ** 2 * (config.outputs or 0)
        self.pos_embed = PatchEmbedding(config, dtypes, rngs=rngs)
        if config.norm_type == "ada_norm_single":
            self.adaln_single = TimeSingle(width, config.has_conditions, dtypes, rngs=rngs)
            table = nnx.initializers.normal(width**-0.5)(rngs.params(), (2, width), dtypes.parameters)
            self.scale_shift_table = nnx.Param(table, axes=(None, "embed"))
            self.proj_out = linear(width, pixels, ("embed", "channels"), dtypes, rngs=rngs)
        else:
            self.proj_out_1 = linear(width, 2 * width, ("embed", "mlp"), dtypes, rngs=rngs)
            self.proj_out_2 = linear(width, pixels, ("embed", "channels"), dtypes, rngs=rngs)
        if config.caption_channels is not None:
            self.caption_projection = Mlp(config.caption_channels, width, dtypes, rngs=rngs)

    def forward(
        self,
        arguments: Arguments,
        conditioning: Conditioning | None = None,
        key: Array | None = None,
        layers: Sequence[Any] | None = None,
    ) -> Float[Array, "..."]:
        """Run the forward pass.

        Args:
            layers: each block's weights, if they are not stacked.
        """
        if arguments.scale is not None:
            layers = None if layers is None else [lora.scale_adapters(layer, arguments.scale) for layer in layers]
            return self._scaled(arguments.scale).forward(arguments._replace(scale=None), conditioning, key, layers)
        hidden = arguments.hidden_states
        timing = Timing(arguments.timestep, arguments.class_labels, arguments.conditions)
        keys = (None, None) if key is None else jax.random.split(key)
        if conditioning is None:
            modulations, key_values = self.modulate(timing, keys[0]), BlockKeyValues()
            context = arguments.encoder_hidden_states
            context = None if context is None else self._project_captions(context)
        else:
            key_values = spread_context(conditioning.context, hidden.shape[0])
            modulations, context = conditioning.modulations, None
        biases = Biases(
            *(
                None if mask is None else to_bias(mask, hidden.shape[0], self.config.num_attention_heads)
                for mask in (arguments.attention_mask, arguments.encoder_attention_mask)
            )
        )
        x = self._read_input(hidden)
        x = run_blocks(
            self.transformer_blocks,
            x,
            modulations.blocks,
            key_values,
            biases,
            self.execution,
            context=context,
            objects=arguments.objects,
            key=keys[1],
            layers=layers,
        )
        return self._write_output(x, modulations.head, hidden)

    def _read_input(self, x: Array) -> Float[Array, "b n d"]:
        if self.config.kind == "continuous":
            pixels = self.norm(x.transpose(0, 2, 3, 1))
            return self.proj_in(pixels.reshape(x.shape[0], -1, x.shape[1]))
        return self.latent_image_embedding(x) if self.config.kind == "discrete" else self.pos_embed(x)

    def _write_output(self, x: Float[Array, "b n d"], head: BlockAffine | None, hidden: Array) -> Float[Array, "..."]:
        if self.config.kind == "continuous":
            pixels = self.proj_out(x).swapaxes(1, 2)
            return pixels.reshape(*pixels.shape[:2], *hidden.shape[2:]) + hidden
        if self.config.kind == "discrete":
            logits = self.out(self.norm_out(x)).astype(jnp.float32)
            return jax.nn.log_softmax(logits, axis=-1).swapaxes(1, 2)
        assert head is not None  # The norm types of patches always have a head.
        out = self.proj_out if self.config.norm_type == "ada_norm_single" else self.proj_out_2
        patch = self.config.patch_size or 1
        pixels = out(head(standardize(x, HEAD_EPSILON)).astype(x.dtype))
        rows = hidden.shape[2] // patch
        return rearrange(pixels, "b (h w) (p q c) -> b c (h p) (w q)", h=rows, p=patch, q=patch)

    def _project_captions(self, context: Float[Array, "..."]) -> Float[Array, "b m c"]:
        """Return encoder_hidden_states for the blocks: captions are projected, and may have an additional axis."""
        if self.config.kind != "patches" or self.config.caption_channels is None:
            return context
        projected = self.caption_projection(context, tanh_gelu)
        return projected.reshape(projected.shape[0], -1, projected.shape[-1])

    def _scaled(self, scale: Array) -> "Network":
        """Return this model with adapters multiplied by `scale`."""
        graph, state = nnx.split(self)
        return nnx.merge(graph, lora.scale_adapters(state, scale))

    def project_context(self, context: Array, scale: Array | None = None) -> BlockKeyValues:
        if scale is not None:
            return self._scaled(scale).project_context(context)
        context = self._project_captions(context)
        graph, stacked = nnx.split(self.transformer_blocks)
        # One layer at a time, because a product with a batch of matrices is slower on a CPU.
        return lax.map(lambda weights: nnx.merge(graph, weights).project_context(context), stacked)

    def modulate(self, timing: Timing, key: Array | None = None, scale: Array | None = None) -> Modulations:
        if scale is not None:
            return self._scaled(scale).modulate(timing, key)
        blocks, config = self.transformer_blocks, self.config
        if timing.timestep is None:
            return Modulations(BlockModulation())
        if config.block_norm == "ada_norm":
            second = _for_each_layer(blocks.norm2, timing.timestep) if isinstance(blocks.norm2, TimeNorm) else None
            return Modulations(BlockModulation(_for_each_layer(blocks.norm1, timing.timestep), None, second))
        if config.block_norm == "ada_norm_zero":
            timing = timing if key is None else self._drop_labels(timing, key)
            modulation = _for_each_layer(blocks.norm1, timing.timestep, timing.class_labels)
            if config.kind != "patches":
                return Modulations(modulation)
            parts = self.proj_out_1(jax.nn.silu(embed_in_first_layer(blocks, timing)))
            return Modulations(modulation, head_affine(parts.reshape(parts.shape[0], 2, -1)))
        if config.kind != "patches":
            return Modulations(modulate_by_table(blocks, timing.timestep))
        parts, embedded = self.adaln_single(timing.timestep, timing.conditions)
        head = self.scale_shift_table[...].astype(jnp.float32) + embedded[:, None]
        return Modulations(modulate_by_table(blocks, parts), head_affine(head))

    def _drop_labels(self, timing: Timing, key: Array) -> Timing:
        """Replace some labels by the null class, once per element; diffusers draws again in every block."""
        labels = timing.class_labels
        assert labels is not None
        drops = jax.random.bernoulli(key, CLASS_DROPOUT, labels.shape)
        null = jnp.asarray(self.config.num_embeds_ada_norm, labels.dtype)
        return timing._replace(class_labels=jnp.where(drops, null, labels))
