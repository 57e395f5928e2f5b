"""Which requests go to the device next, together: decided from when each is due and what batches are known to take."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from service.engine.costs import Costs

# A larger batch has to give so many times more answers per second: what it gives, each member waits longer for.
WORTH = 1.02


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
    costs: Costs
    sizes: Sequence[int]
    waiting: list[Request]


class Batching(Generic[Request]):
    """Requests in one line for each program that can run them together. No clock, no threads.

    Whenever the device is free and somebody waits, something runs: batches come about because requests come while
    the device is busy, and nobody waits for others to join. Who has to begin soonest goes first, so that nobody who is
    served often is in anybody's way. A request joins when nobody would come late by it who would not anyway, in this
    line or in another; of the sizes for which that holds, the one that gives most answers per second is taken, or now
    and then one that can be full and has not been measured for long.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line[Request]] = {}

    def __len__(self) -> int:
        """Requests that wait, those included that nobody wants any more."""
        return sum(len(line.waiting) for line in self._lines.values())

    def add(self, key: Hashable, request: Request, costs: Costs, sizes: Collection[int]) -> None:
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
        key = min(heads, key=lambda key: heads[key].due - self._lines[key].costs.slow(1))
        line, head = self._lines[key], heads.pop(key)
        members, size = [head], 1
        if not head.is_alone:
            others = [(other.due, self._lines[place].costs.slow(1)) for place, other in heads.items()]
            together = [request for request in line.waiting if not request.is_alone]
            count, size = _fitting(now, together, others, line.costs, line.sizes)
            members = together[:count]
        line.waiting = [request for request in line.waiting if request not in members]
        if not line.waiting:
            del self._lines[key]
        return Chosen(key, members, size)


def _fitting(
    now: float,
    together: Sequence[Waiting],
    others: Sequence[tuple[float, float]],
    costs: Costs,
    sizes: Sequence[int],
) -> tuple[int, int]:
    """How many of those who could go together do, and the size of their batch."""
    at_once = now + costs.slow(1)
    best, most = (1, 1), 1 / max(costs.usual(1), 1e-9)
    before = 1
    for size in sizes[1:]:
        if len(together) <= before:
            break  # the rest would be padding
        count = min(len(together), size)
        # A size that was measured in a bad moment would never be run again, and never be known to be better.
        is_tried = count == size and costs.is_old(size)
        end = now + (costs.at_most(size) if is_tried else costs.slow(size))
        if any(at_once <= member.due < end for member in together[:count]):
            break
        if any(at_once + cost <= due < end + cost for due, cost in others):
            break
        if is_tried:
            return count, size
        rate = count / max(costs.usual(size), 1e-9)
        if rate > WORTH * most or costs.usual(size) <= 0:
            best, most = (count, size), rate
        before = size
    return best
