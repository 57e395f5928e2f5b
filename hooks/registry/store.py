"""The registered webhooks: transactions on the database."""

import json
import sqlite3
from dataclasses import replace

from hooks.errors import InvalidWebhook, UnknownWebhook
from hooks.registry.webhook import SUSPENDED, Watched, Webhook
from hooks.registry.wish import Wish
from hooks.sending import delivery_log, queue
from hooks.sending.outcome import Destination

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


class WebhookStore:
    """What is done to webhooks; every method is a transaction, or a part of one.

    Attributes:
        max_webhooks: that there may be.
        suspend_after: deliveries in a row that were given up, after which a webhook gets nothing more.
    """

    def __init__(self, max_webhooks: int, suspend_after: int):
        self.max_webhooks = max_webhooks
        self.suspend_after = suspend_after

    def all(self, connection: sqlite3.Connection) -> list[Webhook]:
        """Oldest first."""
        return [_webhook(row) for row in connection.execute("SELECT * FROM webhooks ORDER BY created_at, rowid")]

    def get(self, connection: sqlite3.Connection, webhook_id: str) -> Webhook:
        """One of them.

        Raises:
            UnknownWebhook: there is none of this id.
        """
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
            UnknownWebhook: there is none of this id.
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
        """Let it have events again; what has waited is sent at once.

        Raises:
            UnknownWebhook: there is none of this id.
        """
        self._set(connection, webhook_id, "", now)
        queue.release(connection, webhook_id, now)
        return self.get(connection, webhook_id)

    def disable(self, connection: sqlite3.Connection, webhook_id: str, now: float, how: str = "disabled") -> Webhook:
        """Let it have no more events; what waits goes on waiting.

        Raises:
            UnknownWebhook: there is none of this id.
        """
        self._set(connection, webhook_id, how, now)
        queue.hold(connection, webhook_id)
        return self.get(connection, webhook_id)

    def _set(self, connection: sqlite3.Connection, webhook_id: str, disabled: str, now: float) -> None:
        self.get(connection, webhook_id)
        connection.execute(
            "UPDATE webhooks SET disabled = ?, exhausted = 0, updated_at = ? WHERE id = ?", (disabled, now, webhook_id)
        )

    def delete(self, connection: sqlite3.Connection, webhook_id: str) -> None:
        """Forget it, what waits for it, and its log.

        Raises:
            UnknownWebhook: there is none of this id.
        """
        self.get(connection, webhook_id)
        connection.execute("DELETE FROM webhooks WHERE id = ?", (webhook_id,))
        delivery_log.forget(connection, webhook_id)

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
    connection.execute(
        "INSERT INTO webhooks (id, url, job, watched, domains, secret, secrets, disabled, created_at, updated_at) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET url = excluded.url, job = excluded.job, "
        "watched = excluded.watched, domains = excluded.domains, secret = excluded.secret, "
        "secrets = excluded.secrets, updated_at = excluded.updated_at",
        (
            webhook.id,
            webhook.url,
            webhook.job,
            json.dumps([[item.type, item.name] for item in webhook.watched]),
            json.dumps(webhook.domains),
            webhook.secret,
            json.dumps(dict(webhook.secrets)),
            webhook.disabled,
            webhook.created_at,
            webhook.updated_at,
        ),
    )


def _webhook(row: sqlite3.Row) -> Webhook:
    return Webhook(
        id=row["id"],
        url=row["url"],
        job=row["job"],
        watched=tuple(Watched(*item) for item in json.loads(row["watched"])),
        domains=tuple(json.loads(row["domains"])),
        secret=row["secret"],
        secrets=json.loads(row["secrets"]),
        disabled=row["disabled"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
