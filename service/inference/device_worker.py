"""Device worker: one thread per device that forms batches, runs them, and is replaced when stuck."""

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from service.errors import PolicyFailed
from service.inference.batching import (
    BatchScheduler,
    LatencyModel,
    ObservationLayout,
    Shape,
    StackingBuffers,
    read_layout,
)
from service.inference.loaded_policy import InferenceResult, InferenceStuck, Replica
from service.threads import as_plain_exception, lower_priority


class Overdue(Exception):
    """A batch takes far longer than usual, so the request may be sent to another device.

    Attributes:
        is_counted: whether the error, shared by the batch's members, already counts against the device.
        answer: late result of the device, if it can still be received.
    """

    is_counted = False
    answer: "asyncio.Future[InferenceResult] | None" = None


class DeviceGone(Exception):
    """The device is gone; its requests can go to another one."""


class DeviceStuck(DeviceGone):
    """The device was given up because it did not answer this request, which may be the cause."""


class EngineLost(PolicyFailed):
    """The engine ended while it did something that is asked again when another one has the policy."""

    status = 503
    code = "engine_lost"


class InputRefused(PolicyFailed):
    """The policy refused its input, as it would on any device; the text is for clients."""


class WorkerClosed(PolicyFailed):
    """The worker is closed and answers no more requests."""

    status = 503
    code = "server_ending"


class DeviceWorker(Protocol):
    """Interface of a worker that answers requests on one device; used on one event loop."""

    @property
    def pending(self) -> int:
        """Requests that have no answer yet."""
        ...

    @property
    def last_used_at(self) -> float:
        """Monotonic time of the newest request."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether an answer takes longer than usual; other devices are asked first then."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that have not begun to run."""
        ...

    @property
    def abandoned(self) -> int:
        """Threads abandoned in a batch that did not return in time."""
        ...

    @property
    def batches(self) -> Mapping[int, int]:
        """Number of batches run, by batch size."""
        ...

    def load(self, now: float) -> float:
        """Share of the last seconds that the device was busy."""
        ...

    async def submit(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool = False,
        may_move: bool = False,
    ) -> InferenceResult:
        """Run a policy on one observation, in a batch with others or alone.

        Raises:
            Overdue: with ``may_move``, its batch takes far longer than usual.
            DeviceGone: the device is there no more.
            InputRefused: no other device would do better.
            InferenceStuck: it did not come back in time.
            WorkerClosed: the device is closed, or was before there was an answer.
            Exception: whatever the policy raises for this observation.
        """
        ...

    async def close(self, within: float) -> bool:
        """Release the device; its running batch gets ``within`` seconds. Returns whether that was enough."""
        ...


logger = logging.getLogger(__name__)

# Seconds after which an inference is overdue if others wait: three times its usual time, at least the first value; the
# second value applies before any measurement.
MIN_OVERDUE = 0.1
OVERDUE_UNMEASURED = 1.0
# Seconds after which a request goes before earlier deadlines, so that it does not starve.
LONGEST_WAIT = 1.0
# Window of a device's load, in seconds.
LOAD_WINDOW = 5.0
# Threads left behind that may still come back; with so many a batch is waited for until it is stuck.
MAX_ABANDONED = 8

CLOSED_MESSAGE = "the device is closed: the server is ending"


@dataclass(eq=False)
class Request:
    """One observation and the future of its result.

    Attributes:
        deadline: monotonic time at which the caller's plan ends, or None.
        is_alone: it may spoil the results of others, so it is not batched.
        may_move: another device may run it.
        batch: the newest batch with it.
        shape: shapes shared by observations that can be stacked with it; None runs it alone.
        latency: latencies of such batches, set by the device's thread.
    """

    replica: Replica
    observation: Mapping[str, np.ndarray]
    deadline: float | None
    outcome: asyncio.Future[InferenceResult]
    submitted: float
    is_alone: bool = False
    may_move: bool = False
    batch: "Batch | None" = None
    shape: tuple[Shape, ...] | None = None
    latency: LatencyModel | None = None
    _due: float | None = None

    @property
    def due(self) -> float:
        """Monotonic time by which to answer; computed on demand by the device's thread."""
        if self._due is None:
            due = self.deadline
            if due is None:
                due = self.submitted + (2 * self.latency.measured(1).p90 if self.latency is not None else 0.0)
            self._due = min(due, self.submitted + LONGEST_WAIT)
        return self._due

    @property
    def is_awaited(self) -> bool:
        """Whether somebody still waits for the result."""
        return not self.outcome.done()


