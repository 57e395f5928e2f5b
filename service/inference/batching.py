"""Batch scheduler: which requests run next and together, and their stacked arrays."""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from service.inference.latency_model import LatencyModel

# A larger batch has to give so many times more answers per second: what it gives, each member waits longer for.
MIN_THROUGHPUT_GAIN = 1.02
# So much later than reckoned all others may be served, in times of the best batch: more come, or the device is slower.
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
    """Requests chosen to run as one batch.

    Attributes:
        key: theirs.
        members: the soonest due first.
        size: of the batch, with padding.
        latency: what batches of this key take.
    """

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
    """Queues of requests, one per program, and the choice of the next batch. Reads no clock and starts no threads.

    Whenever the device is free and somebody waits, something runs: batches come about because requests come while
    the device is busy, and nobody waits for others to join. Who has to begin soonest goes first, so that nobody who is
    served often is in anybody's way. A request joins when nobody would come late by it who would not anyway, in this
    line or in another; of the sizes for which that holds, the one that gives most answers per second is taken, or now
    and then one that can be full and has not been measured for long. Where more wait than can be served in time,
    whoever is spared makes others late, and more of them: then the size that gives most is taken, whoever it is.
    """

    def __init__(self) -> None:
        self._queues: dict[Hashable, _RequestQueue[Request]] = {}

    def __len__(self) -> int:
        """Number of queued requests, cancelled ones included."""
        return sum(len(queue.requests) for queue in self._queues.values())

    def add(self, key: Hashable, request: Request, latency: LatencyModel, sizes: Collection[int]) -> None:
        """Queue a request.

        Args:
            key: requests of one key can run together.
            latency: what their batches take.
            sizes: batch sizes that can run at once; 1 always can.
        """
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _RequestQueue(latency, (), [])
        queue.sizes = sorted({1, *sizes})  # more of them come while robots stand still
        queue.requests.append(request)

    def next_batch(self, now: float) -> BatchPlan[Request] | None:
        """Remove and return the requests that run next; None when nobody waits."""
        if len(self._queues) == 1:
            ((key, queue),) = self._queues.items()
            if len(queue.requests) == 1 and queue.requests[0].is_awaited:
                del self._queues[key]  # nothing to decide, as with one robot
                return BatchPlan(key, queue.requests, 1, queue.latency)
        heads: dict[Hashable, Request] = {}
        for key, queue in list(self._queues.items()):
            queue.requests = [request for request in queue.requests if request.is_awaited]
            if not queue.requests:
                del self._queues[key]  # with it a policy, and its weights, would wait for the next request
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
    """Return how many of the requests run together, and the batch size.

    Args:
        others: of each other line, when the first is due and how long it takes.
    """
    if len(together) == 1:
        return 1, 1
    forecast = _QueueForecast([request.due for request in together], now, latency, sizes)
    at_once = now + latency.predict(1).p90

    def is_another_late(end: float) -> bool:
        return any(at_once + cost <= due < end + cost for due, cost in others)

    for size in sizes[1:]:
        # A size that was measured in a bad moment would never be run again, and never be known to be better.
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
    """Forecast of when the requests of one queue are answered, by batch size.

    Args:
        dues: when each is due, the soonest first.
    """

    def __init__(self, dues: Sequence[float], now: float, costs: LatencyModel, sizes: Sequence[int]):
        self._dues = dues
        # So many are late even if they run now: nobody's reason to hurry.
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

        Args:
            begin: when it does; what would make anybody late is left out, and when nothing is left nobody goes.
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


# XLA takes an array of the host as it is when it begins on such a boundary; others it copies first.
ALIGNMENT = 64
MAX_BUFFERS = 8

Shape = tuple[str, tuple[int, ...], str]


def stacking_shape(observation: Mapping[str, np.ndarray]) -> tuple[Shape, ...] | None:
    """Return the shapes and types that observations must share to be stacked; None when this one cannot be."""
    shapes = []
    for name, array in observation.items():
        if not isinstance(array, np.ndarray) or not array.ndim or array.shape[0] != 1 or array.dtype.hasobject:
            return None
        shapes.append((name, array.shape[1:], array.dtype.str))
    return tuple(sorted(shapes))


class StackingBuffers:
    """Reused arrays in which one thread stacks observations."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[tuple[Shape, ...], int], dict[str, np.ndarray]] = OrderedDict()

    def stack(
        self, shape: tuple[Shape, ...], observations: Sequence[Mapping[str, np.ndarray]], size: int
    ) -> Mapping[str, np.ndarray]:
        """Stack observations of one shape into a batch of ``size``; valid until the next call.

        Rows that nobody needs hold what is there, numbers apart: those are the first member's, because leftovers of
        somebody whose numbers were refused would be refused again.
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
