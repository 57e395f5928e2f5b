"""The times of ticks: a grid from one moment on, so that lateness never adds up."""

import math
from dataclasses import dataclass

# An absolute grid is computed with floats: a tick may come this much early and still be that tick.
_EARLY = 1e-6


@dataclass(frozen=True)
class Due:
    """A tick to be done.

    Attributes:
        deadline: when it was due.
        missed: how many before it nobody woke up for.
        late: seconds from the deadline of the tick that should have come next.
    """

    deadline: float
    missed: int
    late: float


class Grid:
    """Ticks ``period`` seconds apart, each done once or not at all."""

    def __init__(self, period: float):
        self.period = period
        self._anchor = 0.0
        self._index = -1

    def begin(self, now: float, *, is_done: bool = False) -> None:
        """Lay the grid anew: a tick is due now, and then every period. ``is_done`` says that this one is over."""
        self._anchor, self._index = now, 0 if is_done else -1

    def next_deadline(self, now: float) -> float:
        """When the next tick is due."""
        return self._anchor + max(self._index + 1, self.slot(now)) * self.period

    def slot(self, now: float) -> int:
        """The number of the tick that was due last."""
        return math.floor((now - self._anchor) / self.period + _EARLY)

    def take(self, now: float) -> Due | None:
        """The newest tick that is due, or None when it was done already; older ones are passed over."""
        index = self.slot(now)
        if index <= self._index:
            return None
        due = Due(
            self._anchor + index * self.period,
            index - self._index - 1,
            # Late against the tick that should have come next, not only against the newest.
            max(now - self._anchor - (self._index + 1) * self.period, 0.0),
        )
        self._index = index
        return due
