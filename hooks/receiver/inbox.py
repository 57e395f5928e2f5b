"""Inbox of a receiver: events in SQLite, their states, duplicates, replay and pruning."""

import json
import sqlite3
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Any, Self

from hooks.database import Database, alone, insert_row
from hooks.errors import UnknownEvent
from hooks.queue import OPEN, Queue

SCHEMA = """
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    path TEXT NOT NULL,
    webhook_id TEXT NOT NULL,
    identity TEXT NOT NULL,
    lane TEXT NOT NULL,
    delivery_id TEXT,
    repo TEXT,
    repo_type TEXT,
    scope TEXT,
    action TEXT,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    crashes INTEGER NOT NULL DEFAULT 0,
    is_acknowledged INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL,
    received_at REAL NOT NULL,
    finished_at REAL,
    error TEXT,
    size INTEGER NOT NULL,
    answer_status INTEGER,
    answer_type TEXT,
    answer_headers TEXT,
    answer_body BLOB,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (path, webhook_id, identity)
) STRICT;
CREATE INDEX events_in_lanes ON events (path, lane, number) WHERE status IN ('waiting', 'running');
CREATE INDEX events_by_webhook ON events (webhook_id, received_at);
CREATE INDEX events_by_status ON events (status, number);
CREATE INDEX events_by_end ON events (finished_at);
"""
QUEUE = Queue("events", group="path", ordered="one.lane <> ''")
BRIEF = (
    "number, id, path, webhook_id, delivery_id, repo, repo_type, scope, action, status, attempt, received_at, "
    "finished_at, error, failures, size"
)


