"""How a simulated machine forms batches: as our engine does it, and in the ways others do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from service.inference.batching import WINDOW, BatchScheduler, LatencyModel

# What is rare makes robots late, so the ends are looked at closely.
LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)


@dataclass(eq=False, slots=True)
class Ask:
    """One question of a robot, as far as its turn depends on it; times in simulated seconds.

    Attributes:
        robot: whose it is.
        asked: when the robot sent it.
        due: when the robot's plan runs dry.
    """

    robot: int
    asked: float
    due: float
    is_alone: bool = False
    is_awaited: bool = True


@dataclass(frozen=True)
class Times:
    """What batches take.

    Attributes:
        usual: batch size to seconds, the median.
        beside: batch size to how many times as long as those around them batches take: the quantiles of ``LEVELS``;
            always the same where there are none.
    """

    usual: Mapping[int, float]
    beside: Mapping[int, Sequence[float]] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes there are programs for."""
        return tuple(sorted(self.usual))

    def draw(self, size: int, random: np.random.Generator) -> float:
        """One batch."""
        return self._at(size, float(random.random()))

    def _at(self, size: int, level: float) -> float:
        beside = self.beside.get(size)
        return self.usual[size] * (1.0 if beside is None else float(np.interp(level, LEVELS, beside)))

    def costs(self, sizes: Sequence[int]) -> LatencyModel:
        """What an engine knows that has run batches of these sizes for a while."""
        known, random = LatencyModel(), np.random.default_rng(0)
        levels = (np.arange(WINDOW) + 0.5) / WINDOW
        mixed = {size: random.permutation(levels).tolist() for size in sizes}
        for place in range(WINDOW):
            for size in sizes:
                known.record(size, self._at(size, mixed[size][place]))
        return known


class Forming(Protocol):
    """A way to form batches."""

    def add(self, ask: Ask, now: float) -> None:
        """Let a question wait."""
        ...

    def take(self, now: float) -> tuple[Sequence[Ask], int] | float | None:
        """The next batch and the size it is padded to; or until when to wait for more; None when nobody waits."""
        ...

    def learn(self, size: int, seconds: float) -> None:
        """A batch took so long."""
        ...


class ByDeadline:
    """Ours: the engine's own code (``service.inference.batching``). One size is one request at a time."""

    def __init__(self, times: Times, sizes: Sequence[int] | None = None):
        self._sizes = times.sizes if sizes is None else tuple(sizes)
        self._costs = times.costs(self._sizes)
        self._batching: BatchScheduler[Ask] = BatchScheduler()

    def add(self, ask: Ask, now: float) -> None:
        """See ``Forming``."""
        self._batching.add("line", ask, self._costs, self._sizes)

    def take(self, now: float) -> tuple[Sequence[Ask], int] | float | None:
        """See ``Forming``."""
        chosen = self._batching.next_batch(now)
        return None if chosen is None else (chosen.members, chosen.size)

    def learn(self, size: int, seconds: float) -> None:
        """See ``Forming``."""
        self._costs.record(size, seconds)


class ByArrival:
    """Whoever waits goes, first come first, up to the largest batch.

    Args:
        window: seconds for which the first waits for others to come, as inference servers offer it.
    """

    def __init__(self, times: Times, window: float = 0.0):
        self._sizes = times.sizes
        self._window = window
        self._waiting: list[tuple[Ask, float]] = []

    def add(self, ask: Ask, now: float) -> None:
        """See ``Forming``."""
        self._waiting.append((ask, now))

    def take(self, now: float) -> tuple[Sequence[Ask], int] | float | None:
        """See ``Forming``."""
        self._waiting = [(ask, came) for ask, came in self._waiting if ask.is_awaited]
        if not self._waiting:
            return None
        largest = self._sizes[-1]
        until = self._waiting[0][1] + self._window
        if len(self._waiting) < largest and now < until:
            return until
        members = [ask for ask, _ in self._waiting[:largest]]
        self._waiting = self._waiting[largest:]
        return members, next(size for size in self._sizes if size >= len(members))

    def learn(self, size: int, seconds: float) -> None:
        """See ``Forming``; whoever goes by arrival need not know."""


def formings(window: float) -> dict[str, Callable[[Times], Forming]]:
    """All of them by name."""
    return {
        "one at a time": lambda times: ByDeadline(times, (1,)),
        "by arrival": ByArrival,
        f"by arrival, waiting {window * 1e3:g} ms": lambda times: ByArrival(times, window),
        "by deadline": ByDeadline,
    }
