"""Pauses of this machine, whose cores other processes also use."""

import os
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

PERIOD = 0.01
# Smaller delays come from waiting for another thread.
LEAST = 0.03


class Pauses:
    """Context with one timer thread per core that records late wake-ups."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._stood: list[tuple[float, float]] = []
        self._due = dict.fromkeys(cores, 0.0)
        self._threads = [threading.Thread(target=self._run, args=(core,), daemon=True) for core in cores]

    def __enter__(self) -> Self:
        self._due = dict.fromkeys(self._due, time.monotonic() + PERIOD)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, core: int) -> None:
        with suppress(AttributeError, OSError):  # Without permission, any core will do.
            os.sched_setaffinity(threading.get_native_id(), {core})
        while not self._over.is_set():
            time.sleep(PERIOD)
            with self._lock:
                now = time.monotonic()
                if now - self._due[core] > LEAST:
                    self._stood.append((self._due[core], now))
                self._due[core] = now + PERIOD

    def all(self, since: float, until: float | None = None) -> list[float]:
        """Return the seconds of each pause of any core from ``since`` to ``until`` (default: now), both monotonic."""
        with self._lock:
            now = time.monotonic()
            # The caller may wake up before the timers do.
            late = [(due, now) for due in self._due.values() if now - due > LEAST]
            stood = sorted([*self._stood, *late])
        until, parts, reached = now if until is None else until, list[float](), since
        for begin, end in stood:
            begin, end = max(begin, reached), min(end, until)
            if end > begin:
                parts.append(end - begin)
                reached = end
        return parts

    def lost(self, since: float, until: float | None = None) -> float:
        return sum(self.all(since, until))

    def running(self, since: float, until: float | None = None) -> float:
        """Return the seconds between two times without the pauses; ``until`` defaults to now."""
        until = time.monotonic() if until is None else until
        return until - since - self.lost(since, until)
