"""Requests of robots to an engine in another process."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmodels.errors import ObservationError
from service.engines.connection import ConnectionLost
from service.engines.messages import EngineFacts
from service.engines.remote_policy import RemotePolicy, check_answer
from service.inference.batching import LatencyModel, SlidingWindow, read_layout
from service.inference.device_worker import DeviceGone, DeviceStuck, InputRefused, Overdue, WorkerClosed
from service.inference.loaded_policy import InferenceResult, InferenceStuck, Replica
from service.threads import mark_retrieved, settle

# A request goes to another engine after three times the usual latency, at least the first figure (seconds). Before any
# measurement it is the second figure. A call over the network takes a millisecond, and sometimes tens of milliseconds.
MIN_OVERDUE = 0.25
DEFAULT_OVERDUE = 1.0


class RemoteWorker:
    """A `DeviceWorker` whose device is an engine in another process.

    Args:
        call: calls a method of the engine with arguments; see `Connection.call`.
        on_stuck: called when a request was not answered within `stuck_after` seconds.

    Attributes:
        facts: load and latencies that the engine reported last.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., asyncio.Future[Any]],
        stuck_after: float = 5.0,
        on_stuck: Callable[[], None] = lambda: None,
    ):
        self.name = name
        self.facts = EngineFacts()
        self.last_used_at = 0.0
        self._call, self._on_stuck = call, on_stuck
        self._stuck_after = stuck_after
        self._pending: dict[asyncio.Future[Any], float] = {}  # values: when it was sent, oldest first
        self._latency = SlidingWindow()
        self._gone_reason: str | None = None
        self._is_closed = False

    @property
    def pending(self) -> int:
        """Requests of this server that have no answer yet."""
        return len(self._pending)

    @property
    def is_late(self) -> bool:
        """Whether an answer to this server takes longer than usual."""
        oldest = next(iter(self._pending.values()), None)
        return oldest is not None and time.monotonic() - oldest > self._usual_latency

    @property
    def waiting(self) -> int:
        """Requests of all servers that the engine has not begun."""
        return self.facts.waiting

    @property
    def batches(self) -> Mapping[int, int]:
        """Number of batches that the engine ran for all servers, by batch size."""
        return self.facts.batches

    def load(self, now: float) -> float:
        """Share of the last seconds that the engine was busy, as it reported last."""
        return self.facts.load

    async def submit(
        self, replica: Replica, observation: Mapping[str, np.ndarray], due: float | None, *, may_move: bool = False
    ) -> InferenceResult:
        """Run a policy on one observation; see `DeviceWorker.submit`."""
        if self._is_closed:
            raise WorkerClosed("the server is ending")
        if self._gone_reason is not None:
            raise DeviceGone(self._gone_reason)
        policy = replica.policy
        assert isinstance(policy, RemotePolicy)
        now, loop = time.monotonic(), asyncio.get_running_loop()
        # A request stays pending when its caller gives up, so that the next one goes to an engine with less to do.
        outcome = self._call("act", policy.handle, dict(observation), None if due is None else due - now)
        result: asyncio.Future[Any] = loop.create_future()
        self._pending[outcome] = self.last_used_at = now
        timer = loop.call_later(self._stuck_after, self._give_up, result)
        latency = replica.latencies[read_layout(observation).frames]
        outcome.add_done_callback(lambda outcome: self._end(outcome, result, timer, now, latency))
        answering = self._answer(result)
        if may_move:
            answer = loop.create_task(answering)
            answer.add_done_callback(mark_retrieved)
            usual = self._usual_latency
            done, _ = await asyncio.wait([answer], timeout=usual)
            if not done:
                # This is not a failure of the engine. It gets requests last while it owes answers, and the pool
                # finds out whether it lives. On a busy machine all engines are late, and recover a moment later.
                late = Overdue(f"{self.name} has not answered for {usual:.2f} s")
                late.answer = answer
                raise late
            return await answer
        return await answering

    @property
    def _usual_latency(self) -> float:
        usual = max(3 * self._latency.latency.median, MIN_OVERDUE) if self._latency.numbers else DEFAULT_OVERDUE
        return min(usual, self._stuck_after)

    @staticmethod
    async def _answer(result: asyncio.Future[Any]) -> InferenceResult:
        try:
            return check_answer(await result)
        except ObservationError as error:
            raise InputRefused(str(error)) from error

    def _end(
        self,
        outcome: asyncio.Future[Any],
        result: asyncio.Future[Any],
        timer: asyncio.TimerHandle,
        sent_at: float,
        latency: LatencyModel,
    ) -> None:
        timer.cancel()
        del self._pending[outcome]
        error = outcome.exception()
        if isinstance(error, ConnectionLost):
            error = DeviceGone(f"engine {self.name}: its process ended")
        answer = error or outcome.result()
        if isinstance(answer, InferenceResult):
            batch_seconds = answer.total - answer.queue
            total = time.monotonic() - sent_at
            # The transport counts as waiting.
            waited = max(total - answer.to_device - answer.compute - answer.to_host, answer.queue)
            answer = answer._replace(queue=waited, total=total)
            # Robots get their answers before the latency is recorded.
            outcome.get_loop().call_soon(outcome.get_loop().call_soon, self._record, answer, batch_seconds, latency)
        settle(result, answer)

    def _record(self, answer: InferenceResult, batch_seconds: float, latency: LatencyModel) -> None:
        self._latency.append(answer.total)
        latency.record(answer.batch, batch_seconds)

    def _give_up(self, result: asyncio.Future[Any]) -> None:
        """Fail a request that has no answer after ``stuck_after`` seconds; its engine still owes the answer."""
        self._on_stuck()
        is_gone = self._gone_reason is not None
        settle(result, DeviceStuck(self._gone_reason) if is_gone else InferenceStuck.after(self._stuck_after))

    def fail(self, why: str) -> None:
        """Fail all pending requests: the engine is gone. Later answers are ignored."""
        self._gone_reason = why
        for outcome in tuple(self._pending):
            settle(outcome, DeviceGone(why))

    async def close(self, within: float) -> bool:
        """Fail all pending requests."""
        self._is_closed = True
        for outcome in tuple(self._pending):
            settle(outcome, WorkerClosed("the server is ending"))
        return True
