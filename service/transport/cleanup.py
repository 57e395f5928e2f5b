"""Rooms that nobody uses any more are removed, now and then or when asked."""

import asyncio
import time
from collections.abc import Callable

from service.transport.address import Kind
from service.transport.rooms import Place, RoomTable


class Cleanup:
    """Removes rooms that are empty and were not touched for ``idle`` seconds; ``run`` does so every ``interval``."""

    def __init__(
        self,
        table: RoomTable,
        idle: float = 3600.0,
        interval: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.table = table
        self.idle = idle
        self.interval = interval
        self.is_running = False
        self._clock = clock

    def clean(self, kind: Kind | None = None) -> list[Place]:
        """Remove what is idle now, of one service or of both."""
        return self.table.clean(self._clock(), self.idle, kind)

    async def run(self) -> None:
        """Clean for ever; ends by being cancelled."""
        self.is_running = True
        try:
            while True:
                await asyncio.sleep(self.interval)
                self.clean()
        finally:
            self.is_running = False
