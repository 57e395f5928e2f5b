"""Calls in threads, with timeouts."""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def start_in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Start a call in a new daemon thread; return the future of its result.

    A thread of a pool would hold the end of the program, and an address look-up that hangs cannot be ended.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # so that it cannot be cancelled while the thread sets its result
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as error:  # handed on to who waits
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="hub-call", daemon=True).start()
    return future


def run_with_timeout(seconds: float, work: Callable[[], Result]) -> Result:
    """Return a call's result; after the timeout, leave its thread alone and raise ``TimeoutError``."""
    future = start_in_thread(work)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise  # the work's own
        raise TimeoutError(f"not done in {seconds:g} s") from None
