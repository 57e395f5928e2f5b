"""Store of registered webhooks in SQLite, with validated create and update."""

import re
import sqlite3
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated_dataclass

from hooks.addresses import MAX_URL
from hooks.errors import InvalidWebhook, UnknownWebhook
from hooks.registry import delivery_queue
from hooks.registry.delivery import MAX_JOB_SECRET, MAX_SECRET, Destination, format_time

# Older versions of huggingface_hub send the plural "discussions".
Domain = Annotated[
    Literal["repo", "discussion", "session"],
    BeforeValidator(lambda value: "discussion" if value == "discussions" else value),
]
HUB_DOMAINS = ("repo", "discussion")

# The value of ``disabled`` in addition to true and false, as on the Hub.
SUSPENDED = "suspended-after-failure"
MAX_WATCHED = 100
MAX_SECRETS = 32
MAX_ERRORS = 10  # errors per answer
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("wanted name or owner/name")
    return name


@validated_dataclass(frozen=True)
class Watched:
    """A repo by its type and name, or all repos of a user or org."""

    type: Literal["bucket", "dataset", "kernel", "model", "org", "space", "user"]
    name: Annotated[str, AfterValidator(_check_name)]


@validated_dataclass(frozen=True)
class Webhook(Destination):
    """A registered webhook; either ``url`` or ``job`` is set.

    Attributes:
        disabled: empty for an enabled webhook, else ``disabled`` or ``SUSPENDED``.
        exhausted: number of consecutive deliveries that failed for good.
    """

    watched: tuple[Watched, ...] = ()
    domains: tuple[str, ...] = ()
    disabled: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    exhausted: int = 0

    def to_json(self) -> dict[str, Any]:
        """Convert to the Hub's JSON, without secrets."""
        fields: dict[str, Any] = {
            "id": self.id,
            "watched": [{"type": item.type, "name": item.name} for item in self.watched],
            "domains": list(self.domains),
            "hasSecret": bool(self.secret),
            "disabled": SUSPENDED if self.disabled == SUSPENDED else bool(self.disabled),
            "createdAt": format_time(self.created_at),
            "updatedAt": format_time(self.updated_at),
        }
        if self.url is not None:
            return fields | {"url": self.url}
        # huggingface_hub builds a JobSpec from ``job``; the job's command stays private to the operator.
        return fields | {"jobSourceId": self.job, "job": {"labels": {"id": self.job}}, "secretNames": [*self.secrets]}

    def matches(self, scope: str, repo_type: str, repo_name: str) -> bool:
        """Whether the webhook receives Hub events of this scope and repo."""
        domain = "discussion" if scope.split(".")[0] == "discussion" else "repo"
        if self.disabled or domain not in self.domains:
            return False
        name = repo_name.casefold()
        owner = name.partition("/")[0] if "/" in name else None
        return any(
            item.name.casefold() == (owner if item.type in ("user", "org") else name)
            and item.type in ("user", "org", repo_type)
            for item in self.watched
        )

    @property
    def is_watching_sessions(self) -> bool:
        """Whether the webhook receives the events of sessions."""
        return not self.disabled and "session" in self.domains


def _check_secret(secret: str) -> str:
    if not secret.isascii() or not secret.isprintable() or secret != secret.strip():
        raise ValueError("wanted printable ASCII (it is sent as a header) without spaces at its ends")
    return secret


def _check_variable(text: str) -> str:
    if len(text.encode()) > MAX_JOB_SECRET or "\0" in text:
        raise ValueError(f"wanted text of at most {MAX_JOB_SECRET} bytes")
    return text


Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class WebhookUpdate(BaseModel):
    """JSON body that creates or updates a webhook; an update keeps fields that are None and removes empty secrets."""

    model_config = ConfigDict(frozen=True)

    url: Annotated[str, Field(max_length=MAX_URL)] | None = None
    job: Annotated[str, Field(max_length=MAX_URL)] | None = Field(default=None, alias="jobSourceId")
    watched: Annotated[tuple[Watched, ...], Field(max_length=MAX_WATCHED)] | None = None
    domains: Annotated[tuple[Domain, ...], Field(min_length=1, max_length=MAX_WATCHED)] | None = None
    secret: Annotated[str, Field(max_length=MAX_SECRET), AfterValidator(_check_secret)] | None = Field(None, repr=False)
    secrets: (
        Annotated[dict[Variable, Annotated[str, AfterValidator(_check_variable)]], Field(max_length=MAX_SECRETS)] | None
    ) = Field(None, repr=False)


