"""Sleeping threads, one per core, whose late wake-ups show how long a core of the machine stood still."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

PERIOD = 0.005


class Witness:
    """The longest that a thread without work was kept from running, between two looks.

    Args:
        core: on which it sleeps; a virtual machine may lose one of them for a while, and keep the others.
    """

    def __init__(self, core: int):
        self._core = core
        self._longest = 0.0

    def taken(self) -> float:
        """The longest since the last look, in seconds; begins anew."""
        longest, self._longest = self._longest, 0.0
        return longest

    def watch(self, ended: threading.Event) -> None:
        """Sleep until the event, in the thread that this is called in."""
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {self._core})
        due = time.monotonic()
        while not ended.wait(max(due + PERIOD - time.monotonic(), 0)):
            due += PERIOD
            late = time.monotonic() - due
            self._longest = max(self._longest, late)
            if late > PERIOD:
                due += late


@contextmanager
def witnesses() -> Iterator[list[Witness]]:
    """One for each core, until the block ends; their process must have nothing else to do."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    watching, ended = [Witness(core) for core in cores], threading.Event()
    with ExitStack() as stack:
        for one in watching:
            thread = threading.Thread(target=one.watch, args=(ended,), daemon=True)
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        yield watching
