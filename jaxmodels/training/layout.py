"""Where the arrays of a training lie: batches over all devices, parameters whole on each or spread over some.

A mesh has the axes ``data`` and ``fsdp``: a batch is split over both, parameters and what the optimizer remembers of
them over ``fsdp`` alone (https://arxiv.org/abs/2304.11277); XLA moves what a product needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmodels.devices import device_name, find_device
from jaxmodels.errors import ConfigError

DATA, FSDP = "data", "fsdp"
# Numbers below which an array lies whole on every device: gathering it takes longer than reading.
SMALL = 1 << 12

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Layout:
    """A mesh of devices, of this process and of the others."""

    mesh: Mesh

    @cached_property
    def whole(self) -> NamedSharding:
        """For what every device has all of."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def batch(self) -> NamedSharding:
        """For arrays whose first axis is the batch."""
        return NamedSharding(self.mesh, PartitionSpec((DATA, FSDP)))

    @cached_property
    def parts(self) -> NamedSharding:
        """For batches in parts, which are the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(None, (DATA, FSDP)))

    def spread(self, shape: tuple[int, ...]) -> NamedSharding:
        """For a parameter: split along its widest axis that the devices of ``fsdp`` divide."""
        count = self.mesh.shape[FSDP]
        axes = [axis for axis, size in enumerate(shape) if size % count == 0]
        if count == 1 or not axes or np.prod(shape) < SMALL:
            return self.whole
        widest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(
            self.mesh, PartitionSpec(*(FSDP if axis == widest else None for axis in range(widest + 1)))
        )

    def spread_tree(self, shapes: Tree) -> Tree:
        """`spread` for every leaf of a tree of arrays or shapes."""
        return jax.tree.map(lambda leaf: self.spread(np.shape(leaf)), shapes)

    def put(self, array: Any, sharding: NamedSharding) -> jax.Array:
        """An array of the host, the same in every process, onto the devices."""
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def put_batch(self, batch: Tree) -> Tree:
        """A batch, of which every process brings its own part."""
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(self.batch, array), batch)

    def gather(self, arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Arrays as the host knows them, whole; every process has to ask."""
        return {name: _gather(array) for name, array in arrays.items()}


def _gather(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def find_layout(device: str | None, data: int | None, fsdp: int | None, batch_size: int, parts: int) -> Layout:
    """A mesh of this many devices.

    Args:
        device: a kind (``cpu``, ``gpu``, ``cuda``, ``tpu``) or a single one of them (``cuda:1``); JAX's choice if None.
        data, fsdp: sizes of the mesh's axes; where one is None, all there are, and 1 for `data` when both are.
        parts: in which a batch is computed.

    Raises:
        ConfigError: there are not that many devices, or they do not divide the batch.
    """
    devices = _devices(device)
    if fsdp is None:
        data = data or 1
        fsdp = max(1, len(devices) // data)
    count = (data or max(1, len(devices) // fsdp)) * fsdp
    found = ", ".join(device_name(device) for device in devices)
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        wanted = "all of them, as there are several processes" if count <= len(devices) else "no more than there are"
        raise ConfigError(f"mesh of {count // fsdp} x {fsdp} devices; found {len(devices)} ({found}), wanted {wanted}")
    if batch_size % (count * parts):
        raise ConfigError(
            f"batch_size is {batch_size}; wanted a multiple of {count * parts}: {count} devices ({found})"
            + (f" and {parts} parts" if parts > 1 else "")
            + "; choose another, or fewer devices (--mesh=data:1)"
        )
    shape = (count // fsdp, fsdp)
    return Layout(Mesh(np.array(devices[:count]).reshape(shape), (DATA, FSDP)))


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Makes this process one of several that train together; before anything else is done with JAX.

    Without arguments JAX asks the cluster.

    Raises:
        ConfigError: some are given and others are not, or the others cannot be reached.
    """
    given = (coordinator_address, num_processes, process_id)
    if any(value is None for value in given) and any(value is not None for value in given):
        raise ConfigError(
            f"of several processes: coordinator_address is {coordinator_address}, num_processes {num_processes}, "
            f"process_id {process_id}; wanted all three, or none"
        )
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(f"the other processes cannot be reached ({reason}); is the first one running?") from error


def _devices(name: str | None) -> list[Any]:
    if name is None:
        return jax.devices()
    first = find_device(name)  # which says what there is when there is no such device
    return [first] if ":" in name else jax.devices(first.platform)
