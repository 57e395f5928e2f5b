"""The blocks of all layers as one module, every array with a leading axis; and how to run over them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxmodels.transformer2d.arguments import Timing
from jaxmodels.transformer2d.attention import Dtypes
from jaxmodels.transformer2d.block import Biases, Block, Seen
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.transformer2d.modulation import Affine, Modulation, TimeAndClassNorm, TimeNorm, six_parts


class Execution(NamedTuple):
    """How to run over the layers.

    Attributes:
        scan: one compiled block over all layers, or each written out.
        remat: recompute each block in the backward pass.
    """

    scan: bool
    remat: bool


def stack_blocks(config: Transformer2DConfig, dtypes: Dtypes, rngs: nnx.Rngs) -> Block:
    """Blocks with fresh weights, stacked."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs) -> Block:
        return Block(config, dtypes, rngs=rngs)

    return build(rngs)


def run_blocks(
    blocks: Block,
    x: Float[Array, "b n d"],
    modulation: Modulation,
    seen: Seen,
    biases: Biases,
    execution: Execution,
    *,
    context: Float[Array, "b m c"] | None = None,
    objects: Float[Array, "b o c"] | None = None,
    key: PRNGKeyArray | None = None,
    layers: Sequence[Any] | None = None,
) -> Float[Array, "b n d"]:
    """Tokens through every layer.

    Args:
        modulation: of every layer, with a leading axis; likewise `seen`.
        context: in the place of `seen`: each block makes its own keys and values.
        key: switches dropout on.
        layers: each block's weights by itself, when they do not lie in one array each; then `blocks` only tells
            what a block is.
    """
    graph, stacked = nnx.split(blocks)
    count = jax.tree.leaves(stacked)[0].shape[0] if layers is None else len(layers)

    def step(x: Array, layer: tuple[Any, Modulation, Seen, PRNGKeyArray | None]) -> tuple[Array, None]:
        weights, modulation, seen, key = layer
        block = nnx.merge(graph, weights)
        seen = seen if context is None else block.look_at(context)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return block(x, modulation, seen, biases, objects, rngs), None

    step = jax.checkpoint(step) if execution.remat else step
    keys = None if key is None else jax.random.split(key, count)
    if execution.scan and layers is None:
        return lax.scan(step, x, (stacked, modulation, seen, keys))[0]
    for i in range(count):
        rest = jax.tree.map(lambda array, i=i: array[i], (modulation, seen, keys))
        weights = jax.tree.map(lambda array, i=i: array[i], stacked) if layers is None else layers[i]
        x, _ = step(x, (weights, *rest))
    return x


def look_at(blocks: Block, context: Float[Array, "b m c"]) -> Seen:
    """Keys and values of a context for every layer."""
    graph, stacked = nnx.split(blocks)
    # One layer at a time: a product with a batch of matrices is slower on a CPU.
    return lax.map(lambda weights: nnx.merge(graph, weights).look_at(context), stacked)


def modulate_by_time(blocks: Block, timing: Timing) -> Modulation:
    """ada_norm: scales and shifts of both attentions' norms in every layer."""
    second = None
    if isinstance(blocks.norm2, TimeNorm):
        second = _for_each_layer(blocks.norm2, timing.timestep)
    return Modulation(_for_each_layer(blocks.norm1, timing.timestep), None, second)


def modulate_by_class(blocks: Block, timing: Timing) -> Modulation:
    """ada_norm_zero: shift, scale and gate of attention and feed-forward in every layer."""
    return _for_each_layer(blocks.norm1, timing.timestep, timing.class_labels)


def modulate_by_table(blocks: Block, parts: Float[Array, "b 6 d"]) -> Modulation:
    """ada_norm_single: the timestep's six parts on top of each layer's own."""
    tables = blocks.scale_shift_table[...].astype(jnp.float32)
    return jax.vmap(lambda table: six_parts(table[None] + parts))(tables)


def embed_in_first_layer(blocks: Block, timing: Timing) -> Float[Array, "b d"]:
    """The embedding of timestep and class that the first layer of ada_norm_zero makes, which the head uses as well."""
    assert isinstance(blocks.norm1, TimeAndClassNorm)
    assert timing.timestep is not None
    assert timing.class_labels is not None
    graph, stacked = nnx.split(blocks.norm1)
    first = nnx.merge(graph, jax.tree.map(lambda array: array[0], stacked))
    return first.emb(timing.timestep, timing.class_labels)


def head_affine(parts: Float[Array, "b 2 d"]) -> Affine:
    """What modulates the head of a patched model: shift first, as diffusers keeps it."""
    shift, scale = jnp.split(parts.astype(jnp.float32), 2, axis=1)
    return Affine(scale, shift)


def _for_each_layer(norm: nnx.Module, *arguments: Any) -> Any:
    graph, stacked = nnx.split(norm)

    def run(weights: Any) -> Any:
        layer: Any = nnx.merge(graph, weights)
        return layer(*arguments)

    return jax.vmap(run)(stacked)