@dataclass(eq=False)
class Batch:
    """Requests that run together.

    ``paused`` counts seconds in which the whole process was stopped. An abandoned batch may still return.
    """

    members: Sequence[Request]
    size: int
    latency: LatencyModel
    started: float
    paused: float = 0.0
    is_abandoned: bool = False

    @cached_property
    def overdue(self) -> float:
        """Seconds after which it keeps others waiting for longer than they have to. Most batches are never asked."""
        if not self.latency.is_measured:
            return OVERDUE_UNMEASURED
        return max(3 * self.latency.measured(self.size).median, MIN_OVERDUE)


class _Inbox:
    """Incoming requests of a device, and its scheduler with the queued ones.

    The event loop is the producer, the device's thread the consumer. An idle thread reads a pipe: ``os.write`` releases
    the interpreter's lock, so a round trip takes 7 us where ``queue.SimpleQueue`` takes 35.
    """

    def __init__(self) -> None:
        self.scheduler: BatchScheduler[Request] = BatchScheduler()
        self._arriving: deque[Request | None] = deque()
        self._is_reader_asleep = False
        self._read_end, self._write_end = os.pipe()
        weakref.finalize(self, _close_descriptors, self._read_end, self._write_end).atexit = False

    def put(self, request: Request | None) -> None:
        """Append a request; None ends the thread."""
        self._arriving.append(request)
        if self._is_reader_asleep:
            self._is_reader_asleep = False
            os.write(self._write_end, b"\0")

    def receive(self, *, wait: bool) -> bool:
        """Move new requests to the scheduler, with ``wait`` sleep until there is one; False when closed."""
        while wait and not self._arriving:
            self._is_reader_asleep = True
            # Check again: an earlier request did not wake this thread.
            if not self._arriving:
                os.read(self._read_end, 64)
            self._is_reader_asleep = False
        while self._arriving:
            request = self._arriving.popleft()
            if request is None:
                return False
            replica = request.replica
            try:
                frames, shape = read_layout(request.observation)
            except Exception:  # the policy, asked alone, says what is wrong with it
                frames, shape = ObservationLayout(frozenset(), None)
            if request.is_alone or shape is None:
                request.is_alone, shape = True, None
            request.shape, request.latency = shape, replica.latencies[frames]
            sizes = () if request.is_alone else replica.batch_sizes.get(frames, ())
            # What runs alone has the place in line that its policy has, with such frames.
            self.scheduler.add((replica, frames, shape), request, request.latency, sizes)
        return True


