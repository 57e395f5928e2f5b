"""Conversion of a module's weights to a flat mapping (``encoder.layers.0.attention.query.kernel``) and back."""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxmodels.errors import WeightsMismatch

Module = TypeVar("Module", bound=nnx.Module)


class RunningStatistic(nnx.Variable):
    """A float32 statistic that each pass of a module in training mode changes."""


def _name(path: tuple[Any, ...]) -> str:
    # NNX ends the path to every variable in ".value".
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return ".".join(parts[:-1] if parts[-1] == "value" else parts)


def flatten(module: nnx.Module) -> dict[str, jax.Array]:
    """Return all variables of `module` by name, parameters and buffers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.state(module))
    return {_name(path): leaf for path, leaf in leaves}


@dataclass(frozen=True)
class Blueprint(Generic[Module]):
    """A module without weights: their shapes, and how to put them in.

    Attributes:
        shapes: name to shape and dtype of every weight.
        learned: names of weights that an optimizer may change, in the same order; other weights are buffers.
        running: names of the buffers that are running statistics.
    """

    graph: nnx.GraphDef[Module]
    tree: Any
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    learned: tuple[str, ...]
    running: tuple[str, ...] = ()

    def count_parameters(self) -> int:
        """Count the numbers in all weights, parameters and buffers."""
        return sum(math.prod(shape.shape) for shape in self.shapes.values())

    def assemble(self, weights: Mapping[str, Any]) -> Module:
        """Return the module over these arrays (or tracers); a weight without an array cannot be computed with."""
        arrays = [weights.get(name, shape) for name, shape in self.shapes.items()]
        return nnx.merge(self.graph, jax.tree_util.tree_unflatten(self.tree, arrays))


class _SameKey(nnx.RngStream):
    """Stream that returns the same key each time, because counting keys in NNX makes abstract modules slow to build."""

    def __call__(self) -> jax.Array:
        return self.key[...]


class _SameKeys(nnx.Rngs):
    default: nnx.RngStream

    def __init__(self) -> None:
        super().__init__()
        self.default = _SameKey(0, tag="default")


def blueprint(build: Callable[[nnx.Rngs], Module]) -> Blueprint[Module]:
    """Build a module with `build` and random keys, without allocating or drawing its weights."""
    graph, state = nnx.split(nnx.eval_shape(lambda: build(_SameKeys())))
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    shapes = {_name(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves}

    def names(kind: type[nnx.Variable]) -> tuple[str, ...]:
        chosen, _ = jax.tree_util.tree_flatten_with_path(nnx.filter_state(state, kind))
        return tuple(_name(path) for path, _ in chosen)

    return Blueprint(graph, tree, shapes, names(nnx.Param), names(RunningStatistic))


@lru_cache(maxsize=16)
def blueprint_of(model: Callable[..., Module], config: Hashable, **options: Any) -> Blueprint[Module]:
    """Return the cached `blueprint` of a config's network; `model` builds it with `options` and the keys ``rngs``."""
    return blueprint(lambda rngs: model(config, **options, rngs=rngs))


def check_fit(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], *, where: str, hint: str = ""
) -> None:
    """Raise WeightsMismatch with every missing, unused and misshaped tensor, if weights differ from the expected."""
    missing = [f"{name} {list(expected[name])}" for name in expected if name not in stored]
    unused = [f"{name} {list(stored[name])}" for name in stored if name not in expected]
    misshaped = [
        f"{name}: found {list(stored[name])}, wanted {list(shape)}"
        for name, shape in expected.items()
        if name in stored and tuple(stored[name]) != tuple(shape)
    ]
    lists = {"missing": missing, "unused": unused, "misshaped": misshaped}
    if missing or unused or misshaped:
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in lists.items() if names)
        lines = [f"  {kind}: {name}" for kind, names in lists.items() for name in sorted(names)]
        advice = hint or "the weights belong to another config, or the config was edited"
        raise WeightsMismatch("\n".join([f"{where}: weights do not fit the config ({counts}); {advice}", *lines]))


def not_finite(weights: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the arrays that hold a NaN or an infinity."""
    return [name for name, array in weights.items() if not np.isfinite(array).all()]
