"""Devices and dtypes by name, placement of arrays, meshes and sharding, processes that train together.

A batch is split over both axes of a mesh, ``data`` and ``fsdp``; parameters and the optimizer's state are split over
``fsdp`` (https://arxiv.org/abs/2304.11277). Layers name the axes of their weights (``nnx.Variable`` metadata ``axes``,
e.g. ``("embed", "heads")``), and rules map these names to axes of the mesh.
"""

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxmodels.errors import ConfigError

Device: TypeAlias = Any  # jax.Device is created at run time, so type checkers do not know it.
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
MODEL_DTYPES = (*DTYPES, "float16")
PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def find_device(name: str | None) -> Device:
    """Return a device by name (``cpu``, ``cuda:1``), JAX's default for None; raises ConfigError if unknown."""
    if name is None:
        return jax.local_devices()[0]
    platform, _, number = name.partition(":")
    backend = PLATFORMS.get(platform, platform)
    try:
        if not number:
            return jax.local_devices(backend=backend)[0]
        # Find the device by id, because the ids of one of several processes do not begin at 0.
        return next(device for device in jax.devices(backend) if device.id == int(number))
    except (RuntimeError, ValueError, IndexError, StopIteration) as error:
        available = ", ".join(device_name(device) for device in jax.devices())
        raise ConfigError(f"device is {name!r}; found {available} (and cpu:0)") from error


def device_name(device: Device) -> str:
    """Return the name of a device, as in ``cuda:1``."""
    return f"{device.platform}:{device.id}"


def find_dtype(name: str | None, platform: str = "cpu", accelerator_dtype: str = "float32") -> jnp.dtype:
    """Return the dtype that a policy or model computes in; bfloat16 is slow on a CPU.

    Args:
        name: name of `DTYPES`; None for `accelerator_dtype` on an accelerator and float32 on a CPU.
        platform: JAX's name of the device's platform.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in (None, *DTYPES):
        raise ConfigError(f"dtype is {name!r}; wanted one of {', '.join(DTYPES)}")
    return jnp.dtype(DTYPES[name or ("float32" if platform == "cpu" else accelerator_dtype)])


def read_dtype(dtype: DTypeLike | None) -> jnp.dtype:
    """Return a model's dtype from a name, or as NumPy and JAX write it; float32 for None.

    Raises:
        ConfigError: it is not in `MODEL_DTYPES`.
    """
    try:
        resolved = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError as error:
        raise ConfigError(f"dtype is {dtype!r}; wanted one of {', '.join(MODEL_DTYPES)}") from error
    if resolved.name not in MODEL_DTYPES:
        raise ConfigError(f"dtype is {resolved.name}; wanted one of {', '.join(MODEL_DTYPES)}")
    return resolved


def use_exact_products(dtype: DTypeLike) -> AbstractContextManager[Any]:
    """Return a context in which float32 products are exact; accelerators otherwise round them to fewer bits."""
    return jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else None)


DATA, FSDP = "data", "fsdp"
# Smaller arrays are whole on every device, because gathering takes longer than reading.
SHARDED_FROM = 1 << 12

Tree = TypeVar("Tree")


def _split_widest(shape: tuple[int, ...], count: int, name: str, smallest: int) -> PartitionSpec | None:
    """Return the split over `name` of an array's widest axis that `count` divides; None for few numbers or no axis."""
    axes = [axis for axis, size in enumerate(shape) if size % count == 0]
    if count == 1 or not axes or np.prod(shape) < smallest:
        return None
    widest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * widest, name)


