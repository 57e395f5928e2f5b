"""Registry: webhooks managed on this machine, with their deliveries, while its server runs."""

import asyncio
import ipaddress
import logging
import math
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sanic import Blueprint

from hooks.addresses import Resolve, TargetRules
from hooks.database import Database, alone
from hooks.errors import HooksError, InvalidSettings
from hooks.payload import WebhookPayload
from hooks.registry import delivery_queue
from hooks.registry.api import Management, add_routes
from hooks.registry.delivery import TIMEOUT, HttpDeliverer, format_time
from hooks.registry.delivery import resolve_host as ask_name_server
from hooks.registry.delivery_queue import Message, generate_id
from hooks.registry.jobs import JobDeliverer, load_jobs
from hooks.registry.sender import Sender, SenderSettings
from hooks.registry.store import SCHEMA, WebhookStore

MIN_TOKEN = 16


@dataclass(frozen=True)
class RegistrySettings:
    """Settings of a registry, for the operator.

    Attributes:
        tokens: ``Authorization: Bearer ...`` of those who may manage webhooks; at least one.
        read_tokens: of those who may only look.
        database: the SQLite file; None keeps everything in memory, and a restart loses it.
        owner: the user name that ``/api/whoami-v2`` gives.
        allowed_networks: networks that may be sent to although they are not public, e.g. ``192.168.1.0/24``.
        jobs_file: TOML of the jobs that webhooks may start; None for none.
        max_webhooks: that may be registered.
        timeout: seconds for one attempt.
        jobs_at_once: processes of jobs that run at once.
        suspend_after: deliveries in a row that were given up, after which a webhook is suspended.
        sender: retries, order, retention.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    read_tokens: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    owner: str = "robojax"
    allowed_networks: tuple[str, ...] = ()
    jobs_file: Path | None = None
    max_webhooks: int = 100
    timeout: float = TIMEOUT
    jobs_at_once: int = 2
    suspend_after: int = 3
    sender: SenderSettings = field(default_factory=SenderSettings)

    def __post_init__(self) -> None:
        wrong = []
        if not self.tokens:
            wrong.append(
                "no token is configured, and without one anybody could make this server send requests and start jobs; "
                "set at least one (e.g. from `openssl rand -hex 32`) and give it to clients as HF_TOKEN"
            )
        if any(len(token) < MIN_TOKEN or not token.isascii() for token in (*self.tokens, *self.read_tokens)):
            wrong.append(f"a token is shorter than {MIN_TOKEN} characters or not ASCII; make one: openssl rand -hex 32")
        for network in self.allowed_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                wrong.append(f"allowed network {network!r}: {error}; wanted e.g. 192.168.1.0/24")
        for name in ("max_webhooks", "jobs_at_once", "suspend_after", "timeout"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name}: {getattr(self, name)!r}, wanted more than 0")
        if wrong:
            raise InvalidSettings("registry of webhooks: " + "; ".join(wrong))

    @property
    def rules(self) -> TargetRules:
        """Rules for the addresses that deliveries may go to."""
        return TargetRules.from_networks(self.allowed_networks)


_TYPE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


def build_repo_message(
    name: str, new_sha: str, old_sha: str | None, *, repo_type: str = "model", ref: str = "refs/heads/main"
) -> Message:
    """Build the message that a local repo's content has changed."""
    repo = {
        "type": repo_type,
        "name": name,
        "id": f"{repo_type}:{name}",
        "private": True,
        "owner": {"id": name.partition("/")[0] if "/" in name else "local"},
        "headSha": new_sha,
        "tags": [],
        # It is nowhere on the web; huggingface_hub's model of the payload wants a text.
        "url": {"web": f"robojax:{repo_type}/{name}"},
    }
    body = {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": repo,
        "updatedRefs": [{"ref": ref, "oldSha": old_sha, "newSha": new_sha}],
    }
    return Message(generate_id(), "repo.content", str(repo["id"]), body, is_hub=True)


