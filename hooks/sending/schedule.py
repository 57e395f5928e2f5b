"""When a delivery that failed is tried again."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Schedule:
    """The waits before each attempt.

    The default is that of Standard Webhooks in its first half day.

    Attributes:
        waits: seconds before the first attempt, before the second, ...; as many attempts as there are waits.
        jitter: part of a wait by which it is randomly longer or shorter, so that targets that came back are not all
            met at once.
        longest_asked: seconds; a ``Retry-After`` above it counts as this much.
    """

    waits: tuple[float, ...] = (0.0, 5.0, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR)
    jitter: float = 0.2
    longest_asked: float = 10 * HOUR

    def __post_init__(self) -> None:
        if not self.waits or any(not 0 <= wait < math.inf for wait in self.waits):
            raise ValueError(f"waits: {self.waits!r}, wanted one number of seconds per attempt, none below 0")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter: {self.jitter!r}, wanted 0 up to below 1")

    def wait(self, failed: int, random: Callable[[], float], asked: float | None = None) -> float | None:
        """Seconds until the next attempt, or None when there is none left.

        Args:
            failed: attempts that failed up to now.
            random: a number of [0, 1).
            asked: seconds by the target's ``Retry-After``: never sooner than that.
        """
        if failed >= len(self.waits):
            return None
        wait = self.waits[failed] * (1 + self.jitter * (2 * random() - 1))
        return wait if asked is None else max(wait, min(asked, self.longest_asked))


def retry_after(header: str | None, now: float) -> float | None:
    """Seconds of a ``Retry-After`` header: a number, or a date; None when it is missing or neither.

    Args:
        now: seconds since 1970.
    """
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    # A date without a zone is in UTC: RFC 9110, 5.6.7.
    return max((date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now, 0.0)


def iso(seconds: float | None) -> str | None:
    """Seconds since 1970 as RFC 3339 in UTC, as the Hub writes times."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
