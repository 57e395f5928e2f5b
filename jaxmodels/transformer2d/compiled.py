"""Ahead-of-time executables of a 2D transformer for known shapes, over a flat tuple of weights."""

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.export
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxmodels.cache_dirs import use_compile_cache
from jaxmodels.devices import use_exact_products
from jaxmodels.errors import InputError
from jaxmodels.transformer2d import lora
from jaxmodels.transformer2d.arguments import Arguments, ArrayLike, read_arguments
from jaxmodels.transformer2d.block import Conditioning

# Structure of the arguments, and shape and dtype of each array in them.
Shapes: TypeAlias = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
BLOCKS = "transformer_blocks"
# Weights of modulations stay stacked, because they are used for all layers at once.
MODULATING = ("norm1.emb.", "norm1.linear.", "norm2.emb.", "norm2.linear.", "scale_shift_table")
WRITTEN_OUT = 8  # A program of more layers takes long to compile, and gains little.


class CompiledTransformer2D:
    """Forward pass of one model, as an executable for each set of shapes; a call never compiles.

    Up to `WRITTEN_OUT` layers are written out with separate arrays, because a slice of a stack is copied in every call.

    Args:
        model: a `Transformer2DModel`; later changes of its weights have no effect.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxmodels import Transformer2DModel
        >>> model = Transformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=8, norm_num_groups=2)
        >>> compiled = CompiledTransformer2D(model)
        >>> compiled.compile(jnp.zeros((1, 8, 4, 4)))
        >>> compiled(jnp.zeros((1, 8, 4, 4))).shape
        (1, 8, 4, 4)
    """

    def __init__(self, model: Any):
        self._graph, state = nnx.split(model)
        self._config, self._dtype = model.config, model.dtype
        paths, self._tree = jax.tree_util.tree_flatten_with_path(state)
        names = [".".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths]
        layers, modulating = model.config.num_layers, tuple(f"{BLOCKS}.{part}" for part in MODULATING)
        is_split = [name.startswith(f"{BLOCKS}.") and not name.startswith(modulating) for name in names]
        self._parts = [layers if split and layers <= WRITTEN_OUT else None for split in is_split]
        self._weights = self._flatten([array for _, array in paths])
        self._executables: dict[Shapes, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def compile(self, hidden_states: ArrayLike, **others: Any) -> None:
        """Compile for these shapes if necessary; takes arguments of a call, or `jax.ShapeDtypeStruct`."""
        call = {"hidden_states": hidden_states, **others}
        arguments, conditioning = self._abstract(**call)
        key = _shapes((arguments, conditioning))
        spread = {
            name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=call[name].sharding)
            for name, shape in arguments._asdict().items()
            if isinstance(getattr(call.get(name), "sharding", None), NamedSharding)
        }
        with self._lock:  # Two threads that need the same program wait for one compilation.
            if key not in self._executables:
                use_compile_cache()
                lowered = jax.jit(self._forward).lower(self._weights, arguments._replace(**spread), conditioning)
                self._executables[key] = lowered.compile()

    def export(self, platform: str, hidden_states: ArrayLike, **others: Any) -> jax.export.Exported:
        """Lower the program for these shapes to StableHLO for ``cpu``, ``cuda`` or ``tpu``, which may be absent."""
        arguments = self._abstract(hidden_states=hidden_states, **others)
        return jax.export.export(jax.jit(self._forward), platforms=[platform])(self._weights, *arguments)

    def forget(self, hidden_states: ArrayLike, **others: Any) -> None:
        """Drop the executable for these shapes."""
        with self._lock:
            self._executables.pop(_shapes(self._abstract(hidden_states=hidden_states, **others)), None)

    def __call__(
        self, hidden_states: ArrayLike, *others: ArrayLike, conditioning: Conditioning | None = None, **named: ArrayLike
    ) -> Float[Array, "..."]:
        """Return the sample; raises InputError if an argument is wrong or its shapes are not compiled."""
        arguments = read_arguments(
            self._config, self._dtype, hidden_states, *others, conditioning=conditioning, **named
        )
        shapes = _shapes((arguments, conditioning))
        executable = self._executables.get(shapes)
        if executable is None:
            known = "; ".join(map(_describe, self._executables)) or "nothing yet"
            raise InputError(
                f"not compiled for {_describe(shapes)}; call compile() with these shapes first (compiled for: {known})"
            )
        if len(self._weights[0].sharding.device_set) > 1:
            _, *shardings = executable.input_shardings[0]
            arguments, conditioning = jax.device_put((arguments, conditioning), tuple(shardings))
        return executable(self._weights, arguments, conditioning)

    def _abstract(self, **call: Any) -> tuple[Arguments, Conditioning | None]:
        """Return the shapes of the executable's arguments."""

        def read(call: dict[str, Any]) -> tuple[Arguments, Conditioning | None]:
            return read_arguments(self._config, self._dtype, **call), call.get("conditioning")

        # A list would become one argument for each of its numbers.
        return jax.eval_shape(
            read, {name: np.asarray(x) if type(x) in (list, tuple) else x for name, x in call.items()}
        )

    def _flatten(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        flat: list[Array] = []
        for array, parts in zip(arrays, self._parts, strict=True):
            flat += [array] if parts is None else [array[i] for i in range(parts)]
        return tuple(flat)

    def _forward(
        self, weights: tuple[Array, ...], arguments: Arguments, conditioning: Conditioning | None
    ) -> Float[Array, "..."]:
        remaining = iter(weights)
        # `_Parts` replaces divided stacks, which the pass never uses directly.
        leaves = [
            next(remaining) if parts is None else _Parts([next(remaining) for _ in range(parts)])
            for parts in self._parts
        ]
        scale = arguments.scale
        model = nnx.merge(self._graph, jax.tree.unflatten(self._tree, leaves)).scale_adapters(scale)
        layers = None
        if any(isinstance(leaf, _Parts) for leaf in leaves):
            _, blocks = nnx.split(model.transformer_blocks)
            layers = [
                jax.tree.map(lambda leaf, i=i: leaf.parts[i] if isinstance(leaf, _Parts) else leaf, blocks)
                for i in range(self._config.num_layers)
            ]
            layers = layers if scale is None else [lora.scale_adapters(layer, scale) for layer in layers]
        with use_exact_products(self._dtype):
            return model.forward(arguments, conditioning, layers=layers)


class _Parts:
    """A stack's arrays, in the place of the stack."""

    def __init__(self, parts: list[Array]):
        self.parts = parts


def _shapes(arguments: Any) -> Shapes:
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _describe(shapes: Shapes) -> str:
    tree, leaves = shapes
    arguments, conditioning = jax.tree.unflatten(tree, [f"{dtype}{list(shape)}" for shape, dtype in leaves])
    described = [f"{name} {value}" for name, value in arguments._asdict().items() if value is not None]
    return ", ".join([*described, *(["conditioning"] if conditioning is not None else [])])