def build_relayed_message(payload: WebhookPayload | Mapping[str, Any], event_id: str | None) -> tuple[Message, str]:
    """Build the message that relays a verified event of the Hub; return the webhook that it came by, too.

    Args:
        event_id: the delivery it came with; the same again is no new event. None: it is new.

    Raises:
        ValueError: it is no payload of the Hub.
    """
    payload_model = payload if isinstance(payload, WebhookPayload) else WebhookPayload.model_validate(payload)
    body = payload_model.model_dump(mode="json", exclude_unset=True)
    del body["webhook"]
    message_id = generate_id() if event_id is None else f"relay:{payload_model.webhook.id}:{event_id}"
    subject = f"{payload_model.repo.type}:{payload_model.repo.id}"
    return Message(message_id, payload_model.event.scope, subject, body, is_hub=True), payload_model.webhook.id


def build_session_message(kind: str, data: Mapping[str, Any], now: float) -> Message:
    """Build the message of an event of a session or of the server.

    Args:
        kind: ``session.started``, ``session.policy.swapped``, ``server.degraded``, ...
        data: plain values; ``session_id`` in it is what the order of events is kept by.
        now: seconds since 1970.

    Raises:
        ValueError: the type is none.
    """
    if not _TYPE.fullmatch(kind):
        raise ValueError(f"event type {kind!r}: wanted words with dots between, e.g. session.started")
    plain = _to_json_value(data)
    body = {"type": kind, "timestamp": format_time(now), "data": plain}
    return Message(generate_id(), kind, f"session:{plain.get('session_id', '')}", body, is_hub=False)


