"""Chunk scheduler: when to request the next chunk, by measured delays, and with which prefix of the plan."""

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

# Codes of answers without a chunk: a program is being compiled, or the inference did not return.
COMPILING, STUCK = "compiling", "stuck"
# Arrival of an answer, compared with the planned time and one action before and after it.
EARLY, ON_TIME, LATE = "early", "on_time", "late"


@dataclass(frozen=True)
class ChunkRequest:
    """One request to the policy for a chunk.

    Attributes:
        due: monotonic time of the plan's end; None without a plan.
        motion: number of the motion; answers of an earlier motion are dropped.
    """

    snapshot: Snapshot
    requested_at: float
    due: float | None = None
    motion: int = 0


class PolicyAnswer(NamedTuple):
    """Result of a request to the policy.

    Attributes:
        chunk: unchecked actions (1, t, a), or None.
        error: code and text of the reason why there is no chunk.
        fade: number of actions of another policy's first chunk to blend with the old plan.
        inputs: inputs of the policy, for its runner.
    """

    request: ChunkRequest
    chunk: object = None
    error: tuple[str, str] | None = None
    fade: int | None = None
    inputs: object = None


class ChunkScheduler:
    """Decides when to request a chunk; at most one request is in flight.

    Attributes:
        ahead: seconds between a request and the need for its chunk, configured or estimated from answers.
        in_flight: request without an answer, or None.
        discarded: number of answers that were dropped because of a hold or a stop.
        latency: seconds from request to answer, on the event loop.
        delay: number of actions executed between the newest chunk's frames and its arrival; None before two chunks.
        delays: ``delay`` of the newest chunks.
        timing: number of early, timely and late answers.
    """

    def __init__(self, config: ControlConfig):
        self.config = config
        self.ahead = config.ask_ahead or 0.0
        self.in_flight: ChunkRequest | None = None
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
    ) -> ChunkRequest | None:
        """Return a request for a chunk that follows this snapshot and the plan, or None if it is not needed yet."""
        if self.in_flight is not None:
            return None
        delay = self.ahead / queue.period
        # The margin is one action, because an answer that arrives during a tick is used at the next tick.
        is_running_dry = queue.left <= math.ceil(delay) + 1
        has_done_enough = queue.consumed + math.floor(delay) >= self.config.action_steps
        if not (self._is_hurried or is_running_dry or has_done_enough):
            return None
        if history.steps > 1:
            snapshot = replace(snapshot, past=history.before(now, snapshot))
        if self.config.overlap.sends_plan:
            prefix = self.prefix(queue, snapshot.observed_at)
            sizes = {**snapshot.sizes, PREFIX_ACTIONS: (self.config.chunk, self.config.width)}
            snapshot = replace(snapshot, prefix=prefix, sizes=sizes)
        self.in_flight = ChunkRequest(snapshot, now, queue.dry_at if queue.left else None, self._motion)
        self._is_hurried = False
        return self.in_flight

    def prefix(self, queue: ActionQueue, observed_at: float) -> Mapping[str, np.ndarray]:
        """Return the plan from ``observed_at`` on as inputs of a policy, with a batch axis of 1."""
        _, plan, _ = queue.remaining(observed_at, self.config.chunk)
        delay = self.delays.upper_estimate()
        if delay is None:
            delay = (self.latency.upper_estimate() or 0.0) / queue.period
        return plan_prefix(plan[:, : self.config.width], math.ceil(delay), self.config)

    def end_motion(self) -> None:
        """End the motion: the answer to the request in flight will be dropped."""
        self._motion += 1

    def request_soon(self) -> None:
        """Drop the answer to the request in flight, and request another chunk after it."""
        self.end_motion()
        self._is_hurried = True

    def withdraw(self) -> None:
        """Forget the request in flight, which was not executed."""
        self.in_flight = None

    def close(self, answer: PolicyAnswer, queue: ActionQueue, now: float) -> bool:
        """Note an answer to the request in flight; return False if it belongs to an earlier motion."""
        request = answer.request
        if request is not self.in_flight:
            return False
        self.in_flight = None
        if request.motion != self._motion:
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
        """Return latencies and delays in actions of ``period`` seconds, and counts of answers; JSON-ready."""

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
    """Return the inputs of a policy that continues a plan, each with a batch axis of 1.

    Args:
        plan: planned actions (n, a) from the observation on, at most a chunk; may be empty.
        delay: estimated number of these actions whose time is over at the answer.
    """
    actions = np.zeros((1, config.chunk, config.width), np.float32)
    if len(plan):  # An empty plan may have another width.
        actions[0, : len(plan)] = plan
    return {
        PREFIX_ACTIONS: actions,
        PREFIX_DELAY: np.array([min(delay, len(plan))], np.int32),
        PREFIX_LENGTH: np.array([len(plan)], np.int32),
    }
