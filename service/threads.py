"""Work off the event loop, in daemon threads."""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


def lower_priority(niceness: int) -> None:
    """Lower the priority of this thread, and of threads that it starts later, by this number of steps.

    Use it only for work that releases Python's lock: a thread that other programs displace while it holds the lock
    delays the event loop. Nothing happens on systems other than Linux, where the niceness belongs to the process.
    """
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19))


_UNFINISHED = object()  # Result of a call that is not the last of several.


def run_call(call: Callable[[], Result], outcome: asyncio.Future[Result]) -> None:
    """Run a call on this thread, and pass its result or its error to the future on its event loop."""
    try:
        result = call()
    except BaseException as error:  # The waiting side raises every error.
        call_soon(outcome.get_loop(), _settle_waiting, outcome.set_exception, outcome, as_plain_exception(error))
    else:
        if result is not _UNFINISHED:
            call_soon(outcome.get_loop(), _settle_waiting, outcome.set_result, outcome, result)


def _settle_waiting(settle: Callable[[Any], None], outcome: asyncio.Future[Any], value: object) -> None:
    if not outcome.done():
        settle(value)


def as_plain_exception(error: BaseException) -> BaseException:
    """Return an error that a future can carry: no StopIteration, and no exit, which would end another thread."""
    is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
    return error if is_plain else RuntimeError(f"{type(error).__name__} in a worker thread")


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call a function on an event loop, from any thread; nothing happens when the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


class WorkerThread:
    """Daemon thread that runs calls in order, except calls that were cancelled before their turn.

    A call that never returns does not keep the process from ending. With a ``count`` there are that many threads, which
    begin calls in order. An executor of the standard library takes six times as long on the event loop.
    """

    def __init__(self, name: str, count: int = 1):
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        self._is_started = False

    def submit(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue a call; returns the future of its result."""
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._enqueue(call, outcome)
        return outcome

    def _enqueue(self, call: Callable[[], Any], outcome: asyncio.Future[Any]) -> None:
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        self._calls.put((call, outcome))

    def submit_all(self, calls: Sequence[Callable[[], Result]]) -> asyncio.Future[list[Result]]:
        """Queue one or more calls; returns the future of all results, or of the first error.

        The event loop wakes up once.
        """
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        results: list[Any] = [None] * len(calls)
        unfinished = [None] * len(calls)

        def run(index: int) -> Any:
            results[index] = calls[index]()
            unfinished.pop()
            return _UNFINISHED if unfinished else results

        for index in range(len(calls)):
            self._enqueue(partial(run, index), outcome)
        return outcome

    def close(self, timeout: float) -> bool:
        """End a single thread after its present call; returns whether it ended within ``timeout`` seconds."""
        self._calls.put(None)
        if self._is_started:
            self._threads[0].join(timeout)
        return not self._threads[0].is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            if not item[1].cancelled():
                run_call(*item)
            del item  # It may hold a policy, whose weights would stay in memory until the next call.


def call_in_thread(call: Callable[[], Result], name: str, niceness: int = 0) -> asyncio.Future[Result]:
    """Run one call in a daemon thread of its own."""
    outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    def run() -> None:
        lower_priority(niceness)
        run_call(call, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


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
    """Mark a future's error as retrieved, so that asyncio does not log it."""
    if not answer.cancelled():
        answer.exception()
