"""Work off the event loop, in threads that can be abandoned."""

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


def lower_priority(niceness: int) -> None:
    """Raise the niceness of this thread by so many steps, and that of threads it will start.

    On Linux niceness belongs to a thread and is inherited, so a numeric library whose thread pool
    is first used from here computes below the event loop. Elsewhere it would be the whole process's: left alone.

    It is for what computes without Python's lock. A thread that keeps the lock for milliseconds, as a parser of JSON
    does, must not stand below the event loop: where other programs use the machine, too, they take its core away, and
    the loop waits for the lock meanwhile (27 ms instead of 10 with four of them on two cores).
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19))


@dataclass
class Job(Generic[Result]):
    """One call that a worker thread runs.

    Attributes:
        submitted, started, ended: ``time.monotonic()``; the latter two None until then.
        is_unwanted: set it and a job that has not begun is skipped.
    """

    call: Callable[[], Result]
    outcome: asyncio.Future[Result]
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    ended: float | None = None
    is_unwanted: bool = False

    def run(self) -> None:
        """Run the call, and hand its result to the event loop that waits for it."""
        self.started = time.monotonic()
        try:
            result = self.call()
        except BaseException as error:  # whatever it is belongs to the waiting side, which raises it there
            self.ended = time.monotonic()
            # A future cannot carry a StopIteration, and an exit of this thread is no exit of the process.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            self._deliver(_fail, error if is_plain else RuntimeError(f"{type(error).__name__} in {self.call!r}"))
        else:
            self.ended = time.monotonic()
            self._deliver(_succeed, result)

    def _deliver(self, how: Callable[[asyncio.Future[Any], Any], None], what: object) -> None:
        loop = self.outcome.get_loop()
        try:
            loop.call_soon_threadsafe(how, self.outcome, what)
        except RuntimeError:
            # The loop has ended, and whoever waited with it.
            if not loop.is_closed():
                raise


def _succeed(outcome: asyncio.Future[Any], result: object) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: asyncio.Future[Any], error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


class Worker:
    """Thread that runs jobs in order; when a job is stuck, another thread takes over.

    The thread is a daemon: a call that never returns must not keep the process from ending.

    Attributes:
        abandoned: how many threads were left behind in a job that did not return in time.
    """

    def __init__(self, name: str, niceness: int = 0):
        self.abandoned = 0
        self._name = name
        self._niceness = niceness
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._current: Job[Any] | None = None
        self._thread = self._start()

    def submit(self, call: Callable[[], Result]) -> Job[Result]:
        """Queue a call; await ``job.outcome`` on the loop that this is called on."""
        job = Job(call, asyncio.get_running_loop().create_future())
        self._jobs.put(job)
        return job

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        return self._jobs.qsize()

    def abandon(self, job: Job[Any]) -> bool:
        """Leave the thread that is stuck in this job behind and start a new one; False when no thread is in it."""
        with self._lock:
            if self._current is not job:
                return False
            self._current = None
            self.abandoned += 1
            self._thread = self._start()
        return True

    def close(self, timeout: float) -> bool:
        """End the thread after its present job; returns whether it ended within ``timeout`` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _start(self) -> threading.Thread:
        name = self._name if not self.abandoned else f"{self._name}-{self.abandoned + 1}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        lower_priority(self._niceness)
        while (job := self._jobs.get()) is not None:
            if job.is_unwanted:
                continue
            with self._lock:
                self._current = job
            job.run()
            with self._lock:
                if self._current is not job:
                    return  # left behind; somebody else works here now
                self._current = None
            del job  # with it a policy, and its weights, would wait here for the next job


def call_in_thread(call: Callable[[], Result], name: str, niceness: int = 0) -> asyncio.Future[Result]:
    """Run one call in a daemon thread of its own."""
    job = Job(call, asyncio.get_running_loop().create_future())

    def run() -> None:
        lower_priority(niceness)
        job.run()

    threading.Thread(target=run, name=name, daemon=True).start()
    return job.outcome


def settle_threadsafe(loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], result: Any) -> None:
    """Set the result or the error of a future of this loop, from any thread."""
    try:
        loop.call_soon_threadsafe(settle, outcome, result)
    except RuntimeError:
        # The loop has ended, and whoever waited with it.
        if not loop.is_closed():
            raise


def settle(outcome: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result, or its error where the result is an exception; nothing happens when it is done already."""
    if outcome.done():
        return
    if isinstance(result, BaseException):
        outcome.set_exception(result)
        mark_retrieved(outcome)
    else:
        outcome.set_result(result)


def mark_retrieved(answer: asyncio.Future[Any]) -> None:
    """Mark a future's error as retrieved, so that asyncio does not log it when nobody awaits it."""
    if not answer.cancelled():
        answer.exception()
