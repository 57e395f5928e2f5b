"""The main thread waits, in the background the server serves."""

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def serve_until_signal(stop: threading.Event, is_running: Callable[[], bool], close: Callable[[], object]) -> None:
    """Wait until ``stop`` is set, nothing runs any more, or SIGINT or SIGTERM sets it; then ``close``.

    Only the main thread is told of signals. A second one ends the process at once, also while it closes.
    """
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        for known in before:
            signal.signal(known, signal.SIG_DFL)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    try:
        # With a time limit, because Windows would not let a signal in.
        while is_running() and not stop.wait(1.0):
            pass
    finally:
        try:
            close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def has_running_loop() -> bool:
    """Whether this is called from a coroutine or a callback, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
