"""Hints from any thread, held on the event loop until their time has come."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from hooks.deployment.debounce import Debounce, Hint


class Hints:
    """Takes them at any time; gives out those that are due."""

    def __init__(self, quiet: float, longest: float, now: Callable[[], float]):
        """As `Debounce`, by this clock."""
        self._told: deque[Hint] = deque()
        self._held = Debounce(quiet, longest)
        self._now = now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether none is held."""
        return not self._told and self._held.next_at() is None

    def tell(self, hint: Hint) -> None:
        """Take one. From any thread; never waits."""
        self._told.append(hint)
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._news.set)

    async def due(self) -> Sequence[Hint]:
        """Wait for the next that are due."""
        self._loop = asyncio.get_running_loop()
        try:
            return await self._wait()
        finally:
            self._loop = None

    async def _wait(self) -> Sequence[Hint]:
        while True:
            self._news.clear()
            while self._told:
                self._held.add(self._told.popleft(), self._now())
            if ripe := self._held.due(self._now()):
                return ripe
            at = self._held.next_at()
            try:
                async with asyncio.timeout(None if at is None else max(0.0, at - self._now())):
                    await self._news.wait()
            except TimeoutError:
                continue
