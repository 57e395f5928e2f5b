"""Event of a receiver: a delivery as it is stored and shown."""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Effect = Callable[[sqlite3.Connection], object]


class Status(StrEnum):
    """State of an event.

    ``failed`` is one whose handler failed while the sender waited: the sender was told 500 and is to send it again.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    IGNORED = "ignored"
    SUPERSEDED = "superseded"


OPEN = (Status.WAITING, Status.RUNNING)


@dataclass(frozen=True)
class Answer:
    """Answer to the sender of a delivery."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Delivery that was accepted, with what became of it.

    Attributes:
        id: ours, the same in every attempt and every duplicate; effects elsewhere can be made once by it.
        number: in the order of acceptance.
        path: of the endpoint.
        delivery_id: ``Webhook-Id`` of the sender, if it gave one.
        webhook_id: of the payload, if it has one.
        repo: name of the repo, if the payload has one; likewise the next three.
        attempt: 1 in the first run; 0 before. More than 1 tells that a run before may have had an effect.
        received_at, finished_at: seconds since 1970.
        error: why the last run failed.
        failures: of runs since it was accepted, or replayed.
        headers: of the request, without secrets and signatures.
        body: as it was sent; empty in listings.
        answer: what the sender of a duplicate is told; None until it is done, and in listings.
    """

    id: str
    number: int
    path: str
    status: Status
    attempt: int
    received_at: float
    delivery_id: str | None = None
    webhook_id: str | None = None
    repo: str | None = None
    repo_type: str | None = None
    scope: str | None = None
    action: str | None = None
    finished_at: float | None = None
    error: str | None = None
    failures: int = 0
    size: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = field(default=b"", repr=False)
    answer: Answer | None = field(default=None, repr=False)
    effects: list[Effect] = field(default_factory=list, repr=False, compare=False)

    def when_done(self, effect: Effect) -> None:
        """Run an effect exactly once: within the transaction that marks this event as done.

        Args:
            effect: a function of the inbox's SQLite connection, which may write tables of its own there (named so that
                they do not begin with ``events``). When it raises, nothing is written and the run has failed. It may
                not commit, so neither ``with connection:`` nor ``executescript``.
        """
        self.effects.append(effect)
