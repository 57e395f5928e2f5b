"""Policies that an engine could not have while others have them: when that is tried again, and what is said of it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Seconds until a first try again; each that fails doubles them, up to the second number.
FIRST = 5.0
MOST = 300.0


@dataclass
class _Lack:
    why: str
    tries: int
    failed_at: float
    again_at: float


class Lacking:
    """Reads no clock and asks nobody."""

    def __init__(self) -> None:
        self._lacks: dict[tuple[str, str], _Lack] = {}

    def failed(self, engine: str, handle: str, why: str, now: float) -> None:
        """It could not have it."""
        before = self._lacks.get((engine, handle))
        tries = 1 if before is None else before.tries + 1
        # After three days of tries the power alone would be more than a float can hold.
        self._lacks[engine, handle] = _Lack(why, tries, now, now + min(FIRST * 2.0 ** min(tries - 1, 60), MOST))

    def has(self, engine: str, handle: str) -> None:
        """It has it now."""
        self._lacks.pop((engine, handle), None)

    def keep(self, engines: Collection[str], handles: Collection[str]) -> None:
        """Nothing is wanted of other engines than these, nor of policies that none of them has."""
        for engine, handle in tuple(self._lacks):
            if engine not in engines or handle not in handles:
                del self._lacks[engine, handle]

    def forget(self, engine: str, before: float) -> None:
        """It tried all again; what was not heard of since then is not wanted any more."""
        for key, lack in tuple(self._lacks.items()):
            if key[0] == engine and lack.failed_at < before:
                del self._lacks[key]

    def due(self, now: float) -> Sequence[str]:
        """Engines that should try again."""
        return sorted({engine for (engine, _), lack in self._lacks.items() if now >= lack.again_at})

    def words(self, now: float) -> str:
        """What is wrong, for people; nothing when all is well."""
        return "; ".join(
            f"{engine} goes without policy {handle[:12]}, which others have: {lack.why} "
            f"(tried {lack.tries} times, {_when(lack.again_at - now)})"
            for (engine, handle), lack in sorted(self._lacks.items())
        )


def _when(seconds: float) -> str:
    return f"again in {seconds:.0f} s" if seconds > 0 else "and now again"
