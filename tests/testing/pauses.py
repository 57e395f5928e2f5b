"""How long this machine stood still: one that others use too takes its cores away when it likes."""

import os
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

PERIOD = 0.01
# A timer that is less late than this waited for the turn of another thread.
LEAST = 0.03


class Pauses:
    """Bare timers, one for each core in a thread of its own, which note when they come late; a context."""

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
        with suppress(AttributeError, OSError):  # where a thread may not choose, one core is as good as another
            os.sched_setaffinity(threading.get_native_id(), {core})
        while not self._over.is_set():
            time.sleep(PERIOD)
            with self._lock:
                now = time.monotonic()
                if now - self._due[core] > LEAST:
                    self._stood.append((self._due[core], now))
                self._due[core] = now + PERIOD

    def all(self, since: float, until: float | None = None) -> list[float]:
        """Seconds of each pause of any core between two times of ``time.monotonic``, or from one to now."""
        with self._lock:
            now = time.monotonic()
            # Whoever asks may have been woken before the timers were.
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
        """Seconds from one time to another, or to now, without those in which a core stood still."""
        until = time.monotonic() if until is None else until
        return until - since - self.lost(since, until)
