"""Which requests run next, together, and their stacked arrays."""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from service.inference.latency_model import LatencyModel

# A larger batch has to give so many times more answers per second: what it gives, each member waits longer for.
WORTH = 1.02
# So much later than reckoned all others may be served, in times of the best batch: more come, or the device is slower.
SPARE = 0.5


class Waiting(Protocol):
    """A request, as far as its turn depends on it."""

    @property
    def due(self) -> float: ...
    @property
    def is_alone(self) -> bool: ...
    @property
    def is_wanted(self) -> bool: ...


Request = TypeVar("Request", bound=Waiting)


@dataclass(frozen=True)
class Chosen(Generic[Request]):
    """A batch: a line's key, its members, soonest due first, and the size they are padded to."""

    line: Hashable
    members: Sequence[Request]
    size: int


@dataclass
class _Line(Generic[Request]):
    costs: LatencyModel
    sizes: Sequence[int]
    waiting: list[Request]


class Batching(Generic[Request]):
    """Requests in one line for each program that can run them together. No clock, no threads.

    Whenever the device is free and somebody waits, something runs: batches come about because requests come while
    the device is busy, and nobody waits for others to join. Who has to begin soonest goes first, so that nobody who is
    served often is in anybody's way. A request joins when nobody would come late by it who would not anyway, in this
    line or in another; of the sizes for which that holds, the one that gives most answers per second is taken, or now
    and then one that can be full and has not been measured for long. Where more wait than can be served in time,
    whoever is spared makes others late, and more of them: then the size that gives most is taken, whoever it is.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[Request]] = {}

    def __len__(self) -> int:
        """Requests that wait, those included that nobody wants any more."""
        return sum(len(line.waiting) for line in self._lines.values())

    def add(self, key: Hashable, request: Request, costs: LatencyModel, sizes: Collection[int]) -> None:
        """Let a request wait.

        Args:
            key: requests of one key can run together.
            costs: what their batches take.
            sizes: batch sizes that can run at once; 1 always can.
        """
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(costs, (), [])
        line.sizes = sorted({1, *sizes})  # more of them come while robots stand still
        line.waiting.append(request)

    def choose(self, now: float) -> Chosen[Request] | None:
        """Take out what runs next; None when nobody waits."""
        if len(self._lines) == 1:
            ((key, line),) = self._lines.items()
            if len(line.waiting) == 1 and line.waiting[0].is_wanted:
                del self._lines[key]  # nothing to decide, as with one robot
                return Chosen(key, line.waiting, 1)
        heads: dict[Hashable, Request] = {}
        for key, line in list(self._lines.items()):
            line.waiting = [request for request in line.waiting if request.is_wanted]
            if not line.waiting:
                del self._lines[key]  # with it a policy, and its weights, would wait for the next request
                continue
            line.waiting.sort(key=lambda request: request.due)
            heads[key] = line.waiting[0]
        if not heads:
            return None
        key = min(heads, key=lambda key: heads[key].due - self._lines[key].costs.expected(1).slow)
        line, head = self._lines[key], heads.pop(key)
        members, size = [head], 1
        if not head.is_alone:
            others = [(other.due, self._lines[place].costs.expected(1).slow) for place, other in heads.items()]
            together = [request for request in line.waiting if not request.is_alone]
            count, size = _fitting(now, together, others, line.costs, line.sizes)
            members = together[:count]
        taken = set(map(id, members))
        line.waiting = [request for request in line.waiting if id(request) not in taken]
        if not line.waiting:
            del self._lines[key]
        return Chosen(key, members, size)


@dataclass(frozen=True, slots=True)
class _Way:
    """So many go together, in a batch of the size at this place among the sizes, which takes so long at most."""

    count: int
    place: int
    seconds: float


def _fitting(
    now: float,
    together: Sequence[Waiting],
    others: Sequence[tuple[float, float]],
    costs: LatencyModel,
    sizes: Sequence[int],
) -> tuple[int, int]:
    """How many of those who could go together do, and the size of their batch.

    Args:
        others: of each other line, when the first is due and how long it takes.
    """
    if len(together) == 1:
        return 1, 1
    queue = _Queue([request.due for request in together], now, costs, sizes)
    at_once = now + costs.expected(1).slow

    def is_another_late(end: float) -> bool:
        return any(at_once + cost <= due < end + cost for due, cost in others)

    for size in sizes[1:]:
        # A size that was measured in a bad moment would never be run again, and never be known to be better.
        if size <= len(together) and costs.is_old(size):
            end = now + costs.at_most(size)
            if not (queue.is_late(size, end) or is_another_late(end)):
                return size, size
    most = queue.best(len(sizes))
    way = queue.best(len(sizes), now)
    while way.count and (is_another_late(now + way.seconds) or not queue.can_be_in_time(way.count, now + way.seconds)):
        way = queue.best(way.place, now)
    way = way if way.count else most
    return way.count, sizes[way.place]


class _Queue:
    """Who waits in one line.

    Args:
        dues: when each is due, the soonest first.
    """

    def __init__(self, dues: Sequence[float], now: float, costs: LatencyModel, sizes: Sequence[int]):
        self._dues = dues
        # So many are late even if they run now: nobody's reason to hurry.
        self._hopeless = bisect_left(dues, now + costs.expected(1).slow)
        expected = [(size, costs.expected(size)) for size in sizes]
        self._sizes = [(size, max(taken.usual, 1e-9), taken.slow) for size, taken in expected]
        self._spare = SPARE * self.best(len(sizes)).seconds

    def is_late(self, count: int, end: float, served: int = 0) -> bool:
        """Whether one of the next so many is late when they are served at this time, and need not be."""
        first = max(served, self._hopeless)
        return first < served + count and self._dues[first] < end

    def best(self, sizes: int, begin: float = -math.inf, served: int = 0) -> _Way:
        """Of the smallest so many sizes the one that gives most answers per second, when so many were served.

        Args:
            begin: when it does; what would make anybody late is left out, and when nothing is left nobody goes.
        """
        left, before, most, best = len(self._dues) - served, 0, 0.0, _Way(0, 0, 0.0)
        for place, (size, usual, slow) in enumerate(self._sizes[:sizes]):
            count = min(left, size)
            if left <= before or self.is_late(count, begin + slow, served):
                break  # the rest would be padding, or takes longer
            if count / usual > WORTH * most:
                most, best = count / usual, _Way(count, place, slow)
            before = size
        return best

    def can_be_in_time(self, served: int, now: float) -> bool:
        """Whether all that are left are, with something to spare."""
        while served < len(self._dues):
            way = self.best(len(self._sizes), now + self._spare, served)
            if not way.count:
                return False
            now += way.seconds
            served += way.count
        return True


# XLA takes an array of the host as it is when it begins on such a boundary; others it copies first.
ALIGNMENT = 64
KEPT = 8

Shape = tuple[str, tuple[int, ...], str]


def shape_of(observation: Mapping[str, np.ndarray]) -> tuple[Shape, ...] | None:
    """What an observation has to have in common with others to be stacked with them; None when it cannot be."""
    found = []
    for name, array in observation.items():
        if not isinstance(array, np.ndarray) or not array.ndim or array.shape[0] != 1 or array.dtype.hasobject:
            return None
        found.append((name, array.shape[1:], array.dtype.str))
    return tuple(sorted(found))


class Stacks:
    """Arrays that are used again and again, by one thread."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[tuple[Shape, ...], int], dict[str, np.ndarray]] = OrderedDict()

    def stack(
        self, shape: tuple[Shape, ...], observations: Sequence[Mapping[str, np.ndarray]], size: int
    ) -> Mapping[str, np.ndarray]:
        """Observations of one shape as one with a batch axis of ``size``; good until the next call.

        Rows that nobody needs hold what is there, numbers apart: those are the first member's, because leftovers of
        somebody whose numbers were refused would be refused again.
        """
        arrays = self._arrays.pop((shape, size), None)
        if arrays is None:
            arrays = {name: aligned((size, *rest), np.dtype(kind)) for name, rest, kind in shape}
        self._arrays[shape, size] = arrays
        if len(self._arrays) > KEPT:
            self._arrays.popitem(last=False)
        for name, array in arrays.items():
            for row, observation in enumerate(observations):
                array[row] = observation[name][0]
            if array.dtype != np.uint8:
                array[len(observations) :] = array[0]
        return arrays


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin on a boundary of `ALIGNMENT` bytes."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
