"""How late this machine is by itself: a bare loop that tells a busy machine from a slow server."""

import asyncio
import time
from collections import deque

PERIOD = 0.01


class Meter:
    """Wakes up a hundred times a second and notes how late."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=60_000)

    async def run(self) -> None:
        while True:
            due = time.monotonic() + PERIOD
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            self._late.append((now, now - due))

    def worst(self, since: float = 0.0, until: float = float("inf")) -> float:
        """The largest lateness in this time, in seconds."""
        return max((late for at, late in self._late if since <= at <= until + PERIOD), default=0.0)