def _to_json_value(value: Any) -> Any:
    """Convert a value to JSON: non-finite numbers become null, unknown objects their text."""
    if isinstance(value, Mapping):
        return {_replace_surrogates(key): _to_json_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json_value(part) for part in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return _replace_surrogates(value)


def _replace_surrogates(value: object) -> str:
    """Replace lone surrogates, which names of files may have and no database takes."""
    return str(value).encode("utf-8", "replace").decode()


logger = logging.getLogger(__name__)


class Registry:
    """Registry of webhooks, managed by the Hub's API, and their deliveries.

    Raises:
        InvalidSettings: the jobs file cannot be used.
        HooksError: by all but ``blueprint`` and ``running``: it does not run, or its database cannot be used.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        *,
        resolve: Resolve = ask_name_server,
        clock: Callable[[], float] = time.time,
    ):
        """Make a registry; nothing runs and no file is open before ``running``, or the server of ``blueprint``, starts.

        Args:
            resolve: names to addresses.
            clock: seconds since 1970.
        """
        self.settings = settings
        self._jobs = load_jobs(settings.jobs_file)
        self._rules = settings.rules
        self._store = WebhookStore(settings.max_webhooks, settings.suspend_after)
        self._resolve = resolve
        self._clock = clock
        self._open: tuple[Database, Sender, Management] | None = None

    @property
    def _running(self) -> tuple[Database, Sender, Management]:
        if self._open is None:
            raise HooksError("the registry of webhooks does not run; it does while its server does")
        return self._open

    @property
    def management(self) -> Management:
        """Operations on the registered webhooks."""
        return self._running[2]

    @property
    def sender(self) -> Sender:
        """Sender of the deliveries."""
        return self._running[1]

    def blueprint(self) -> Blueprint:
        """Build the Hub's API; an app that serves it runs the registry from before its first request to after its last.

        Paths are whole, as clients ask for them: ``/api/settings/webhooks``, ``/api/whoami-v2``.
        """
        made = Blueprint("webhooks-registry")
        add_routes(
            made,
            lambda: self.management,
            tokens=self.settings.tokens,
            read_tokens=self.settings.read_tokens,
            owner=self.settings.owner,
        )
        stack = AsyncExitStack()

        async def start(*_: object) -> None:
            await stack.enter_async_context(self.running())

        async def stop(*_: object) -> None:
            await stack.aclose()

        made.before_server_start(start)
        made.after_server_stop(stop)
        return made

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Registry"]:
        """Run the sender and jobs within this context; unfinished deliveries are sent again at the next start.

        Raises:
            StoreError: the database cannot be used, or another process uses it.
        """
        settings = self.settings
        # Two senders on one queue would send everything twice.
        advice = "another process sends from it; end that, run one process, or give this one another file"
        with alone(settings.database, advice), closing(Database(settings.database, SCHEMA)) as database:
            jobs_folder = settings.database and settings.database.with_name(settings.database.name + ".jobs")
            http_deliverer = HttpDeliverer(self._rules, timeout=settings.timeout, resolve=self._resolve)
            job_deliverer = JobDeliverer(self._jobs, jobs_folder, settings.jobs_at_once)
            sender = Sender(
                database,
                self._store,
                lambda destination: http_deliverer if destination.job is None else job_deliverer,
                settings.sender,
                clock=self._clock,
            )
            management = Management(database, self._store, sender, self._rules, self._jobs, self._resolve, self._clock)
            self._open = database, sender, management
            task = asyncio.create_task(sender.run(), name="webhooks sender")
            task.add_done_callback(_log_task_error)
            try:
                yield self
            finally:
                task.cancel()
                # Together: a sender that waits for a job ends with it.
                await asyncio.gather(task, job_deliverer.close(), return_exceptions=True)
                self._open = None

    async def emit_session(self, type: str, data: Mapping[str, Any]) -> int:
        """Emit an event of a session or of the server: ``session.started``, ``server.degraded``, ...

        When this returns the event is on the disk. Order is kept by ``data["session_id"]``.

        Returns:
            how many webhooks get it: those with the domain ``session``.

        Raises:
            ValueError: the type is none.
        """
        message = build_session_message(type, data, self._clock())
        return await self.sender.queue_message(
            message,
            lambda connection: [one.id for one in self._store.list_webhooks(connection) if one.is_watching_sessions],
        )

    async def emit_repo(
        self,
        name: str,
        new_sha: str,
        old_sha: str | None = None,
        *,
        repo_type: str = "model",
        ref: str = "refs/heads/main",
    ) -> int:
        """Emit that a local repo's content has changed; return for how many webhooks."""
        return await self._emit(build_repo_message(name, new_sha, old_sha, repo_type=repo_type, ref=ref))

    async def emit_payload(self, payload: WebhookPayload | Mapping[str, Any], *, event_id: str | None = None) -> int:
        """Relay a verified event of the Hub to the webhooks that watch its repo; return for how many.

        One that this registry sent itself goes to nobody: it would go round for ever.

        Args:
            event_id: the ``Webhook-Id`` it came with; the same event given again is sent once.

        Raises:
            ValueError: it is no payload of the Hub.
        """
        return await self._emit(*build_relayed_message(payload, event_id))

    async def _emit(self, message: Message, source_webhook: str | None = None) -> int:
        return await self.sender.queue_message(
            message, lambda connection: self._find_subscribers(connection, message, source_webhook)
        )

    def _find_subscribers(
        self, connection: sqlite3.Connection, message: Message, source_webhook: str | None = None
    ) -> list[str]:
        webhooks = self._store.list_webhooks(connection)
        if any(one.id == source_webhook for one in webhooks):
            return []
        repo, scope = message.body["repo"], message.body["event"]["scope"]
        return [one.id for one in webhooks if one.matches(scope, repo["type"], repo["name"])]

    async def get_stats(self) -> dict[str, int]:
        """Return figures: webhooks, deliveries by status, and those dropped since the start."""
        database, sender, _ = self._running

        def transaction(connection: sqlite3.Connection) -> dict[str, int]:
            webhooks = self._store.list_webhooks(connection)
            return {
                "webhooks": len(webhooks),
                "webhooks_disabled": sum(bool(one.disabled) for one in webhooks),
                **{
                    f"deliveries_{status}": count
                    for status, count in delivery_queue.count_by_status(connection).items()
                },
            }

        return await database.run(transaction) | {"deliveries_dropped_since_start": sender.dropped}


def _log_task_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s ended", task.get_name(), exc_info=task.exception())