def read_update(body: object, *, is_new: bool) -> WebhookUpdate:
    """Parse the body of a create or update; an empty ``watched`` counts as omitted; raise ``InvalidWebhook``."""
    if not isinstance(body, dict):
        raise InvalidWebhook(f"body: {type(body).__name__}, wanted a JSON object")
    if body.get("job") is not None:
        raise InvalidWebhook("job: only the operator of this server registers jobs; give a job's id as jobSourceId")
    try:
        update = WebhookUpdate.model_validate(body)
    except ValidationError as error:
        raise InvalidWebhook("; ".join(map(_describe_error, error.errors(include_url=False)[:MAX_ERRORS]))) from None
    if update.url and update.job:
        raise InvalidWebhook("url and jobSourceId exclude each other; give url or jobSourceId")
    if is_new and not update.url and not update.job:
        raise InvalidWebhook("url and jobSourceId are missing; give url or jobSourceId")
    if update.secrets and (update.url or (is_new and not update.job)):
        raise InvalidWebhook("secrets: only jobs have them; give them together with jobSourceId")
    domains = None if update.domains is None else tuple(dict.fromkeys(update.domains))
    watched = tuple(dict.fromkeys(update.watched or ())) or None
    if is_new:
        domains = domains or HUB_DOMAINS
        if not watched and domains != ("session",):
            raise InvalidWebhook("watched: wanted at least one item, e.g. {'type': 'model', 'name': 'owner/name'}")
    return update.model_copy(update={"domains": domains, "watched": watched})


def _describe_error(error: Any) -> str:
    """Return the place and reason of an error; include the found value only if it cannot be a secret."""
    name, *parts = error["loc"]
    place = name + "".join(f"[{part!r:.40}]" for part in parts)
    is_shown = name in ("watched", "domains") and error["type"] != "too_long"
    return f"{place}: {error['msg'].removeprefix('Value error, ')}" + (
        f", found {error['input']!r:.100}" if is_shown else ""
    )


SCHEMA = "CREATE TABLE webhooks (id TEXT PRIMARY KEY, json TEXT NOT NULL) STRICT;" + delivery_queue.SCHEMA
_WEBHOOK = TypeAdapter(Webhook)


