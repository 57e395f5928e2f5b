"""A process's thread that only sleeps: how late it wakes says how long the machine stood still."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD = 0.005


class Witness:
    """The longest that a thread without work was kept from running, between two looks."""

    def __init__(self) -> None:
        self.longest = 0.0

    def taken(self) -> float:
        """The longest since the last look, in seconds; begins anew."""
        longest, self.longest = self.longest, 0.0
        return longest

    def _watch(self, ended: threading.Event) -> None:
        due = time.monotonic()
        while not ended.wait(max(due + PERIOD - time.monotonic(), 0)):
            due += PERIOD
            late = time.monotonic() - due
            self.longest = max(self.longest, late)
            if late > PERIOD:
                due += late


@contextmanager
def witness() -> Iterator[Witness]:
    """A thread that watches until the block ends; its process must have nothing else to do."""
    watching, ended = Witness(), threading.Event()
    thread = threading.Thread(target=watching._watch, args=(ended,), daemon=True)
    thread.start()
    try:
        yield watching
    finally:
        ended.set()
        thread.join()
