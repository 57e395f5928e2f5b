"""How a simulated machine forms batches: as our engine does it, and in the ways others do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.engine.batching import Batching
from service.engine.costs import KEPT, Costs

# Of a normal distribution.
_P90 = 1.2816


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
    is_wanted: bool = True


@dataclass(frozen=True)
class Times:
    """What batches take, by size: median and 90th percentile in seconds, drawn from a lognormal distribution."""

    seconds: Mapping[int, tuple[float, float]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes there are programs for."""
        return tuple(sorted(self.seconds))

    def draw(self, size: int, random: np.random.Generator) -> float:
        """One batch."""
        median, p90 = self.seconds[size]
        return median * float(np.exp(_spread(median, p90) * random.standard_normal()))

    def costs(self, sizes: Sequence[int]) -> Costs:
        """What an engine knows that has run batches of these sizes for a while."""
        known = Costs()
        for size in sizes:
            median, p90 = self.seconds[size]
            for share in _quantiles(KEPT):
                known.learn(size, median * float(np.exp(_spread(median, p90) * share)))
        return known


def _spread(median: float, p90: float) -> float:
    return float(np.log(max(p90 / median, 1.0))) / _P90


def _quantiles(count: int) -> np.ndarray:
    """Evenly likely values of a standard normal distribution, in any order."""
    draws = np.random.default_rng(0).standard_normal(4096)
    return np.quantile(draws, (np.arange(count) + 0.5) / count)


class Forming(Protocol):
    """A way to form batches."""

    def add(self, ask: Ask, now: float) -> None:
        """Let a question wait."""
        ...

    def take(self, now: float) -> tuple[Sequence[Ask], int] | float | None:
        """The next batch and the size it is padded to; or until when to wait for more; None when nobody waits."""
        ...


class ByDeadline:
    """Ours: the engine's own code (``service.engine.batching``). One size is one request at a time."""

    def __init__(self, times: Times, sizes: Sequence[int] | None = None):
        self._sizes = times.sizes if sizes is None else tuple(sizes)
        self._costs = times.costs(self._sizes)
        self._batching: Batching[Ask] = Batching()

    def add(self, ask: Ask, now: float) -> None:
        """See ``Forming``."""
        self._batching.add("line", ask, self._costs, self._sizes)

    def take(self, now: float) -> tuple[Sequence[Ask], int] | float | None:
        """See ``Forming``."""
        chosen = self._batching.choose(now)
        return None if chosen is None else (chosen.members, chosen.size)


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
        self._waiting = [(ask, came) for ask, came in self._waiting if ask.is_wanted]
        if not self._waiting:
            return None
        largest = self._sizes[-1]
        until = self._waiting[0][1] + self._window
        if len(self._waiting) < largest and now < until:
            return until
        members = [ask for ask, _ in self._waiting[:largest]]
        self._waiting = self._waiting[largest:]
        return members, next(size for size in self._sizes if size >= len(members))


def formings(window: float) -> dict[str, Callable[[Times], Forming]]:
    """All of them by name."""
    return {
        "one at a time": lambda times: ByDeadline(times, (1,)),
        "by arrival": ByArrival,
        f"by arrival, waiting {window * 1e3:g} ms": lambda times: ByArrival(times, window),
        "by deadline": ByDeadline,
    }