@dataclass(frozen=True)
class WebhookStore:
    """Transactions on registered webhooks; an unknown id raises ``UnknownWebhook``."""

    max_webhooks: int
    suspend_after: int

    def list_webhooks(self, connection: sqlite3.Connection) -> list[Webhook]:
        """List the webhooks, oldest first."""
        rows = connection.execute("SELECT json FROM webhooks ORDER BY rowid")
        return [_WEBHOOK.validate_json(row["json"]) for row in rows]

    def find(self, connection: sqlite3.Connection, webhook_id: str) -> Webhook | None:
        """Return the webhook with this id, or None."""
        row = connection.execute("SELECT json FROM webhooks WHERE id = ?", (webhook_id,)).fetchone()
        return None if row is None else _WEBHOOK.validate_json(row["json"])

    def get(self, connection: sqlite3.Connection, webhook_id: str) -> Webhook:
        """Return the webhook with this id."""
        webhook = self.find(connection, webhook_id)
        if webhook is None:
            raise UnknownWebhook("there is no webhook with this id", 404)
        return webhook

    def create(self, connection: sqlite3.Connection, fields: WebhookUpdate, now: float) -> Webhook:
        """Register a webhook; raise ``InvalidWebhook`` if there are too many."""
        (count,) = connection.execute("SELECT count(*) FROM webhooks").fetchone()
        if count >= self.max_webhooks:
            raise InvalidWebhook(f"there are {count} webhooks already, the largest number; delete a webhook first")
        webhook = Webhook(
            id=delivery_queue.generate_id(),
            url=fields.url,
            job=fields.job,
            watched=fields.watched or (),
            domains=fields.domains or (),
            secret=fields.secret or None,
            secrets={name: value for name, value in (fields.secrets or {}).items() if value},
            created_at=now,
            updated_at=now,
        )
        _write_webhook(connection, webhook)
        return webhook

    def update(self, connection: sqlite3.Connection, webhook_id: str, changes: WebhookUpdate, now: float) -> Webhook:
        """Change the given fields and keep the rest; raise ``InvalidWebhook`` if the result would be invalid."""
        old = self.get(connection, webhook_id)
        url, job = old.url, old.job
        secrets = dict(old.secrets)
        if changes.url:
            url, job, secrets = changes.url, None, {}
        elif changes.job:
            url, job = None, changes.job
        if changes.secrets:
            if job is None:
                raise InvalidWebhook("secrets: only jobs have them, and this webhook has a url")
            secrets = {name: value for name, value in (secrets | dict(changes.secrets)).items() if value}
        new = replace(
            old,
            url=url,
            job=job,
            watched=old.watched if changes.watched is None else changes.watched,
            domains=old.domains if changes.domains is None else changes.domains,
            secret=old.secret if changes.secret is None else changes.secret or None,
            secrets=secrets,
            updated_at=now,
        )
        if not new.watched and new.domains != ("session",):
            raise InvalidWebhook("watched: this webhook watches nothing; give at least one item")
        _write_webhook(connection, new)
        return new

    def enable(self, connection: sqlite3.Connection, webhook_id: str, now: float) -> Webhook:
        """Enable a webhook; its waiting deliveries are sent at once."""
        delivery_queue.release_webhook(connection, webhook_id, now)
        return self._set_disabled(connection, webhook_id, "", now)

    def disable(self, connection: sqlite3.Connection, webhook_id: str, now: float, reason: str = "disabled") -> Webhook:
        """Disable a webhook; its waiting deliveries keep waiting."""
        webhook = self._set_disabled(connection, webhook_id, reason, now)
        delivery_queue.hold_webhook(connection, webhook_id)
        return webhook

    def _set_disabled(self, connection: sqlite3.Connection, webhook_id: str, disabled: str, now: float) -> Webhook:
        webhook = replace(self.get(connection, webhook_id), disabled=disabled, exhausted=0, updated_at=now)
        _write_webhook(connection, webhook)
        return webhook

    def delete(self, connection: sqlite3.Connection, webhook_id: str) -> None:
        """Delete a webhook with its waiting deliveries and its log."""
        self.get(connection, webhook_id)
        connection.execute("DELETE FROM webhooks WHERE id = ?", (webhook_id,))
        delivery_queue.delete_log(connection, webhook_id)

    def record_result(self, connection: sqlite3.Connection, webhook_id: str, result: str, now: float) -> None:
        """Record a result: ``delivered``, ``exhausted`` (no attempt left) or ``gone`` (410)."""
        webhook = self.find(connection, webhook_id)
        if webhook is None:
            return
        exhausted = webhook.exhausted + 1 if result == "exhausted" else 0
        if result == "gone":
            self.disable(connection, webhook_id, now)
        elif exhausted >= self.suspend_after and not webhook.disabled:
            self.disable(connection, webhook_id, now, SUSPENDED)
        elif exhausted != webhook.exhausted:
            _write_webhook(connection, replace(webhook, exhausted=exhausted))


def _write_webhook(connection: sqlite3.Connection, webhook: Webhook) -> None:
    connection.execute(
        "INSERT INTO webhooks VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET json = excluded.json",
        (webhook.id, _WEBHOOK.dump_json(webhook).decode()),
    )
