"""Inbox of received events in SQLite: state transitions, replay, pruning."""

import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hooks.database import Database, alone, insert_row
from hooks.errors import UnknownEvent
from hooks.queue import OPEN, Queue
from hooks.receiver.events import Answer, Effect, Event, Status

SCHEMA = [
    """CREATE TABLE events (
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
CREATE INDEX events_open ON events (number) WHERE status IN ('waiting', 'running');
CREATE INDEX events_by_webhook ON events (webhook_id, received_at);
CREATE INDEX events_by_status ON events (status, number);
CREATE INDEX events_by_end ON events (finished_at)""",
    """DROP INDEX events_open;
CREATE INDEX events_in_lanes ON events (path, lane, number) WHERE status IN ('waiting', 'running')""",
]
QUEUE = Queue("events", group="path", ordered="one.lane <> ''")
BRIEF = (
    "number, id, path, webhook_id, delivery_id, repo, repo_type, scope, action, status, attempt, received_at, "
    "finished_at, error, failures, size"
)
ENDED = (Status.DONE, Status.IGNORED, Status.SUPERSEDED)
DEAD = (Status.DEAD, Status.FAILED)


def get_event(connection: sqlite3.Connection, event_id: str) -> Event:
    """Return one event with its headers, body and answer.

    Raises:
        UnknownEvent: there is none of this id.
    """
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


def count_deliveries(connection: sqlite3.Connection, *, since: float) -> dict[str, int]:
    """Count deliveries by webhook id since a time."""
    rows = connection.execute(
        "SELECT webhook_id, count(*) AS count FROM events WHERE webhook_id<>'' AND received_at>? GROUP BY webhook_id",
        (since,),
    )
    return {row["webhook_id"]: row["count"] for row in rows}


def prune_events(
    connection: sqlite3.Connection,
    *,
    now: float,
    max_age: float,
    max_dead_age: float,
    max_bytes: int,
    batch_size: int = 500,
) -> int:
    """Delete finished events that are too old, and the oldest when their bodies take too much; return how many."""
    count = 0
    for statuses, age in ((ENDED, max_age), (DEAD, max_dead_age)):
        marks = ",".join("?" * len(statuses))
        count += connection.execute(
            "DELETE FROM events WHERE number IN"
            f" (SELECT number FROM events WHERE finished_at<=? AND status IN ({marks}) LIMIT ?)",
            (now - age, *statuses, batch_size),
        ).rowcount
    marks = ",".join("?" * len(ENDED))
    total = connection.execute(f"SELECT total(size) AS size FROM events WHERE status IN ({marks})", ENDED).fetchone()
    excess = total["size"] - max_bytes
    if excess > 0:
        for row in connection.execute(
            f"SELECT number, size FROM events WHERE status IN ({marks}) ORDER BY number LIMIT ?", (*ENDED, batch_size)
        ).fetchall():
            if excess <= 0:
                break
            connection.execute("DELETE FROM events WHERE number=?", (row["number"],))
            excess -= row["size"]
            count += 1
    return count


def read_event(row: sqlite3.Row) -> Event:
    """Read an event from a whole row, or from a brief one of a listing."""
    fields: dict[str, Any] = {name: row[name] for name in BRIEF.split(", ")}
    fields |= {"status": Status(row["status"]), "webhook_id": row["webhook_id"] or None}
    if "body" in row.keys():  # noqa: SIM118 (a Row is no dict)
        fields |= {"headers": json.loads(row["headers"]), "body": row["body"]}
        if row["answer_status"] is not None:
            answer = row["answer_status"], row["answer_body"], row["answer_type"], json.loads(row["answer_headers"])
            fields["answer"] = Answer(*answer)
    return Event(**fields)


class Acceptance(Enum):
    """Outcome of accepting a delivery: new, retried by its sender, duplicate, or refused for lack of room."""

    NEW = auto()
    RETRIED = auto()  # it failed while its sender waited, and the sender sends it again
    DUPLICATE = auto()
    FULL = auto()


class EffectFailed(Exception):
    """An effect of a handler could not be written; the cause is the effect's own error."""


@dataclass(frozen=True)
class IncomingEvent:
    """Delivery that passed every check and is about to be stored.

    Attributes:
        lane: events with the same are run in order; empty for none.
        identity: of the body, for a delivery without an id; empty when it is never a duplicate.
    """

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
    status: Status


