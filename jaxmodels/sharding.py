"""Where each weight of a model lies on a mesh of devices, by the logical names of its axes.

Layers name the axes of their weights (``nnx.Variable`` metadata ``axes``, e.g. ``("embed", "heads")``); rules say which
axis of the mesh a name is spread over. Stacked layers have a leading axis ``layers`` that nobody needs to name.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmodels.errors import ConfigError

LAYERS = "layers"
# Each attention's heads and each feed-forward's channels are split; everything between is whole on every device.
TENSOR_PARALLEL: Mapping[str, str] = MappingProxyType({"heads": "model", "mlp": "model", "vocabulary": "model"})
# Weights are spread over the devices that share a batch, and gathered where they are used.
FULLY_SHARDED: Mapping[str, str] = MappingProxyType({"embed": "data"})


def logical_axes(model: nnx.Module) -> dict[tuple[Any, ...], tuple[str | None, ...]]:
    """Path of every variable to the names of its axes; None for an axis without a name."""
    named = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes = variable.get_metadata().get("axes")
        missing = len(variable.shape) - len(axes or ())
        leading = (LAYERS,) * missing if axes is not None else (None,) * missing
        named[path] = (*leading, *(axes or ()))
    return named


def shardings(model: nnx.Module, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL) -> Any:
    """A sharding for every variable, as a state of the model's structure.

    Args:
        rules: logical name to an axis of the mesh; a name without a rule is whole on every device, and so is an axis
            whose size the mesh's does not divide.

    Raises:
        ConfigError: a rule names an axis the mesh does not have, or the mesh's axes are explicit.
    """
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ConfigError(
            "the mesh has explicit axes, as jax.make_mesh makes them; wanted jax.sharding.Mesh(devices, names), or "
            "axis_types=(jax.sharding.AxisType.Auto,) for each of its axes"
        )
    unknown = sorted(set(rules.values()) - set(mesh.axis_names))
    if unknown:
        raise ConfigError(f"rules name {', '.join(unknown)}; the mesh has axes {', '.join(map(str, mesh.axis_names))}")
    names = logical_axes(model)
    state = nnx.state(model)
    flat = [
        (path, variable.replace(NamedSharding(mesh, _spec(variable.shape, names[path], mesh, rules))))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


def shard(model: nnx.Module, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL) -> None:
    """Puts the weights of a model onto a mesh, in place; calls then run on all of its devices.

    Inputs are spread by whoever calls, e.g. ``jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))``.
    """
    nnx.update(model, jax.device_put(nnx.state(model), shardings(model, mesh, rules)))


def _spec(shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh, rules: Mapping[str, str]) -> PartitionSpec:
    axes: list[str | None] = []
    for size, name in zip(shape, names, strict=True):
        axis = rules.get(name) if name is not None else None
        is_spread = axis is not None and axis not in axes and size % mesh.shape[axis] == 0
        axes.append(axis if is_spread else None)
    return PartitionSpec(*axes)