def _close_descriptors(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class InferenceWorker:
    """A `DeviceWorker` for a device of this process; only the inference itself leaves the event loop.

    It is never late, because a new thread replaces a thread with an overdue batch.
    """

    is_late = False

    def __init__(self, name: str = "device", niceness: int = 0, stuck_after: float = 5.0):
        self.stuck_after = stuck_after
        self.abandoned = 0
        self.last_used_at = 0.0
        self.batches: dict[int, int] = {}
        self._requests: set[Request] = set()
        self._is_closed = False
        self._busy_spans: deque[tuple[float, float]] = deque(maxlen=256)
        self._check_interval = min(MIN_OVERDUE, stuck_after) / 4
        self._name = name
        self._niceness = niceness
        self._inbox = _Inbox()
        self._lock = threading.Lock()
        self._current: Batch | None = None
        self._abandoned_batches: list[Batch] = []
        self._timer: asyncio.TimerHandle | None = None
        self._thread = self._start_thread()

    @property
    def pending(self) -> int:
        """Requests that have no answer yet."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Requests that have not begun to run."""
        running = [*self._abandoned_batches, *filter(None, (self._current,))]
        begun = sum(member.is_awaited and member.batch is batch for batch in running for member in batch.members)
        return max(self.pending - begun, 0)

    def load(self, now: float) -> float:
        """Share of the last seconds that the device was busy."""
        since = now - LOAD_WINDOW
        spent = [(began, ended) for began, ended in tuple(self._busy_spans) if ended > since]
        if len(spent) == self._busy_spans.maxlen:
            since = spent[0][0]  # there were more before them
        return min(sum(ended - max(began, since) for began, ended in spent) / max(now - since, 1e-9), 1.0)

    async def submit(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool = False,
        may_move: bool = False,
    ) -> InferenceResult:
        """See ``DeviceWorker.submit``; a batch that takes over ``stuck_after`` seconds also replaces the thread."""
        if self._is_closed:
            raise WorkerClosed(CLOSED_MESSAGE)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        request = Request(replica, observation, due, loop.create_future(), now, is_alone, may_move)
        self._requests.add(request)
        self.last_used_at = now
        self._inbox.put(request)
        if self._timer is None:
            self._timer = loop.call_later(self._check_interval, self._check_batches, loop, now + self._check_interval)
        try:
            return await request.outcome
        finally:
            self._requests.discard(request)

    async def close(self, within: float) -> bool:
        """End the thread after its running batch; returns whether it ended in time. All waiting requests fail."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()  # here and not in another thread: timers belong to the loop
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, within)
        await asyncio.sleep(0)  # the present batch's answer is on its way to the loop
        for request in tuple(self._requests):
            if request.is_awaited:
                request.outcome.set_exception(WorkerClosed(CLOSED_MESSAGE))
        return not self._thread.is_alive()

    # Looking after the thread, on the event loop.

    def _check_batches(self, loop: asyncio.AbstractEventLoop, expected: float) -> None:
        self._timer = None
        now = time.monotonic()
        current = self._current
        running = [*self._abandoned_batches, *filter(None, (current,))]
        if now - expected > self.stuck_after / 10:
            # This whole process stood still.
            for batch in running:
                batch.paused += now - expected
        for batch in running:
            ran = now - batch.started - batch.paused
            is_others = len(batch.members) > 1 or self.waiting or any(member.may_move for member in batch.members)
            if (
                not batch.is_abandoned
                and ran >= batch.overdue
                and is_others
                and len(self._abandoned_batches) < MAX_ABANDONED
            ):
                self._abandon(batch)
            if ran >= self.stuck_after:
                self._fail_stuck(batch)
        if self.pending or self._abandoned_batches:
            now, pause = time.monotonic(), self._check_interval
            self._timer = loop.call_later(pause, self._check_batches, loop, now + pause)

    def _abandon(self, batch: Batch) -> bool:
        """Replace a running batch's thread; its members run again alone or elsewhere. False if the batch has ended."""
        with self._lock:
            if self._current is not batch:
                return False
            self._current = None
            self.abandoned += 1
            batch.is_abandoned = True
            self._abandoned_batches.append(batch)
            self._thread = self._start_thread()
        overdue = Overdue()
        for member in batch.members:
            if member.may_move and member.is_awaited:
                member.outcome.set_exception(overdue)
            elif len(batch.members) > 1:
                # Any of these calls may block forever.
                self._requeue(member)
        return True

    def _fail_stuck(self, batch: Batch) -> None:
        if not (batch.is_abandoned or self._abandon(batch)):
            return
        self._abandoned_batches = [other for other in self._abandoned_batches if other is not batch]
        waiting = [member for member in batch.members if member.is_awaited and member.batch is batch]
        if waiting:
            logger.error("an inference did not return in %.1f s; its thread is replaced", self.stuck_after)
        for member in waiting:
            member.outcome.set_exception(InferenceStuck.after(self.stuck_after))

    def _requeue(self, member: Request) -> None:
        if member.is_awaited:
            member.is_alone, member.batch = True, None
            self._inbox.put(member)

    def _set_results(self, batch: Batch, results: Sequence[InferenceResult] | BaseException) -> None:
        if self._abandoned_batches:
            self._abandoned_batches = [other for other in self._abandoned_batches if other is not batch]
        if not isinstance(results, BaseException):
            self.batches[batch.size] = self.batches.get(batch.size, 0) + 1
            for member, result in zip(batch.members, results, strict=True):
                if not member.outcome.done():
                    member.outcome.set_result(result)
        elif len(batch.members) > 1:
            if not batch.is_abandoned:
                for member in batch.members:
                    self._requeue(member)
        elif batch.members[0].is_awaited:
            batch.members[0].outcome.set_exception(as_plain_exception(results))

    # The thread.

    def _start_thread(self) -> threading.Thread:
        name = self._name if not self.abandoned else f"{self._name}-{self.abandoned + 1}"
        thread = threading.Thread(target=self._run, args=(self._inbox, StackingBuffers()), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, inbox: _Inbox, stacks: StackingBuffers) -> None:
        """Receive requests, choose a batch, run it and hand over its results, until the worker is closed."""
        lower_priority(self._niceness)
        is_idle = False
        while inbox.receive(wait=is_idle):
            plan = inbox.scheduler.next_batch(time.monotonic())
            is_idle = plan is None
            if plan is None:
                continue
            batch = Batch(plan.members, plan.size, plan.latency, time.monotonic())
            with self._lock:
                self._current = batch
            results = _run_batch(batch, stacks)
            with self._lock:
                is_left = self._current is not batch
                if not is_left:
                    self._current = None
            self._busy_spans.append((batch.started, time.monotonic()))
            loop = batch.members[0].outcome.get_loop()
            try:
                loop.call_soon_threadsafe(self._set_results, batch, results)
            except RuntimeError:
                # Once the loop is closed, the results are not needed.
                if not loop.is_closed():
                    raise
            if is_left:
                return  # another thread works here now
            # With them a policy, and its weights, would wait here for the next request.
            del plan, batch, results


def _run_batch(batch: Batch, stacks: StackingBuffers) -> Sequence[InferenceResult] | BaseException:
    """Run a batch; returns a result for each of its members, or what the policy raised."""
    members, policy, shape = batch.members, batch.members[0].replica.policy, batch.members[0].shape
    for member in members:
        member.batch = batch
    try:
        if shape is None or batch.size == 1:
            observation = members[0].observation
        else:
            observation = stacks.stack(shape, [member.observation for member in members], batch.size)
        chunks = policy.act(observation)
        ended = time.monotonic()
        timings = dict(policy.timings)
        if len(members) > 1 and (not isinstance(chunks, np.ndarray) or chunks.shape[:1] != (batch.size,)):
            raise ValueError(f"a batch of {batch.size} was answered with {np.shape(chunks)}")
    except BaseException as error:  # raised again by the waiting side
        return error
    spent = ended - batch.started
    # Limit one outlier, such as a batch that hung for a minute; a slower device still shows in many samples.
    batch.latency.record(batch.size, min(spent, batch.overdue) if batch.is_abandoned else spent)
    results = []
    for row, member in enumerate(members):
        result = InferenceResult(
            # Copy each row, so that sessions cannot change each other's results.
            chunk=chunks[row : row + 1].copy() if len(members) > 1 else chunks,
            queue=batch.started - member.submitted,
            to_device=timings.get("to_device", 0.0),
            compute=timings.get("compute", spent),
            to_host=timings.get("to_host", 0.0),
            total=ended - member.submitted,
            batch=len(members),
        )
        results.append(result)
    return results
