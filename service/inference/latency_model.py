"""Latency model: measured and predicted duration of each batch size."""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Newest measurements of each size; a device that got slower is known after half as many batches.
WINDOW = 32
# What a size took so many batches ago says little, and is soon outweighed: so few of its measurements still count.
STALE_AFTER = 32
KEPT_WHEN_STALE = 4
# Newest batches, of any size, that tell how fast the device is just now; even, so that of two sizes that take turns
# neither is the pace.
PACE_WINDOW = 6
# So far from 1 the pace is not let: in a day of batches it wanders, and what is remembered with it the other way.
MAX_PACE = 2.0
# Seconds below which a batch computes nothing, and its time is the thread's.
MIN_SECONDS = 1e-6


class Latency(NamedTuple):
    """Seconds of one batch size: the median, and the 90th percentile."""

    median: float
    p90: float


class _SlidingWindow:
    """The newest ``WINDOW`` numbers, kept sorted too: sorting them anew for each batch took 8 us of 14."""

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
        if len(numbers) == WINDOW:
            self.drop_oldest()
        numbers.append(number)
        insort(self._ordered, number)

    def drop_oldest(self) -> None:
        ordered = self._ordered
        del ordered[bisect_left(ordered, self._numbers.popleft())]

    def latency(self) -> Latency:
        ordered = self._ordered
        return Latency(median_of_sorted(ordered), ordered[int(0.9 * len(ordered))])


class _Samples:
    """Measured seconds of one batch size, and the same divided by the device's pace at the time."""

    def __init__(self) -> None:
        self.seconds, self.normalized = _SlidingWindow(), _SlidingWindow()

    def add(self, seconds: float, pace: float) -> None:
        self.seconds.append(seconds)
        self.normalized.append(seconds / pace)

    def drop_stale(self) -> None:
        """Keep only the newest samples; of a single one, none."""
        kept = min(KEPT_WHEN_STALE, len(self.seconds) - 1)
        while len(self.seconds) > kept:
            self.seconds.drop_oldest()
            self.normalized.drop_oldest()


class LatencyModel:
    """Seconds by batch size. Written and read by any thread.

    A device's thread feeds it, whoever compiles, and a thread that was left behind and came back after all.

    A machine that others share is slower for a tenth of a second now and then, and all batches of that time are. Were
    each size remembered as it ran last, one that ran in such a moment would seem the worse choice until it runs again,
    though all would have taken longer then. So what a batch takes is set against what those before it took, of whatever
    size (``predict``); what is told to people and promised to robots is what was measured (``median``).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[int, _Samples] = {}
        # Replaced and never changed: who reads needs no lock, and nobody waits for a reader.
        self._measured: Mapping[int, Latency] = {}
        self._normalized: Mapping[int, Latency] = {}
        self._ran_at: Mapping[int, int] = {}
        self._count = 0
        self._ratios = deque([1.0] * PACE_WINDOW, PACE_WINDOW)  # one batch that is held up at the beginning is no pace
        self._pace = 1.0
        self._now: tuple[Mapping[int, Latency], float] = (self._normalized, self._pace)

    def record(self, size: int, seconds: float) -> None:
        """Record that a batch of this size took so many seconds."""
        with self._lock:
            before = self._normalized.get(size)
            samples = self._samples.get(size) or self._samples.setdefault(size, _Samples())
            if self.is_stale(size):
                samples.drop_stale()
            samples.add(seconds, self._pace)  # of those before it: it says nothing about itself
            self._update_latency(size)
            if before is not None and before.median >= MIN_SECONDS:
                self._ratios.append(max(seconds, MIN_SECONDS) / before.median)
                self._pace = median_of_sorted(sorted(self._ratios))
                if not 1 / MAX_PACE < self._pace < MAX_PACE:
                    self._rebase_pace()
            self._now = self._normalized, self._pace

    def mark_fresh(self) -> None:
        """Mark all sizes as measured just now: what ran since was profiling, while nothing else could run."""
        with self._lock:
            self._ran_at = dict.fromkeys(self._ran_at, self._count)

    def copy_from(self, other: "LatencyModel", size: int) -> bool:
        """Replace this size's samples by another model's; returns whether that has any."""
        with other._lock:
            there = other._samples.get(size)
            seconds = () if there is None else tuple(there.seconds)
            paced = () if there is None else tuple(one * other._pace for one in there.normalized)
        if seconds:
            with self._lock:
                samples = self._samples[size] = _Samples()
                samples.seconds = _SlidingWindow(seconds)
                samples.normalized = _SlidingWindow(one / self._pace for one in paced)
                self._update_latency(size)
                self._now = self._normalized, self._pace
        return bool(seconds)

    def _rebase_pace(self) -> None:
        """Rescale all samples so that the present pace counts as 1; predictions stay the same."""
        for size, samples in self._samples.items():
            samples.normalized = _SlidingWindow(one * self._pace for one in samples.normalized)
            self._normalized = {**self._normalized, size: samples.normalized.latency()}
        self._ratios = deque((ratio / self._pace for ratio in self._ratios), PACE_WINDOW)
        self._pace = 1.0

    def _update_latency(self, size: int) -> None:
        self._count += 1
        samples = self._samples[size]
        self._measured = {**self._measured, size: samples.seconds.latency()}
        self._normalized = {**self._normalized, size: samples.normalized.latency()}
        self._ran_at = {**self._ran_at, size: self._count}

    @property
    def is_measured(self) -> bool:
        """Whether any batch was measured."""
        return bool(self._measured)

    def is_stale(self, size: int) -> bool:
        """Return whether a size was measured so many batches ago that it should be measured again."""
        at = self._ran_at.get(size)
        return at is not None and self._count - at >= STALE_AFTER

    def upper_bound(self, size: int) -> float:
        """Return the seconds a stale size takes at most: predicted, or scaled from the size that ran last."""
        ran_at = self._ran_at
        newest = max(ran_at, key=lambda other: ran_at[other], default=size)
        return min(self.predict(size).p90, self.predict(newest).p90 * max(size / newest, 1.0))

    def predict(self, size: int) -> Latency:
        """Return the latency of the next batch at the device's present pace; zeros when nothing was measured."""
        known, pace = self._now
        found = _estimate(known, size)
        return Latency(found.median * pace, found.p90 * pace)

    def median(self, size: int) -> float:
        """Return the measured median of a size; 0 when nothing was measured."""
        return _estimate(self._measured, size).median

    def p90(self, size: int) -> float:
        """Return the measured 90th percentile of a size; 0 when nothing was measured."""
        return _estimate(self._measured, size).p90

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Return batch size to median and p90 in milliseconds, JSON-ready."""
        return {
            str(size): {"p50": round(found.median * 1e3, 3), "p90": round(found.p90 * 1e3, 3)}
            for size, found in sorted(self._measured.items())
        }


def median_of_sorted(ordered: Sequence[float]) -> float:
    """Return the median of sorted numbers."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _estimate(known: Mapping[int, Latency], size: int) -> Latency:
    found = known.get(size)
    if found is not None:
        return found
    # As many times as long as the nearest size takes, when it is larger: nothing is promised of a batch nobody ran.
    nearest = min(known, key=lambda other: abs(other - size), default=None)
    if nearest is None:
        return Latency(0.0, 0.0)
    usual, slow = known[nearest]
    return Latency(usual * max(size / nearest, 1.0), slow * max(size / nearest, 1.0))
