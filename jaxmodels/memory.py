"""Memory and operations of a policy: measured on its traced program, and compared with what the machine has.

A policy that does not fit is refused, because a host without memory may kill the process that moves a robot.
"""

import math
import re
import resource
from collections.abc import Sequence, Set
from dataclasses import dataclass, is_dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from jax.extend import core

from jaxmodels.devices import Placement
from jaxmodels.errors import ConfigError, ObservationError, WeightsMismatch
from jaxmodels.ranges import LAYERS_WRITTEN_OUT, list_numbers

# A network with more layers takes over a second to build, so its config is first compared with the file.
QUICK_LAYERS = 32
TENSORS_PER_LAYER = 4  # Fewest tensors of a layer of any network here.
# Numbers in tables of positions; ACT with four cameras of 1080x1920 and a width of 1024 has 1.4e8.
MAX_TABLE_NUMBERS = 1 << 29
# Operations of one chunk: ten seconds of a fast accelerator. The largest published policy takes 6e13, ACT 1e11.
MAX_OPERATIONS = 10**15
# XLA allocates 0.6 to 1.8 times the bytes of the live values of a program.
MARGIN = 1.5
FLOAT = 4  # Bytes of a weight in memory as it is read.
# Smaller needs are never refused, because an estimate must not stop a small policy.
SPARE = 64 << 20
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
PLATFORM_NAMES = {"gpu": ("cuda", "rocm")}  # JAX's name of a device to the names by which programs choose branches.
# XLA computes these within the operations that use them, without a buffer.
_WITHOUT_BUFFER = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "iota", "stop_gradient"})


@dataclass(frozen=True)
class Demand:
    """What a program needs.

    Attributes:
        activations: bytes of live values, without the arguments.
        operations: multiplications and additions.
        traffic: bytes that are read from memory at least: arguments, and what a loop reads again in each step.
    """

    activations: int
    operations: int
    traffic: int = 0


class _Measured(NamedTuple):
    """Most bytes of live values, operations, bytes read of each argument, and bytes of own values read again."""

    live: int
    operations: int
    reads: list[int]
    again: int


def measure_program(jaxpr: Any, platform: str = "cpu") -> Demand:
    """Measure a traced program for a platform without compiling it; a loop of unknown length counts once.

    Args:
        platform: JAX's name of the platform, e.g. ``gpu``; other names take the default branches.
    """
    found = _measure(getattr(jaxpr, "jaxpr", jaxpr), {platform, *PLATFORM_NAMES.get(platform, ())})
    return Demand(int(MARGIN * found.live), found.operations, sum(found.reads) + found.again)


def _measure(jaxpr: Any, platforms: Set[str]) -> _Measured:
    eqns = _list_used(jaxpr)
    last_use = {var: i for i, eqn in enumerate(eqns) for var in filter(_is_variable, eqn.invars)}
    last_use |= {var: len(eqns) for var in filter(_is_variable, jaxpr.outvars)}
    held: dict[Any, int] = {}
    branches: dict[Any, int] = {}  # Values that depend on the platform alone, to the branch that they choose.
    reads: dict[Any, int] = {}
    live = most = operations = again = 0
    for i, eqn in enumerate(eqns):
        name, inputs = eqn.primitive.name, list(filter(_is_variable, eqn.invars))
        if name == "platform_index":
            places = enumerate(eqn.params["platforms"])
            branches[eqn.outvars[0]] = next(i for i, names in places if names is None or platforms & set(names))
        elif name in ("clamp", "convert_element_type") and (known := [branches[v] for v in inputs if v in branches]):
            branches[eqn.outvars[0]] = known[0]
        inner = _list_inner(eqn)
        if name == "cond" and eqn.invars[0] in inputs and eqn.invars[0] in branches:
            inner = inner[branches[eqn.invars[0]] :][:1]
        measured = [_measure(program, platforms) for program in inner]
        times = eqn.params["length"] if name == "scan" else 1
        operations += times * max((found.operations for found in measured), default=0) + _count_operations(eqn)
        again += times * max((found.again for found in measured), default=0)
        for var, size in zip(eqn.invars, _list_reads(eqn, measured, times), strict=True):
            if _is_variable(var):
                reads[var] = max(size, reads.get(var, 0))
        if name not in _WITHOUT_BUFFER:
            held |= {var: _count_bytes(var) for var in eqn.outvars}
        before, live = live, sum(held.values())
        most = max(most, live, before + max((found.live for found in measured), default=0))
        held = {var: size for var, size in held.items() if last_use.get(var, -1) > i}
        live = sum(held.values())
    arguments = [reads.pop(var, 0) for var in jaxpr.invars]
    # A value that is read once may stay in a cache; only loops read a value more than once.
    return _Measured(most, operations, arguments, again + sum(n for var, n in reads.items() if n > _count_bytes(var)))


