"""One delivery: a single attempt, its outcome, and the waits between attempts."""

import asyncio
import hmac
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from hooks.threads import start_in_thread

MAX_EXCERPT = 1024  # bytes of an answer or of a job's output that are kept
MAX_SECRET = 512
MAX_JOB_SECRET = 8192
MAX_READ = MAX_EXCERPT + MAX_SECRET


@dataclass(frozen=True)
class Destination:
    """Destination of a webhook's events: a URL, or a job by its id with its variables ``secrets``."""

    id: str
    url: str | None = None
    job: str | None = None
    secret: str | None = field(default=None, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class DeliveryRequest:
    """One event for one webhook: the same id (``Webhook-Id``) and JSON in every attempt, restart and replay."""

    id: str
    body: bytes
    is_hub: bool = False

    @property
    def repo(self) -> tuple[str, str] | None:
        """Id and type of the event's repo, read from the body."""
        if not self.is_hub:
            return None
        repo = json.loads(self.body)["repo"]
        return str(repo["name"]), str(repo["type"])


@dataclass(frozen=True)
class DeliveryOutcome:
    """Outcome of one delivery attempt.

    Attributes:
        status: HTTP status; None without a response, and for jobs.
        exit_status: exit status of a job; negative for a signal.
        error: why the attempt failed without a status, as text for people.
        excerpt: beginning of the response, or end of a job's output.
        retry_after: seconds from the header ``Retry-After``.
        seconds: duration of the attempt.
        is_interrupted: whether the stop of the server interrupted the attempt, which the next start repeats.
    """

    status: int | None = None
    exit_status: int | None = None
    error: str | None = None
    excerpt: str = ""
    retry_after: float | None = None
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def is_delivered(self) -> bool:
        """Whether the target accepted the delivery."""
        if self.error is not None:
            return False
        return self.exit_status == 0 if self.status is None else 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        """Whether the target refuses all further deliveries (410)."""
        return self.status == 410

    @property
    def text(self) -> str:
        """The outcome in words, for logs."""
        if self.error is not None:
            return self.error
        return f"exit status {self.exit_status}" if self.status is None else f"HTTP {self.status}"


def make_excerpt(
    data: bytes,
    secrets: Iterable[str | None] = (),
    *,
    is_end: bool = False,
    max_bytes: int = MAX_EXCERPT,
    longest_secret: int = MAX_SECRET,
) -> str:
    """Return the beginning or end of ``data`` as text, with secrets masked.

    ``data`` is longer than the excerpt by ``longest_secret``, so that no part of a secret remains at its end.
    """
    text = data.decode("utf-8", "replace")
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    # C programs would read the text only up to a NUL.
    excerpt = text.replace("\0", "\ufffd").encode()
    if len(data) >= max_bytes + longest_secret:
        excerpt = excerpt[longest_secret:] if is_end else excerpt[: max(len(excerpt) - longest_secret, 0)]
    return (excerpt[-max_bytes:] if is_end else excerpt[:max_bytes]).decode("utf-8", "ignore")


MINUTE, HOUR = 60.0, 3600.0
# Seconds before the first attempt, before the second, ...; each wait allows one attempt.
WAITS = (0.0, 5.0, 5 * MINUTE, 30 * MINUTE, 2 * HOUR, 5 * HOUR, 10 * HOUR)
JITTER = 0.2  # share of a wait by which it is randomly longer or shorter, so that retries spread
MAX_RETRY_AFTER = 10 * HOUR


def get_wait(
    waits: Sequence[float], failed_attempts: int, random: Callable[[], float], retry_after: float | None = None
) -> float | None:
    """Return the seconds until the next attempt, at least ``retry_after``; None if no attempt is left."""
    if failed_attempts >= len(waits):
        return None
    wait = waits[failed_attempts] * (1 + JITTER * (2 * random() - 1))
    return wait if retry_after is None else max(wait, min(retry_after, MAX_RETRY_AFTER))


def parse_retry_after(header: str | None, now: float) -> float | None:
    """Return the seconds from ``now`` (since 1970) in a ``Retry-After`` header; None for other texts."""
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


def format_time(seconds: float | None) -> str | None:
    """Format seconds since 1970 as RFC 3339 in UTC, as the Hub writes times."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


RESOLVE_TIMEOUT = 5.0


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Resolve a host's addresses in a daemon thread; raise ``OSError`` if the host is unknown or after a timeout.

    A stopping server would wait for threads of the loop's own pool, and a look-up can take half a minute.
    """
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            infos = await asyncio.wrap_future(
                start_in_thread(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            )
    except UnicodeError:
        raise OSError(f"{host!r} is not a host name") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in infos))


def is_valid_secret(text: str, secrets: Iterable[str]) -> bool:
    """Return whether a text equals a secret, in a time that does not depend on the position of a difference."""
    is_equal = False
    for secret in secrets:
        is_equal |= hmac.compare_digest(text.encode("utf-8", "surrogateescape"), secret.encode())
    return is_equal
