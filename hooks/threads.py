"""Calls in threads, with timeouts."""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def start_in_thread(work: Callable[[], Result]) -> Future[Result]:
    """Start a call in a new daemon thread; return the future of its result.

    The program would wait for a thread of a pool at its end, and an address look-up that hangs cannot be cancelled.
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # A running future cannot be cancelled while the thread sets its result.
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as error:  # The caller gets it from the future.
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="hub-call", daemon=True).start()
    return future


def run_with_timeout(seconds: float, work: Callable[[], Result]) -> Result:
    """Return a call's result; after the timeout, raise ``TimeoutError`` and let its thread continue."""
    future = start_in_thread(work)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():
            raise  # The call itself raised it.
        raise TimeoutError(f"not done in {seconds:g} s") from None