def _list_used(jaxpr: Any) -> list[Any]:
    """Return the equations that the results depend on, in order."""
    needed, used = set(filter(_is_variable, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            used.insert(0, eqn)
            needed.update(filter(_is_variable, eqn.invars))
    return used


def _list_reads(eqn: Any, measured: Sequence[_Measured], times: int) -> list[int]:
    """Return the bytes that an equation reads of each input; a loop reads its constants in every step."""
    sizes = [_count_bytes(var) for var in eqn.invars]
    if eqn.primitive.name in ("gather", "dynamic_slice"):
        sizes[0] = _count_bytes(eqn.outvars[0])
    # The arguments of an inner program are the last inputs of its equation. A kernel's are others.
    if measured and all(len(found.reads) <= len(sizes) for found in measured):
        inner = [times * max(each) for each in zip_longest(*(reversed(found.reads) for found in measured), fillvalue=0)]
        sizes[len(sizes) - len(inner) :] = reversed(inner)
    return sizes


def _is_variable(var: Any) -> bool:
    return isinstance(var, core.Var)


def _count_bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _list_inner(eqn: Any) -> list[Any]:
    """Return the programs within an equation, such as the body of a loop."""
    values = [part for value in eqn.params.values() for part in (value if isinstance(value, tuple) else (value,))]
    return [getattr(part, "jaxpr", part) for part in values if isinstance(part, core.Jaxpr | core.ClosedJaxpr)]


def _count_operations(eqn: Any) -> int:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, axis = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // kernel[axis]
    return 0


def count_layers(config: Any) -> int:
    """Count the layers that a config's network builds one by one; a stack of layers is built at once."""
    total = sum(count_layers(value) for value in vars(config).values() if is_dataclass(value))
    for name, number in list_numbers(type(config)).items():
        most = None if number.range is None else number.range.maximum
        if name.endswith(("layers", "depth")) and most == LAYERS_WRITTEN_OUT:
            total += getattr(config, name)
    return total


def check_tables(config: Any) -> None:
    """Raise ConfigError if a config's tables of positions are too large, before any of them is computed."""
    if config.table_numbers > MAX_TABLE_NUMBERS:
        raise ConfigError(
            f"the frames, the chunk and the width of the config need tables of positions with "
            f"{config.table_numbers:.0e} numbers; wanted {MAX_TABLE_NUMBERS:.0e} at most"
        )


def check_layers(config: Any, tensors: int, where: str) -> None:
    """Raise WeightsMismatch if a file `where` has too few `tensors` for its config's layers, before these are built."""
    layers = count_layers(config)
    if layers > QUICK_LAYERS and tensors < TENSORS_PER_LAYER * layers:
        raise WeightsMismatch(
            f"{where}: {tensors} tensors; the config has {layers} layers, which have "
            f"{TENSORS_PER_LAYER * layers} or more; the weights belong to another config, or the config was edited"
        )


@dataclass(frozen=True)
class Needs:
    """Estimated bytes of a policy: `host` memory while loading, `weights` and `activations` on the device."""

    host: int
    weights: int
    activations: int = 0

    @property
    def device(self) -> int:
        return self.weights + self.activations


def estimate_needs(parameters: int, serving: int, item: int, runs_as_read: bool) -> Needs:
    """Estimate the bytes that a policy takes while it is loaded and afterwards.

    Args:
        parameters: numbers in the weights of the files.
        serving: numbers in the weights of the program.
        item: bytes of a number on the device.
        runs_as_read: whether the program uses the arrays as they were read.
    """
    read = FLOAT * parameters
    # Weights that the program uses as they were read are converted one array at a time.
    host = read + read // 5 if runs_as_read else read + FLOAT * serving
    return Needs(host, item * serving)


def check_loading(needs: Needs, placement: Placement, *, shares_memory: bool) -> None:
    """Refuse to read the weights of a policy that does not fit into memory.

    Args:
        shares_memory: whether a program on the CPU uses the arrays that were read.

    Raises:
        ConfigError: there is too little memory.
    """
    if placement.platform == "cpu":
        size = needs.host + (0 if shares_memory else needs.weights)
        _compare(size, get_free_host_memory(), "the machine", f"weights {_format_bytes(size)}")
        return
    what = f"weights {_format_bytes(needs.host)} before they are sent"
    _compare(needs.host, get_free_host_memory(), "the machine", what)
    share = needs.weights // len(placement.devices)
    _compare(share, get_free_device_memory(placement), placement.name, f"weights {_format_bytes(share)}")


def check_running(demand: Demand, placement: Placement, what: str) -> None:
    """Refuse to compile a program for which memory is too small or that takes too long for a robot.

    Args:
        what: the batch and the frames, for the error.

    Raises:
        ObservationError: the program takes too much memory or too many operations.
    """
    if demand.operations > MAX_OPERATIONS:
        raise ObservationError(
            f"{what} take about {demand.operations:.0e} operations; wanted {MAX_OPERATIONS:.0e} at most"
        )
    free = get_free_host_memory() if placement.platform == "cpu" else get_free_device_memory(placement)
    if free is not None and demand.activations > max(free, SPARE):
        raise ObservationError(
            f"{what} need about {_format_bytes(demand.activations)} of memory; {_format_bytes(free)} are free on "
            f"{placement.name}"
        )


def check_host(bytes_needed: int, what: str) -> None:
    """Raise ConfigError if this number of bytes does not fit into this machine's memory."""
    _compare(bytes_needed, get_free_host_memory(), "the machine", what)


def get_free_device_memory(placement: Placement) -> int | None:
    """Return the free bytes of the fullest device of a placement; None if unknown."""
    known = [device.memory_stats() or {} for device in placement.devices]
    free = [stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in known if "bytes_limit" in stats]
    return min(free, default=None)


def get_free_host_memory() -> int | None:
    """Return the bytes that the machine, the control groups and the process' limits still allow; None if unknown."""
    limits = [kilobytes << 10 for kilobytes in _find_kilobytes("meminfo", "MemAvailable")]
    limits += [*_list_group_limits(), *_list_process_limits()]
    return max(min(limits), 0) if limits else None


def _compare(needed: int, free: int | None, where: str, what: str) -> None:
    if free is not None and needed > max(free, SPARE):
        raise ConfigError(
            f"it needs about {_format_bytes(needed)} of memory ({what}); {_format_bytes(free)} are free on {where}. "
            "Use a smaller policy or more memory"
        )


def _find_kilobytes(file: str, name: str) -> list[int]:
    return [int(number) for number in re.findall(rf"^{name}:\s+(\d+) kB", _read(_PROC / file), re.MULTILINE)]


def _list_group_limits() -> list[int]:
    """Return the bytes left of the memory limits of this process' control group and of its parents."""
    limits = []
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0":
            root, limit, used, cache = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            root, cache = _GROUPS / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (root / inside, *(root / parent for parent in inside.parents)):
            most, now = _read(folder / limit).strip(), _read(folder / used).strip()
            if most.isdecimal() and now.isdecimal():
                # The system frees cached files when a process needs memory.
                spare = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                limits.append(int(most) - int(now) + (int(spare[1]) if spare else 0))
    return limits


def _list_process_limits() -> list[int]:
    limits = []
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            limits += [most - (used << 10) for used in _find_kilobytes("self/status", name)]
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _format_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
