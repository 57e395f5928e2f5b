"""Latencies of batches that follow one another, and the machine's speed meanwhile: input of the fleet simulation."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.fleet import Side
from benchmarks.fleet_forming import LEVELS
from benchmarks.fleet_pace import resampled, smooth
from benchmarks.measured import percentiles

# Of each look: the pace for so long, then some batches of each size, at least for so long.
SECONDS = 0.75
BATCHES = 8
SHORTEST = 0.03
# The size whose batches tell the pace: short enough to tell moments apart, and as busy on all cores as large ones.
PROBE = 8


@dataclass(frozen=True)
class _Look:
    """Seconds of batches: of those that tell the pace, and of each size right after them."""

    during: str
    around: np.ndarray
    taken: Mapping[int, np.ndarray]


class Chains:
    """Engines that know one batch size each.

    Args:
        policy, device, frame: as of a ``Side``.
        sizes: of batches.
    """

    def __init__(self, policy: str, sizes: Sequence[int], device: str, frame: tuple[int, int] | None):
        self._sides = {size: Side(policy, sorted({1, size}), (device,), frame) for size in sizes}
        self._probe = min(sizes, key=lambda size: abs(size - PROBE))
        self._stack = AsyncExitStack()
        self._looks: list[_Look] = []

    async def __aenter__(self) -> "Chains":
        for side in self._sides.values():
            await self._stack.enter_async_context(side)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def look(self, during: str) -> None:
        """Measure once more; ``during`` names what is measured all around."""
        around = await self._chain(self._probe, SECONDS)
        taken = {
            size: await self._chain(size, max(BATCHES * side.costs.measured(size).median, SHORTEST))
            for size, side in self._sides.items()
        }
        self._looks.append(_Look(during, around, taken))

    async def _chain(self, size: int, seconds: float) -> np.ndarray:
        taken: list[float] = []
        while len(taken) < BATCHES:
            taken += await self._sides[size].chained(size, seconds)
        return np.array(taken)

    def figures(self) -> Mapping[str, Any]:
        """``chained_ms``: batch size to what it takes at the usual pace, and how many times as long as those that ran
        about the same time batches take (``beside``, quantiles of ``LEVELS``). ``pace``: that of the machine during
        each of what was measured.
        """
        usual = float(np.median(np.concatenate([look.around for look in self._looks])))
        paces: dict[str, list[float]] = {}
        for look in self._looks:
            paces.setdefault(look.during, []).extend(resampled(look.around, usual))
        chained = {}
        for size in self._sides:
            seconds = np.concatenate([look.taken[size] * usual / np.median(look.around) for look in self._looks])
            beside = [look.taken[size] / np.median(look.taken[size]) for look in self._looks]
            if size == self._probe:
                beside = [look.around / smooth(look.around) for look in self._looks]
            quantiles = np.quantile(np.concatenate(beside), LEVELS)
            chained[str(size)] = percentiles(seconds, (50, 90)) | {
                "batches": len(seconds),
                "beside": [round(float(factor), 3) for factor in quantiles],
            }
        return {"chained_ms": chained, "pace": paces}
