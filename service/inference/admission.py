"""Admission control: whether devices have time for one more robot, and reservations of that time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

from service.inference.batching import FrameSizesKey, LatencyModel
from service.inference.loaded_policy import FrameSizes, LoadedPolicy, describe_sizes


@dataclass(frozen=True)
class DeviceAdmission:
    """Whether a policy's devices have time for more inferences per second.

    Attributes:
        load: share of one device's time.
        per_second: number of inferences that fit.
        text: the figures, for the refusal.
    """

    fits: bool
    load: float
    per_second: float
    text: str


def estimate_latency(
    latency: LatencyModel, sizes: Iterable[int], rates: Sequence[float], devices: int = 1
) -> tuple[float, int]:
    """Return the seconds of a device that one inference takes when robots of these rates share it, and its batch size.

    Batches are no larger than there are robots for a device, and twice one's time (a request may come when one has
    just begun) is no longer than the quickest robot leaves between its requests.
    """
    robots, fastest = -(-len(rates) // devices), max(rates)
    usable = [size for size in sizes if size <= max(robots, 1) and 2 * latency.measured(size).p90 * fastest <= 1]
    best = min(usable, key=lambda size: latency.measured(size).median / size, default=1)
    return latency.measured(best).median / best, best


def estimate_load(loaded: LoadedPolicy, frames: FrameSizesKey, rates: Sequence[float]) -> float:
    """Return the share of one device's time that robots of these rates take, all with frames of these sizes."""
    first, devices = loaded.replicas[0], len(loaded.replicas)
    return (
        sum(rates)
        * estimate_latency(first.latencies[frames], first.batch_sizes.get(frames, (1,)), rates, devices)[0]
        / devices
    )


def costliest_frames(loaded: LoadedPolicy, known: Sequence[FrameSizesKey]) -> FrameSizesKey:
    """Return the most expensive frame sizes of other robots for one that has sent none; without others the trained."""
    first = loaded.replicas[0]
    return max(known or (first.trained_frames,), key=lambda frames: first.latencies[frames].measured(1).median)


def compute_admission(
    loaded: LoadedPolicy,
    per_second: float,
    peer_rates: Sequence[float],
    other_load: float,
    *,
    limit: float,
    frames: FrameSizesKey | None = None,
) -> DeviceAdmission:
    """Return whether a policy's devices have time for this many more inferences per second.

    Args:
        peer_rates: rates of robots with the same policy and frame sizes.
        other_load: share of a device used by others.
        limit: largest total share.
        frames: frame sizes; None selects the trained ones.
    """
    first, devices = loaded.replicas[0], len(loaded.replicas)
    frames = first.trained_frames if frames is None else frames
    latency = first.latencies[frames]
    seconds, batch = estimate_latency(latency, first.batch_sizes.get(frames, (1,)), (*peer_rates, per_second), devices)
    before = other_load + sum(peer_rates) * seconds / devices
    share = per_second * seconds / devices
    left = max(limit - before, 0.0) * devices / seconds if seconds else per_second
    # A session runs one inference at a time.
    alone = 1 / latency.measured(1).p90 if latency.measured(1).p90 else per_second
    possible = min(left, alone, per_second)
    description = "" if frames == first.trained_frames else f"{describe_sizes(dict(frames))}, "
    text = (
        f"an inference takes {seconds * 1e3:.1f} ms here ({description}in batches of {batch}), {len(peer_rates)} other "
        f"sessions like it and {before:.0%} of the device's time are promised (engine_load allows {limit:.0%}); "
        f"this session asks for {per_second:.1f} inferences per second and there is time for {possible:.1f}"
    )
    return DeviceAdmission(before + share <= limit + 1e-9 and per_second <= alone, share, possible, text)


# Frame sizes that a session sends; None while unknown.
ReadFrameSizes = Callable[[], FrameSizes | None]


@dataclass(frozen=True)
class _Reservation:
    """The device time of one session; it holds no reference to its policy."""

    loaded: ReferenceType[LoadedPolicy]
    per_second: float
    read_sizes: ReadFrameSizes


