"""Clients that keep engines busy, and when the second engine was there, for ``benchmarks/ray_serve_growing.py``."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Load:
    """So many askers that ask again at once.

    Attributes:
        alone: seconds in which the first engine's rate is counted.
        settling: seconds that both take to settle in, and for which their rate is counted afterwards.
        patience: seconds until the second one has to be there.
    """

    askers: int
    alone: float
    settling: float
    patience: float
    _answered: list[float] = field(default_factory=list)
    _second_at: float | None = None

    async def put_on(self, ask: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """Until a while after the second one answered.

        Args:
            ask: whether it was the second one that answered.

        Raises:
            RuntimeError: there was none in time.
        """
        time = asyncio.get_running_loop().time
        began = time()
        asking = asyncio.gather(*(self._ask(ask) for _ in range(self.askers)))
        try:
            while self._second_at is None:
                await asyncio.wait([asking], timeout=0.02)
                if asking.done():
                    asking.result()
                if time() - began > self.patience:
                    raise RuntimeError(f"no second engine answered in {self.patience:g} s")
            second = self._second_at
            await asyncio.sleep(second + 2 * self.settling - time())
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        return {
            "second_answers_after_s": round(second - began, 2),
            "answers_per_second_of_one": self._rate(began, began + self.alone),
            "answers_per_second_of_two": self._rate(second + self.settling, second + 2 * self.settling),
        }

    def _rate(self, begin: float, end: float) -> float:
        return round(sum(begin <= at < end for at in self._answered) / (end - begin), 1)

    async def _ask(self, ask: Callable[[], Awaitable[bool]]) -> None:
        while True:
            is_second = await ask()
            now = asyncio.get_running_loop().time()
            self._answered.append(now)
            if is_second and self._second_at is None:
                self._second_at = now
