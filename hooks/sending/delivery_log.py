"""The log of deliveries: read, counted, and shortened."""

import sqlite3
from typing import Any

from hooks.queue import OPEN
from hooks.sending.queue import marks
from hooks.sending.schedule import iso

# delivered: taken; failed: no attempt left; dropped: too many waited; waiting: the only one that is not final.
STATES = ("waiting", "delivered", "failed", "dropped")


def forget(connection: sqlite3.Connection, webhook_id: str) -> None:
    """A webhook is gone, and its log with it."""
    connection.execute("DELETE FROM held WHERE webhook_id = ?", (webhook_id,))
    connection.execute("DELETE FROM deliveries WHERE webhook_id = ?", (webhook_id,))
    _drop_messages(connection)


def prune(connection: sqlite3.Connection, before: float, most: int) -> int:
    """Forget what was finished before then, and above so many also what is newer; how many.

    What waits for a webhook that is not enabled is forgotten too when it is older.
    """
    count = connection.execute(
        "DELETE FROM deliveries WHERE finished_at < ? OR number IN (SELECT number FROM deliveries "
        "WHERE finished_at IS NOT NULL ORDER BY finished_at DESC, number DESC LIMIT -1 OFFSET ?) "
        "OR (status = 'waiting' AND created_at < ? AND webhook_id IN (SELECT * FROM held))",
        (before, most, before),
    ).rowcount
    if count:
        _drop_messages(connection)
    return count


def _drop_messages(connection: sqlite3.Connection) -> None:
    connection.execute(
        "DELETE FROM messages WHERE NOT EXISTS (SELECT 1 FROM deliveries WHERE message_id = messages.id)"
    )


def entries(
    connection: sqlite3.Connection, webhook_id: str, limit: int, before: str | None = None
) -> list[dict[str, Any]]:
    """The newest deliveries of a webhook with their attempts, newest first; older than ``before`` when given."""
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
    attempts: dict[str, list[dict[str, Any]]] = {row["id"]: [] for row in rows}
    for attempt in connection.execute(
        f"SELECT * FROM attempts WHERE delivery_id IN ({marks(rows)}) ORDER BY rowid", [row["id"] for row in rows]
    ):
        attempts[attempt["delivery_id"]].append(_attempt(attempt))
    return [
        {
            "id": row["id"],
            "webhookDeliveryId": f"msg_{row['id']}",
            "type": row["type"],
            "subject": row["lane"],
            "status": public_status(row["status"]),
            "createdAt": iso(row["created_at"]),
            "finishedAt": iso(row["finished_at"]),
            "nextAttemptAt": iso(row["due"])
            if public_status(row["status"]) == "waiting" and not row["is_behind"]
            else None,
            "attempts": attempts[row["id"]],
        }
        for row in rows
    ]


def _attempt(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "at": iso(row["at"]),
        "seconds": round(row["seconds"], 3),
        "status": row["status"],
        "exitStatus": row["exit_status"],
        "error": row["error"],
        "excerpt": row["excerpt"],
        "isReplay": bool(row["is_replay"]),
    }


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """How many deliveries of each status there are."""
    found: dict[str, int] = dict.fromkeys(STATES, 0)
    for status, count in connection.execute("SELECT status, count(*) FROM deliveries GROUP BY 1"):
        found[public_status(status)] += count
    return found


def public_status(status: str) -> str:
    """The status as people see it: what is under way waits for its outcome."""
    return "waiting" if status == "running" else status
