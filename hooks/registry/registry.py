"""Registry: webhooks managed on this machine, their settings, and the sender of their deliveries."""

import asyncio
import ipaddress
import json
import logging
import math
import random
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hooks.addresses import Resolve, TargetRules
from hooks.database import Database, alone
from hooks.errors import HooksError, HubTrouble, InvalidSettings, InvalidWebhook, StoreError, UnknownWebhook
from hooks.payload import WebhookPayload
from hooks.queue import QueueRunner
from hooks.registry import delivery_queue
from hooks.registry.delivery import WAITS, DeliveryOutcome, DeliveryRequest, Destination, format_time, get_wait
from hooks.registry.delivery import resolve_host as ask_name_server
from hooks.registry.delivery_queue import DueDelivery, Message, generate_id
from hooks.registry.jobs import JobDeliverer, load_jobs
from hooks.registry.store import SCHEMA, Webhook, WebhookStore, WebhookUpdate, read_update

logger = logging.getLogger(__name__)

_TYPE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
MIN_TOKEN = 16
POSITIVE = ("max_webhooks", "jobs_at_once", "suspend_after", "max_parallel", "max_waiting")


@dataclass(frozen=True)
class RegistrySettings:
    """Settings of a registry.

    Attributes:
        tokens: bearer tokens that the API accepts; at least one.
        database: SQLite file; None for memory, which a restart clears.
        allowed_networks: networks of allowed targets that are not public, e.g. ``192.168.1.0/24``.
        jobs_file: TOML file of the jobs that webhooks may start, or None.
        max_webhooks: largest number of registered webhooks.
        jobs_at_once: largest number of jobs that run in parallel.
        suspend_after: number of consecutive failed deliveries that suspends a webhook.
        waits: seconds before each attempt of a delivery.
        max_parallel: parallel deliveries of one webhook. Deliveries of one repo run one at a time.
        max_waiting: waiting deliveries of one webhook; the oldest are dropped above this number.
        retention: seconds that finished deliveries stay in the log.
        max_retained: finished deliveries in the log, over all webhooks.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    allowed_networks: tuple[str, ...] = ()
    jobs_file: Path | None = None
    max_webhooks: int = 100
    jobs_at_once: int = 2
    suspend_after: int = 3
    waits: tuple[float, ...] = WAITS
    max_parallel: int = 4
    max_waiting: int = 1000
    retention: float = 14 * 24 * 3600.0
    max_retained: int = 10_000

    def __post_init__(self) -> None:
        wrong = []
        if not self.tokens:
            wrong.append(
                "no token is configured, so any client could make this server send requests and start jobs; "
                "set at least one (e.g. from `openssl rand -hex 32`) and give it to clients as HF_TOKEN"
            )
        if any(len(token) < MIN_TOKEN or not token.isascii() for token in self.tokens):
            wrong.append(f"a token is shorter than {MIN_TOKEN} characters or not ASCII; make one: openssl rand -hex 32")
        for network in self.allowed_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                wrong.append(f"allowed network {network!r}: {error}; wanted e.g. 192.168.1.0/24")
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                wrong.append(f"{name}: {getattr(self, name)!r}, wanted more than 0")
        if not self.waits or any(not 0 <= wait < math.inf for wait in self.waits):
            wrong.append(f"waits: {self.waits!r}, wanted one number of seconds per attempt, none below 0")
        if wrong:
            raise InvalidSettings("registry of webhooks: " + "; ".join(wrong))


PRUNE_INTERVAL = 600.0
STOP_TIMEOUT = 0.5  # seconds for running deliveries to end and be recorded when the sender stops


class Sender:
    """Sends due deliveries in parallel, per webhook; ``dropped`` counts deliveries above ``max_waiting``."""

    def __init__(
        self,
        database: Database,
        store: WebhookStore,
        deliver: Callable[[Destination, DeliveryRequest, float], Awaitable[DeliveryOutcome]],
        settings: RegistrySettings,
        *,
        clock: Callable[[], float] = time.time,
        random: Callable[[], float] = random.random,
    ):
        """Create a sender that starts with ``run``; ``deliver`` makes one attempt."""
        self.dropped = 0
        self._database = database
        self._store = store
        self._deliver_once = deliver
        self._settings = settings
        self._clock = clock
        self._random = random
        self._replays: set[asyncio.Task[object]] = set()
        self.runner = QueueRunner(database, delivery_queue.QUEUE, self._deliver, self._get_limits, clock=clock)

    async def queue_message(self, message: Message, webhooks: Callable[[sqlite3.Connection], Collection[str]]) -> int:
        """Queue an event durably for the webhooks that ``webhooks`` returns; return their number."""

        def transaction(connection: sqlite3.Connection) -> tuple[int, dict[str, int]]:
            limit = self._settings.max_waiting
            return delivery_queue.queue_message(connection, message, webhooks(connection), self._clock(), limit)

        count, dropped = await self._database.run(transaction)
        for webhook_id, number in dropped.items():
            self.dropped += number
            logger.warning(
                "webhook %s: more than %d deliveries wait, the oldest %d dropped (%d since the start); "
                "its delivery log says why they are not accepted",
                webhook_id,
                self._settings.max_waiting,
                number,
                self.dropped,
            )
        self.runner.wake()
        return count

    async def run(self) -> None:
        """Send until cancelled; the next start repeats interrupted deliveries with the same ids."""
        pruning = asyncio.create_task(self._prune(), name="webhooks prune")
        try:
            await self.runner.write(delivery_queue.QUEUE.release_running)  # A killed process left these.
            await self.runner.run()
        finally:
            pruning.cancel()
            await asyncio.gather(self.runner.close(STOP_TIMEOUT), pruning, return_exceptions=True)
            for task in self._replays:
                task.cancel()
            await asyncio.gather(*self._replays, return_exceptions=True)
            with suppress(StoreError):  # The next start releases them, too.
                await self._database.run(delivery_queue.QUEUE.release_running)

    def _get_limits(self, webhook_id: str) -> Mapping[str, int]:
        return {webhook_id: self._settings.max_parallel}

    async def _deliver(self, row: sqlite3.Row) -> None:
        delivery = await self.runner.write(delivery_queue.get_delivery, row["webhook_id"], row["id"])
        if delivery is not None:
            await self._attempt_delivery(delivery)

    async def _attempt_delivery(self, delivery: DueDelivery, *, is_replay: bool = False) -> DeliveryOutcome | None:
        destination = await self.runner.write(self._store.find, delivery.webhook_id)
        if destination is None:
            return None
        started_at = self._clock()
        try:
            outcome = await self._deliver_once(destination, delivery.request, started_at)
        except Exception as error:
            # A bug in one delivery must not stop the others, and its retries must wait.
            logger.exception("delivery %s failed in this server", delivery.id)
            outcome = DeliveryOutcome(
                error=f"this server failed to send it ({type(error).__name__}); its log says more"
            )
        if outcome.is_interrupted:
            return outcome
        wait = get_wait(self._settings.waits, delivery.failed_attempts + 1, self._random, outcome.retry_after)
        now = self._clock()

        def record(connection: sqlite3.Connection) -> None:
            is_given_up = delivery_queue.record_attempt(
                connection, delivery, outcome, started_at, now, wait, is_replay=is_replay
            )
            if outcome.is_gone or outcome.is_delivered or is_given_up:
                result = "gone" if outcome.is_gone else "delivered" if outcome.is_delivered else "exhausted"
                self._store.record_result(connection, delivery.webhook_id, result, now)

        await self.runner.write(record)
        if not outcome.is_delivered:
            logger.warning(
                "webhook %s, delivery %s, attempt %d: %s; %s",
                delivery.webhook_id,
                delivery.id,
                delivery.failed_attempts + 1,
                outcome.text,
                "it was a replay" if is_replay else "given up" if wait is None else f"next in {wait:.0f} s",
            )
        if is_replay:
            self.runner.wake()  # An accepted replay unblocks the next delivery of its lane.
        return outcome

    async def replay(self, webhook_id: str, delivery_id: str, *, is_awaited: bool = True) -> DeliveryOutcome | None:
        """Send a logged delivery again now; return its outcome (202 if not awaited), or None if it is unknown."""
        delivery = await self._database.run(delivery_queue.get_delivery, webhook_id, delivery_id)
        if delivery is None:
            return None
        if is_awaited:
            return await self._attempt_delivery(delivery, is_replay=True)
        task = asyncio.ensure_future(self._attempt_delivery(delivery, is_replay=True))
        self._replays.add(task)
        task.add_done_callback(self._replays.discard)
        return DeliveryOutcome(status=202)

    async def _prune(self) -> None:
        while True:
            try:
                await self._database.run(
                    delivery_queue.prune_log, self._clock() - self._settings.retention, self._settings.max_retained
                )
            except StoreError as error:
                logger.error("the delivery log cannot be shortened: %s", error)
            await asyncio.sleep(PRUNE_INTERVAL)


class Registry:
    """Registry of webhooks, managed by the Hub's API, and their deliveries.

    Each coroutine raises ``HooksError`` if the registry does not run or its database cannot be used, and
    ``UnknownWebhook`` for an unknown id.

    Raises:
        InvalidSettings: the jobs file cannot be used.
    """

    def __init__(self, settings: RegistrySettings, *, resolve: Resolve = ask_name_server):
        """Create a registry, which runs within ``running`` or while the server of ``blueprint`` runs."""
        self.settings = settings
        self._jobs = load_jobs(settings.jobs_file)
        self._rules = TargetRules(tuple(map(ipaddress.ip_network, settings.allowed_networks)))
        self._store = WebhookStore(settings.max_webhooks, settings.suspend_after)
        self._resolve = resolve
        self._open: tuple[Database, Sender] | None = None

    @property
    def _running(self) -> tuple[Database, Sender]:
        if self._open is None:
            raise HooksError("the registry of webhooks does not run; start its server")
        return self._open

    async def _run(self, transaction: Callable[..., Any], *arguments: Any) -> Any:
        return await self._running[0].run(transaction, *arguments)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Registry"]:
        """Run the sender and jobs within this context; raise ``StoreError`` if another process uses the database."""
        settings = self.settings
        # Two senders on one queue would send each event twice.
        advice = "another process sends from it; end that process, or give this process another file"
        with alone(settings.database, advice), closing(Database(settings.database, [SCHEMA])) as database:
            jobs_folder = settings.database and settings.database.with_name(settings.database.name + ".jobs")
            jobs = JobDeliverer(self._jobs, jobs_folder, settings.jobs_at_once)

            async def deliver(destination: Destination, request: DeliveryRequest, now: float) -> DeliveryOutcome:
                if destination.job is not None:
                    return await jobs.deliver(destination, request, now)
                from hooks.registry.http_delivery import HttpDeliverer  # Imported late, because it takes 0.2 s.

                urls = HttpDeliverer(self._rules, resolve=self._resolve)
                return await urls.deliver(destination, request, now)

            sender = Sender(database, self._store, deliver, settings)
            self._open = database, sender
            task = asyncio.create_task(sender.run(), name="webhooks sender")
            task.add_done_callback(_log_task_error)
            try:
                yield self
            finally:
                task.cancel()
                # At the same time, because the sender may wait for a job.
                await asyncio.gather(task, jobs.close(), return_exceptions=True)
                self._open = None

    async def list_webhooks(self) -> list[Webhook]:
        """Return all webhooks, oldest first."""
        return await self._run(self._store.list_webhooks)

    async def get_webhook(self, webhook_id: str) -> Webhook:
        """Return the webhook with this id."""
        return await self._run(self._store.get, webhook_id)

    async def create_webhook(self, body: object) -> Webhook:
        """Register a webhook from the JSON of ``HfApi.create_webhook``; raise ``InvalidWebhook``, ``UnsafeTarget``."""
        update = await self._check_target(read_update(body, is_new=True))
        return await self._run(self._store.create, update, time.time())

    async def update_webhook(self, webhook_id: str, body: object) -> Webhook:
        """Change the fields in the body; raise the same errors as ``create_webhook``."""
        before = await self.get_webhook(webhook_id)
        update = await self._check_target(read_update(body, is_new=False), before.job)
        return await self._run(self._store.update, webhook_id, update, time.time())

    async def _check_target(self, update: WebhookUpdate, old_job: str | None = None) -> WebhookUpdate:
        if update.url:
            target = self._rules.parse_url(update.url)
            # An unknown host name is not unsafe, because each attempt resolves and checks it again.
            with suppress(OSError):
                await self._rules.resolve_target(target, self._resolve)
        if update.job and update.job not in self._jobs:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UnknownWebhook(f"there is no job {update.job[:100]!r}; the operator registered: {known}", 404)
        job = self._jobs.get(update.job or (old_job or "" if not update.url else ""))
        unknown = sorted(set(update.secrets or ()) - set(job.secrets if job else ()))
        if unknown and job:
            raise InvalidWebhook(
                f"secrets: job {job.id!r} takes no {', '.join(unknown)}; it takes: {', '.join(job.secrets) or 'none'}"
            )
        return update

    async def enable_webhook(self, webhook_id: str) -> Webhook:
        """Enable deliveries of a webhook (again)."""
        webhook = await self._run(self._store.enable, webhook_id, time.time())
        self._running[1].runner.wake()
        return webhook

    async def disable_webhook(self, webhook_id: str) -> Webhook:
        """Disable deliveries of a webhook."""
        return await self._run(self._store.disable, webhook_id, time.time())

    async def delete_webhook(self, webhook_id: str) -> None:
        """Delete a webhook and its delivery log."""
        await self._run(self._store.delete, webhook_id)

    async def list_deliveries(self, webhook_id: str, limit: int, before: str | None = None) -> list[dict[str, Any]]:
        """Return a webhook's delivery log, newest first; entries older than the delivery ``before`` if given."""
        await self.get_webhook(webhook_id)
        return await self._run(delivery_queue.list_deliveries, webhook_id, limit, before)

    async def replay(self, webhook_id: str, delivery_id: str) -> DeliveryOutcome:
        """Send a logged delivery again, or start its job; raise ``HubTrouble`` without an HTTP answer."""
        webhook = await self.get_webhook(webhook_id)
        outcome = await self._running[1].replay(webhook_id, delivery_id, is_awaited=webhook.job is None)
        if outcome is None:
            raise UnknownWebhook("the webhook's log has no delivery with this id; it may have been pruned", 404)
        if outcome.status is None:
            raise HubTrouble(f"replayed, but not accepted: {outcome.text}", 502)
        return outcome

    async def emit_session(self, type: str, data: Mapping[str, Any]) -> int:
        """Emit an event of a type such as ``session.started``, in order per ``data["session_id"]``.

        Returns:
            The number of webhooks that receive the event, which is stored on disk.
        """
        if not _TYPE.fullmatch(type):
            raise ValueError(f"event type {type!r}: wanted words separated by dots, e.g. session.started")
        # Other values become text, NaN and infinities null, and lone surrogates of file names question marks.
        text = json.dumps(data, default=str, ensure_ascii=False).encode("utf-8", "replace")
        plain = json.loads(text, parse_constant=lambda name: None)
        body = {"type": type, "timestamp": format_time(time.time()), "data": plain}
        message = Message(generate_id(), type, f"session:{plain.get('session_id', '')}", body, is_hub=False)
        return await self._running[1].queue_message(
            message,
            lambda connection: [one.id for one in self._store.list_webhooks(connection) if one.is_watching_sessions],
        )

    async def emit_repo(self, name: str, new_sha: str, old_sha: str | None = None, *, repo_type: str = "model") -> int:
        """Emit that a local repo's content has changed; return the number of webhooks that receive it."""
        subject = f"{repo_type}:{name}"
        body = {
            "event": {"action": "update", "scope": "repo.content"},
            "repo": {
                "type": repo_type,
                "name": name,
                "id": subject,
                "private": True,
                "owner": {"id": name.partition("/")[0] if "/" in name else "local"},
                "headSha": new_sha,
                "tags": [],
                # The repo has no web page, but huggingface_hub's model of the payload requires a text.
                "url": {"web": f"robojax:{repo_type}/{name}"},
            },
            "updatedRefs": [{"ref": "refs/heads/main", "oldSha": old_sha, "newSha": new_sha}],
        }
        return await self._emit(Message(generate_id(), "repo.content", subject, body, is_hub=True))

    async def emit_payload(self, payload: WebhookPayload | Mapping[str, Any], *, event_id: str | None = None) -> int:
        """Relay a verified event of the Hub to the webhooks that watch its repo; return their number.

        Events that this registry sent are not relayed, and events with the same ``event_id`` are sent once.
        """
        event = payload if isinstance(payload, WebhookPayload) else WebhookPayload.model_validate(payload)
        body = event.model_dump(mode="json", exclude_unset=True)
        del body["webhook"]
        message_id = generate_id() if event_id is None else f"relay:{event.webhook.id}:{event_id}"
        message = Message(message_id, event.event.scope, f"{event.repo.type}:{event.repo.id}", body, is_hub=True)
        return await self._emit(message, event.webhook.id)

    async def _emit(self, message: Message, source_webhook: str | None = None) -> int:
        repo, scope = message.body["repo"], message.body["event"]["scope"]

        def find_webhooks(connection: sqlite3.Connection) -> list[str]:
            webhooks = self._store.list_webhooks(connection)
            if any(one.id == source_webhook for one in webhooks):
                return []
            return [one.id for one in webhooks if one.matches(scope, repo["type"], repo["name"])]

        return await self._running[1].queue_message(message, find_webhooks)


def _log_task_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s ended", task.get_name(), exc_info=task.exception())
