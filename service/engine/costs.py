"""How long batches take: what was measured, and a careful guess for sizes that were not."""

from collections import deque
from collections.abc import Mapping
from statistics import median

# Newest measurements of each size; a device that got slower is known after half as many batches.
KEPT = 32
# What a size took so many batches ago says little: the device may have been busy with something else just then.
OLD = 256


class Costs:
    """Seconds by batch size. Fed by one thread, read by any."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._usual: dict[int, float] = {}
        self._slow: dict[int, float] = {}
        self._learnt: dict[int, int] = {}  # how many batches there had been
        self._count = 0

    def learn(self, size: int, seconds: float) -> None:
        """A batch of this size took so long."""
        samples = self._samples.setdefault(size, deque(maxlen=KEPT))
        if self.is_old(size):
            samples.clear()
        self._count += 1
        self._learnt[size] = self._count
        samples.append(seconds)
        ordered = sorted(samples)
        self._usual[size] = median(ordered)
        self._slow[size] = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._usual)

    def is_old(self, size: int) -> bool:
        """Whether others were measured since for so long that this one should be measured again."""
        return self._count - self._learnt.get(size, self._count) >= OLD

    def at_most(self, size: int) -> float:
        """Of an old size: what it took, or what as many members take in batches of the size that ran last."""
        newest = max(self._learnt, key=self._learnt.__getitem__, default=size)
        return min(self.slow(size), _of(self._slow, newest) * max(size / newest, 1.0))

    def usual(self, size: int) -> float:
        """The median; 0 when nothing was ever measured."""
        return _of(self._usual, size)

    def slow(self, size: int) -> float:
        """What nine of ten do not exceed; 0 when nothing was ever measured."""
        return _of(self._slow, size)

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Batch size to median and p90, JSON-ready."""
        return {
            str(size): {"p50": round(self._usual[size] * 1e3, 3), "p90": round(self._slow[size] * 1e3, 3)}
            for size in sorted(self._usual)
        }


def _of(known: Mapping[int, float], size: int) -> float:
    found = known.get(size)
    if found is not None:
        return found
    # As many times as long as the nearest size takes, when it is larger: nothing is promised of a batch nobody ran.
    nearest = min(known, key=lambda other: abs(other - size), default=None)
    return 0.0 if nearest is None else known[nearest] * max(size / nearest, 1.0)
