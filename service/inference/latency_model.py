"""Measured and estimated duration of each batch size."""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Newest measurements of each size; a device that got slower is known after half as many batches.
KEPT = 32
# What a size took so many batches ago says little, and is soon outweighed: so few of its measurements still count.
OLD = 32
TRUSTED = 4
# Newest batches, of any size, that tell how fast the device is just now; even, so that of two sizes that take turns
# neither is the pace.
PACE = 6
# So far from 1 the pace is not let: in a day of batches it wanders, and what is remembered with it the other way.
FAR = 2.0
# Seconds below which a batch computes nothing, and its time is the thread's.
SHORTEST = 1e-6


class Taken(NamedTuple):
    """Seconds of one size: the median, and what nine of ten do not exceed."""

    usual: float
    slow: float


class _Newest:
    """The newest ``KEPT`` numbers, kept in order of size too: sorting them anew for each batch took 8 us of 14."""

    def __init__(self, numbers: Iterable[float] = ()) -> None:
        self._numbers: deque[float] = deque()
        self._ordered: list[float] = []
        for number in numbers:
            self.append(number)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[float]:
        return iter(self._numbers)

    def append(self, number: float) -> None:
        numbers = self._numbers
        if len(numbers) == KEPT:
            self.drop_oldest()
        numbers.append(number)
        insort(self._ordered, number)

    def drop_oldest(self) -> None:
        ordered = self._ordered
        del ordered[bisect_left(ordered, self._numbers.popleft())]

    def taken(self) -> Taken:
        ordered = self._ordered
        return Taken(median(ordered), ordered[int(0.9 * len(ordered))])


class _Samples:
    """Of one size: seconds, and how many they would have been at the pace at which all others are kept."""

    def __init__(self) -> None:
        self.seconds, self.paced = _Newest(), _Newest()

    def add(self, seconds: float, pace: float) -> None:
        self.seconds.append(seconds)
        self.paced.append(seconds / pace)

    def forget(self) -> None:
        """All but the newest; what was measured once, too."""
        kept = min(TRUSTED, len(self.seconds) - 1)
        while len(self.seconds) > kept:
            self.seconds.drop_oldest()
            self.paced.drop_oldest()


class LatencyModel:
    """Seconds by batch size. Fed and read by any thread.

    A device's thread feeds it, whoever compiles, and a thread that was left behind and came back after all.

    A machine that others share is slower for a tenth of a second now and then, and all batches of that time are. Were
    each size remembered as it ran last, one that ran in such a moment would seem the worse choice until it runs again,
    though all would have taken longer then. So what a batch takes is set against what those before it took, of whatever
    size (``expected``); what is told to people and promised to robots is what was measured (``usual``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[int, _Samples] = {}
        # Replaced and never changed: who reads needs no lock, and nobody waits for a reader.
        self._known: Mapping[int, Taken] = {}
        self._paced: Mapping[int, Taken] = {}
        self._ran_at: Mapping[int, int] = {}
        self._count = 0
        self._ratios = deque([1.0] * PACE, PACE)  # one batch that is held up at the beginning is no pace
        self._pace = 1.0
        self._now: tuple[Mapping[int, Taken], float] = (self._paced, self._pace)

    def learn(self, size: int, seconds: float) -> None:
        """A batch of this size took so long."""
        with self._lock:
            before = self._paced.get(size)
            samples = self._samples.get(size) or self._samples.setdefault(size, _Samples())
            if self.is_old(size):
                samples.forget()
            samples.add(seconds, self._pace)  # of those before it: it says nothing about itself
            self._note(size)
            if before is not None and before.usual >= SHORTEST:
                self._ratios.append(max(seconds, SHORTEST) / before.usual)
                self._pace = median(sorted(self._ratios))
                if not 1 / FAR < self._pace < FAR:
                    self._begin_anew_with_this_pace()
            self._now = self._paced, self._pace

    def renew(self) -> None:
        """Nothing is old: what ran since was rehearsed, while nothing else could run."""
        with self._lock:
            self._ran_at = dict.fromkeys(self._ran_at, self._count)

    def take_over(self, other: "LatencyModel", size: int) -> bool:
        """What batches of this size took elsewhere counts here, and not what they took here; whether any ran there."""
        with other._lock:
            there = other._samples.get(size)
            seconds = () if there is None else tuple(there.seconds)
            paced = () if there is None else tuple(one * other._pace for one in there.paced)
        if seconds:
            with self._lock:
                samples = self._samples[size] = _Samples()
                samples.seconds = _Newest(seconds)
                samples.paced = _Newest(one / self._pace for one in paced)
                self._note(size)
                self._now = self._paced, self._pace
        return bool(seconds)

    def _begin_anew_with_this_pace(self) -> None:
        """All is remembered as it would be at this one; nothing that is expected changes by it."""
        for size, samples in self._samples.items():
            samples.paced = _Newest(one * self._pace for one in samples.paced)
            self._paced = {**self._paced, size: samples.paced.taken()}
        self._ratios = deque((ratio / self._pace for ratio in self._ratios), PACE)
        self._pace = 1.0

    def _note(self, size: int) -> None:
        self._count += 1
        samples = self._samples[size]
        self._known = {**self._known, size: samples.seconds.taken()}
        self._paced = {**self._paced, size: samples.paced.taken()}
        self._ran_at = {**self._ran_at, size: self._count}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._known)

    def is_old(self, size: int) -> bool:
        """Whether others were measured since for so long that this one should be measured again."""
        at = self._ran_at.get(size)
        return at is not None and self._count - at >= OLD

    def at_most(self, size: int) -> float:
        """Of an old size: what it should take, or what as many members take in batches of the size that ran last."""
        ran_at = self._ran_at
        newest = max(ran_at, key=lambda other: ran_at[other], default=size)
        return min(self.expected(size).slow, self.expected(newest).slow * max(size / newest, 1.0))

    def expected(self, size: int) -> Taken:
        """What the next batch should take, as fast as the device was just now; zeros when nothing was ever measured."""
        known, pace = self._now
        found = _of(known, size)
        return Taken(found.usual * pace, found.slow * pace)

    def usual(self, size: int) -> float:
        """The median of what was measured; 0 when nothing was ever."""
        return _of(self._known, size).usual

    def slow(self, size: int) -> float:
        """What nine of ten did not exceed; 0 when nothing was ever measured."""
        return _of(self._known, size).slow

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Batch size to median and p90, JSON-ready."""
        return {
            str(size): {"p50": round(found.usual * 1e3, 3), "p90": round(found.slow * 1e3, 3)}
            for size, found in sorted(self._known.items())
        }


def median(ordered: Sequence[float]) -> float:
    """The median of numbers that are in order already."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _of(known: Mapping[int, Taken], size: int) -> Taken:
    found = known.get(size)
    if found is not None:
        return found
    # As many times as long as the nearest size takes, when it is larger: nothing is promised of a batch nobody ran.
    nearest = min(known, key=lambda other: abs(other - size), default=None)
    if nearest is None:
        return Taken(0.0, 0.0)
    usual, slow = known[nearest]
    return Taken(usual * max(size / nearest, 1.0), slow * max(size / nearest, 1.0))
