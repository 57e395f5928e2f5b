"""How long batches take: what was measured, and a careful guess for sizes that were not."""

import threading
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

# Newest measurements of each size; a device that got slower is known after half as many batches.
KEPT = 32
# What a size took so many batches ago says little: the device may have been busy with something else just then.
OLD = 256


class _Taken(NamedTuple):
    """Seconds of one size, and how many batches there had been when it ran last."""

    usual: float
    slow: float
    at: int


class Costs:
    """Seconds by batch size. Fed and read by any thread.

    A device's thread feeds it, whoever compiles, and a thread that was left behind and came back after all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[int, deque[float]] = {}
        # Replaced and never changed: who reads needs no lock, and nobody waits for a reader.
        self._known: Mapping[int, _Taken] = {}
        self._count = 0

    def learn(self, size: int, seconds: float) -> None:
        """A batch of this size took so long."""
        with self._lock:
            samples = self._samples.setdefault(size, deque(maxlen=KEPT))
            if self.is_old(size):
                samples.clear()
            samples.append(seconds)
            self._note(size)

    def take_over(self, other: "Costs", size: int) -> bool:
        """What batches of this size took elsewhere counts here, and not what they took here; whether any ran there."""
        with other._lock:
            samples = tuple(other._samples.get(size, ()))
        if samples:
            with self._lock:
                self._samples[size] = deque(samples, maxlen=KEPT)
                self._note(size)
        return bool(samples)

    def _note(self, size: int) -> None:
        ordered = sorted(self._samples[size])
        slow = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]
        self._count += 1
        self._known = {**self._known, size: _Taken(median(ordered), slow, self._count)}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._known)

    def is_old(self, size: int) -> bool:
        """Whether others were measured since for so long that this one should be measured again."""
        found = self._known.get(size)
        return found is not None and self._count - found.at >= OLD

    def at_most(self, size: int) -> float:
        """Of an old size: what it took, or what as many members take in batches of the size that ran last."""
        known = self._known
        newest = max(known, key=lambda other: known[other].at, default=size)
        return min(_of(known, size).slow, _of(known, newest).slow * max(size / newest, 1.0))

    def usual(self, size: int) -> float:
        """The median; 0 when nothing was ever measured."""
        return _of(self._known, size).usual

    def slow(self, size: int) -> float:
        """What nine of ten do not exceed; 0 when nothing was ever measured."""
        return _of(self._known, size).slow

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Batch size to median and p90, JSON-ready."""
        return {
            str(size): {"p50": round(found.usual * 1e3, 3), "p90": round(found.slow * 1e3, 3)}
            for size, found in sorted(self._known.items())
        }


def _of(known: Mapping[int, _Taken], size: int) -> _Taken:
    found = known.get(size)
    if found is not None:
        return found
    # As many times as long as the nearest size takes, when it is larger: nothing is promised of a batch nobody ran.
    nearest = min(known, key=lambda other: abs(other - size), default=None)
    if nearest is None:
        return _Taken(0.0, 0.0, 0)
    usual, slow, at = known[nearest]
    return _Taken(usual * max(size / nearest, 1.0), slow * max(size / nearest, 1.0), at)
