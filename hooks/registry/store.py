"""The registered webhooks: transactions on the database."""

import json
import sqlite3
from dataclasses import dataclass, replace

from hooks.errors import InvalidWebhook, UnknownWebhook
from hooks.registry.webhook import SUSPENDED, Watched, Webhook, Wish
from hooks.sending import queue
from hooks.sending.outcome import Destination


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


WEBHOOKS = """
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    url TEXT,
    job TEXT,
    watched TEXT NOT NULL,
    domains TEXT NOT NULL,
    secret TEXT,
    secrets TEXT NOT NULL,
    disabled TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    exhausted INTEGER NOT NULL DEFAULT 0,
    CHECK ((url IS NULL) <> (job IS NULL))
) STRICT;
CREATE TABLE folders (
    name TEXT PRIMARY KEY,
    sha TEXT NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
"""
SCHEMA = (WEBHOOKS + queue.SCHEMA, queue.LANES)


@dataclass(frozen=True)
class WebhookStore:
    """What is done to webhooks; every method is a transaction, or a part of one.

    Attributes:
        max_webhooks: that there may be.
        suspend_after: deliveries in a row that were given up, after which a webhook gets nothing more.

    Raises:
        UnknownWebhook: by every method that is given an id but the last two: there is no such webhook.
    """

    max_webhooks: int
    suspend_after: int

    def all(self, connection: sqlite3.Connection) -> list[Webhook]:
        """Oldest first."""
        return [_webhook(row) for row in connection.execute("SELECT * FROM webhooks ORDER BY created_at, rowid")]

    def get(self, connection: sqlite3.Connection, webhook_id: str) -> Webhook:
        """One of them."""
        row = connection.execute("SELECT * FROM webhooks WHERE id = ?", (webhook_id,)).fetchone()
        if row is None:
            raise UnknownWebhook("there is no webhook of this id", 404)
        return _webhook(row)

    def create(self, connection: sqlite3.Connection, wish: Wish, now: float) -> Webhook:
        """Register one.

        Raises:
            InvalidWebhook: there are too many.
        """
        (count,) = connection.execute("SELECT count(*) FROM webhooks").fetchone()
        if count >= self.max_webhooks:
            raise InvalidWebhook(f"there are {count} webhooks, and no more may be; delete one that is not needed")
        made = Webhook(
            id=queue.new_id(),
            url=wish.url,
            job=wish.job,
            watched=wish.watched or (),
            domains=wish.domains or (),
            secret=wish.secret or None,
            secrets={name: value for name, value in (wish.secrets or {}).items() if value},
            created_at=now,
            updated_at=now,
        )
        _write(connection, made)
        return made

    def update(self, connection: sqlite3.Connection, webhook_id: str, wish: Wish, now: float) -> Webhook:
        """Change what the wish names, and keep the rest; what waits goes to the new place.

        Raises:
            InvalidWebhook: the result would watch nothing, or would be a URL with secrets for a job.
        """
        before = self.get(connection, webhook_id)
        url, job = before.url, before.job
        secrets = dict(before.secrets)
        if wish.url:
            url, job, secrets = wish.url, None, {}
        elif wish.job:
            url, job = None, wish.job
        if wish.secrets:
            if job is None:
                raise InvalidWebhook("secrets: they are for jobs, and this webhook has a url")
            secrets = {name: value for name, value in (secrets | dict(wish.secrets)).items() if value}
        after = replace(
            before,
            url=url,
            job=job,
            watched=before.watched if wish.watched is None else wish.watched,
            domains=before.domains if wish.domains is None else wish.domains,
            secret=before.secret if wish.secret is None else wish.secret or None,
            secrets=secrets,
            updated_at=now,
        )
        if not after.watched and after.domains != ("session",):
            raise InvalidWebhook("watched: it watches nothing so far; give at least one item")
        _write(connection, after)
        return after

    def enable(self, connection: sqlite3.Connection, webhook_id: str, now: float) -> Webhook:
        """Let it have events again; what has waited is sent at once."""
        self._set(connection, webhook_id, "", now)
        queue.release(connection, webhook_id, now)
        return self.get(connection, webhook_id)

    def disable(self, connection: sqlite3.Connection, webhook_id: str, now: float, how: str = "disabled") -> Webhook:
        """Let it have no more events; what waits goes on waiting."""
        self._set(connection, webhook_id, how, now)
        queue.hold(connection, webhook_id)
        return self.get(connection, webhook_id)

    def _set(self, connection: sqlite3.Connection, webhook_id: str, disabled: str, now: float) -> None:
        self.get(connection, webhook_id)
        connection.execute(
            "UPDATE webhooks SET disabled = ?, exhausted = 0, updated_at = ? WHERE id = ?", (disabled, now, webhook_id)
        )

    def delete(self, connection: sqlite3.Connection, webhook_id: str) -> None:
        """Forget it, what waits for it, and its log."""
        self.get(connection, webhook_id)
        connection.execute("DELETE FROM webhooks WHERE id = ?", (webhook_id,))
        queue.forget(connection, webhook_id)

    def destination(self, connection: sqlite3.Connection, webhook_id: str) -> Destination | None:
        """Where its events go now."""
        row = connection.execute("SELECT * FROM webhooks WHERE id = ?", (webhook_id,)).fetchone()
        if row is None:
            return None
        webhook = _webhook(row)
        return Destination(webhook.id, webhook.url, webhook.job, webhook.secret, webhook.secrets)

    def heard(self, connection: sqlite3.Connection, webhook_id: str, what: str, now: float) -> None:
        """How it does; see ``Subscribers``."""
        row = connection.execute("SELECT disabled, exhausted FROM webhooks WHERE id = ?", (webhook_id,)).fetchone()
        if row is None:
            return
        if what == "gone":
            self.disable(connection, webhook_id, now)
        elif what == "exhausted" and row["exhausted"] + 1 >= self.suspend_after and not row["disabled"]:
            self.disable(connection, webhook_id, now, SUSPENDED)
        else:
            exhausted = row["exhausted"] + 1 if what == "exhausted" else 0
            connection.execute("UPDATE webhooks SET exhausted = ? WHERE id = ?", (exhausted, webhook_id))


def _write(connection: sqlite3.Connection, webhook: Webhook) -> None:
    watched = json.dumps([[item.type, item.name] for item in webhook.watched])
    texts = {"watched": watched, "domains": json.dumps(webhook.domains), "secrets": json.dumps(dict(webhook.secrets))}
    connection.execute(
        "INSERT INTO webhooks (id, url, job, watched, domains, secret, secrets, disabled, created_at, updated_at) "
        "VALUES (:id, :url, :job, :watched, :domains, :secret, :secrets, :disabled, :created_at, :updated_at) "
        "ON CONFLICT (id) DO UPDATE SET url = excluded.url, job = excluded.job, watched = excluded.watched, "
        "domains = excluded.domains, secret = excluded.secret, secrets = excluded.secrets, "
        "updated_at = excluded.updated_at",
        vars(webhook) | texts,
    )


def _webhook(row: sqlite3.Row) -> Webhook:
    kept = {name: row[name] for name in row.keys() if name != "exhausted"}  # noqa: SIM118 (a Row is no dict)
    return Webhook(
        **kept
        | {
            "watched": tuple(Watched(*item) for item in json.loads(row["watched"])),
            "domains": tuple(json.loads(row["domains"])),
            "secrets": json.loads(row["secrets"]),
        }
    )
