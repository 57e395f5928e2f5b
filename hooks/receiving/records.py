"""The inbox's one table: its rows as events, and which of them are kept."""

import json
import sqlite3

from hooks.errors import UnknownEvent
from hooks.queue import Queue
from hooks.receiving.event import Answer, Event, Status

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


def get(connection: sqlite3.Connection, event_id: str) -> Event:
    """One event, whole.

    Raises:
        UnknownEvent: there is none of this id.
    """
    row = connection.execute("SELECT * FROM events WHERE id=?", (event_id,)).fetchone()
    if row is None:
        raise UnknownEvent(f"there is no event {event_id!r}; it may have been pruned")
    return event_of(row)


def newest(
    connection: sqlite3.Connection, *, status: str | None, path: str | None, limit: int, before: int | None
) -> list[Event]:
    """Newest first, without headers, bodies and answers."""
    clauses, values = ["1"], []
    for clause, value in (("status=?", status), ("path=?", path), ("number<?", before)):
        if value is not None:
            clauses.append(clause)
            values.append(value)
    found = connection.execute(
        f"SELECT {BRIEF} FROM events WHERE {' AND '.join(clauses)} ORDER BY number DESC LIMIT ?", (*values, limit)
    )
    return [event_of(row) for row in found]


def counts(connection: sqlite3.Connection, *, since: float) -> dict[str, int]:
    """Deliveries by webhook id."""
    found = connection.execute(
        "SELECT webhook_id, count(*) AS count FROM events WHERE webhook_id<>'' AND received_at>? GROUP BY webhook_id",
        (since,),
    )
    return {row["webhook_id"]: row["count"] for row in found}


def prune(
    connection: sqlite3.Connection, *, now: float, kept: float, kept_dead: float, kept_bytes: int, at_once: int = 500
) -> int:
    """Forget what ended long ago, or the oldest of it where bodies take too much; how many events that were."""
    count = 0
    for statuses, age in ((ENDED, kept), (DEAD, kept_dead)):
        marks = ",".join("?" * len(statuses))
        count += connection.execute(
            "DELETE FROM events WHERE number IN"
            f" (SELECT number FROM events WHERE finished_at<=? AND status IN ({marks}) LIMIT ?)",
            (now - age, *statuses, at_once),
        ).rowcount
    marks = ",".join("?" * len(ENDED))
    held = connection.execute(f"SELECT total(size) AS size FROM events WHERE status IN ({marks})", ENDED).fetchone()
    excess = held["size"] - kept_bytes
    if excess > 0:
        for row in connection.execute(
            f"SELECT number, size FROM events WHERE status IN ({marks}) ORDER BY number LIMIT ?", (*ENDED, at_once)
        ).fetchall():
            if excess <= 0:
                break
            connection.execute("DELETE FROM events WHERE number=?", (row["number"],))
            excess -= row["size"]
            count += 1
    return count


def event_of(row: sqlite3.Row) -> Event:
    """A whole row, or a brief one of a listing."""
    is_whole = "body" in row.keys()  # noqa: SIM118 (a Row is no dict)
    answer = None
    if is_whole and row["answer_status"] is not None:
        answer = Answer(row["answer_status"], row["answer_body"], row["answer_type"], json.loads(row["answer_headers"]))
    return Event(
        id=row["id"],
        number=row["number"],
        path=row["path"],
        status=Status(row["status"]),
        attempt=row["attempt"],
        received_at=row["received_at"],
        delivery_id=row["delivery_id"],
        webhook_id=row["webhook_id"] or None,
        repo=row["repo"],
        repo_type=row["repo_type"],
        scope=row["scope"],
        action=row["action"],
        finished_at=row["finished_at"],
        error=row["error"],
        failures=row["failures"],
        size=row["size"],
        headers=json.loads(row["headers"]) if is_whole else {},
        body=row["body"] if is_whole else b"",
        answer=answer,
    )
