"""What can be asked of the registry, without the HTTP around it."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hooks.database import Database
from hooks.errors import DeliveryRefused, InvalidWebhook, UnknownWebhook
from hooks.registry.jobs import Job
from hooks.registry.store import WebhookStore
from hooks.registry.webhook import Webhook, Wish, wish_of
from hooks.sending import queue
from hooks.sending.outcome import Outcome
from hooks.sending.sender import Sender
from hooks.sending.targets import Resolve, TargetRules


@dataclass(frozen=True)
class Management:
    """The registered webhooks and their deliveries.

    Raises:
        UnknownWebhook: by every method that is given an id: there is no such webhook.
    """

    _database: Database
    _store: WebhookStore
    _sender: Sender
    _rules: TargetRules
    _jobs: Mapping[str, Job]
    _resolve: Resolve
    _clock: Callable[[], float] = time.time

    async def list(self) -> list[Webhook]:
        """All of them, oldest first."""
        return await self._database.run(self._store.all)

    async def get(self, webhook_id: str) -> Webhook:
        """One of them."""
        return await self._database.run(self._store.get, webhook_id)

    async def create(self, body: object) -> Webhook:
        """Register one.

        Args:
            body: JSON, as ``HfApi.create_webhook`` sends it.

        Raises:
            InvalidWebhook, UnsafeTarget: it cannot be.
            UnknownWebhook: there is no such job.
        """
        wish = await self._checked(wish_of(body, is_new=True))
        return await self._database.run(self._store.create, wish, self._clock())

    async def update(self, webhook_id: str, body: object) -> Webhook:
        """Change what the body names.

        Raises:
            UnknownWebhook: there is no such webhook, or no such job.
            InvalidWebhook, UnsafeTarget: it cannot be.
        """
        before = await self.get(webhook_id)
        wish = await self._checked(wish_of(body, is_new=False), before.job)
        return await self._database.run(self._store.update, webhook_id, wish, self._clock())

    async def _checked(self, wish: Wish, job_before: str | None = None) -> Wish:
        if wish.url:
            target = self._rules.parse(wish.url)
            # A name that nobody knows yet is not unsafe; it is looked up and checked anew for every attempt.
            with suppress(OSError):
                await self._rules.resolve(target, self._resolve)
        if wish.job and wish.job not in self._jobs:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise UnknownWebhook(f"there is no job {wish.job[:100]!r}; registered by the operator: {known}", 404)
        job = self._jobs.get(wish.job or (job_before or "" if not wish.url else ""))
        unknown = sorted(set(wish.secrets or ()) - set(job.secrets if job else ()))
        if unknown and job:
            raise InvalidWebhook(
                f"secrets: job {job.id!r} takes no {', '.join(unknown)}; it takes: {', '.join(job.secrets) or 'none'}"
            )
        return wish

    async def enable(self, webhook_id: str) -> Webhook:
        """Let it have events again."""
        enabled = await self._database.run(self._store.enable, webhook_id, self._clock())
        self._sender.wake()
        return enabled

    async def disable(self, webhook_id: str) -> Webhook:
        """Let it have no more events."""
        return await self._database.run(self._store.disable, webhook_id, self._clock())

    async def delete(self, webhook_id: str) -> None:
        """Forget it and its log."""
        await self._database.run(self._store.delete, webhook_id)

    async def deliveries(self, webhook_id: str, limit: int, before: str | None) -> "list[dict[str, Any]]":
        """Its delivery log, newest first."""
        await self.get(webhook_id)
        return await self._database.run(queue.entries, webhook_id, limit, before)

    async def replay(self, webhook_id: str, delivery_id: str) -> Outcome:
        """Send one of the log again, now. A job is only started, as it may take long; the log has how it ended.

        Raises:
            UnknownWebhook: there is no such webhook, or no such delivery of it.
            DeliveryRefused: there was no HTTP answer.
        """
        webhook = await self.get(webhook_id)
        outcome = await self._sender.replay(webhook_id, delivery_id, is_awaited=webhook.job is None)
        if outcome is None:
            raise UnknownWebhook("there is no delivery of this id in the webhook's log; it may have been pruned", 404)
        if outcome.status is None:
            raise DeliveryRefused(502, f"replayed, but not taken: {outcome.text}")
        return outcome
