"""Transformer block: adaptive norms, timestep modulation, prepared conditioning.

Modulations depend only on timestep and class, so a sampler can compute them for all of its steps before its loop.
Source: diffusers/models/attention.py, BasicTransformerBlock.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxmodels.errors import InputError
from jaxmodels.layers.embeddings import time_sinusoid
from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS, FeedForward
from jaxmodels.layers.norm import LayerNorm, standardize
from jaxmodels.transformer2d.attention import Bias, ContextAttention, Dtypes, Fuser, KeyValue, SelfAttention, linear
from jaxmodels.transformer2d.config import TIME_CHANNELS, Transformer2DConfig
from jaxmodels.transformer2d.embeddings import Mlp, Table

CLASS_DROPOUT = 0.1  # Share of labels that become the null class in training (diffusers' LabelEmbedding).


class BlockAffine(NamedTuple):
    """``x (1 + scale) + shift`` for each token of an element, or for all tokens (n is 1)."""

    scale: Float[Array, "*l b n d"]
    shift: Float[Array, "*l b n d"]

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        return x * (1 + self.scale) + self.shift


class BlockModulation(NamedTuple):
    """Scales, shifts and gates of a block's three parts; a leading axis is the layers, None changes nothing."""

    first: BlockAffine | None = None
    first_gate: Float[Array, "*l b n d"] | None = None
    second: BlockAffine | None = None
    feed_forward: BlockAffine | None = None
    feed_forward_gate: Float[Array, "*l b n d"] | None = None


