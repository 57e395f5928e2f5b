"""Queue of pending deliveries and their log, in SQLite; each webhook and subject (repo, session) is a lane."""

import json
import secrets
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from hooks.queue import OPEN, Queue
from hooks.registry.delivery import DeliveryOutcome, DeliveryRequest, format_time


def delete_log(connection: sqlite3.Connection, webhook_id: str) -> None:
    """Delete the deliveries of a deleted webhook."""
    connection.execute("DELETE FROM held WHERE webhook_id = ?", (webhook_id,))
    connection.execute("DELETE FROM deliveries WHERE webhook_id = ?", (webhook_id,))
    _delete_unused_messages(connection)


def prune_log(connection: sqlite3.Connection, before: float, max_finished: int) -> int:
    """Delete deliveries that ended before a time or exceed a number, and old deliveries of disabled webhooks."""
    count = connection.execute(
        "DELETE FROM deliveries WHERE finished_at < ? OR number IN (SELECT number FROM deliveries "
        "WHERE finished_at IS NOT NULL ORDER BY finished_at DESC, number DESC LIMIT -1 OFFSET ?) "
        "OR (status = 'waiting' AND created_at < ? AND webhook_id IN (SELECT * FROM held))",
        (before, max_finished, before),
    ).rowcount
    if count:
        _delete_unused_messages(connection)
    return count


def _delete_unused_messages(connection: sqlite3.Connection) -> None:
    connection.execute(
        "DELETE FROM messages WHERE NOT EXISTS (SELECT 1 FROM deliveries WHERE message_id = messages.id)"
    )


def list_deliveries(
    connection: sqlite3.Connection, webhook_id: str, limit: int, before: str | None = None
) -> list[dict[str, Any]]:
    """List the newest deliveries of a webhook with their attempts, newest first; older than ``before`` if given."""
    is_behind = (
        "EXISTS (SELECT 1 FROM deliveries AS other WHERE other.webhook_id = deliveries.webhook_id "
        f"AND other.lane = deliveries.lane AND other.number < deliveries.number AND other.{OPEN}) AS is_behind"
    )
    rows = connection.execute(
        f"SELECT deliveries.*, type, {is_behind} FROM deliveries JOIN messages ON messages.id = message_id "
        "WHERE webhook_id = ? AND number < coalesce((SELECT number FROM deliveries WHERE id = ?), ?) "
        "ORDER BY number DESC LIMIT ?",
        (webhook_id, before, 0 if before else 1 << 62, limit),
    ).fetchall()
    return [_format_delivery(row) for row in rows]


def _format_delivery(row: sqlite3.Row) -> dict[str, Any]:
    # The log shows a running delivery as waiting.
    status = "waiting" if row["status"] == "running" else row["status"]
    return {
        "id": row["id"],
        "webhookDeliveryId": f"msg_{row['id']}",
        "type": row["type"],
        "subject": row["lane"],
        "status": status,
        "createdAt": format_time(row["created_at"]),
        "finishedAt": format_time(row["finished_at"]),
        "nextAttemptAt": format_time(row["due"]) if status == "waiting" and not row["is_behind"] else None,
        "attempts": json.loads(row["attempts"]),
    }


SCHEMA = """
CREATE TABLE messages (
    id TEXT PRIMARY KEY,
    type TEXT NOT NULL,
    is_hub INTEGER NOT NULL,
    body TEXT NOT NULL
) STRICT;
CREATE TABLE deliveries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    webhook_id TEXT NOT NULL,
    message_id TEXT NOT NULL REFERENCES messages (id),
    lane TEXT NOT NULL,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    due REAL,
    created_at REAL NOT NULL,
    finished_at REAL,
    attempts TEXT NOT NULL DEFAULT '[]',
    UNIQUE (webhook_id, message_id)
) STRICT;
CREATE INDEX deliveries_in_lanes ON deliveries (webhook_id, lane, number) WHERE status IN ('waiting', 'running');
CREATE INDEX of_message ON deliveries (message_id);
CREATE INDEX finished ON deliveries (finished_at) WHERE finished_at IS NOT NULL;
CREATE TABLE held (webhook_id TEXT PRIMARY KEY) STRICT;
"""
QUEUE = Queue("deliveries", group="webhook_id", ready="webhook_id NOT IN (SELECT webhook_id FROM held)")

MAX_ATTEMPTS = 50  # newest attempts of one delivery in the log, because replays may add any number


@dataclass(frozen=True)
class Message:
    """One event, stored once (by its id) for all its webhooks, and sent in order within its subject.

    If ``is_hub``, the body has the Hub's format, and each receiver's ``webhook`` is added to it.
    """

    id: str
    type: str
    subject: str
    body: Mapping[str, Any]
    is_hub: bool


@dataclass(frozen=True)
class DueDelivery:
    """Delivery that is due for an attempt."""

    id: str
    webhook_id: str
    failed_attempts: int
    request: DeliveryRequest


