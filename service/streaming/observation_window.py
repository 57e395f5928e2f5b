"""Earlier observations of one client, for policies that read several."""

import math
from dataclasses import replace

from service.control.observation_buffer import ObservationHistory, Snapshot
from service.errors import InvalidRequest

_KEPT_PER_STEP = 8  # Largest number of observations kept per step of the policy, which limits memory.


class ObservationWindow:
    """Observations of one client, for policies that read several (``Requirements.observation_steps``).

    The window selects earlier observations by the client's timestamps, or by arrival time.
    """

    def __init__(self) -> None:
        self._history = ObservationHistory()
        self._newest = -math.inf
        self._has_timestamps = False

    def clear(self) -> None:
        """Forget all observations."""
        self._history.clear()
        self._newest = -math.inf

    def add(self, snapshot: Snapshot, timestamp: float | None, steps: int, period: float) -> Snapshot:
        """Keep an observation and return it with its history.

        Args:
            snapshot: observation, whose past replaces the window.
            timestamp: seconds of the client's clock. Defaults to ``snapshot.observed_at``.
            steps: observations that the policy reads.
            period: seconds between them.

        Raises:
            InvalidRequest: the timestamp decreases.
        """
        if (self._history.steps, self._history.period) != (steps, period):
            self._history = ObservationHistory(steps, period)
            self._newest = -math.inf
        if steps == 1:
            return snapshot
        if snapshot.past or self._has_timestamps is not (timestamp is not None):
            self.clear()
        self._has_timestamps = timestamp is not None
        at = snapshot.observed_at if timestamp is None else timestamp
        if at < self._newest and timestamp is not None:
            raise InvalidRequest(
                f"timestamp must not decrease: got {timestamp:g} after {self._newest:g}; "
                '"reset": true forgets earlier observations',
                ("body", "timestamp"),
            )
        for back, (frames, joints) in zip(range(len(snapshot.past), 0, -1), snapshot.past, strict=True):
            self._history.add(at - back * period, replace(snapshot, frames=frames, joints=joints))
        past = snapshot.past or self._history.before(at, snapshot)
        if at - self._newest >= period / _KEPT_PER_STEP:
            self._history.add(at, snapshot)
            self._newest = at
        return replace(snapshot, past=past)
