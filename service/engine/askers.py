"""Whoever asks: one request of theirs at a time, and alone for a while after one that failed."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

Answer = TypeVar("Answer")

# Inferences that go well before one who failed is put together with others again.
TRUSTED_AFTER = 16


@dataclass(eq=False, slots=True)
class _Asker:
    """One of them.

    Attributes:
        turn: held by the request that is under way.
        left: requests that have to go well before it is trusted again.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    left: int = 0


class Askers:
    """Kept by reference only while they live."""

    def __init__(self) -> None:
        self._askers: WeakKeyDictionary[object, _Asker] = WeakKeyDictionary()

    async def ask(self, asker: object | None, ask: Callable[[bool], Awaitable[Answer]]) -> Answer:
        """Ask when it is their turn; ``ask`` is told whether it may spoil what others get. What it raises counts."""
        if asker is None:
            return await ask(False)
        known = self._askers.get(asker)
        if known is None:
            known = self._askers[asker] = _Asker()
        async with known.turn:
            left = known.left
            try:
                answer = await ask(left > 0)
            except Exception:
                known.left = TRUSTED_AFTER
                raise
            known.left = max(left - 1, 0)
            return answer