def generate_id() -> str:
    """Generate an id of 24 hexadecimal digits, as the Hub's are."""
    return secrets.token_hex(12)


def queue_message(
    connection: sqlite3.Connection, message: Message, webhook_ids: Collection[str], now: float, max_waiting: int
) -> tuple[int, dict[str, int]]:
    """Queue an event; return the number of its webhooks, and the numbers of dropped older deliveries by webhook."""
    if not webhook_ids:
        return 0, {}
    body = json.dumps(message.body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    is_new = connection.execute(
        "INSERT OR IGNORE INTO messages VALUES (?, ?, ?, ?)", (message.id, message.type, message.is_hub, body)
    ).rowcount
    if not is_new:
        return 0, {}
    dropped = {}
    for webhook_id in webhook_ids:
        connection.execute(
            "INSERT INTO deliveries (id, webhook_id, message_id, lane, status, due, created_at) "
            "VALUES (?, ?, ?, ?, 'waiting', ?, ?)",
            (generate_id(), webhook_id, message.id, message.subject, now, now),
        )
        if count := _drop_oldest(connection, webhook_id, now, max_waiting):
            dropped[webhook_id] = count
    return len(webhook_ids), dropped


def _drop_oldest(connection: sqlite3.Connection, webhook_id: str, now: float, max_waiting: int) -> int:
    """Drop the oldest waiting deliveries of a webhook above its limit."""
    return connection.execute(
        "UPDATE deliveries SET status = 'dropped', due = NULL, finished_at = ? WHERE number IN (SELECT number "
        f"FROM deliveries WHERE webhook_id = ? AND {OPEN} AND status = 'waiting' "
        "ORDER BY number DESC LIMIT -1 OFFSET ?)",
        (now, webhook_id, max_waiting),
    ).rowcount


def get_delivery(connection: sqlite3.Connection, webhook_id: str, delivery_id: str) -> DueDelivery | None:
    """Return a delivery of any status from the log."""
    row = connection.execute(
        "SELECT deliveries.*, is_hub, body FROM deliveries JOIN messages ON messages.id = message_id "
        "WHERE deliveries.id = ? AND webhook_id = ?",
        (delivery_id, webhook_id),
    ).fetchone()
    if row is None:
        return None
    body = row["body"]
    if row["is_hub"]:
        # Joined as text, because parsing JSON of megabytes would block all other threads.
        webhook = json.dumps({"id": webhook_id, "version": 3}, separators=(",", ":"))
        body = f'{body.removesuffix("}")},"webhook":{webhook}}}'
    return DueDelivery(
        delivery_id,
        webhook_id,
        row["failed"],
        DeliveryRequest(f"msg_{delivery_id}", body.encode(), bool(row["is_hub"])),
    )


def record_attempt(
    connection: sqlite3.Connection,
    delivery: DueDelivery,
    outcome: DeliveryOutcome,
    at: float,
    now: float,
    wait: float | None,
    *,
    is_replay: bool = False,
) -> bool:
    """Record an attempt and the delivery's new state; return whether the delivery failed for good."""
    row = connection.execute("SELECT attempts FROM deliveries WHERE id = ?", (delivery.id,)).fetchone()
    if row is None:
        return False
    attempt = {
        "at": format_time(at),
        "seconds": round(outcome.seconds, 3),
        "status": outcome.status,
        "exitStatus": outcome.exit_status,
        "error": outcome.error,
        "excerpt": outcome.excerpt,
        "isReplay": is_replay,
    }
    attempts = json.dumps([*json.loads(row["attempts"]), attempt][-MAX_ATTEMPTS:])
    connection.execute("UPDATE deliveries SET attempts = ? WHERE id = ?", (attempts, delivery.id))
    if outcome.is_delivered:
        status, due = "delivered", None
    elif is_replay:
        return False  # A failed replay does not change the delivery.
    elif wait is None:
        status, due = "failed", None
    else:
        status, due = "waiting", now + wait
    new_status = connection.execute(
        "UPDATE deliveries SET status = ?, due = ?, failed = failed + ?, finished_at = ? "
        f"WHERE id = ? AND ({OPEN} OR ? = 'delivered')",
        (status, due, not outcome.is_delivered, None if status == "waiting" else now, delivery.id, status),
    ).rowcount
    return bool(new_status) and status == "failed"


def hold_webhook(connection: sqlite3.Connection, webhook_id: str) -> None:
    """Hold a webhook's deliveries until ``release_webhook``."""
    connection.execute("INSERT OR IGNORE INTO held VALUES (?)", (webhook_id,))


def release_webhook(connection: sqlite3.Connection, webhook_id: str, now: float) -> None:
    """Release a webhook's deliveries; waiting deliveries are sent at once."""
    if connection.execute("DELETE FROM held WHERE webhook_id = ?", (webhook_id,)).rowcount:
        connection.execute(
            "UPDATE deliveries SET due = min(due, ?), failed = 0 "
            f"WHERE webhook_id = ? AND {OPEN} AND status = 'waiting'",
            (now, webhook_id),
        )
