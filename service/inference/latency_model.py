"""Latency model: measured and predicted duration of each batch size."""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
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


class _Known(NamedTuple):
    """What is known of one batch size.

    Attributes:
        measured, normalized: latencies as they were measured, and divided by the device's pace at the time.
        ran_at: number of the batch, of whatever size, with which it was measured last.
    """

    measured: Latency
    normalized: Latency
    ran_at: int


class _SlidingWindow:
    """The newest ``WINDOW`` numbers, kept sorted too: sorting them anew for each batch took 8 us of 14."""

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
    """Seconds by batch size. Written and read by any thread.

    A device's thread feeds it, whoever compiles, and a thread that was left behind and came back after all.

    A machine that others share is slower for a tenth of a second now and then, and all batches of that time are. Were
    each size remembered as it ran last, one that ran in such a moment would seem the worse choice until it runs again,
    though all would have taken longer then. So what a batch takes is set against what those before it took, of whatever
    size (``predict``); figures and reservations are of what was measured (``measured``).

    Attributes:
        is_measured: whether any batch was measured.
    """

    def __init__(self) -> None:
        self.is_measured = False
        self._lock = threading.Lock()
        # Of each size the seconds, and the same divided by the device's pace at the time.
        self._windows: dict[int, tuple[_SlidingWindow, _SlidingWindow]] = {}
        self._count = 0
        self._ratios = deque([1.0] * PACE_WINDOW, PACE_WINDOW)  # one batch that is held up at the beginning is no pace
        # By size, and the pace. Replaced and never changed: who reads needs no lock, and nobody waits for a reader.
        self._now: tuple[Mapping[int, _Known], float] = ({}, 1.0)

    def record(self, size: int, seconds: float) -> None:
        """Record that a batch of this size took so many seconds."""
        with self._lock:
            known, pace = self._now
            before = known.get(size)
            if (windows := self._windows.get(size)) is None:
                windows = self._windows[size] = (_SlidingWindow(), _SlidingWindow())
            most = WINDOW
            if before is not None and self._count - before.ran_at >= STALE_AFTER:
                most = min(KEPT_WHEN_STALE + 1, len(windows[0].numbers))  # of a single one that is stale, none counts
            self._count += 1
            windows[0].append(seconds, most)
            windows[1].append(seconds / pace, most)  # by the pace of those before it: it says nothing about itself
            known = {**known, size: _Known(windows[0].latency, windows[1].latency, self._count)}
            if before is not None and before.normalized.median >= MIN_SECONDS:
                self._ratios.append(max(seconds, MIN_SECONDS) / before.normalized.median)
                pace = median(self._ratios)
                if not 1 / MAX_PACE < pace < MAX_PACE:
                    known, pace = self._rebase_pace(known, pace)
            self._now, self.is_measured = (known, pace), True

    def mark_fresh(self) -> None:
        """Mark all sizes as measured just now: what ran since was profiling, while nothing else could run."""
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
            windows = _SlidingWindow(seconds), _SlidingWindow(one * pace_there / pace for one in normalized)
            self._windows[size] = windows
            self._count += 1
            known = {**known, size: _Known(windows[0].latency, windows[1].latency, self._count)}
            self._now, self.is_measured = (known, pace), True
        return True

    def _rebase_pace(self, known: Mapping[int, _Known], pace: float) -> tuple[Mapping[int, _Known], float]:
        """Rescale all samples so that the present pace counts as 1; predictions stay the same."""
        rescaled: dict[int, _Known] = {}
        for size, (seconds, normalized) in self._windows.items():
            window = _SlidingWindow(one * pace for one in normalized.numbers)
            self._windows[size] = seconds, window
            rescaled[size] = known[size]._replace(normalized=window.latency)
        self._ratios = deque((ratio / pace for ratio in self._ratios), PACE_WINDOW)
        return rescaled, 1.0

    def is_stale(self, size: int) -> bool:
        """Return whether a size was measured so many batches ago that it should be measured again."""
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
    """Latency of a size that was never measured: as many times as long as the nearest one takes, when it is larger.

    Nothing better is promised of a batch that nobody ran.
    """
    nearest = min(latencies, key=lambda other: abs(other - size), default=None)
    if nearest is None:
        return Latency(0.0, 0.0)
    factor = max(size / nearest, 1.0)
    return Latency(latencies[nearest].median * factor, latencies[nearest].p90 * factor)