def accept_event(
    connection: sqlite3.Connection,
    incoming: IncomingEvent,
    *,
    now: float,
    window: float,
    coalesce: bool,
    max_waiting: int,
    paths: Collection[str],
) -> tuple[Acceptance, Event, list[str]]:
    """Store a new delivery, or recognise a duplicate, in one transaction.

    Args:
        paths: of the endpoints there are; those of them that are open count for ``max_waiting``.

    Returns:
        The event, and the ids of those that it supersedes.
    """
    (count,) = connection.execute(
        f"SELECT count(*) FROM events WHERE {OPEN} AND path IN ({', '.join('?' * len(paths))})", tuple(paths)
    ).fetchone()
    is_full = count >= max_waiting
    known = _find_duplicate(connection, incoming, now - window, now + window)
    if known is not None:
        status = Status(known["status"])
        if status is Status.FAILED:
            if is_full:
                return Acceptance.FULL, read_event(known), []
            connection.execute(
                "UPDATE events SET status=?, due=?, finished_at=NULL, is_acknowledged=0 WHERE number=?",
                (Status.WAITING, now, known["number"]),
            )
            return Acceptance.RETRIED, read_event(known), []
        if status in (Status.WAITING, Status.RUNNING):
            # The sender is told that it is accepted: a failure may not be handed back to it any more.
            connection.execute("UPDATE events SET is_acknowledged=1 WHERE number=?", (known["number"],))
        return Acceptance.DUPLICATE, read_event(known), []
    is_ignored = incoming.status is Status.IGNORED
    if is_full and not is_ignored:
        return Acceptance.FULL, Event(incoming.id, 0, incoming.path, incoming.status, 0, now), []
    superseded = []
    if coalesce and incoming.lane and not is_ignored:
        superseded = connection.execute(
            "UPDATE events SET status=?, finished_at=? WHERE path=? AND lane=? AND status=? RETURNING id",
            (Status.SUPERSEDED, now, incoming.path, incoming.lane, Status.WAITING),
        ).fetchall()
    identity = (
        f"id:{incoming.delivery_id}" if incoming.delivery_id is not None else f"{incoming.identity}:{incoming.id}"
    )
    insert_row(
        connection,
        "events",
        **vars(incoming) | {"identity": identity},
        due=now,
        received_at=now,
        finished_at=now if is_ignored else None,
        size=len(incoming.body),
    )
    return Acceptance.NEW, get_event(connection, incoming.id), [row["id"] for row in superseded]


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
    # Not of the time to come: after a clock was set back by an hour, nothing of that hour would be new.
    return connection.execute(
        "SELECT * FROM events WHERE path=? AND webhook_id=? AND identity>=? AND identity<? AND received_at>?"
        " AND received_at<=? ORDER BY number DESC LIMIT 1",
        (*key, f"{incoming.identity}:", f"{incoming.identity};", since, until),
    ).fetchone()


def finish_event(
    connection: sqlite3.Connection, event_id: str, answer: Answer, effects: Sequence[Effect], *, now: float
) -> None:
    """Mark an event as done and run its handler's effects, in one transaction.

    Raises:
        EffectFailed: the latter could not be; nothing is written.
    """
    connection.execute(
        "UPDATE events SET status=?, finished_at=?, error=NULL, answer_status=?, answer_type=?, answer_headers=?,"
        " answer_body=? WHERE id=?",
        (Status.DONE, now, answer.status, answer.content_type, json.dumps(dict(answer.headers)), answer.body, event_id),
    )
    for effect in effects:
        with _deny_commits(connection):
            try:
                effect(connection)
            except Exception as error:
                raise EffectFailed from error


@contextmanager
def _deny_commits(connection: sqlite3.Connection) -> Iterator[None]:
    """Deny commits to an effect (``with connection:``, ``executescript``); it is written with its event's end."""

    def authorize(action: int, *_: object) -> int:
        return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_TRANSACTION else sqlite3.SQLITE_OK

    connection.set_authorizer(authorize)
    try:
        yield
    finally:
        connection.set_authorizer(None)