class EventStatus(StrEnum):
    """State of an event.

    ``failed``: the handler failed while the sender waited, and the response 500 asks the sender to repeat the event.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"


@dataclass(frozen=True)
class Answer:
    """Answer to the sender of a delivery."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """Accepted delivery with its outcome.

    Attributes:
        id: the same in every attempt and duplicate; handlers can use it to make their effects idempotent.
        number: position in the order of acceptance.
        path: path of the endpoint.
        delivery_id: ``Webhook-Id`` of the sender, or None.
        webhook_id: id of the webhook in the payload, or None; ``repo`` to ``action`` are from the payload, too.
        attempt: 0 before the first run, then 1. Above 1, an earlier run may have had an effect.
        received_at: seconds since 1970, as ``finished_at``.
        error: error of the last run.
        failures: failed runs since the event was accepted or replayed.
        size: bytes of the body.
        headers: headers of the request, without secrets and signatures.
        body: body of the request; empty in listings.
        answer: answer to duplicates; None until the event is done, and in listings.

    Example:
        >>> def on_push(event: Event):
        ...     print(event.repo, event.attempt)
    """

    id: str
    number: int
    path: str
    status: EventStatus
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


def get_event(connection: sqlite3.Connection, event_id: str) -> Event:
    """Return an event with its headers, body and answer; raise ``UnknownEvent`` for an unknown id."""
    row = connection.execute("SELECT * FROM events WHERE id=?", (event_id,)).fetchone()
    if row is None:
        raise UnknownEvent(f"there is no event {event_id!r}; it may have been pruned")
    return read_event(row)


def list_events(
    connection: sqlite3.Connection, *, status: str | None, path: str | None, limit: int, before: int | None
) -> list[Event]:
    """List events, newest first, without headers, bodies and answers."""
    clauses, values = ["1"], []
    for clause, value in (("status=?", status), ("path=?", path), ("number<?", before)):
        if value is not None:
            clauses.append(clause)
            values.append(value)
    rows = connection.execute(
        f"SELECT {BRIEF} FROM events WHERE {' AND '.join(clauses)} ORDER BY number DESC LIMIT ?", (*values, limit)
    )
    return [read_event(row) for row in rows]


def prune_events(
    connection: sqlite3.Connection,
    *,
    now: float,
    max_age: float,
    max_dead_age: float,
    max_bytes: int,
    batch_size: int = 500,
) -> int:
    """Delete finished events above an age in seconds, and the oldest above ``max_bytes``; return their number."""
    conditions = (
        ("SELECT number FROM events WHERE status = 'done' AND finished_at <= ?", now - max_age),
        ("SELECT number FROM events WHERE status IN ('dead', 'failed') AND finished_at <= ?", now - max_dead_age),
        (
            "SELECT number FROM (SELECT number, sum(size) OVER (ORDER BY number DESC) AS total FROM events"
            " WHERE status = 'done') WHERE total > ? ORDER BY number",
            max_bytes,
        ),
    )
    return sum(
        connection.execute(f"DELETE FROM events WHERE number IN ({select} LIMIT ?)", (limit, batch_size)).rowcount
        for select, limit in conditions
    )


def read_event(row: sqlite3.Row) -> Event:
    """Read an event from a row with all columns, or with those in ``BRIEF``."""
    fields: dict[str, Any] = {name: row[name] for name in BRIEF.split(", ")}
    fields |= {"status": EventStatus(row["status"]), "webhook_id": row["webhook_id"] or None}
    if "body" in row.keys():  # noqa: SIM118 (a Row is no dict)
        fields |= {"headers": json.loads(row["headers"]), "body": row["body"]}
        if row["answer_status"] is not None:
            answer = row["answer_status"], row["answer_body"], row["answer_type"], json.loads(row["answer_headers"])
            fields["answer"] = Answer(*answer)
    return Event(**fields)


class Acceptance(Enum):
    """Outcome of accepting a delivery: it runs (also again, after a failure), is a duplicate, or the queue is full."""

    NEW = auto()
    DUPLICATE = auto()
    FULL = auto()


@dataclass(frozen=True)
class IncomingEvent:
    """Delivery that passed every check; events of one ``lane`` run in order, equal ``identity`` is a duplicate."""

    id: str
    path: str
    body: bytes
    headers: str
    lane: str
    identity: str
    webhook_id: str
    delivery_id: str | None
    repo: str | None
    repo_type: str | None
    scope: str | None
    action: str | None


def accept_event(
    connection: sqlite3.Connection,
    incoming: IncomingEvent,
    *,
    now: float,
    window: float,
    max_waiting: int,
    paths: Collection[str],
) -> tuple[Acceptance, Event]:
    """Store a new delivery, or recognise a duplicate (without an id: an equal body within ``window`` seconds)."""
    (count,) = connection.execute(
        f"SELECT count(*) FROM events WHERE {OPEN} AND path IN ({', '.join('?' * len(paths))})", tuple(paths)
    ).fetchone()
    known = _find_duplicate(connection, incoming, now - window, now + window)
    if known is not None and known["status"] != EventStatus.FAILED:
        # The sender gets 202, so it will not send the event again after a later failure.
        connection.execute(f"UPDATE events SET is_acknowledged=1 WHERE {OPEN} AND number=?", (known["number"],))
        return Acceptance.DUPLICATE, read_event(known)
    if count >= max_waiting:
        return Acceptance.FULL, Event(incoming.id, 0, incoming.path, EventStatus.WAITING, 0, now)
    if known is not None:
        connection.execute(
            "UPDATE events SET status=?, due=?, finished_at=NULL, is_acknowledged=0 WHERE number=?",
            (EventStatus.WAITING, now, known["number"]),
        )
        return Acceptance.NEW, read_event(known)
    identity = (
        f"id:{incoming.delivery_id}" if incoming.delivery_id is not None else f"{incoming.identity}:{incoming.id}"
    )
    insert_row(
        connection,
        "events",
        **vars(incoming) | {"identity": identity},
        status=EventStatus.WAITING,
        due=now,
        received_at=now,
        size=len(incoming.body),
    )
    return Acceptance.NEW, get_event(connection, incoming.id)


def _find_duplicate(
    connection: sqlite3.Connection, incoming: IncomingEvent, since: float, until: float
) -> sqlite3.Row | None:
    key = (incoming.path, incoming.webhook_id)
    if incoming.delivery_id is not None:
        return connection.execute(
            "SELECT * FROM events WHERE path=? AND webhook_id=? AND identity=?", (*key, f"id:{incoming.delivery_id}")
        ).fetchone()
    if not incoming.identity:
        return None
    # Events of the future do not count: after a clock was set back, all deliveries would be duplicates of them.
    return connection.execute(
        "SELECT * FROM events WHERE path=? AND webhook_id=? AND identity>=? AND identity<? AND received_at>?"
        " AND received_at<=? ORDER BY number DESC LIMIT 1",
        (*key, f"{incoming.identity}:", f"{incoming.identity};", since, until),
    ).fetchone()


def finish_event(connection: sqlite3.Connection, event_id: str, answer: Answer, *, now: float) -> None:
    """Mark an event as done and keep the answer for duplicates."""
    connection.execute(
        "UPDATE events SET status=?, finished_at=?, error=NULL, answer_status=?, answer_type=?, answer_headers=?,"
        " answer_body=? WHERE id=?",
        (
            EventStatus.DONE,
            now,
            answer.status,
            answer.content_type,
            json.dumps(dict(answer.headers)),
            answer.body,
            event_id,
        ),
    )


def fail_event(
    connection: sqlite3.Connection,
    event_id: str,
    error: str,
    *,
    now: float,
    attempts: int,
    retry_at: float | None,
    to_sender: bool,
) -> EventStatus:
    """Record a failed run; return ``failed`` (its sender sends it again), ``waiting`` (for another run) or ``dead``.

    Args:
        retry_at: time of the next run; None for no further run.
        to_sender: whether the sender still waits and can get the failure.
    """
    row = connection.execute("SELECT failures, is_acknowledged FROM events WHERE id=?", (event_id,)).fetchone()
    failures = row["failures"] + 1
    if failures >= attempts or (retry_at is None and not (to_sender and not row["is_acknowledged"])):
        status = EventStatus.DEAD
    elif to_sender and not row["is_acknowledged"]:
        status = EventStatus.FAILED
    else:
        status = EventStatus.WAITING
    is_open = status is EventStatus.WAITING
    connection.execute(
        "UPDATE events SET status=?, failures=?, error=?, due=?, finished_at=? WHERE id=?",
        (status, failures, error, retry_at if is_open else now, None if is_open else now, event_id),
    )
    return status


def requeue_event(connection: sqlite3.Connection, event_id: str, *, due: float) -> EventStatus:
    """Set an event back to waiting after its outcome could not be written."""
    connection.execute("UPDATE events SET status=?, due=? WHERE id=?", (EventStatus.WAITING, due, event_id))
    return EventStatus.WAITING


def resume_events(connection: sqlite3.Connection, *, now: float, max_crashes: int) -> dict[str, int]:
    """Set events that ran when the process ended to waiting or dead; return the number of waiting events by path."""
    connection.execute(
        "UPDATE events SET crashes=crashes+1, status=CASE WHEN crashes+1>? THEN ? ELSE ? END,"
        " finished_at=CASE WHEN crashes+1>? THEN ? END,"
        " error='the process ended while it ran' WHERE status=?",
        (max_crashes, EventStatus.DEAD, EventStatus.WAITING, max_crashes, now, EventStatus.RUNNING),
    )
    rows = connection.execute(f"SELECT path, count(*) AS count FROM events WHERE {OPEN} GROUP BY path")
    return {row["path"]: row["count"] for row in rows}


def get_data_version(connection: sqlite3.Connection) -> int:
    """Return a number that changes when another process writes to the database."""
    return connection.execute("PRAGMA data_version").fetchone()[0]


def replay_event(connection: sqlite3.Connection, event_id: str, *, now: float) -> Event:
    """Make an event in any state due now, unless it runs already."""
    event = get_event(connection, event_id)
    if event.status is not EventStatus.RUNNING:
        connection.execute(
            "UPDATE events SET status=?, failures=0, crashes=0, is_acknowledged=1, due=?, finished_at=NULL WHERE id=?",
            (EventStatus.WAITING, now, event_id),
        )
    return get_event(connection, event_id)


class EventInbox:
    """Inbox of events in a file, or in memory when ``path`` is None.

    The methods block; they are for programs that read and replay events while a receiver may run in another process.

    Raises:
        StoreError: the file cannot be opened.
        UnknownEvent: there is no event with this id.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self.database = Database(path, [SCHEMA])
        self._lock = ExitStack()

    def lock(self) -> None:
        """Lock the file for one receiver until ``close``; raise ``StoreError`` if another receiver has locked it."""
        advice = "another receiver uses it; end that receiver or use another file, and serve with one worker process"
        self._lock.enter_context(alone(self.path, advice))

    def list(
        self, *, status: str | None = None, path: str | None = None, limit: int = 50, before: int | None = None
    ) -> list[Event]:
        """List events with a ``number`` below ``before``, newest first, without headers and bodies."""
        return self.database.run_blocking(list_events, status=status, path=path, limit=limit, before=before)

    def get(self, event_id: str) -> Event:
        """Return an event with its headers, body and answer."""
        return self.database.run_blocking(get_event, event_id)

    def replay(self, event_id: str) -> Event:
        """Make an event run again: within a second if a receiver runs, else when a receiver starts."""
        return self.database.run_blocking(replay_event, event_id, now=time.time())

    def close(self) -> None:
        """Close the database and release its lock."""
        self.database.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
