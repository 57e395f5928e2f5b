"""Device worker: one thread per device that forms batches and runs them."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from service.errors import PolicyFailed
from service.inference.batching import (
    BatchPlan,
    BatchScheduler,
    LatencyModel,
    ObservationLayout,
    Shape,
    StackingBuffers,
    read_layout,
)
from service.inference.loaded_policy import InferenceResult, InferenceStuck, Replica
from service.threads import as_plain_exception


class Overdue(Exception):
    """An answer takes far longer than usual, so the request may be sent to another device.

    Attributes:
        answer: late result of the device, if it can still be received.
    """

    answer: "asyncio.Future[InferenceResult] | None" = None


class DeviceGone(Exception):
    """The device is gone; its requests can go to another device."""


class DeviceStuck(DeviceGone):
    """The device was given up because it did not answer this request, which may be the cause."""


class EngineLost(PolicyFailed):
    """The engine ended during a call that is repeated when another engine has the policy."""

    status = 503
    code = "engine_lost"


class InputRefused(PolicyFailed):
    """The policy refused its input, as it would on any device; the text is for clients."""


class WorkerClosed(PolicyFailed):
    """The worker is closed and answers no more requests."""

    status = 503
    code = "server_ending"


class DeviceWorker(Protocol):
    """Interface of a worker that answers requests on one device; used on one event loop.

    Attributes:
        pending: number of requests that have no answer yet.
        waiting: number of requests that have not begun to run.
        last_used_at: monotonic time of the newest request.
        is_late: whether an answer takes longer than usual; other devices get requests first then.
        batches: number of batches run, by batch size.
    """

    @property
    def pending(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def last_used_at(self) -> float: ...
    @property
    def is_late(self) -> bool: ...
    @property
    def batches(self) -> Mapping[int, int]: ...

    def load(self, now: float) -> float:
        """Share of the last seconds that the device was busy."""
        ...

    async def submit(
        self, replica: Replica, observation: Mapping[str, np.ndarray], due: float | None, *, may_move: bool = False
    ) -> InferenceResult:
        """Run a policy on one observation, in a batch with others.

        Args:
            due: monotonic time by which the answer is needed; as soon as possible when None.
            may_move: whether another device can run it, too.

        Raises:
            Overdue: with ``may_move``, the answer takes far longer than usual.
            DeviceGone: the device is gone.
            InputRefused: no other device would accept the observation.
            InferenceStuck: the inference did not return in time.
            WorkerClosed: the device is closed, or was before there was an answer.
            Exception: raised by the policy for this observation.
        """
        ...

    async def close(self, within: float) -> bool:
        """Release the device; its running batch gets ``within`` seconds. Returns whether that was enough."""
        ...


logger = logging.getLogger(__name__)

# Seconds after which a request goes before earlier deadlines, so that it does not starve.
LONGEST_WAIT = 1.0
# Window of a device's load, in seconds.
LOAD_WINDOW = 5.0
# Looks at the running batch in ``stuck_after`` seconds.
CHECKS = 20
# Seconds up to which an inference may run on the event loop.
MAX_INLINE = 0.01

CLOSED_MESSAGE = "the device is closed: the server is ending"


@dataclass(eq=False)
class InferenceRequest:
    """One observation and the future of its result.

    Attributes:
        deadline: monotonic time at which the caller's plan ends, or None.
        shape: shapes shared by observations that can be stacked with it; None runs it alone.
        latency: latencies of such batches, set by the device's thread.
    """

    replica: Replica
    observation: Mapping[str, np.ndarray]
    deadline: float | None
    outcome: asyncio.Future[InferenceResult]
    submitted: float
    shape: tuple[Shape, ...] | None = None
    latency: LatencyModel | None = None
    _due: float | None = None

    @property
    def is_alone(self) -> bool:
        """Whether it is not batched, because it may spoil the results of others."""
        return self.shape is None

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
        """Whether the caller still waits for the result."""
        return not self.outcome.done()


class InferenceWorker:
    """A `DeviceWorker` for a device of this process, which runs batches on a thread.

    A batch that does not return cannot be ended, and blocks the device: the process has to be replaced.
    """

    def __init__(self, name: str = "device", stuck_after: float = 5.0):
        self.stuck_after = stuck_after
        self.last_used_at = 0.0
        self.batches: dict[int, int] = {}
        self._requests: set[InferenceRequest] = set()
        self._is_closed = False
        self._busy_spans: deque[tuple[float, float]] = deque(maxlen=256)
        self._arriving: SimpleQueue[InferenceRequest | None] = SimpleQueue()
        self._scheduler: BatchScheduler[InferenceRequest] = BatchScheduler()
        self._current: BatchPlan[InferenceRequest] | None = None
        self._checked: BatchPlan[InferenceRequest] | None = None
        self._check_count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Requests that have no answer yet."""
        return len(self._requests)

    @property
    def is_late(self) -> bool:
        """Whether the running batch is stuck."""
        return self._check_count >= CHECKS

    @property
    def waiting(self) -> int:
        """Requests that have not begun to run."""
        current = self._current
        return max(self.pending - sum(member.is_awaited for member in (current.members if current else ())), 0)

    def load(self, now: float) -> float:
        """Share of the last seconds that the device was busy."""
        since = now - LOAD_WINDOW
        spent = [(began, ended) for began, ended in tuple(self._busy_spans) if ended > since]
        if len(spent) == self._busy_spans.maxlen:
            since = spent[0][0]  # there were more before them
        return min(sum(ended - max(began, since) for began, ended in spent) / max(now - since, 1e-9), 1.0)

    async def submit(
        self, replica: Replica, observation: Mapping[str, np.ndarray], due: float | None, *, may_move: bool = False
    ) -> InferenceResult:
        """See ``DeviceWorker.submit``; a request does not move to another device."""
        if self._is_closed:
            raise WorkerClosed(CLOSED_MESSAGE)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        request = InferenceRequest(replica, observation, due, loop.create_future(), now)
        self._requests.add(request)
        self.last_used_at = now
        self._arriving.put(request)
        if self._timer is None:
            self._timer = loop.call_later(self.stuck_after / CHECKS, self._check, loop)
        try:
            return await request.outcome
        finally:
            self._requests.discard(request)

    def run_now(self, replica: Replica, observation: Mapping[str, np.ndarray]) -> InferenceResult | None:
        """Run a short inference on the event loop if the device is idle, which saves two changes of the thread.

        Only for a process that another process watches: an inference that does not return blocks the event loop.

        Returns:
            None if the request has to be submitted: others wait, the inference may be long, or the policy raised.
        """
        latency = replica.latencies[read_layout(observation).frames]
        is_short = latency.is_measured and latency.measured(1).p90 < MAX_INLINE
        if not is_short or self._is_closed or self._requests or self._current is not None:
            return None
        self.last_used_at = began = time.monotonic()
        request = InferenceRequest(replica, observation, None, asyncio.get_running_loop().create_future(), began)
        results = _run_batch(BatchPlan(None, [request], 1, latency), began, StackingBuffers())
        self._busy_spans.append((began, time.monotonic()))
        if isinstance(results, BaseException):
            return None
        self.batches[1] = self.batches.get(1, 0) + 1
        return results[0]

    async def close(self, within: float) -> bool:
        """End the thread after its running batch; returns whether it ended in time. All waiting requests fail."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()  # here and not in another thread: timers belong to the loop
        self._arriving.put(None)
        await asyncio.to_thread(self._thread.join, within)
        await asyncio.sleep(0)  # the present batch's answer is on its way to the loop
        for request in tuple(self._requests):
            if request.is_awaited:
                request.outcome.set_exception(WorkerClosed(CLOSED_MESSAGE))
        return not self._thread.is_alive()

    # On the event loop.

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the requests of a stuck batch, and later those behind it.

        Checks are counted instead of seconds, because time in which the whole process is stopped does not count.
        """
        batch = self._current
        self._check_count = self._check_count + 1 if batch is not None and batch is self._checked else 0
        self._checked = batch
        if batch is not None and self._check_count >= CHECKS:
            stuck = batch.members if self._check_count < 2 * CHECKS else tuple(self._requests)
            for request in filter(lambda request: request.is_awaited, stuck):
                logger.error("an inference did not return in %.1f s", self.stuck_after)
                request.outcome.set_exception(InferenceStuck.after(self.stuck_after))
        is_busy = bool(self._requests) or batch is not None
        self._timer = loop.call_later(self.stuck_after / CHECKS, self._check, loop) if is_busy else None

    def _set_results(
        self, batch: BatchPlan[InferenceRequest], results: Sequence[InferenceResult] | BaseException
    ) -> None:
        if isinstance(results, BaseException):
            if batch.members[0].is_awaited:
                batch.members[0].outcome.set_exception(as_plain_exception(results))
            return
        self.batches[batch.size] = self.batches.get(batch.size, 0) + 1
        for member, result in zip(batch.members, results, strict=True):
            if member.is_awaited:
                member.outcome.set_result(result)

    # The thread.

    def _run(self) -> None:
        """Receive requests, choose a batch, run it and hand over its results, until the worker is closed."""
        stacks, is_idle = StackingBuffers(), True
        while self._receive(wait=is_idle):
            began = time.monotonic()
            batch = self._current = self._scheduler.next_batch(began)
            is_idle = batch is None
            if batch is None:
                continue
            results = _run_batch(batch, began, stacks)
            self._current = None
            self._busy_spans.append((began, time.monotonic()))
            if isinstance(results, BaseException) and len(batch.members) > 1:
                self._schedule_alone(batch.members)
            else:
                loop = batch.members[0].outcome.get_loop()
                try:
                    loop.call_soon_threadsafe(self._set_results, batch, results)
                except RuntimeError:
                    # Once the loop is closed, the results are not needed.
                    if not loop.is_closed():
                        raise
            # These references would keep a policy and its weights in memory until the next request.
            del batch, results

    def _receive(self, *, wait: bool) -> bool:
        """Move new requests to the scheduler, with ``wait`` sleep until there is one; False when closed."""
        while wait or not self._arriving.empty():
            request = self._arriving.get()
            if request is None:
                return False
            self._schedule(request)
            wait = False
        return True

    def _schedule_alone(self, requests: Sequence[InferenceRequest]) -> None:
        """Run the members of a failed batch again one by one, so that only the request fails that is the cause."""
        for request in requests:
            self._schedule(request, is_alone=True)

    def _schedule(self, request: InferenceRequest, *, is_alone: bool = False) -> None:
        replica = request.replica
        try:
            frames, shape = read_layout(request.observation)
        except Exception:  # The policy gets it alone and describes what is wrong.
            frames, shape = ObservationLayout(frozenset(), None)
        request.shape, request.latency = None if is_alone else shape, replica.latencies[frames]
        sizes = () if request.is_alone else replica.batch_sizes.get(frames, ())
        self._scheduler.add((replica, frames, request.shape), request, request.latency, sizes)


def _run_batch(
    batch: BatchPlan[InferenceRequest], began: float, stacks: StackingBuffers
) -> Sequence[InferenceResult] | BaseException:
    """Run a batch; returns a result for each of its members, or the error of the policy."""
    members, policy, shape = batch.members, batch.members[0].replica.policy, batch.members[0].shape
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
    spent = ended - began
    batch.latency.record(batch.size, spent)
    return [
        InferenceResult(
            # Copy each row, so that sessions cannot change each other's results.
            chunk=chunks[row : row + 1].copy() if len(members) > 1 else chunks,
            queue=began - member.submitted,
            to_device=timings.get("to_device", 0.0),
            compute=timings.get("compute", spent),
            to_host=timings.get("to_host", 0.0),
            total=ended - member.submitted,
            batch=len(members),
        )
        for row, member in enumerate(members)
    ]
