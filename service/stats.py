"""Percentiles, rates and tallies in constant memory."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

# Upper bounds of the counts over all samples, in seconds: from a tenth of a tick's usual lateness to a stuck inference.
BOUNDS = (0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Recent:
    """The newest samples of one figure, and count, sum and histogram of all samples."""

    def __init__(self, size: int):
        self.count = 0
        self.total = 0.0
        self._ring = np.zeros(size)
        self._histogram = [0] * (len(BOUNDS) + 1)
        self._cached: tuple[int, tuple[float, ...], Sequence[float]] = (-1, (), ())

    def add(self, value: float) -> None:
        """Add a sample; it replaces the oldest."""
        self._ring[self.count % len(self._ring)] = value
        self.count += 1
        self.total += value
        self._histogram[bisect_left(BOUNDS, value)] += 1

    @property
    def histogram(self) -> Sequence[int]:
        """Number of samples between neighboring ``BOUNDS``, and at the end above the last bound."""
        return tuple(self._histogram)

    @property
    def samples(self) -> np.ndarray:
        """The samples still kept, (n,) in no order."""
        return self._ring[: min(self.count, len(self._ring))]

    @property
    def newest(self) -> float | None:
        """The newest sample, or None before the first."""
        return float(self._ring[(self.count - 1) % len(self._ring)]) if self.count else None

    @property
    def newest_ms(self) -> float | None:
        """The newest sample in milliseconds, for samples in seconds."""
        return None if self.newest is None else round(self.newest * 1e3, 3)

    def upper_estimate(self) -> float | None:
        """Return an upper estimate of the next sample, or None before the first.

        It is the 90th percentile of the newest 16, or the median of the newest 3 if that is larger.
        """
        if not self.count:
            return None
        kept, end = min(self.count, len(self._ring), 16), self.count % len(self._ring)
        newest = self._ring[max(end - kept, 0) : end].tolist()
        if end < kept:
            newest = self._ring[end - kept :].tolist() + newest
        ordered = sorted(newest)
        usual = ordered[math.ceil(0.9 * len(ordered)) - 1]
        return max(usual, sorted(newest[-3:])[1]) if len(ordered) > 2 else ordered[-1]

    def percentile(self, percent: float) -> float | None:
        """Return a percentile of the kept samples, or None before the first."""
        return self._percentiles(percent)[0] if self.count else None

    def percentiles_ms(self, *percents: float) -> dict[str, float | None]:
        """Return percentiles in milliseconds, ``{"p50": 1.25, ...}``, for samples in seconds."""
        if not self.count:
            return {f"p{percent:g}": None for percent in percents}
        values = self._percentiles(*percents)
        return {f"p{percent:g}": round(value * 1e3, 3) for percent, value in zip(percents, values, strict=True)}

    def _percentiles(self, *percents: float) -> Sequence[float]:
        # An answer has percentiles of all sessions, between two ticks: numpy's percentile takes five times as long.
        if self._cached[:2] != (self.count, percents):
            ordered = np.sort(self.samples)
            positions = [(len(ordered) - 1) * percent / 100 for percent in percents]
            lower = [float(ordered[int(place)]) for place in positions]
            upper = [float(ordered[min(int(place) + 1, len(ordered) - 1)]) for place in positions]
            values = [
                low + (high - low) * (place % 1) for low, high, place in zip(lower, upper, positions, strict=True)
            ]
            self._cached = (self.count, percents, values)
        return self._cached[2]


class Rate(Recent):
    """The newest times of an event, and its rate."""

    def __init__(self, size: int = 32, max_age: float = 2.0):
        super().__init__(size)
        self._max_age = max_age

    def per_second(self, now: float) -> float:
        """Return events per second; 0 when the newest is older than ``max_age`` seconds."""
        kept = self.samples
        if len(kept) < 2 or now - kept.max() > self._max_age:
            return 0.0
        span = float(kept.max() - kept.min())
        return round((len(kept) - 1) / span, 2) if span > 0 else 0.0


class Tally:
    """Counts by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, reason: str, times: int = 1) -> None:
        """Count a reason."""
        self._counts[reason] += times

    def __getitem__(self, reason: str) -> int:
        return self._counts[reason]

    @property
    def total(self) -> int:
        """Sum of the counts of all reasons."""
        return self._counts.total()

    def by_reason(self) -> Mapping[str, int]:
        """Return a copy of the counts, sorted by reason."""
        return dict(sorted(self._counts.items()))
