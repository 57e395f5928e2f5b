"""Whoever asks: one request of theirs at a time, and alone for a while after one that failed."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

Answer = TypeVar("Answer")

# Inferences that go well before one who failed is put together with others again.
TRUSTED_AFTER = 16


class Askers:
    """Kept by reference only while they live."""

    def __init__(self) -> None:
        self._turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()
        self._suspects: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    async def ask(self, asker: object | None, ask: Callable[[bool], Awaitable[Answer]]) -> Answer:
        """Ask when it is their turn; ``ask`` is told whether it may spoil what others get. What it raises counts."""
        if asker is None:
            return await ask(False)
        turn = self._turns.get(asker)
        if turn is None:
            turn = self._turns[asker] = asyncio.Lock()
        async with turn:
            left = self._suspects.get(asker, 0)
            try:
                answer = await ask(left > 0)
            except Exception:
                self._suspects[asker] = TRUSTED_AFTER
                raise
            if left > 1:
                self._suspects[asker] = left - 1
            elif left:
                del self._suspects[asker]
            return answer
