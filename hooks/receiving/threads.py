"""Threads for sync handlers; one that never returns does not keep the process from ending."""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Threads:
    """At most so many threads, started as they are needed. They are daemons, unlike those of an executor."""

    def __init__(self, count: int):
        self._count = count
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0

    def run(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call it in a thread; cancelling the future only ends the waiting."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        # Whoever waited may have given up; its error is no news then.
        outcome.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        context = contextvars.copy_context()

        def work() -> None:
            result: object = None
            error: Exception | None = None
            try:
                result = context.run(call)
            except StopIteration:  # a future cannot carry it
                error = RuntimeError("StopIteration in a handler")
            except Exception as raised:
                error = raised
            except BaseException as raised:  # an exit of this thread is no exit of the process
                error = RuntimeError(f"{type(raised).__name__} in a handler")
            with suppress(RuntimeError):  # the loop has ended, and whoever waited with it
                loop.call_soon_threadsafe(_tell, outcome, result, error)

        self._calls.put(work)
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=self._work, name=f"webhook-{self._started}", daemon=True).start()
        return outcome

    def close(self) -> None:
        """Let the threads end after what they do now."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def _tell(outcome: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)
