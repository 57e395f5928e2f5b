"""How a receiver behaves, checked when it is made."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

from hooks.errors import InvalidWebhook
from hooks.signatures import sign_standard

DAY = 86_400.0


@dataclass(frozen=True)
class ReceiverSettings:
    """Times in seconds, sizes in bytes.

    Attributes:
        secrets: accepted in ``X-Webhook-Secret``; several while one replaces another, none for an open receiver.
        standard_secrets: of Standard Webhooks signatures.
        github_secrets: of ``X-Hub-Signature-256``.
        database: file of the events; None keeps them in memory, which a restart forgets.
        answer_within: what a handler gets before the sender is told 202 and the handler goes on in the background.
        read_within: what a sender gets for its body.
        store_within: what the database gets before the sender is told 503.
        max_body: of a delivery; the Hub's largest, 10,000 files of a bucket, have about 1.7 MB.
        max_waiting: events accepted and not finished; a sender is told 503 above it.
        rate: deliveries per second that one source may send in the long run.
        burst: deliveries that one source may send at once.
        attempts: runs that may fail before an event is a dead letter.
        backoff: before the second attempt; it doubles with every one.
        longest_backoff: and doubles no further.
        crashes: how often the process may end during an event before that event is a dead letter.
        threads: sync handlers at one time.
        concurrency: async handlers at one time.
        same_body_within: in which an equal body without ``Webhook-Id`` is a duplicate.
        kept: for how long finished events are kept; until then their duplicates are known.
        kept_dead: for how long dead letters and refused events are kept.
        kept_bytes: of bodies of finished events; the oldest go first.
        stop_within: what running handlers get when the server stops; what does not end resumes at the next start.
        retry_after: what a sender is told with 503.
    """

    secrets: tuple[str, ...] = field(default=(), repr=False)
    standard_secrets: tuple[str, ...] = field(default=(), repr=False)
    github_secrets: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    answer_within: float = 5.0
    read_within: float = 10.0
    store_within: float = 8.0
    max_body: int = 5 << 20
    max_waiting: int = 1000
    rate: float = 100.0
    burst: int = 1000
    attempts: int = 5
    backoff: float = 1.0
    longest_backoff: float = 60.0
    crashes: int = 20
    threads: int = 8
    concurrency: int = 32
    same_body_within: float = 10.0
    kept: float = 7 * DAY
    kept_dead: float = 90 * DAY
    kept_bytes: int = 1 << 30
    stop_within: float = 2.0
    retry_after: float = 5.0

    def __post_init__(self) -> None:
        for name in ("secrets", "standard_secrets", "github_secrets"):
            check_secrets(name, getattr(self, name))
        for secret in self.standard_secrets:
            sign_standard(secret, "", 0, b"")
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and (value < 0 or not math.isfinite(value)):
                raise InvalidWebhook(f"{name} is {value}; wanted a number that is not negative")
        for name in ("max_body", "max_waiting", "rate", "burst", "attempts", "threads", "concurrency"):
            if getattr(self, name) <= 0:
                raise InvalidWebhook(f"{name} is {getattr(self, name)}; wanted more than 0")


def check_secrets(name: str, secrets: tuple[str, ...]) -> None:
    """Refuse what would let anybody in.

    Raises:
        InvalidWebhook: one is empty or no ASCII, or they are no tuple of texts.
    """
    if isinstance(secrets, str) or not all(isinstance(secret, str) for secret in secrets):
        raise InvalidWebhook(f"{name} has to be a tuple of texts")
    if not all(secret and secret.isascii() for secret in secrets):
        raise InvalidWebhook(
            f"{name} has one that is empty or has characters outside ASCII; leave it out or replace it"
        )