@dataclass(frozen=True)
class Layout:
    """Mesh of devices for training, of all processes."""

    mesh: Mesh

    @cached_property
    def replicated(self) -> NamedSharding:
        """Sharding of arrays that are whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def microbatch_sharding(self) -> NamedSharding:
        """Sharding of batches in microbatches, which are the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(None, (DATA, FSDP)))

    def parameter_shardings(self, shapes: Tree) -> Tree:
        """Return shardings of a tree of arrays: each is split along its widest axis that ``fsdp`` devices divide."""

        def shard(leaf: Any) -> NamedSharding:
            spec = _split_widest(np.shape(leaf), self.mesh.shape[FSDP], FSDP, SHARDED_FROM)
            return self.replicated if spec is None else NamedSharding(self.mesh, spec)

        return jax.tree.map(shard, shapes)

    def put(self, array: Any, sharding: NamedSharding) -> jax.Array:
        """Put an array of the host, the same in every process, onto the devices."""
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def put_batch(self, batch: Tree) -> Tree:
        """Put a batch onto the devices; each process has its own part."""
        sharding = NamedSharding(self.mesh, PartitionSpec((DATA, FSDP)))
        return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), batch)

    def gather(self, arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Return whole arrays on the host; every process must call it."""
        return {name: _gather(array) for name, array in arrays.items()}


def _gather(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def find_layout(device: str | None, data: int | None, fsdp: int | None, batch_size: int, parts: int) -> Layout:
    """Return the mesh of devices of a training.

    Args:
        device: a kind (``cpu``, ``gpu``, ``cuda``, ``tpu``) or a single device (``cuda:1``); JAX's choice if None.
        data, fsdp: sizes of the mesh's axes; None for all remaining devices, and 1 for `data` when both are None.
        parts: number of parts in which a batch is computed.

    Raises:
        ConfigError: there are too few devices, or they do not divide the batch.
    """
    devices = _devices(device)
    if fsdp is None:
        data = data or 1
        fsdp = max(1, len(devices) // data)
    count = (data or max(1, len(devices) // fsdp)) * fsdp
    available = ", ".join(device_name(device) for device in devices)
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        advice = "all of them, as there are several processes" if count <= len(devices) else "no more than there are"
        raise ConfigError(
            f"mesh of {count // fsdp} x {fsdp} devices; found {len(devices)} ({available}), wanted {advice}"
        )
    if batch_size % (count * parts):
        raise ConfigError(
            f"batch_size is {batch_size}; wanted a multiple of {count * parts}: {count} devices ({available})"
            + (f" and {parts} parts" if parts > 1 else "")
            + "; choose another, or fewer devices (--mesh=data:1)"
        )
    shape = (count // fsdp, fsdp)
    return Layout(Mesh(np.array(devices[:count]).reshape(shape), (DATA, FSDP)))


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Connect this process with others that train together, before any other use of JAX.

    Raises:
        ConfigError: arguments are incomplete, or the other processes cannot be reached.

    Example:
        >>> join("10.0.0.1:1234", num_processes=2, process_id=0)  # doctest: +SKIP
        >>> join("10.0.0.1:1234", num_processes=2, process_id=None)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        jaxmodels.errors.ConfigError: ...
    """
    arguments = (coordinator_address, num_processes, process_id)
    if any(value is None for value in arguments) and any(value is not None for value in arguments):
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
    first = find_device(name)
    return [first] if ":" in name else jax.devices(first.platform)


# Smaller arrays of a policy are whole on every device, because gathering takes longer than reading.
SPLIT_FROM = 1 << 14
AXIS = "model"


@dataclass(frozen=True)
class Placement:
    """Devices of a policy: inputs and outputs are whole on each device, weights are split.

    Each array is split along its largest axis that the devices divide. Results differ from one device's in the last
    bits.
    """

    devices: tuple[Device, ...]

    @property
    def name(self) -> str:
        """Name of the devices as `find_placement` reads it, e.g. ``cpu:0`` or ``cuda:0+cuda:1``."""
        return "+".join(device_name(device) for device in self.devices)

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    @property
    def kind(self) -> str:
        """Kind of device for which executables are compiled: its model, for a CPU its instructions."""
        return cpu_kind() if self.platform == "cpu" else str(self.devices[0].device_kind)

    @property
    def is_host(self) -> bool:
        """Whether computing on the host's own arrays needs no copy."""
        return self.platform == "cpu" and len(self.devices) == 1

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of arrays that are whole on every device."""
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self._mesh, PartitionSpec())

    def shard_weights(self, shapes: Iterable[tuple[int, ...]]) -> list[jax.sharding.Sharding]:
        """Return the sharding of each weight: split over the devices along its widest axis, or replicated."""
        whole = self.replicated
        if len(self.devices) == 1:
            return [whole for _ in shapes]
        specs = (_split_widest(shape, len(self.devices), AXIS, SPLIT_FROM) for shape in shapes)
        return [whole if spec is None else NamedSharding(self._mesh, spec) for spec in specs]

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))


def cpu_kind() -> str:
    """Return the architecture and a hash of the instruction sets of this machine's processor."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    flags = next((line for line in info.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def find_placement(name: str | None) -> Placement:
    """Return the placement of a device's name, or of several joined by ``+``; raises ConfigError for wrong names."""
    devices = (find_device(None),) if name is None else tuple(find_device(part.strip()) for part in name.split("+"))
    if len(set(devices)) < len(devices) or len({device.platform for device in devices}) > 1:
        raise ConfigError(f"device is {name!r}; wanted different devices of one kind, as cuda:0+cuda:1")
    return Placement(devices)


def name_devices(asked: Sequence[str], *, together: bool = False) -> tuple[str, ...]:
    """Check names of devices and return them as `find_placement` reads them.

    Args:
        asked: names, numbers, or ``all`` for the devices that JAX prefers in this process.
        together: whether a policy's weights are split over all of them.

    Raises:
        ConfigError: a device is missing, or weights cannot be split over the devices.

    Example:
        >>> name_devices(["cpu"])
        ('cpu:0',)
    """
    mine = [device_name(device) for device in jax.local_devices()]
    platform = jax.local_devices()[0].platform
    named: list[str] = []
    for name in asked:
        named += mine if name == "all" else [f"{platform}:{name}" if name.isdecimal() else name]
    return tuple(find_placement(name).name for name in (["+".join(named)] if together else named))


LAYERS = "layers"
# Heads of attentions and channels of feed-forwards are split; everything else is whole on every device.
TENSOR_PARALLEL: Mapping[str, str] = {"heads": "model", "mlp": "model", "vocabulary": "model"}
# Weights are split over the devices that share a batch, and gathered where they are used.
FULLY_SHARDED: Mapping[str, str] = {"embed": "data"}


def get_logical_axes(model: nnx.Module) -> dict[tuple[Any, ...], tuple[str | None, ...]]:
    """Return the names of the axes of every variable of a model by path; None for an axis without a name."""
    named = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes = variable.get_metadata().get("axes")
        missing = len(variable.shape) - len(axes or ())
        leading = (LAYERS,) * missing if axes is not None else (None,) * missing
        named[path] = (*leading, *(axes or ()))
    return named


def build_shardings(model: nnx.Module, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL) -> Any:
    """Return a sharding for every variable of a model, as a state of the model's structure.

    Args:
        rules: logical name to an axis of the mesh. An axis without a rule, or whose size the mesh does not divide, is
            whole on every device.

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
    names = get_logical_axes(model)
    state = nnx.state(model)
    flat = [
        (path, variable.replace(NamedSharding(mesh, _spec(variable.shape, names[path], mesh, rules))))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


def shard(model: nnx.Module, mesh: Mesh, rules: Mapping[str, str] = TENSOR_PARALLEL) -> None:
    """Put a model's weights onto a mesh, in place; the caller puts the inputs there with ``jax.device_put``."""
    nnx.update(model, jax.device_put(nnx.state(model), build_shardings(model, mesh, rules)))


def _spec(shape: tuple[int, ...], names: tuple[str | None, ...], mesh: Mesh, rules: Mapping[str, str]) -> PartitionSpec:
    axes: list[str | None] = []
    for size, name in zip(shape, names, strict=True):
        axis = rules.get(name) if name is not None else None
        is_spread = axis is not None and axis not in axes and size % mesh.shape[axis] == 0
        axes.append(axis if is_spread else None)
    return PartitionSpec(*axes)
