"""When to ask for the next chunk; measured delay; plan prefix."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH
from service.control.action_queue import ActionQueue
from service.control.config import ControlConfig
from service.control.observation_buffer import Snapshot
from service.stats import Recent, Tally

# Whether an answer came when the plan was to be taken over: one action more or less is the grain of it.
EARLY, ON_TIME, LATE = "early", "on_time", "late"


class Expected:
    """What the next of some figures will be, on the safe side.

    The ninth of ten of the newest 16, so that one that stands out counts little and what is over is soon forgotten;
    but when it jumps, two of the newest three are believed at once.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._newest: deque[float] = deque(maxlen=16)

    def add(self, figure: float) -> None:
        """One was measured."""
        self._newest.append(figure)
        ordered = sorted(self._newest)
        usual = ordered[min(math.ceil(0.9 * len(ordered)), len(ordered)) - 1]
        lately = median(list(self._newest)[-3:])
        self.value = max(usual, lately) if len(ordered) > 2 else ordered[-1]


@dataclass(frozen=True)
class InFlight:
    """An inference that was asked for: from which snapshot, when, for which stretch of motion, and with a plan left."""

    snapshot: Snapshot
    asked_at: float
    stretch: int
    is_moving: bool = False


class ChunkScheduler:
    """One request at a time.

    Attributes:
        pace: as it is now.
        request: the one in flight, or None.
        discarded: answers that came back after a hold or a stop and were thrown away.
        latency: seconds from asking to answer, on the event loop's side.
        delay: actions given out between what the newest chunk was seen and the chunk; None before one that followed
            another. Time in which nothing was done, as while a program is compiled, is no delay.
        timing: how many answers came early, on time and late, against ``action_steps`` of the chunk before.
    """

    def __init__(self, pace: ControlConfig):
        self.pace = pace
        self.request: InFlight | None = None
        self.discarded = 0
        self.latency = Recent(32)
        self.delay: int | None = None
        self.timing = Tally()
        self._latency, self._delay = Expected(), Expected()
        self._stretch = 0
        self._is_hurried = False

    @property
    def ahead(self) -> float:
        """Seconds before it is needed that a chunk is asked for: as set by hand, else as long as answers take."""
        return (self._latency.value or 0.0) if self.pace.ask_ahead is None else self.pace.ask_ahead

    def is_wanted(self, actions: ActionQueue) -> bool:
        """Whether it is time to ask, with these actions left."""
        if self.request is not None:
            return False
        if self._is_hurried:
            return True
        delay = self.ahead / actions.period
        # One action of margin: an answer that comes during a tick is used at the next.
        is_running_dry = len(actions) <= math.ceil(delay) + 1
        return is_running_dry or actions.consumed + math.floor(delay) >= self.pace.action_steps

    def delay_expected(self, period: float) -> int:
        """How many actions will be over when an answer comes to what is asked now."""
        if self._delay.value is not None:
            return math.ceil(self._delay.value)
        return math.ceil((self._latency.value or 0.0) / period)

    def ask(self, snapshot: Snapshot, now: float, *, is_moving: bool = False) -> None:
        """A chunk is asked for; ``is_moving`` says that something is left to do meanwhile."""
        self.request = InFlight(snapshot, now, self._stretch, is_moving)
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

    def took(self, request: InFlight, actions: ActionQueue, now: float) -> None:
        """A usable answer came, which is yet to be joined with these actions."""
        self.latency.add(now - request.asked_at)
        self._latency.add(now - request.asked_at)
        if not request.is_moving:
            return
        self.delay = actions.taken_since(request.snapshot.seen_at)
        self._delay.add(self.delay)
        done = actions.consumed
        if not len(actions) or done > self.pace.action_steps + 1:
            self.timing.add(LATE)
        else:
            self.timing.add(EARLY if done < self.pace.action_steps - 1 else ON_TIME)

    def figures(self, period: float) -> dict[str, object]:
        """JSON-ready; latencies and delays in actions."""

        def in_actions(percent: float) -> float | None:
            seconds = self.latency.percentile(percent)
            return None if seconds is None else round(seconds / period, 2)

        timing = self.timing.by_reason()
        return {
            "latency_actions": {"p50": in_actions(50), "p90": in_actions(90)},
            "delay_actions": self.delay,
            "asked_ahead_s": round(self.ahead, 4),
            "answers": {when: timing.get(when, 0) for when in (EARLY, ON_TIME, LATE)},
        }


def prefix_of(plan: np.ndarray, delay: int, pace: ControlConfig) -> Mapping[str, np.ndarray]:
    """The parts of an observation, each with a batch axis of 1.

    Args:
        plan: (n, a) what is planned from the moment of the observation on, at most a chunk of it; none is fine.
        delay: how many of these will be over when the answer comes, as far as one knows.
    """
    actions = np.zeros((1, pace.chunk, pace.width), np.float32)
    if len(plan):  # before the first chunk not even its width is known
        actions[0, : len(plan)] = plan
    return {
        PREFIX_ACTIONS: actions,
        PREFIX_DELAY: np.array([min(delay, len(plan))], np.int32),
        PREFIX_LENGTH: np.array([len(plan)], np.int32),
    }
