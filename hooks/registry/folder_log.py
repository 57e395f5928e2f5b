"""What was last known of each watched folder's content, so that a change while the server was off is told too."""

import sqlite3


def note_content(connection: sqlite3.Connection, name: str, sha: str, now: float) -> tuple[bool, str | None]:
    """Write the content down; whether it is a change, and what it was before.

    The first content that is ever seen of a folder is no change.
    """
    row = connection.execute("SELECT sha FROM folders WHERE name = ?", (name,)).fetchone()
    old = None if row is None else row["sha"]
    if old == sha:
        return False, old
    connection.execute(
        "INSERT INTO folders VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET sha = excluded.sha, "
        "changed_at = excluded.changed_at",
        (name, sha, now),
    )
    return old is not None, old
