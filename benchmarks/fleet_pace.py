"""Speed of a simulated machine over time: other load slows all its batches together for a while."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Seconds between figures of a pace.
EVERY = 0.025
# Batches before and after one, of which it is the median.
AROUND = 4


def growing_with(robots: int) -> str:
    """What a row of so many robots at 20 Hz is called among the paces."""
    return f"growing, {robots}"


@dataclass(frozen=True)
class Pace:
    """How many times as long as usual batches take, every ``EVERY`` seconds; after the last figure comes the first."""

    factors: Sequence[float] = (1.0,)

    def at(self, now: float) -> float:
        """At this time, in seconds."""
        return self.factors[int(now / EVERY) % len(self.factors)]

    @property
    def seconds(self) -> float:
        """How long it goes on."""
        return len(self.factors) * EVERY

    @property
    def usual(self) -> float:
        """Its median."""
        return float(np.median(self.factors))


def smooth(taken: np.ndarray) -> np.ndarray:
    """What batches that followed one another took, without what made one of them differ from those around it."""
    places = range(len(taken))
    return np.array([np.median(taken[max(place - AROUND, 0) : place + AROUND + 1]) for place in places])


def resampled(taken: np.ndarray, usual: float) -> list[float]:
    """The factors of a pace at which these batches, which followed one another, ran."""
    ends = np.cumsum(taken)
    moments = np.arange(EVERY / 2, ends[-1], EVERY)
    return [round(float(factor), 2) for factor in smooth(taken)[np.searchsorted(ends, moments)] / usual]
