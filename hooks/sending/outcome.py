"""What one attempt is made with, and what came of it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

MAX_EXCERPT = 1024  # bytes of an answer or of a job's output that are kept
MAX_SECRET = 512
MAX_JOB_SECRET = 8192
MAX_READ = MAX_EXCERPT + MAX_SECRET


@dataclass(frozen=True)
class Destination:
    """Where a webhook's events go: a URL, or a job by its id.

    Attributes:
        secrets: environment variables for the job.
    """

    webhook_id: str
    url: str | None = None
    job: str | None = None
    secret: str | None = field(default=None, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Parcel:
    """One event for one webhook.

    Attributes:
        id: ``Webhook-Id``; the same in every attempt, also across restarts and replays.
        body: JSON; the same in every attempt.
        is_hub: whether the body is of the Hub's shape, about a repo.
    """

    id: str
    body: bytes
    is_hub: bool = False

    @property
    def repo(self) -> tuple[str, str] | None:
        """Id and type of the repo that it is about, read from the body."""
        if not self.is_hub:
            return None
        repo = json.loads(self.body)["repo"]
        return str(repo["name"]), str(repo["type"])


@dataclass(frozen=True)
class Outcome:
    """What came of one attempt.

    Attributes:
        status: HTTP status; None when there was no answer, and for jobs.
        exit_status: of a job; negative for a signal.
        error: why it failed without a status, for people.
        excerpt: the beginning of the answer, or the end of a job's output.
        asked: seconds by ``Retry-After``.
        seconds: that it took.
        is_interrupted: it was ended because the server stops: no attempt, it is made again at the next start.
    """

    status: int | None = None
    exit_status: int | None = None
    error: str | None = None
    excerpt: str = ""
    asked: float | None = None
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def is_delivered(self) -> bool:
        """Whether it was taken."""
        if self.error is not None:
            return False
        return self.exit_status == 0 if self.status is None else 200 <= self.status < 300

    @property
    def is_gone(self) -> bool:
        """Whether the target wants nothing more, ever (410)."""
        return self.status == 410

    @property
    def text(self) -> str:
        """In words, for logs."""
        if self.error is not None:
            return self.error
        return f"exit status {self.exit_status}" if self.status is None else f"HTTP {self.status}"


class Courier(Protocol):
    """Makes one attempt."""

    async def deliver(self, destination: Destination, parcel: Parcel, now: float) -> Outcome:
        """Deliver; what goes wrong is in the outcome."""
        ...


def excerpt(
    data: bytes,
    secrets: Iterable[str | None] = (),
    *,
    of_end: bool = False,
    most: int = MAX_EXCERPT,
    longest: int = MAX_SECRET,
) -> str:
    """The beginning (or end) as text, with secrets that the other side repeated struck out.

    Args:
        data: at most ``most + longest`` bytes; as many mean that there was more.
        most: bytes of the text.
        longest: bytes of the longest secret there may be.
    """
    text = data.decode("utf-8", "replace")
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "***")
    # NUL would end the text where it is read by C.
    kept = text.replace("\0", "\ufffd").encode()
    if len(data) >= most + longest:
        # A secret may have been cut in two where reading ended.
        kept = kept[longest:] if of_end else kept[: max(len(kept) - longest, 0)]
    return (kept[-most:] if of_end else kept[:most]).decode("utf-8", "ignore")
