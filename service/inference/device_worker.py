"""One thread per device: forms batches, runs, abandons stuck ones."""

import asyncio
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from service.errors import PolicyFailed
from service.inference.batching import Batching, Chosen, Stacks, shape_of
from service.inference.loaded_policy import InferenceResult, InferenceStuck, Replica, frames_of
from service.threads import lower_priority


class Overdue(Exception):
    """A batch takes far longer than usual, and whoever asked may ask elsewhere.

    Attributes:
        is_counted: whether it was held against the device already; all members of the batch have this one error.
        answer: what the device will say all the same, where it can still be heard.
    """

    is_counted = False
    answer: "asyncio.Future[InferenceResult] | None" = None


class DeviceGone(Exception):
    """The device is there no more; whatever was asked of it can be asked of another one."""


class InputRefused(PolicyFailed):
    """The policy refused its input, which it would on any device; the text is for clients."""


class WorkerClosed(PolicyFailed):
    """There will be no answer any more."""

    status = 503
    code = "server_ending"


class DeviceWorker(Protocol):
    """Requests in, chunks out; belongs to the event loop it is used on."""

    @property
    def pending(self) -> int:
        """Requests that nobody has answered yet."""
        ...

    @property
    def last_used_at(self) -> float:
        """When it was asked last, monotonic."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether it owes an answer for longer than one usually takes: others are asked first."""
        ...

    @property
    def waiting(self) -> int:
        """Requests not yet begun."""
        ...

    @property
    def abandoned(self) -> int:
        """Threads left behind in a batch that did not return in time."""
        ...

    @property
    def batches(self) -> Mapping[int, int]:
        """How many there were of each size."""
        ...

    def load(self, now: float) -> float:
        """Share of the newest seconds that the device was used."""
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
        """Have a policy run on one observation, in a batch with others or alone.

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
        """Let go of the device, whose present batch gets so many seconds; whether that was enough."""
        ...


logger = logging.getLogger(__name__)

# Seconds that an inference may keep those of other robots waiting: three times what it usually takes, at least this,
# and so long when nobody knows.
OVERDUE = 0.1
UNKNOWN = 1.0
# Seconds after which a request goes before those that are due sooner: whoever has much time is not forgotten.
LONGEST_WAIT = 1.0
# Seconds that a device's load is of.
LOOKED_BACK = 5.0
# Threads left behind that may still come back; with so many a batch is waited for until it is stuck.
MOST_LEFT = 8

CLOSED = "the device is closed: the server is ending"


@dataclass(eq=False)
class Request:
    """One observation, and who waits for what to do about it.

    Attributes:
        deadline: when the caller's plan runs dry, monotonic; None when it has none.
        is_alone: it is not batched with others, because it may spoil what they get.
        may_move: another device can be asked when this one takes too long.
        batch: the newest one it is in.
        due: when it should be answered, monotonic; the device's thread works it out when it takes the request in.
    """

    replica: Replica
    observation: Mapping[str, np.ndarray]
    deadline: float | None
    outcome: asyncio.Future[InferenceResult]
    submitted: float
    is_alone: bool = False
    may_move: bool = False
    batch: "Batch | None" = None
    due: float = math.inf

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""
        return not self.outcome.done()


@dataclass(eq=False)
class Batch:
    """Requests that run together.

    Attributes:
        overdue: seconds after which it keeps others waiting for longer than they have to.
        paused: seconds in which this whole process stood still, and the batch with it.
        is_left: whether the device goes on without it; it may still come back.
    """

    members: Sequence[Request]
    size: int
    started: float
    overdue: float
    paused: float = 0.0
    is_left: bool = False


class _Requests:
    """A queue to the device's thread, which sleeps at a pipe until something comes; one puts, one takes.

    Whoever puts into a ``queue.SimpleQueue`` holds the interpreter's lock while it wakes the other thread, which wakes
    up to wait for that lock. ``os.write`` lets go of it: to the thread and back to the event loop takes 7 us instead
    of 35, and a fifth of the processor time (Linux 6.18 in a virtual machine of two cores, uvloop).
    """

    def __init__(self) -> None:
        self._waiting: deque[Request | None] = deque()
        self._is_reader_asleep = False
        self._read_end, self._write_end = os.pipe()
        weakref.finalize(self, _close, self._read_end, self._write_end).atexit = False

    def put(self, request: Request | None) -> None:
        """Add one; None ends the thread."""
        self._waiting.append(request)
        if self._is_reader_asleep:
            self._is_reader_asleep = False
            os.write(self._write_end, b"\0")

    def take(self) -> Request | None:
        """The oldest.

        Raises:
            IndexError: there is none.
        """
        return self._waiting.popleft()

    def wait(self) -> None:
        """Sleep until there is one."""
        while not self._waiting:
            self._is_reader_asleep = True
            # Looked at again: what was put before that was said has woken nobody.
            if not self._waiting:
                os.read(self._read_end, 64)
            self._is_reader_asleep = False


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@dataclass
class _Inbox:
    """What a thread hands on to the one that takes over."""

    requests: _Requests = field(default_factory=_Requests)
    batching: Batching[Request] = field(default_factory=Batching)


class InferenceWorker:
    """Requests in, chunks out; everything but the work itself belongs to the event loop it is used on.

    Attributes:
        abandoned: threads left behind in a batch that did not return in time.
        last_used_at: when it was asked last, monotonic.
        batches: how many there were of each size.
        is_late: never; a batch that takes too long is left aside, and the thread after it is as good as another's.
    """

    is_late = False

    def __init__(self, name: str = "device", niceness: int = 0, stuck_after: float = 5.0):
        self.stuck_after = stuck_after
        self.abandoned = 0
        self.last_used_at = 0.0
        self.batches: dict[int, int] = {}
        self._requests: set[Request] = set()
        self._is_closed = False
        self._busy: deque[tuple[float, float]] = deque(maxlen=256)
        self._name = name
        self._niceness = niceness
        self._inbox = _Inbox()
        self._lock = threading.Lock()
        self._current: Batch | None = None
        self._left: list[Batch] = []
        self._timer: asyncio.TimerHandle | None = None
        self._thread = self._start()

    @property
    def pending(self) -> int:
        """Requests that nobody has answered yet."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Requests not yet begun."""
        running = [*self._left, *filter(None, (self._current,))]
        begun = sum(member.is_wanted and member.batch is batch for batch in running for member in batch.members)
        return max(self.pending - begun, 0)

    def load(self, now: float) -> float:
        """Share of the newest seconds that the device was used."""
        since = now - LOOKED_BACK
        spent = [(began, ended) for began, ended in tuple(self._busy) if ended > since]
        if len(spent) == self._busy.maxlen:
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
        """Have a policy run on one observation, in a batch with others or alone.

        Raises:
            Overdue: with ``may_move``, its batch takes far longer than usual.
            InferenceStuck: it did not come back in ``stuck_after`` seconds; its thread was replaced.
            WorkerClosed: the device is closed, or was before there was an answer.
            Exception: whatever the policy raises for this observation.
        """
        if self._is_closed:
            raise WorkerClosed(CLOSED)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        request = Request(replica, observation, due, loop.create_future(), now, is_alone, may_move)
        self._requests.add(request)
        self.last_used_at = now
        self._inbox.requests.put(request)
        if self._timer is None:
            self._start_timer(loop)
        try:
            return await request.outcome
        finally:
            self._requests.discard(request)

    async def close(self, within: float) -> bool:
        """End the thread after its present batch; whether it ended in time (seconds). Nobody is left waiting."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()  # here and not in another thread: timers belong to the loop
        self._inbox.requests.put(None)
        await asyncio.to_thread(self._thread.join, within)
        await asyncio.sleep(0)  # the present batch's answer is on its way to the loop
        for request in tuple(self._requests):
            if request.is_wanted:
                request.outcome.set_exception(WorkerClosed(CLOSED))
        return not self._thread.is_alive()

    # Looking after the thread, on the event loop.

    def _start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        pause = min(OVERDUE, self.stuck_after) / 4
        self._timer = loop.call_later(pause, self._look, loop, time.monotonic() + pause)

    def _look(self, loop: asyncio.AbstractEventLoop, expected: float) -> None:
        self._timer = None
        now = time.monotonic()
        current = self._current
        running = [*self._left, *filter(None, (current,))]
        if now - expected > self.stuck_after / 10:
            # This whole process stood still.
            for batch in running:
                batch.paused += now - expected
        for batch in running:
            ran = now - batch.started - batch.paused
            is_others = len(batch.members) > 1 or self.waiting or any(member.may_move for member in batch.members)
            if not batch.is_left and ran >= batch.overdue and is_others and len(self._left) < MOST_LEFT:
                self._leave(batch)
            if ran >= self.stuck_after:
                self._give_up(batch)
        if self.pending or self._left:
            self._start_timer(loop)

    def _leave(self, batch: Batch) -> bool:
        """Go on without a batch in another thread; its members run once more, each alone, or elsewhere.

        False when it is over.
        """
        with self._lock:
            if self._current is not batch:
                return False
            self._current = None
            self.abandoned += 1
            batch.is_left = True
            self._left.append(batch)
            self._thread = self._start()
        overdue = Overdue()
        for member in batch.members:
            if member.may_move and member.is_wanted:
                member.outcome.set_exception(overdue)
            elif len(batch.members) > 1:
                # One of them may be what it does not come back from.
                self._run_again(member)
        return True

    def _give_up(self, batch: Batch) -> None:
        if not (batch.is_left or self._leave(batch)):
            return
        self._left = [other for other in self._left if other is not batch]
        mine = [member for member in batch.members if member.is_wanted and member.batch is batch]
        if mine:
            logger.error("an inference did not return in %.1f s; its thread is replaced", self.stuck_after)
        for member in mine:
            member.outcome.set_exception(InferenceStuck(f"inference did not return in {self.stuck_after:g} s"))

    def _run_again(self, member: Request) -> None:
        if member.is_wanted:
            member.is_alone, member.batch = True, None
            self._inbox.requests.put(member)

    def _set_results(self, batch: Batch, results: Sequence[InferenceResult] | BaseException) -> None:
        if self._left:
            self._left = [other for other in self._left if other is not batch]
        if not isinstance(results, BaseException):
            self.batches[batch.size] = self.batches.get(batch.size, 0) + 1
            for member, result in zip(batch.members, results, strict=True):
                if not member.outcome.done():
                    member.outcome.set_result(result)
        elif len(batch.members) > 1:
            if not batch.is_left:
                for member in batch.members:
                    self._run_again(member)
        elif batch.members[0].is_wanted:
            batch.members[0].outcome.set_exception(_portable(results))

    # The thread.

    def _start(self) -> threading.Thread:
        name = self._name if not self.abandoned else f"{self._name}-{self.abandoned + 1}"
        thread = threading.Thread(target=self._run, args=(self._inbox, Stacks()), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, inbox: _Inbox, stacks: Stacks) -> None:
        lower_priority(self._niceness)
        while _take_in(inbox):
            chosen = inbox.batching.choose(time.monotonic())
            if chosen is None:
                continue
            batch = _batch_of(chosen, chosen.line)
            with self._lock:
                self._current = batch
            found = _infer(batch, chosen.line, stacks)
            with self._lock:
                is_left = self._current is not batch
                if not is_left:
                    self._current = None
            self._busy.append((batch.started, time.monotonic()))
            self._deliver(batch, found)
            if is_left:
                return  # somebody else works here now
            del chosen, batch, found  # with them a policy, and its weights, would wait here for the next request

    def _deliver(self, batch: Batch, found: Sequence[InferenceResult] | BaseException) -> None:
        loop = batch.members[0].outcome.get_loop()
        try:
            loop.call_soon_threadsafe(self._set_results, batch, found)
        except RuntimeError:
            # The loop has ended, and whoever waited with it.
            if not loop.is_closed():
                raise


def _take_in(inbox: _Inbox) -> bool:
    """Let all that came wait for its turn; sleeps when nothing else is to be done. False at the end."""
    if not len(inbox.batching):
        inbox.requests.wait()
    while True:
        try:
            request = inbox.requests.take()
        except IndexError:
            return True
        if request is None:
            return False
        replica = request.replica
        try:
            frames, shape = frames_of(request.observation), shape_of(request.observation)
        except Exception:  # the policy, asked alone, says what is wrong with it
            frames, shape = frozenset(), None
        if request.is_alone or shape is None:
            request.is_alone, shape = True, None
        latency = replica.costs(frames)
        soon = request.submitted + 2 * latency.slow(1)
        request.due = min(soon if request.deadline is None else request.deadline, request.submitted + LONGEST_WAIT)
        sizes = (1,) if request.is_alone else replica.can(frames)
        # What runs alone has the place in line that its policy has, with such frames.
        inbox.batching.add((replica, frames, shape), request, latency, sizes)


def _batch_of(chosen: Chosen[Request], line: Any) -> Batch:
    replica, frames, _ = line
    costs = replica.costs(frames)
    overdue = max(3 * costs.usual(chosen.size), OVERDUE) if costs.is_known else UNKNOWN
    batch = Batch(chosen.members, chosen.size, time.monotonic(), overdue)
    for member in chosen.members:
        member.batch = batch
    return batch


def _infer(batch: Batch, line: Any, stacks: Stacks) -> Sequence[InferenceResult] | BaseException:
    replica, frames, shape = line
    members = batch.members
    try:
        if batch.size == 1:
            observation = members[0].observation
        else:
            observation = stacks.stack(shape, [member.observation for member in members], batch.size)
        chunks = replica.policy.act(observation)
        ended = time.monotonic()
        timings = dict(replica.policy.timings)
        if len(members) > 1 and (not isinstance(chunks, np.ndarray) or chunks.shape[:1] != (batch.size,)):
            raise ValueError(f"a batch of {batch.size} was answered with {np.shape(chunks)}")
    except BaseException as error:  # whatever it is belongs to the waiting side, which raises it there
        return error
    spent = ended - batch.started
    # One that hung for a minute must not turn robots away for as long as it is remembered; a device that got slower is
    # known all the same.
    replica.costs(frames).learn(batch.size, min(spent, batch.overdue) if batch.is_left else spent)
    return [
        InferenceResult(
            # A copy each: what one session does with its rows is nobody else's business.
            chunk=chunks[row : row + 1].copy() if len(members) > 1 else chunks,
            queue=batch.started - member.submitted,
            to_device=timings.get("to_device", 0.0),
            compute=timings.get("compute", spent),
            to_host=timings.get("to_host", 0.0),
            total=ended - member.submitted,
            batch=len(members),
        )
        for row, member in enumerate(members)
    ]


def _portable(error: BaseException) -> BaseException:
    # A future cannot carry a StopIteration, and an exit of that thread is no exit of the process.
    is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
    return error if is_plain else RuntimeError(f"{type(error).__name__} in a policy")
