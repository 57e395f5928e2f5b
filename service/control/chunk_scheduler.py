"""Chunk scheduler: when to ask for the next chunk, by measured delays, and with which prefix of the plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH
from service.control.action_queue import ActionQueue
from service.control.config import ControlConfig
from service.control.observation_buffer import ObservationHistory, Snapshot
from service.stats import Recent, Tally

# Codes of answers without a chunk: a program is being compiled; the inference did not return.
COMPILING, STUCK = "compiling", "stuck"
# When an answer arrived, against the planned moment and one action around it.
EARLY, ON_TIME, LATE = "early", "on_time", "late"


@dataclass(frozen=True)
class PolicyRequest:
    """One request to the policy for a chunk.

    Attributes:
        requested_at: monotonic time.
        due: when the plan runs dry, monotonic; None when there is no plan.
        motion: number of the motion it belongs to; answers to an earlier motion are dropped.
    """

    snapshot: Snapshot
    requested_at: float
    due: float | None = None
    motion: int = 0


class PolicyAnswer(NamedTuple):
    """Result of a request to the policy.

    Attributes:
        chunk: (1, t, a) unchecked actions, or None.
        error: code and text of why there is no chunk: ``compiling``, ``stuck``, or any other failure.
        fade: for the first chunk of another policy, the number of actions blended with the old plan.
        inputs: inputs of the policy, for its runner.
    """

    request: PolicyRequest
    chunk: object = None
    error: tuple[str, str] | None = None
    fade: int | None = None
    inputs: object = None


class ChunkScheduler:
    """Decides when a policy is asked; at most one request is in flight.

    Attributes:
        ahead: seconds between a request and the need for its chunk: as configured, else as long as answers take.
        in_flight: the request that has no answer yet, or None.
        discarded: answers that were dropped because of a hold or a stop.
        latency: seconds from request to answer, on the event loop.
        delay: actions executed between the newest chunk's frames and its arrival; None before the second chunk.
        delays: the same of the newest chunks.
        timing: number of answers that were early, on time and late, against ``action_steps`` of the chunk before.
    """

    def __init__(self, config: ControlConfig):
        self.config = config
        self.ahead = config.ask_ahead or 0.0
        self.in_flight: PolicyRequest | None = None
        self.discarded = 0
        self.latency, self.delays = Recent(32), Recent(16)
        self.delay: int | None = None
        self.timing = Tally()
        self._motion = 0
        self._is_hurried = False

    def adjust(self, config: ControlConfig) -> None:
        """Schedule requests by another configuration from now on."""
        self.config = config
        self.ahead = (self.latency.upper_estimate() or 0.0) if config.ask_ahead is None else config.ask_ahead

    def next_request(
        self, snapshot: Snapshot, history: ObservationHistory, queue: ActionQueue, now: float
    ) -> PolicyRequest | None:
        """Return a request for a chunk that follows this snapshot and the plan; None while it is not time for it."""
        if self.in_flight is not None:
            return None
        delay = self.ahead / queue.period
        # One action of margin: an answer that comes during a tick is used at the next.
        is_running_dry = queue.left <= math.ceil(delay) + 1
        has_done_enough = queue.consumed + math.floor(delay) >= self.config.action_steps
        if not (self._is_hurried or is_running_dry or has_done_enough):
            return None
        if history.steps > 1:
            snapshot = replace(snapshot, past=history.before(now, snapshot))
        if self.config.overlap.sends_plan:
            snapshot = replace(snapshot, prefix=self.prefix(queue, snapshot.observed_at))
        self.in_flight = PolicyRequest(snapshot, now, queue.dry_at if queue.left else None, self._motion)
        self._is_hurried = False
        return self.in_flight

    def prefix(self, queue: ActionQueue, observed_at: float) -> Mapping[str, np.ndarray]:
        """Return the plan from ``observed_at`` on as inputs of a policy that continues it, with a batch axis of 1."""
        _, plan, _ = queue.remaining(observed_at, self.config.chunk)
        delay = self.delays.upper_estimate()
        if delay is None:
            delay = (self.latency.upper_estimate() or 0.0) / queue.period
        return plan_prefix(plan[:, : self.config.width], math.ceil(delay), self.config)

    def end_motion(self) -> None:
        """End the motion: the answer to the request in flight will be dropped."""
        self._motion += 1

    def request_soon(self) -> None:
        """Drop the answer to the request in flight, and ask for another chunk as soon as that answer is there."""
        self.end_motion()
        self._is_hurried = True

    def withdraw(self) -> None:
        """Forget the request in flight: it was not carried out."""
        self.in_flight = None

    def close(self, answer: PolicyAnswer, queue: ActionQueue, now: float) -> bool:
        """Note that the request in flight was answered; return False when the answer is of an earlier motion."""
        request = answer.request
        if request is not self.in_flight:
            return False
        self.in_flight = None
        if request.motion != self._motion:
            # Its frames are from before a hold or a stop.
            self.discarded += 1
            return False
        if answer.error is not None:
            return True
        self.latency.add(now - request.requested_at)
        if self.config.ask_ahead is None:
            self.ahead = self.latency.upper_estimate() or 0.0
        if request.due is not None:
            self.delay = queue.count_taken_since(request.snapshot.observed_at)
            self.delays.add(self.delay)
            if not queue.left or queue.consumed > self.config.action_steps + 1:
                self.timing.add(LATE)
            else:
                self.timing.add(EARLY if queue.consumed < self.config.action_steps - 1 else ON_TIME)
        return True

    def get_stats(self, period: float) -> dict[str, object]:
        """Latencies and delays in actions of ``period`` seconds, and how timely answers were; JSON-ready."""

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


def plan_prefix(plan: np.ndarray, delay: int, config: ControlConfig) -> Mapping[str, np.ndarray]:
    """Inputs of a policy that continues a plan, each with a batch axis of 1.

    Args:
        plan: (n, a) what is planned from the moment of the observation on, at most a chunk of it; none is fine.
        delay: how many of these will be over when the answer comes, as far as one knows.
    """
    actions = np.zeros((1, config.chunk, config.width), np.float32)
    if len(plan):  # before the first chunk not even its width is known
        actions[0, : len(plan)] = plan
    return {
        PREFIX_ACTIONS: actions,
        PREFIX_DELAY: np.array([min(delay, len(plan))], np.int32),
        PREFIX_LENGTH: np.array([len(plan)], np.int32),
    }
