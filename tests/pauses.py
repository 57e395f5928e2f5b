"""How long this process stood still: a machine that others use too takes its processors away when it likes."""

import threading
import time
from types import TracebackType
from typing import Self

PERIOD = 0.01
# A timer that is less late than this waited for the turn of another thread.
LEAST = 0.03


class Pauses:
    """A bare timer in a thread of its own, which notes when it came late; begins and ends as a context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._stood: list[tuple[float, float]] = []
        self._due = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pauses", daemon=True)

    def __enter__(self) -> Self:
        self._due = time.monotonic() + PERIOD
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            time.sleep(PERIOD)
            with self._lock:
                now = time.monotonic()
                if now - self._due > LEAST:
                    self._stood.append((self._due, now))
                self._due = now + PERIOD

    def all(self, since: float, until: float | None = None) -> list[float]:
        """Seconds of each pause between two times of ``time.monotonic``, or from one to now."""
        with self._lock:
            now = time.monotonic()
            # Whoever asks may have been woken before the timer was.
            stood = [*self._stood, *([(self._due, now)] if now - self._due > LEAST else [])]
        until = now if until is None else until
        parts = [min(end, until) - max(begin, since) for begin, end in stood]
        return [part for part in parts if part > 0]

    def lost(self, since: float, until: float | None = None) -> float:
        """Seconds in which the process stood still, from one time to another, or to now."""
        return sum(self.all(since, until))

    def running(self, since: float, until: float | None = None) -> float:
        """Seconds from one time to another, or to now, without those in which the process stood still."""
        until = time.monotonic() if until is None else until
        return until - since - self.lost(since, until)