class Reservations:
    """Device time reserved by all sessions, by holder; computed on request, as measurements arrive later."""

    def __init__(self, max_load: float | None):
        """Start without reservations; ``max_load`` is the reservable share of device time, None without a limit."""
        self._max_load = float("inf") if max_load is None else max_load
        self._reservations: dict[object, _Reservation] = {}

    @property
    def per_second(self) -> float:
        """Inferences per second reserved by all sessions together."""
        return sum(reservation.per_second for reservation in self._reservations.values())

    @property
    def load(self) -> float:
        """Share of the devices' time that all reservations take."""
        return sum(estimate_load(loaded, frames, rates) for (loaded, frames), rates in self._group_rates().items())

    def check_admission(
        self, loaded: LoadedPolicy, per_second: float, *, read_sizes: ReadFrameSizes, holder: object = None
    ) -> DeviceAdmission:
        """Return whether the devices have time for this many more inferences per second; reserves nothing.

        Args:
            read_sizes: returns the sizes of the frames that the session sends. Before they are measured, the sizes of
                this policy's most expensive session count, or the sizes that the policy was trained with.
            holder: session whose present reservation is left out, because this one replaces it.
        """
        loaded, read_sizes = loaded.unnamed, _to_own_names(loaded, read_sizes)
        rates = self._group_rates(excluded=holder)
        frames = _measured_frames(loaded, read_sizes)
        if frames is None:
            frames = costliest_frames(loaded, _known_frames(loaded, rates))
        own = rates.pop((loaded, frames), [])
        others = sum(estimate_load(other, of, each) for (other, of), each in rates.items())
        return compute_admission(loaded, per_second, own, others, limit=self._max_load, frames=frames)

    def reserve(self, holder: object, loaded: LoadedPolicy, per_second: float, read_sizes: ReadFrameSizes) -> None:
        """Reserve inferences per second for a holder until ``release``; their load follows the frames that it sends."""
        self._reservations[holder] = _Reservation(ref(loaded.unnamed), per_second, _to_own_names(loaded, read_sizes))

    def move(self, holder: object, loaded: LoadedPolicy) -> None:
        """Move a holder's reservation to another policy, whose inferences may take more or less time."""
        if (reservation := self._reservations.get(holder)) is not None:
            self._reservations[holder] = replace(reservation, loaded=ref(loaded.unnamed))

    def release(self, holder: object) -> None:
        """Release a holder's reservation."""
        self._reservations.pop(holder, None)

    def _group_rates(self, excluded: object = None) -> dict[tuple[LoadedPolicy, FrameSizesKey], list[float]]:
        """Return the reserved rates, grouped by policy and frame sizes: those can run in one batch."""
        rates: dict[tuple[LoadedPolicy, FrameSizesKey], list[float]] = {}
        unmeasured: list[tuple[LoadedPolicy, float]] = []
        for holder, reservation in tuple(self._reservations.items()):
            loaded = reservation.loaded()
            if loaded is None or holder is excluded:
                continue
            frames = _measured_frames(loaded, reservation.read_sizes)
            if frames is None:
                unmeasured.append((loaded, reservation.per_second))
            else:
                rates.setdefault((loaded, frames), []).append(reservation.per_second)
        for loaded, per_second in unmeasured:
            rates.setdefault((loaded, costliest_frames(loaded, _known_frames(loaded, rates))), []).append(per_second)
        return rates


def _measured_frames(loaded: LoadedPolicy, read_sizes: ReadFrameSizes) -> FrameSizesKey | None:
    """Return a robot's frame sizes if measured; a robot is held while its frames are being compiled for."""
    sizes = read_sizes()
    frames = None if sizes is None else frozenset(sizes.items())
    return frames if frames is not None and loaded.replicas[0].latencies[frames].is_measured else None


def _known_frames(loaded: LoadedPolicy, rates: Iterable[tuple[LoadedPolicy, FrameSizesKey]]) -> list[FrameSizesKey]:
    return [frames for other, frames in rates if other is loaded]


def _to_own_names(loaded: LoadedPolicy, read_sizes: ReadFrameSizes) -> ReadFrameSizes:
    """Return a function that gives frame sizes by the policy's own names of cameras."""
    own_names = loaded.own_names  # A reference to the policy would keep its weights in memory.
    if not own_names:
        return read_sizes

    def read() -> FrameSizes | None:
        sizes = read_sizes()
        return None if sizes is None else {own_names.get(name, name): size for name, size in sizes.items()}

    return read
