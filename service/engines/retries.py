"""When which engine loads which missing policy again."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# Seconds until a first try again; each that fails doubles them, up to the second number.
FIRST_RETRY = 5.0
LONGEST_RETRY = 300.0


@dataclass
class _Failure:
    why: str
    tries: int
    failed_at: float
    retry_at: float


class RetryState:
    """Schedule of retries: when which engine loads which missing policy again. Pure; reads no clock."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], _Failure] = {}

    def record_failure(self, engine: str, handle: str, why: str, now: float) -> None:
        """Record that an engine could not load a policy."""
        before = self._failures.get((engine, handle))
        tries = 1 if before is None else before.tries + 1
        # After three days of tries the power alone would be more than a float can hold.
        self._failures[engine, handle] = _Failure(
            why, tries, now, now + min(FIRST_RETRY * 2.0 ** min(tries - 1, 60), LONGEST_RETRY)
        )

    def record_success(self, engine: str, handle: str) -> None:
        """Record that an engine has a policy."""
        self._failures.pop((engine, handle), None)

    def retain(self, engines: Collection[str], handles: Collection[str]) -> None:
        """Forget all engines but these, and policies that none of them has."""
        for engine, handle in tuple(self._failures):
            if engine not in engines or handle not in handles:
                del self._failures[engine, handle]

    def drop_failures(self, engine: str, before: float) -> None:
        """Forget failures of an engine from before it tried everything again."""
        for key, failure in tuple(self._failures.items()):
            if key[0] == engine and failure.failed_at < before:
                del self._failures[key]

    def due(self, now: float) -> Sequence[str]:
        """Return the engines that should try again."""
        return sorted({engine for (engine, _), failure in self._failures.items() if now >= failure.retry_at})

    def describe(self, now: float) -> str:
        """Describe all missing policies, for people; empty when there are none."""
        return "; ".join(
            f"{engine} is missing policy {handle[:12]}, which others have: {failure.why} "
            f"(tried {failure.tries} times, {_when(failure.retry_at - now)})"
            for (engine, handle), failure in sorted(self._failures.items())
        )


def _when(seconds: float) -> str:
    return f"again in {seconds:.0f} s" if seconds > 0 else "and now again"
