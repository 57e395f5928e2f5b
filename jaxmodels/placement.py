"""Where a policy's weights lie: on one device, or spread over several that compute together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmodels.devices import Device, device_name, find_device
from jaxmodels.errors import ConfigError

# Numbers below which an array lies whole on every device: it is small, and gathering takes longer than reading.
SMALL = 1 << 14
AXIS = "model"
# The place of all devices of all processes that have joined, `jaxmodels.hosts`.
HOSTS = "hosts"


@dataclass(frozen=True)
class Placement:
    """Devices of one kind; what comes and goes is whole on each, weights are spread.

    For policies too large for one device: each array is split along its largest axis that the devices divide, and XLA
    moves what a product needs. Answers differ in the last bits from those of one device.
    """

    devices: tuple[Device, ...]

    @property
    def name(self) -> str:
        """As `find_placement` reads it, e.g. ``cpu:0`` or ``cuda:0+cuda:1``."""
        if self.is_shared:
            return HOSTS
        return "+".join(device_name(device) for device in self.devices)

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def is_host(self) -> bool:
        """Whether arrays of the host are where they are computed on."""
        return self.platform == "cpu" and len(self.devices) == 1

    @cached_property
    def is_shared(self) -> bool:
        """Whether other processes have some of the devices: they then run the same programs in the same order."""
        return any(device.process_index != jax.process_index() for device in self.devices)

    def put(self, arrays: Any, shardings: Any) -> Any:
        """A tree of arrays on the devices of this process, as one sharding for all or a tree of them says.

        Of devices that other processes have, too, each process puts its own parts, and nothing travels between them:
        all have to give the same numbers.
        """
        if not self.is_shared:
            return jax.device_put(arrays, shardings)
        if isinstance(shardings, jax.sharding.Sharding):
            return jax.tree.map(lambda array: _part(array, shardings), arrays)
        return jax.tree.map(_part, arrays, shardings)

    @property
    def whole(self) -> jax.sharding.Sharding:
        """For what every device has all of."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec())

    def spread(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """For a weight of this shape."""
        count = len(self.devices)
        axes = [axis for axis, size in enumerate(shape) if size % count == 0]
        if count == 1 or not axes or np.prod(shape) < SMALL:
            return self.whole
        widest = max(axes, key=lambda axis: shape[axis])
        return NamedSharding(
            self._mesh, PartitionSpec(*(AXIS if axis == widest else None for axis in range(len(shape))))
        )

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))


def find_placement(name: str | None) -> Placement:
    """A device by name (see `find_device`), several with ``+`` between them, or ``hosts`` for all of all processes.

    Raises:
        ConfigError: there is no such device, one is named twice, or they are of different kinds.
    """
    if name == HOSTS:
        return Placement(tuple(jax.devices()))
    devices = (find_device(None),) if name is None else tuple(find_device(part.strip()) for part in name.split("+"))
    if len(set(devices)) < len(devices) or len({device.platform for device in devices}) > 1:
        raise ConfigError(f"device is {name!r}; wanted different devices of one kind, as cuda:0+cuda:1")
    return Placement(devices)


def name_devices(asked: Sequence[str], *, together: bool = False) -> tuple[str, ...]:
    """Places as `find_placement` reads them, each of which is there.

    Args:
        asked: names, ``all`` for all devices of this process that JAX prefers, or numbers of those.
        together: one place, over which a policy's weights are spread, instead of one for each.

    Raises:
        ConfigError: one of them is not there, or nothing can be spread over them.
    """
    mine = [device_name(device) for device in jax.local_devices()]
    platform = jax.local_devices()[0].platform
    named: list[str] = []
    for name in asked:
        named += mine if name == "all" else [f"{platform}:{name}" if name.isdecimal() else name]
    return tuple(find_placement(place).name for place in (["+".join(named)] if together else named))


def _part(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    # `jax.device_put` would first compare what the processes gave, in a program of its own for each array.
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: np.asarray(host[index]))
