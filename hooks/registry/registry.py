"""Registry: webhooks managed on this machine, with their deliveries, while its server runs."""

import asyncio
import json
import logging
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import Any

from sanic import Blueprint

from hooks.addresses import Resolve, TargetRules
from hooks.database import Database, alone
from hooks.errors import HooksError, HubTrouble, InvalidWebhook, UnknownWebhook
from hooks.payload import WebhookPayload
from hooks.registry import delivery_queue
from hooks.registry.api import add_routes
from hooks.registry.delivery import DeliveryRequest, Destination, HttpDeliverer, Outcome, format_time
from hooks.registry.delivery import resolve_host as ask_name_server
from hooks.registry.delivery_queue import Message, generate_id
from hooks.registry.jobs import JobDeliverer, load_jobs
from hooks.registry.sender import Sender
from hooks.registry.settings import RegistrySettings
from hooks.registry.store import SCHEMA, Webhook, WebhookStore, WebhookUpdate, read_update

logger = logging.getLogger(__name__)

_TYPE = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


class Registry:
    """Registry of webhooks, managed by the Hub's API, and their deliveries.

    Each coroutine raises ``HooksError`` when the registry does not run or its database cannot be used, and
    ``UnknownWebhook`` for an id that no webhook has.

    Raises:
        InvalidSettings: the jobs file cannot be used.
    """

    def __init__(self, settings: RegistrySettings, *, resolve: Resolve = ask_name_server):
        """Make a registry; nothing runs before ``running``, or the server of ``blueprint``, starts."""
        self.settings = settings
        self._jobs = load_jobs(settings.jobs_file)
        self._rules = TargetRules.from_networks(settings.allowed_networks)
        self._store = WebhookStore(settings.max_webhooks, settings.suspend_after)
        self._resolve = resolve
        self._open: tuple[Database, Sender] | None = None

    @property
    def _running(self) -> tuple[Database, Sender]:
        if self._open is None:
            raise HooksError("the registry of webhooks does not run; it does while its server does")
        return self._open

    async def _run(self, transaction: Callable[..., Any], *arguments: Any) -> Any:
        return await self._running[0].run(transaction, *arguments)

    def blueprint(self) -> Blueprint:
        """Build the Hub's API with whole paths; an app that serves it also runs the registry."""
        made = Blueprint("webhooks-registry")
        add_routes(made, self, self.settings.tokens)
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
        """Run the sender and jobs within this context; raise ``StoreError`` if another process uses the database."""
        settings = self.settings
        # Two senders on one queue would send everything twice.
        advice = "another process sends from it; end that, run one process, or give this one another file"
        with alone(settings.database, advice), closing(Database(settings.database, [SCHEMA])) as database:
            jobs_folder = settings.database and settings.database.with_name(settings.database.name + ".jobs")
            urls = HttpDeliverer(self._rules, resolve=self._resolve)
            jobs = JobDeliverer(self._jobs, jobs_folder, settings.jobs_at_once)

            async def deliver(destination: Destination, request: DeliveryRequest, now: float) -> Outcome:
                target = urls if destination.job is None else jobs
                return await target.deliver(destination, request, now)

            sender = Sender(database, self._store, deliver, settings)
            self._open = database, sender
            task = asyncio.create_task(sender.run(), name="webhooks sender")
            task.add_done_callback(_log_task_error)
            try:
                yield self
            finally:
                task.cancel()
                # Together: a sender that waits for a job ends with it.
                await asyncio.gather(task, jobs.close(), return_exceptions=True)
                self._open = None

    # Management.

    async def list_webhooks(self) -> list[Webhook]:
        """Return all webhooks, oldest first."""
        return await self._run(self._store.list_webhooks)

    async def get_webhook(self, webhook_id: str) -> Webhook:
        """Return the webhook with this id."""
        return await self._run(self._store.get, webhook_id)

    async def create_webhook(self, body: object) -> Webhook:
        """Register a webhook by the JSON of ``HfApi.create_webhook``; raise ``InvalidWebhook``, ``UnsafeTarget``."""
        update = await self._check_target(read_update(body, is_new=True))
        return await self._run(self._store.create, update, time.time())

    async def update_webhook(self, webhook_id: str, body: object) -> Webhook:
        """Change the fields that the body names; raises as ``create_webhook``."""
        before = await self.get_webhook(webhook_id)
        update = await self._check_target(read_update(body, is_new=False), before.job)
        return await self._run(self._store.update, webhook_id, update, time.time())

    async def _check_target(self, update: WebhookUpdate, old_job: str | None = None) -> WebhookUpdate:
        if update.url:
            target = self._rules.parse_url(update.url)
            # An unknown name is not unsafe; it is resolved and checked again before each attempt.
            with suppress(OSError):
                await self._rules.resolve_target(target, self._resolve)
        if update.job and update.job not in self._jobs:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UnknownWebhook(f"there is no job {update.job[:100]!r}; registered by the operator: {known}", 404)
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

    async def replay(self, webhook_id: str, delivery_id: str) -> Outcome:
        """Send a logged delivery again, or start its job; raise ``HubTrouble`` without an HTTP answer."""
        webhook = await self.get_webhook(webhook_id)
        outcome = await self._running[1].replay(webhook_id, delivery_id, is_awaited=webhook.job is None)
        if outcome is None:
            raise UnknownWebhook("there is no delivery of this id in the webhook's log; it may have been pruned", 404)
        if outcome.status is None:
            raise HubTrouble(f"replayed, but not taken: {outcome.text}", 502)
        return outcome

    # Events.

    async def emit_session(self, type: str, data: Mapping[str, Any]) -> int:
        """Emit an event of a type such as ``session.started``, in order per ``data["session_id"]``.

        Returns:
            The number of webhooks that receive it; the event is on the disk then.
        """
        if not _TYPE.fullmatch(type):
            raise ValueError(f"event type {type!r}: wanted words with dots between, e.g. session.started")
        # Other values become their text, NaN and infinities null, and lone surrogates of file names question marks.
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

        An event that this registry sent itself is not relayed, and an event with the same ``event_id`` is sent once.
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
