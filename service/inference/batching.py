"""Batching: how long batches of each size take, which requests run next and together, and their stacked arrays."""

import math
import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxmodels.types import PREFIX_ACTIONS

# Newest measurements of each size; half of them decide the median.
WINDOW = 32
# Batches after which the measurements of a size are stale, and the number of stale measurements that still count.
STALE_AFTER = 32
KEPT_WHEN_STALE = 4
# Newest batches, of any size, that determine the device's pace. Even, so that two alternating sizes average.
PACE_WINDOW = 6
# The pace stays between this figure and its inverse, because it drifts over many batches.
MAX_PACE = 2.0
# Seconds below which a batch computes nothing, and its time is the thread's.
MIN_SECONDS = 1e-6


class Latency(NamedTuple):
    """Seconds of one batch size: the median, and the 90th percentile."""

    median: float
    p90: float


class _Known(NamedTuple):
    """Measured and pace-normalized latency of one batch size, and the number of its last batch."""

    measured: Latency
    normalized: Latency
    ran_at: int


class SlidingWindow:
    """The newest ``WINDOW`` numbers, which are also kept sorted, because sorting them takes 8 us."""

    def __init__(self, numbers: Iterable[float] = ()) -> None:
        self.numbers: deque[float] = deque()
        self.latency = Latency(0.0, 0.0)
        self._ordered: list[float] = []
        for number in numbers:
            self.append(number)

    def append(self, number: float, most: int = WINDOW) -> None:
        """Add a number; the oldest ones go where there are more than ``most``."""
        numbers, ordered = self.numbers, self._ordered
        while len(numbers) >= most:
            del ordered[bisect_left(ordered, numbers.popleft())]
        numbers.append(number)
        insort(ordered, number)
        count = len(ordered)
        self.latency = Latency((ordered[(count - 1) // 2] + ordered[count // 2]) / 2, ordered[int(0.9 * count)])


class LatencyModel:
    """Seconds by batch size, thread-safe.

    A shared machine is slower at times. Therefore ``predict`` scales by the device's present pace, and a size that was
    measured in a slow moment is not avoided later. ``measured`` returns unscaled times for statistics and reservations.
    """

    def __init__(self) -> None:
        self.is_measured = False
        self._lock = threading.Lock()
        # For each size: the seconds, and the seconds divided by the device's pace at the time.
        self._windows: dict[int, tuple[SlidingWindow, SlidingWindow]] = {}
        self._count = 0
        self._ratios = deque([1.0] * PACE_WINDOW, PACE_WINDOW)  # the first batch may be slow
        # Latencies by size, and the pace. Replaced and never mutated, so that readers need no lock.
        self._now: tuple[Mapping[int, _Known], float] = ({}, 1.0)

    def record(self, size: int, seconds: float) -> None:
        """Record the seconds of a batch of this size."""
        with self._lock:
            known, pace = self._now
            before = known.get(size)
            if (windows := self._windows.get(size)) is None:
                windows = self._windows[size] = (SlidingWindow(), SlidingWindow())
            most = WINDOW
            if before is not None and self._count - before.ran_at >= STALE_AFTER:
                most = min(KEPT_WHEN_STALE + 1, len(windows[0].numbers))
            self._count += 1
            windows[0].append(seconds, most)
            windows[1].append(seconds / pace, most)
            known = {**known, size: _Known(windows[0].latency, windows[1].latency, self._count)}
            if before is not None and before.normalized.median >= MIN_SECONDS:
                self._ratios.append(max(seconds, MIN_SECONDS) / before.normalized.median)
                pace = median(self._ratios)
                if not 1 / MAX_PACE < pace < MAX_PACE:
                    known, pace = self._rebase_pace(known, pace)
            self._now, self.is_measured = (known, pace), True

    def mark_fresh(self) -> None:
        """Mark all sizes as measured just now, after profiling, during which nothing else ran."""
        with self._lock:
            known, pace = self._now
            self._now = {size: one._replace(ran_at=self._count) for size, one in known.items()}, pace

    def copy_from(self, other: "LatencyModel", size: int) -> bool:
        """Replace this size's samples by another model's; returns whether that has any."""
        with other._lock:
            if size not in other._windows:
                return False
            seconds, normalized = (tuple(window.numbers) for window in other._windows[size])
            pace_there = other._now[1]
        with self._lock:
            known, pace = self._now
            windows = SlidingWindow(seconds), SlidingWindow(one * pace_there / pace for one in normalized)
            self._windows[size] = windows
            self._count += 1
            known = {**known, size: _Known(windows[0].latency, windows[1].latency, self._count)}
            self._now, self.is_measured = (known, pace), True
        return True

    def _rebase_pace(self, known: Mapping[int, _Known], pace: float) -> tuple[Mapping[int, _Known], float]:
        """Rescale all samples so that the present pace counts as 1; predictions stay the same."""
        rescaled: dict[int, _Known] = {}
        for size, (seconds, normalized) in self._windows.items():
            window = SlidingWindow(one * pace for one in normalized.numbers)
            self._windows[size] = seconds, window
            rescaled[size] = known[size]._replace(normalized=window.latency)
        self._ratios = deque((ratio / pace for ratio in self._ratios), PACE_WINDOW)
        return rescaled, 1.0

    @property
    def sizes(self) -> Collection[int]:
        """Batch sizes that were measured."""
        return self._now[0].keys()

    def is_stale(self, size: int) -> bool:
        """Return whether the measurements of a size are stale, so that it should be measured again."""
        one = self._now[0].get(size)
        return one is not None and self._count - one.ran_at >= STALE_AFTER

    def upper_bound(self, size: int) -> float:
        """Return the seconds a stale size takes at most: predicted, or scaled from the size that ran last."""
        known = self._now[0]
        newest = max(known, key=lambda other: known[other].ran_at, default=size)
        return min(self.predict(size).p90, self.predict(newest).p90 * max(size / newest, 1.0))

    def predict(self, size: int) -> Latency:
        """Return the latency of the next batch at the device's present pace; zeros when nothing was measured."""
        known, pace = self._now
        if (one := known.get(size)) is not None:
            return Latency(one.normalized.median * pace, one.normalized.p90 * pace)
        usual, slow = _scale({other: one.normalized for other, one in known.items()}, size)
        return Latency(usual * pace, slow * pace)

    def measured(self, size: int) -> Latency:
        """Return the measured latency of a size; zeros when nothing was measured."""
        known, _ = self._now
        if (one := known.get(size)) is not None:
            return one.measured
        return _scale({other: one.measured for other, one in known.items()}, size)

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Return batch size to median and p90 in milliseconds, JSON-ready."""
        return {
            str(size): {"p50": round(one.measured.median * 1e3, 3), "p90": round(one.measured.p90 * 1e3, 3)}
            for size, one in sorted(self._now[0].items())
        }


def _scale(latencies: Mapping[int, Latency], size: int) -> Latency:
    """Latency of an unmeasured size: the nearest size's, scaled up in proportion when this one is larger."""
    nearest = min(latencies, key=lambda other: abs(other - size), default=None)
    if nearest is None:
        return Latency(0.0, 0.0)
    factor = max(size / nearest, 1.0)
    return Latency(latencies[nearest].median * factor, latencies[nearest].p90 * factor)


# Factor by which a larger batch has to increase the answers per second, because its members wait longer.
MIN_THROUGHPUT_GAIN = 1.02
# Reserve for the deadlines of later requests, in times of the best batch.
SLACK = 0.5


class WaitingRequest(Protocol):
    """The parts of a request that decide when it runs."""

    @property
    def due(self) -> float: ...
    @property
    def is_alone(self) -> bool: ...
    @property
    def is_awaited(self) -> bool: ...


Request = TypeVar("Request", bound=WaitingRequest)


@dataclass(frozen=True)
class BatchPlan(Generic[Request]):
    """Requests chosen to run as one batch, the soonest due first; ``size`` includes padding."""

    key: Hashable
    members: Sequence[Request]
    size: int
    latency: LatencyModel


@dataclass
class _RequestQueue(Generic[Request]):
    latency: LatencyModel
    sizes: Sequence[int]
    requests: list[Request]


class BatchScheduler(Generic[Request]):
    """Queues of requests, one per program, and the choice of the next batch. Has no clock and no threads.

    A free device always runs something; no request waits for others to join. The request that must begin soonest goes
    first. Others join it unless that makes a request of any queue late. Among the remaining sizes the highest
    throughput wins, or occasionally a full batch whose measurement is stale. Under overload, throughput alone decides,
    because sparing one request delays several others.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, _RequestQueue[Request]] = {}

    def __len__(self) -> int:
        """Number of queued requests, cancelled ones included."""
        return sum(len(queue.requests) for queue in self._queues.values())

    def add(self, key: Hashable, request: Request, latency: LatencyModel, sizes: Collection[int]) -> None:
        """Queue a request.

        Args:
            key: requests with equal keys can run together.
            latency: latencies of their batches.
            sizes: compiled batch sizes; 1 is always included.
        """
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _RequestQueue(latency, (), [])
        queue.sizes = sorted({1, *sizes})  # more sizes are compiled while robots stand still
        queue.requests.append(request)

    def next_batch(self, now: float) -> BatchPlan[Request] | None:
        """Remove and return the requests that run next; None when no request waits."""
        if len(self._queues) == 1:
            ((key, queue),) = self._queues.items()
            if len(queue.requests) == 1 and queue.requests[0].is_awaited:
                del self._queues[key]
                return BatchPlan(key, queue.requests, 1, queue.latency)
        heads: dict[Hashable, Request] = {}
        for key, queue in list(self._queues.items()):
            queue.requests = [request for request in queue.requests if request.is_awaited]
            if not queue.requests:
                del self._queues[key]  # It refers to a policy with its weights.
                continue
            queue.requests.sort(key=lambda request: request.due)
            heads[key] = queue.requests[0]
        if not heads:
            return None
        key = min(heads, key=lambda key: heads[key].due - self._queues[key].latency.predict(1).p90)
        queue, head = self._queues[key], heads.pop(key)
        members, size = [head], 1
        if not head.is_alone:
            others = [(other.due, self._queues[other_key].latency.predict(1).p90) for other_key, other in heads.items()]
            candidates = [request for request in queue.requests if not request.is_alone]
            count, size = _choose_batch(now, candidates, others, queue.latency, queue.sizes)
            members = candidates[:count]
        taken = set(map(id, members))
        queue.requests = [request for request in queue.requests if id(request) not in taken]
        if not queue.requests:
            del self._queues[key]
        return BatchPlan(key, members, size, queue.latency)


@dataclass(frozen=True, slots=True)
class _BatchOption:
    """One possible batch: how many requests, the index of its size, and its seconds at most."""

    count: int
    size_index: int
    seconds: float


def _choose_batch(
    now: float,
    together: Sequence[WaitingRequest],
    others: Sequence[tuple[float, float]],
    latency: LatencyModel,
    sizes: Sequence[int],
) -> tuple[int, int]:
    """Return the number of requests in the batch, and its size; ``others`` holds (due, seconds) per other queue."""
    if len(together) == 1:
        return 1, 1
    forecast = _QueueForecast([request.due for request in together], now, latency, sizes)
    at_once = now + latency.predict(1).p90

    def is_another_late(end: float) -> bool:
        return any(at_once + cost <= due < end + cost for due, cost in others)

    for size in sizes[1:]:
        # Measure a stale size again: it may have been measured in a slow moment.
        if size <= len(together) and latency.is_stale(size):
            end = now + latency.upper_bound(size)
            if not (forecast.is_late(size, end) or is_another_late(end)):
                return size, size
    fastest = forecast.best_option(len(sizes))
    option = forecast.best_option(len(sizes), now)
    while option.count and (
        is_another_late(now + option.seconds) or not forecast.can_meet_deadlines(option.count, now + option.seconds)
    ):
        option = forecast.best_option(option.size_index, now)
    option = option if option.count else fastest
    return option.count, sizes[option.size_index]


class _QueueForecast:
    """Forecast of when a queue's requests, sorted by due time, are answered, by batch size."""

    def __init__(self, dues: Sequence[float], now: float, costs: LatencyModel, sizes: Sequence[int]):
        self._dues = dues
        # Number of requests that are late even if they run now, so they do not constrain the choice.
        self._already_late = bisect_left(dues, now + costs.predict(1).p90)
        expected = [(size, costs.predict(size)) for size in sizes]
        self._sizes = [(size, max(taken.median, 1e-9), taken.p90) for size, taken in expected]
        self._slack = SLACK * self.best_option(len(sizes)).seconds

    def is_late(self, count: int, end: float, served: int = 0) -> bool:
        """Return whether any of the next ``count`` requests would be late if answered at ``end``, and need not be."""
        first = max(served, self._already_late)
        return first < served + count and self._dues[first] < end

    def best_option(self, sizes: int, begin: float = -math.inf, served: int = 0) -> _BatchOption:
        """Return the batch with most answers per second among the ``sizes`` smallest sizes, after ``served`` requests.

        Batches that start at ``begin`` and make a request late are left out.
        """
        left, before, most, best = len(self._dues) - served, 0, 0.0, _BatchOption(0, 0, 0.0)
        for index, (size, usual, slow) in enumerate(self._sizes[:sizes]):
            count = min(left, size)
            if left <= before or self.is_late(count, begin + slow, served):
                break  # the rest would be padding, or takes longer
            if count / usual > MIN_THROUGHPUT_GAIN * most:
                most, best = count / usual, _BatchOption(count, index, slow)
            before = size
        return best

    def can_meet_deadlines(self, served: int, now: float) -> bool:
        """Return whether all requests after ``served`` can be in time, with some slack."""
        while served < len(self._dues):
            option = self.best_option(len(self._sizes), now + self._slack, served)
            if not option.count:
                return False
            now += option.seconds
            served += option.count
        return True


# XLA reads an array of the host in place when it begins at a multiple of this; it copies other arrays first.
ALIGNMENT = 64
MAX_BUFFERS = 8

Shape = tuple[str, tuple[int, ...], str]


IMAGES = "observation.images."
# Cameras with the size of their frames as a key, and the plan's size if the policy continues a plan (`add_plan`).
FrameSizesKey = frozenset[tuple[str, tuple[int, int]]]


class ObservationLayout(NamedTuple):
    """Layout that decides which observations can run together.

    Attributes:
        frames: cameras with frame sizes, and the size of a plan, which select the program.
        shapes: shapes and dtypes that stacked observations share, or None if it cannot be stacked.
    """

    frames: FrameSizesKey
    shapes: tuple[Shape, ...] | None


def read_layout(observation: Mapping[str, np.ndarray]) -> ObservationLayout:
    """Return the layout of an observation; values that are not arrays are ignored."""
    frames, shapes, is_stackable = set(), [], True
    for name, array in observation.items():
        if not isinstance(array, np.ndarray):
            is_stackable = False
            continue
        shape = array.shape
        if len(shape) in (4, 5) and name.startswith(IMAGES):
            frames.add((name[len(IMAGES) :], shape[-3:-1]))
        elif len(shape) == 3 and name == PREFIX_ACTIONS:
            frames.add((name, shape[1:]))
        if not shape or shape[0] != 1 or array.dtype.hasobject:
            is_stackable = False
        shapes.append((name, shape[1:], array.dtype.str))
    return ObservationLayout(frozenset(frames), tuple(sorted(shapes)) if is_stackable else None)


class StackingBuffers:
    """Reused arrays in which one thread stacks observations."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[tuple[Shape, ...], int], dict[str, np.ndarray]] = OrderedDict()

    def stack(
        self, shape: tuple[Shape, ...], observations: Sequence[Mapping[str, np.ndarray]], size: int
    ) -> Mapping[str, np.ndarray]:
        """Stack observations of one shape into a batch of ``size``; valid until the next call.

        Padding repeats the first member's numbers, because an earlier observation may be invalid.
        """
        arrays = self._arrays.pop((shape, size), None)
        if arrays is None:
            arrays = {name: allocate_aligned((size, *rest), np.dtype(kind)) for name, rest, kind in shape}
        self._arrays[shape, size] = arrays
        if len(self._arrays) > MAX_BUFFERS:
            self._arrays.popitem(last=False)
        for name, array in arrays.items():
            for row, observation in enumerate(observations):
                array[row] = observation[name][0]
            if array.dtype != np.uint8:
                array[len(observations) :] = array[0]
        return arrays


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros whose memory begins on a boundary of `ALIGNMENT` bytes."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
