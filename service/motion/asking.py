"""When the policy is asked for a chunk, and whose answer still counts."""

import math
from dataclasses import dataclass

from service.motion.actions import ActionQueue
from service.motion.buffer import Snapshot
from service.motion.pace import Pace
from service.stats import Recent


@dataclass(frozen=True)
class InFlight:
    """An inference that was asked for: from which snapshot, when, and for which stretch of motion."""

    snapshot: Snapshot
    asked_at: float
    stretch: int


class Asking:
    """One request at a time.

    Attributes:
        request: the one in flight, or None.
        discarded: answers that came back after a hold or a stop and were thrown away.
        latency: seconds from asking to answer, on the event loop's side.
    """

    def __init__(self, pace: Pace):
        self.request: InFlight | None = None
        self.discarded = 0
        self.latency = Recent(32)
        self._pace = pace
        self._stretch = 0
        self._is_hurried = False
        self._usual_latency = 0.0

    def is_wanted(self, actions: ActionQueue) -> bool:
        """Whether it is time to ask, with these actions left."""
        if self.request is not None:
            return False
        if self._pace.ensemble is not None or self._is_hurried:
            return True
        delay = self._usual_latency / actions.period
        # One action of margin: an answer that comes during a tick is used at the next.
        is_running_dry = len(actions) <= math.ceil(delay) + 1
        return is_running_dry or actions.consumed + math.floor(delay) >= self._pace.action_steps

    def ask(self, snapshot: Snapshot, now: float) -> None:
        """A chunk is asked for."""
        self.request = InFlight(snapshot, now, self._stretch)
        self._is_hurried = False

    def part(self) -> None:
        """What is in flight belongs to a motion that is over."""
        self._stretch += 1

    def hurry(self) -> None:
        """What is in flight is not wanted, another chunk is, as soon as possible."""
        self.part()
        self._is_hurried = True

    def close(self) -> InFlight | None:
        """The answer is there; None when it is of no use any more."""
        request, self.request = self.request, None
        if request is not None and request.stretch != self._stretch:
            # Its frames are from before a hold or a stop.
            self.discarded += 1
            return None
        return request

    def took(self, seconds: float) -> None:
        """How long a usable answer took."""
        self.latency.add(seconds)
        self._usual_latency = self.latency.percentile(90) or 0.0