def fail_event(
    connection: sqlite3.Connection,
    event_id: str,
    error: str,
    *,
    now: float,
    attempts: int,
    retry_at: float | None,
    to_sender: bool,
) -> Status:
    """Record a failed run of an event.

    Args:
        attempts: runs that may fail.
        retry_at: when it may run again; None for never.
        to_sender: its sender still waits and would be told.

    Returns:
        ``failed`` when its sender has to send it again, ``waiting`` when it is tried again here, else ``dead``.
    """
    row = connection.execute("SELECT failures, is_acknowledged FROM events WHERE id=?", (event_id,)).fetchone()
    failures = row["failures"] + 1
    if failures >= attempts or (retry_at is None and not (to_sender and not row["is_acknowledged"])):
        status = Status.DEAD
    elif to_sender and not row["is_acknowledged"]:
        status = Status.FAILED
    else:
        status = Status.WAITING
    is_open = status is Status.WAITING
    connection.execute(
        "UPDATE events SET status=?, failures=?, error=?, due=?, finished_at=? WHERE id=?",
        (status, failures, error, retry_at if is_open else now, None if is_open else now, event_id),
    )
    return status


def requeue_event(connection: sqlite3.Connection, event_id: str, *, due: float) -> Status:
    """Set an event back to waiting when its outcome could not be written."""
    connection.execute("UPDATE events SET status=?, due=? WHERE id=?", (Status.WAITING, due, event_id))
    return Status.WAITING


def resume_events(connection: sqlite3.Connection, *, now: float, max_crashes: int) -> dict[str, int]:
    """Set events that ran when the process ended back to waiting, or to dead after too many crashes.

    Returns:
        How many wait, by path.
    """
    connection.execute(
        "UPDATE events SET crashes=crashes+1, status=CASE WHEN crashes+1>? THEN ? ELSE ? END,"
        " finished_at=CASE WHEN crashes+1>? THEN ? END,"
        " error='the process ended while it ran' WHERE status=?",
        (max_crashes, Status.DEAD, Status.WAITING, max_crashes, now, Status.RUNNING),
    )
    rows = connection.execute(f"SELECT path, count(*) AS count FROM events WHERE {OPEN} GROUP BY path")
    return {row["path"]: row["count"] for row in rows}


def get_data_version(connection: sqlite3.Connection) -> int:
    """Return a number that changes when another process has written to the database."""
    return connection.execute("PRAGMA data_version").fetchone()[0]


def replay_event(connection: sqlite3.Connection, event_id: str, *, now: float) -> Event:
    """Set an event to run again, whatever its state; one that waits runs now.

    Raises:
        UnknownEvent: there is none of this id.
    """
    event = get_event(connection, event_id)
    if event.status is not Status.RUNNING:
        connection.execute(
            "UPDATE events SET status=?, failures=0, crashes=0, is_acknowledged=1, due=?, finished_at=NULL WHERE id=?",
            (Status.WAITING, now, event_id),
        )
    return get_event(connection, event_id)


class Inbox:
    """Inbox of events in a file, or in memory when ``path`` is None.

    The methods here wait for the database: they are for programs that read and replay beside a running receiver.

    Raises:
        StoreError: it cannot be opened.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self.database = Database(path, SCHEMA)
        self._lock = ExitStack()

    def lock(self) -> None:
        """Lock the file for one receiver until it is closed or the process ends.

        Raises:
            StoreError: another one has it: both would run the same events.
        """
        advice = "another receiver works on it; end that one, give this one a file of its own, and serve with one "
        self._lock.enter_context(alone(self.path, advice + "worker process"))

    def list(
        self, *, status: str | None = None, path: str | None = None, limit: int = 50, before: int | None = None
    ) -> list[Event]:
        """List events, newest first, without headers and bodies.

        Args:
            status: one of ``Status``; ``dead`` lists the dead letters.
            before: the ``number`` of the last one of the page before.
        """
        return self.database.run_blocking(list_events, status=status, path=path, limit=limit, before=before)

    def get(self, event_id: str) -> Event:
        """Return one event with its headers, body and answer.

        Raises:
            UnknownEvent: there is none of this id.
        """
        return self.database.run_blocking(get_event, event_id)

    def replay(self, event_id: str) -> Event:
        """Set an event to run again; a running receiver begins within a second, else the next that starts.

        Raises:
            UnknownEvent: there is none of this id.
        """
        return self.database.run_blocking(replay_event, event_id, now=time.time())

    def close(self) -> None:
        """Close the database and release its lock."""
        self.database.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
