"""How much memory there is, and whether a policy fits into it: asked before anything is allocated.

What does not fit is refused with figures. Without this a host that runs out of memory ends a process, maybe that of a
robot that moves; a device says so itself, but only after seconds of compiling and copying.
"""

import re
import resource
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jax

from jaxmodels.errors import ConfigError, ObservationError
from jaxmodels.placement import Placement
from jaxmodels.sizes import Sizes

FLOAT = 4  # bytes of a weight as it is read, whatever it is served in
# Always there, or the machine is lost anyway: what needs less is not compared, so that a small policy is never refused
# for an estimate.
SPARE = 64 << 20
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Needs:
    """Bytes that a policy takes, estimated.

    Attributes:
        host: of the machine's memory, on its own side: weights as they were read, and while they are prepared.
        weights: on the device.
        activations: on the device, while a chunk is computed.
    """

    host: int
    weights: int
    activations: int

    @property
    def device(self) -> int:
        return self.weights + self.activations


def needs_of(sizes: Sizes, item: int = FLOAT) -> Needs:
    """What loading and running it takes.

    Args:
        item: bytes of a number on the device.
    """
    return Needs(FLOAT * (sizes.parameters + sizes.serving), item * sizes.serving, item * sizes.activations)


def check_loading(sizes: Sizes, placement: Placement, item: int = FLOAT) -> None:
    """Whether there is room for a policy that is to be loaded.

    Raises:
        ConfigError: there is not; with what it needs, what for, and what is free.
    """
    needs = needs_of(sizes, item)
    what = (
        f"weights {_written(needs.host + (needs.weights if placement.platform == 'cpu' else 0))}, activations "
        f"{_written(needs.activations)} for {sizes.tokens} tokens of {sizes.pixels} pixels"
    )
    if placement.platform == "cpu":
        _compare(needs.host + needs.device, free_on_host(), "the machine", what)
    else:
        _compare(needs.host, free_on_host(), "the machine", f"weights {_written(needs.host)} before they are sent")
        share = needs.weights // len(placement.devices) + needs.activations
        _compare(share, free_on_device(placement), placement.name, what)


def check_running(sizes: Sizes, placement: Placement, item: int, what: str) -> None:
    """Whether there is room for one more program of a policy that is loaded.

    Args:
        what: of which frames and batch it is, for the error.

    Raises:
        ObservationError: there is not.
    """
    needed = item * sizes.activations
    free = free_on_host() if placement.platform == "cpu" else free_on_device(placement)
    if free is not None and needed > max(free, SPARE):
        raise ObservationError(
            f"{what} need about {_written(needed)} of memory; {_written(free)} are free on {placement.name}"
        )


def check_host(bytes_needed: int, what: str) -> None:
    """Whether arrays of so many bytes fit into this machine's memory.

    Raises:
        ConfigError: they do not.
    """
    _compare(bytes_needed, free_on_host(), "the machine", what)


def free_on_device(placement: Placement) -> int | None:
    """Bytes that are free on that device of a place that has the fewest; None where devices do not say."""
    found = [stats for device in placement.devices if (stats := _stats(device)) is not None]
    return min((stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found), default=None)


def free_on_host() -> int | None:
    """Bytes that this process can still have: of the machine, of its group (a container's limit) and of its own limits;
    None where nothing says."""
    limits = [*_machine(), *_groups(), *_own_limits()]
    return max(min(limits), 0) if limits else None


def _compare(needed: int, free: int | None, where: str, what: str) -> None:
    if free is not None and needed > max(free, SPARE):
        raise ConfigError(
            f"it needs about {_written(needed)} of memory ({what}); {_written(free)} are free on {where}. Use a "
            "smaller policy or more memory"
        )


def _stats(device: Any) -> dict[str, int] | None:
    if device.process_index != jax.process_index():
        return None  # another host's, which says so there
    stats = device.memory_stats()
    return stats if stats and "bytes_limit" in stats else None


def _machine() -> list[int]:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(_PROC / "meminfo"), re.MULTILINE)
    return [int(found[1]) << 10] if found else []


def _groups() -> list[int]:
    """What is left of the limits of this process' control group and of all above it."""
    found = []
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0":
            root, limit, used, cache = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in kinds.split(","):
            root, limit, used, cache = (
                _GROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (root / inside, *(root / parent for parent in inside.parents)):
            most, now = _read(folder / limit).strip(), _read(folder / used).strip()
            if most.isdecimal() and now.isdecimal():
                # Files that were read lie in memory as long as nobody else needs it.
                spare = re.search(rf"^{cache} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                found.append(int(most) - int(now) + (int(spare[1]) if spare else 0))
    return found


def _own_limits() -> list[int]:
    found, status = [], _read(_PROC / "self" / "status")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        now = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
        if most != resource.RLIM_INFINITY and now:
            found.append(most - (int(now[1]) << 10))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _written(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
