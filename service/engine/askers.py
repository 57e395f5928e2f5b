"""Whoever asks: one request of theirs at a time, and alone for a while after one that failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

# Inferences that go well before one who failed is put together with others again.
TRUSTED_AFTER = 16


class Askers:
    """Kept by reference only while they live."""

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()
        self._suspects: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    @asynccontextmanager
    async def turn(self, asker: object | None) -> AsyncIterator[bool]:
        """Wait for their turn; whether what they ask may spoil what others get. An error in the context counts."""
        if asker is None:
            yield False
            return
        turn = self._turns.get(asker)
        if turn is None:
            turn = self._turns[asker] = asyncio.Lock()
        async with turn:
            left = self._suspects.get(asker, 0)
            try:
                yield left > 0
            except Exception:
                self._suspects[asker] = TRUSTED_AFTER
                raise
            if left > 1:
                self._suspects[asker] = left - 1
            else:
                self._suspects.pop(asker, None)
