"""Lateness of this machine, which distinguishes a busy machine from a slow server."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path

PERIOD = 0.01
LOOK = 5  # Periods between measurements of the waiting time of processes.
WAY = 1.0  # Seconds within which an event has passed each process.
PAUSE = 0.2  # Seconds of a pause that may cause a hold: frames arrive every 0.04 s and may be 0.3 s old.


class Meter:
    """Timer at 100 Hz that records its own lateness, and the time for which processes waited for a core."""

    def __init__(self, chain: Callable[[], Collection[int]] = tuple) -> None:
        self.chain = chain
        self._late: deque[tuple[float, float]] = deque(maxlen=60_000)
        self.waited: deque[tuple[float, float]] = deque([(float("-inf"), 0.0)], maxlen=12_000)
        self._known: dict[Path, float] = {}
        self._stolen = stolen_seconds()

    async def run(self) -> None:
        while True:
            for _ in range(LOOK):
                due = time.monotonic() + PERIOD
                await asyncio.sleep(PERIOD)
                now = time.monotonic()
                self._late.append((now, now - due))
            self.look()

    def look(self) -> None:
        """Record the waiting time of the main threads, which run the event loops, and the worst other thread."""
        known, stolen = self._known, stolen_seconds()
        new, self._stolen = stolen - self._stolen, stolen
        self._known = {}
        for process in self.chain():
            others = [0.0]
            for thread in _threads(process):
                waited = _waited(thread)
                grown = waited - known.get(thread, waited)
                self._known[thread] = waited
                if thread.name == str(process):
                    new += grown
                else:
                    others.append(grown)
            new += max(others)
        self.waited.append((time.monotonic(), self.waited[-1][1] + new))

    def worst(self, since: float = 0.0, until: float = float("inf"), ways: int = 1) -> float:
        """Return the largest lateness in seconds for an event that passes this process ``ways`` times."""
        self.look()
        bare = max((late for at, late in self._late if since <= at <= until + PERIOD), default=0.0)
        return ways * bare + self._withheld(since, until)

    def lost(self, since: float) -> float:
        """Return the total lateness since then in seconds, for limits on operations of many steps."""
        self.look()
        before = max((waited for at, waited in self.waited if at <= since), default=0.0)
        return sum(late for at, late in self._late if at >= since and late > PERIOD) + self.waited[-1][1] - before

    def pauses(self, since: float) -> int:
        """Return the number of pauses since then that are long enough to hold a robot."""
        self.look()
        waits = [waited - before for (_, before), (at, waited) in pairwise(self.waited) if at >= since]
        return sum(late > PAUSE for at, late in self._late if at >= since) + sum(wait > PAUSE for wait in waits)

    def _withheld(self, since: float, until: float) -> float:
        """Return the longest common waiting time of the processes between these times, or in any second of it."""
        looks, worst, first = list(self.waited), 0.0, 0
        for at, waited in looks:
            if at < since:
                continue
            while first + 1 < len(looks) and looks[first + 1][0] <= max(since, at - WAY):
                first += 1
            worst = max(worst, waited - looks[first][1])
            if at >= until:  # This measurement includes all earlier waits.
                break
        return worst


def _threads(process: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return []


def _waited(thread: Path) -> float:
    """Return the seconds for which a thread was ready to run without a core, from the kernel's counters."""
    try:
        return int((thread / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def stolen_seconds() -> float:
    """Return the seconds since boot that the hypervisor withheld from the processors, or 0 if they are not reported."""
    try:
        return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