class TimeNorm(nnx.Module):
    """ada_norm: a table of learned timesteps, and their scale and shift; here the scale is first."""

    def __init__(self, width: int, timesteps: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.emb = Table(timesteps, width, dtypes, rngs=rngs)
        self.linear = linear(width, 2 * width, ("embed", "mlp"), dtypes, rngs=rngs)

    def __call__(self, timestep: Int[Array, " b"]) -> BlockAffine:
        parts = self.linear(jax.nn.silu(self.emb(timestep))).astype(jnp.float32)
        scale, shift = jnp.split(parts[:, None], 2, axis=-1)
        return BlockAffine(scale, shift)


class TimeAndClass(nnx.Module):
    """Sum of the embeddings of a timestep and a class; the last row of the table is the null class."""

    def __init__(self, width: int, classes: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.timestep_embedder = Mlp(TIME_CHANNELS, width, dtypes, rngs=rngs)
        self.class_embedder = ClassEmbedder(classes + 1, width, dtypes, rngs=rngs)

    def __call__(self, timestep: Float[Array, " b"], labels: Int[Array, " b2"]) -> Float[Array, "b3 d"]:
        time = self.timestep_embedder(time_sinusoid(timestep, TIME_CHANNELS, shift=1))
        return time + self.class_embedder(labels).astype(time.dtype)


class ClassEmbedder(nnx.Module):
    """Embedding table of classes, nested as in diffusers' files."""

    def __init__(self, rows: int, width: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.embedding_table = Table(rows, width, dtypes, rngs=rngs)

    def __call__(self, labels: Int[Array, " b"]) -> Float[Array, "b d"]:
        return self.embedding_table(labels)


class TimeAndClassNorm(nnx.Module):
    """ada_norm_zero: shifts, scales and gates of attention and feed-forward from a timestep and a class."""

    def __init__(self, width: int, classes: int, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.emb = TimeAndClass(width, classes, dtypes, rngs=rngs)
        self.linear = linear(width, 6 * width, ("embed", "mlp"), dtypes, rngs=rngs)

    def __call__(self, timestep: Float[Array, " b"], labels: Int[Array, " b2"]) -> BlockModulation:
        parts = self.linear(jax.nn.silu(self.emb(timestep, labels))).astype(jnp.float32)
        return six_parts(parts.reshape(parts.shape[0], 6, -1))


def six_parts(parts: Float[Array, "b 6 d"]) -> BlockModulation:
    """Return the modulation of (shift, scale, gate) of attention, then of feed-forward."""
    shift, scale, gate, shift2, scale2, gate2 = (parts[:, i : i + 1] for i in range(6))
    return BlockModulation(BlockAffine(scale, shift), gate, None, BlockAffine(scale2, shift2), gate2)


class TimeSingle(nnx.Module):
    """ada_norm_single: one time embedding for all layers (diffusers' AdaLayerNormSingle, arXiv 2310.00426)."""

    def __init__(self, width: int, has_conditions: bool, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.emb = TimeAndConditions(width, has_conditions, dtypes, rngs=rngs)
        self.linear = linear(width, 6 * width, ("embed", "mlp"), dtypes, rngs=rngs)

    def __call__(
        self, timestep: Float[Array, " b"], conditions: Mapping[str, Array] | None
    ) -> tuple[Float[Array, "b 6 d"], Float[Array, "b d"]]:
        """Return the blocks' six parts, and the embedding for the head."""
        embedded = self.emb(timestep, conditions)
        parts = self.linear(jax.nn.silu(embedded))
        return parts.reshape(parts.shape[0], 6, -1).astype(jnp.float32), embedded.astype(jnp.float32)


class TimeAndConditions(nnx.Module):
    """Sum of the embeddings of a timestep and, for PixArt at 1024 pixels, of resolution and aspect ratio."""

    def __init__(self, width: int, has_conditions: bool, dtypes: Dtypes, *, rngs: nnx.Rngs):
        self.timestep_embedder = Mlp(TIME_CHANNELS, width, dtypes, rngs=rngs)
        third = width // 3
        self.resolution_embedder = Mlp(TIME_CHANNELS, third, dtypes, rngs=rngs) if has_conditions else None
        self.aspect_ratio_embedder = Mlp(TIME_CHANNELS, third, dtypes, rngs=rngs) if has_conditions else None

    def __call__(self, timestep: Float[Array, " b"], conditions: Mapping[str, Array] | None) -> Float[Array, "b d"]:
        embedded = self.timestep_embedder(time_sinusoid(timestep, TIME_CHANNELS, shift=0))
        if self.resolution_embedder is None or self.aspect_ratio_embedder is None or conditions is None:
            return embedded
        size = self._embed(self.resolution_embedder, conditions["resolution"])
        aspect = self._embed(self.aspect_ratio_embedder, conditions["aspect_ratio"])
        return embedded + jnp.concatenate((size, aspect), -1)

    @staticmethod
    def _embed(embedder: Mlp, numbers: Float[Array, "b k"]) -> Float[Array, "b c"]:
        embedded = embedder(time_sinusoid(numbers, TIME_CHANNELS, shift=0))
        return embedded.reshape(numbers.shape[0], -1)


# Epsilons of the norms without weights that ada_norm and ada_norm_zero modulate; fixed in diffusers.
ADA_NORM_EPSILON, ADA_NORM_ZERO_EPSILON = 1e-5, 1e-6


class PlainNorm(LayerNorm):
    """Layer norm with the config's epsilon and weights."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes):
        super().__init__(
            config.inner_dim,
            epsilon=float(config.norm_eps),
            affine=config.norm_elementwise_affine,
            keeps_float32=True,
            param_dtype=dtypes.parameters,
        )


class BlockKeyValues(NamedTuple):
    """Keys and values of the context; a leading axis is the layers, None is self-attention."""

    first: KeyValue | None = None
    second: KeyValue | None = None


class Biases(NamedTuple):
    """Biases of the scores of a block's two attentions."""

    first: Bias | None = None
    second: Bias | None = None


class Block(nnx.Module):
    """Transformer block for every kind of norm, modulated from outside (`BlockModulation`)."""

    def __init__(self, config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs):
        width, heads, norm = config.inner_dim, config.num_attention_heads, config.block_norm
        options = {"bias": config.attention_bias, "rate": float(config.dropout), "rngs": rngs}
        self.dtype = dtypes.compute
        self.norm1 = self._first_norm(config, dtypes, rngs=rngs)
        if config.first_context is None:
            self.attn1 = SelfAttention(width, heads, dtypes, **options)
        else:
            self.attn1 = ContextAttention(width, heads, config.first_context, dtypes, **options)
        self.fuser = (
            Fuser(width, heads, config.cross_attention_dim or width, dtypes, rngs=rngs) if config.has_fuser else None
        )
        has_second = config.has_cross_attention
        if norm == "ada_norm" and has_second:
            self.norm2 = TimeNorm(width, config.num_embeds_ada_norm or 0, dtypes, rngs=rngs)
        else:
            self.norm2 = PlainNorm(config, dtypes) if has_second or norm == "ada_norm_single" else None
        self.attn2 = ContextAttention(width, heads, config.second_context, dtypes, **options) if has_second else None
        # ada_norm_single has its second norm before the feed-forward, and no norm before the second attention.
        self.is_single = norm == "ada_norm_single"
        self.norm3 = None if self.is_single else PlainNorm(config, dtypes)
        activation = DIFFUSERS_ACTIVATIONS[config.activation_fn]
        self.ff = FeedForward(
            width,
            4 * width * activation.inputs,
            activation,
            rate=float(config.dropout),
            dtype=dtypes.compute,
            param_dtype=dtypes.parameters,
            rngs=rngs,
        )
        if self.is_single:
            table = nnx.initializers.normal(width**-0.5)(rngs.params(), (6, width), dtypes.parameters)
            self.scale_shift_table = nnx.Param(table, axes=(None, "embed"))

    @staticmethod
    def _first_norm(
        config: Transformer2DConfig, dtypes: Dtypes, *, rngs: nnx.Rngs
    ) -> PlainNorm | TimeNorm | TimeAndClassNorm:
        count = config.num_embeds_ada_norm or 0
        if config.block_norm == "ada_norm":
            return TimeNorm(config.inner_dim, count, dtypes, rngs=rngs)
        if config.block_norm == "ada_norm_zero":
            return TimeAndClassNorm(config.inner_dim, count, dtypes, rngs=rngs)
        return PlainNorm(config, dtypes)

    def project_context(self, context: Float[Array, "b m c"]) -> BlockKeyValues:
        """Return keys and values of the context for the attentions that use it."""
        first = self.attn1.project_context(context) if isinstance(self.attn1, ContextAttention) else None
        return BlockKeyValues(first, None if self.attn2 is None else self.attn2.project_context(context))

    def __call__(
        self,
        x: Float[Array, "b n d"],
        modulation: BlockModulation,
        context: BlockKeyValues,
        biases: Biases,
        objects: Float[Array, "b o c"] | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "b n d"]:
        normal = self._modulate(self._normalize(self.norm1, x), modulation.first)
        if isinstance(self.attn1, ContextAttention):
            mixed = self.attn1(normal, context.first, biases.first, rngs)
        else:
            mixed = self.attn1(normal, biases.first, rngs)
        x = x + _gate(mixed, modulation.first_gate)
        if self.fuser is not None and objects is not None:
            x = self.fuser(x, objects)
        if self.attn2 is not None:
            normal = x if self.is_single else self._modulate(self._normalize(self.norm2, x), modulation.second)
            x = x + self.attn2(normal, context.second, biases.second, rngs)
        norm = self.norm2 if self.is_single else self.norm3
        normal = self._modulate(self._normalize(norm, x), modulation.feed_forward)
        return x + _gate(self.ff(normal, rngs), modulation.feed_forward_gate)

    def _modulate(self, normal: Float[Array, "b n d"], affine: BlockAffine | None) -> Float[Array, "b n d"]:
        return (normal if affine is None else affine(normal)).astype(self.dtype)

    @staticmethod
    def _normalize(norm: nnx.Module | None, x: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
        if isinstance(norm, PlainNorm):
            return norm(x)
        return standardize(x, ADA_NORM_EPSILON if isinstance(norm, TimeNorm) else ADA_NORM_ZERO_EPSILON)


def _gate(x: Float[Array, "b n d"], gate: Float[Array, "#b #n d"] | None) -> Float[Array, "b n d"]:
    return x if gate is None else x * gate.astype(x.dtype)


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


def for_each_layer(layers: nnx.Module, *arguments: Any, count: int | None = None) -> Any:
    """Run a module of stacked layers with the same arguments; of the first `count` layers only if it is given."""
    graph, stacked = nnx.split(layers)

    def run(weights: Any) -> Any:
        layer: Any = nnx.merge(graph, weights)
        return layer(*arguments)

    return jax.vmap(run)(jax.tree.map(lambda array: array[:count], stacked))


class Modulations(NamedTuple):
    """Modulation of all layers (leading axis) and of a patched model's head.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxmodels import Transformer2DModel
        >>> model = Transformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=4, in_channels=4, sample_size=8, patch_size=2,
        ...     norm_type="ada_norm_zero", num_embeds_ada_norm=10,
        ... )
        >>> modulations = model.prepare_modulations(jnp.array([7]), class_labels=jnp.array([3]))
        >>> isinstance(modulations, Modulations)
        True
    """

    blocks: BlockModulation
    head: BlockAffine | None = None


class Conditioning(NamedTuple):
    """Everything that `Transformer2DModel.prepare` computes before a call; a pytree.

    `context` (keys and values for every layer) is the same for all steps; `modulations` differ for each timestep.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxmodels import Transformer2DModel
        >>> model = Transformer2DModel(
        ...     num_attention_heads=2, attention_head_dim=4, in_channels=8, norm_num_groups=2, cross_attention_dim=6
        ... )
        >>> model.prepare(encoder_hidden_states=jnp.zeros((1, 5, 6))).keys
        5
    """

    context: BlockKeyValues
    modulations: Modulations

    @property
    def keys(self) -> int | None:
        """Number of tokens of the context; None without one."""
        key_value = self.context.first if self.context.second is None else self.context.second
        return None if key_value is None else key_value.key.shape[-2]


def check_conditioning(config: Transformer2DConfig, conditioning: Conditioning, batch: int) -> None:
    """Raise InputError for a conditioning of another model or batch; one for a single element fits all."""
    if not isinstance(conditioning, Conditioning):
        raise InputError(
            f"conditioning is a {type(conditioning).__name__}; wanted what model.prepare gives, or "
            "Conditioning(model.prepare_context(...), model.prepare_modulations(...))"
        )
    blocks, head = conditioning.modulations
    if (blocks.first is None) != (config.block_norm == "layer_norm") or (head is None) != (config.kind != "patches"):
        raise InputError(
            f"conditioning's modulations are of another kind of model; {config.kind} input with {config.block_norm} "
            "wants the result of its own prepare (with a timestep, if the model takes one)"
        )
    for what, part, axes in (
        ("context", conditioning.context, 4),
        ("modulations", blocks, 4),
        ("head's modulation", head, 3),
    ):
        for array in jax.tree.leaves(part):
            if array.ndim != axes:
                raise InputError(
                    f"conditioning's {what} has shape {list(array.shape)}; wanted {axes} axes, for one step (if it was "
                    "prepared for many steps, give one step's: a sampler's extras do)"
                )
            if axes == 4 and array.shape[0] != config.num_layers:
                raise InputError(
                    f"conditioning's {what} is of {array.shape[0]} layers; this model has {config.num_layers}"
                )
            if array.shape[axes - 3] not in (1, batch):
                raise InputError(
                    f"conditioning's {what} was prepared for {array.shape[axes - 3]} elements, and hidden_states has "
                    f"{batch}; prepare it for {batch}, or for one element, which serves all"
                )


def spread_context(context: BlockKeyValues, batch: int) -> BlockKeyValues:
    """Repeat the keys and values of one element for all elements."""
    return jax.tree.map(lambda array: jnp.broadcast_to(array, (array.shape[0], batch, *array.shape[2:])), context)
