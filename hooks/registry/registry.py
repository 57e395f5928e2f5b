"""The registry put together: API, events, deliveries; it runs while its Sanic app does."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

from sanic import Blueprint

from hooks.database import Database, alone
from hooks.errors import HooksError, StoreError
from hooks.payload import WebhookPayload
from hooks.registry import events
from hooks.registry.folder_log import note_content
from hooks.registry.job_courier import JobCourier
from hooks.registry.jobs import load_jobs
from hooks.registry.management import Management
from hooks.registry.routes import add_routes
from hooks.registry.settings import RegistrySettings
from hooks.registry.store import SCHEMA, WebhookStore
from hooks.registry.watcher import FolderWatcher
from hooks.sending import delivery_log
from hooks.sending.post import PostCourier
from hooks.sending.queue import Message
from hooks.sending.resolver import resolve as ask_name_server
from hooks.sending.sender import Sender
from hooks.sending.targets import Resolve

logger = logging.getLogger(__name__)


class Registry:
    """Webhooks managed by the Hub's API, and their deliveries.

    Raises:
        InvalidSettings: the jobs file cannot be used.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        *,
        resolve: Resolve = ask_name_server,
        clock: Callable[[], float] = time.time,
    ):
        """Make one; nothing runs and no file is open before ``running``, or the server of ``blueprint``, starts.

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
        """The registered webhooks.

        Raises:
            HooksError: the registry does not run.
        """
        return self._running[2]

    @property
    def sender(self) -> Sender:
        """The deliveries.

        Raises:
            HooksError: the registry does not run.
        """
        return self._running[1]

    def blueprint(self) -> Blueprint:
        """The Hub's API; serving an app with it runs the registry, from before its first request until after its last.

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
        """Send, watch and run jobs in here. What is under way at the end is sent again at the next start.

        Raises:
            StoreError: the database cannot be used, or another process uses it.
        """
        settings = self.settings
        # Two senders on one queue would send everything twice.
        taken = "another process sends from it; end that, run one process, or give this one another file"
        with alone(settings.database, taken), closing(Database(settings.database, SCHEMA)) as database:
            aside = settings.database and settings.database.with_name(settings.database.name + ".jobs")
            posts = PostCourier(self._rules, timeout=settings.timeout, resolve=self._resolve)
            jobs = JobCourier(self._jobs, aside, settings.jobs_at_once)
            sender = Sender(
                database,
                self._store,
                lambda destination: posts if destination.job is None else jobs,
                settings.sender,
                clock=self._clock,
            )
            management = Management(database, self._store, sender, self._rules, self._jobs, self._resolve, self._clock)
            watcher = FolderWatcher(settings.folders, self._settled, quiet=settings.quiet, poll=settings.poll)
            self._open = database, sender, management
            tasks = [
                asyncio.create_task(sender.run(), name="webhooks sender"),
                asyncio.create_task(watcher.run(), name="webhooks watcher"),
            ]
            for task in tasks:
                task.add_done_callback(_tell_of_defect)
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                # Together: a sender that waits for a job ends with it.
                await asyncio.gather(*tasks, jobs.close(), return_exceptions=True)
                self._open = None

    async def emit_session(self, type: str, data: Mapping[str, Any]) -> int:
        """Tell of a session or of the server: ``session.started``, ``server.degraded``, ...

        When this returns the event is on the disk. Order is kept by ``data["session_id"]``.

        Returns:
            how many webhooks get it: those with the domain ``session``.

        Raises:
            ValueError: the type is none.
            HooksError: the registry does not run, or its database cannot be written.
        """
        message = events.session_message(type, data, self._clock())
        return await self.sender.put(
            message, lambda connection: [one.id for one in self._store.all(connection) if one.wants_sessions]
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
        """Tell that the content of a repo of ours is another one. For how many webhooks.

        Raises:
            HooksError: the registry does not run, or its database cannot be written.
        """
        return await self._emit(events.repo_message(name, new_sha, old_sha, repo_type=repo_type, ref=ref))

    async def emit_payload(self, payload: WebhookPayload | Mapping[str, Any], *, event_id: str | None = None) -> int:
        """Send a verified event of the Hub on to the webhooks here that watch its repo. For how many.

        One that this registry sent itself goes to nobody: it would go round for ever.

        Args:
            event_id: the ``Webhook-Id`` it came with; the same event given again is sent once.

        Raises:
            ValueError: it is no payload of the Hub.
            HooksError: the registry does not run, or its database cannot be written.
        """
        return await self._emit(*events.relayed_message(payload, event_id))

    async def _emit(self, message: Message, came_by: str | None = None) -> int:
        return await self.sender.put(message, lambda connection: self._wanting(connection, message, came_by))

    def _wanting(self, connection: sqlite3.Connection, message: Message, came_by: str | None = None) -> list[str]:
        webhooks = self._store.all(connection)
        if any(one.id == came_by for one in webhooks):
            return []
        repo, scope = message.body["repo"], message.body["event"]["scope"]
        return [one.id for one in webhooks if one.wants(scope, repo["type"], repo["name"])]

    async def _settled(self, name: str, sha: str) -> None:
        """A watched folder is whole, with this content."""
        database, sender, _ = self._running

        def transaction(connection: sqlite3.Connection) -> tuple[str, int, dict[str, int]] | None:
            is_change, old = note_content(connection, name, sha, self._clock())
            if not is_change:
                return None
            message = events.repo_message(name, sha, old)
            return old or "", *sender.put_within(connection, message, self._wanting(connection, message))

        while True:
            try:
                done = await database.run(transaction)
            except StoreError as error:
                logger.error("folder %s: its change cannot be written down (%s); tried again", name, error)
                await asyncio.sleep(self.settings.poll)
                continue
            if done is not None:
                old, count, dropped = done
                logger.info("folder %s: %s -> %s, told to %d webhooks", name, old[:8], sha[:8], count)
                sender.queued(count, dropped)
            return

    async def facts(self) -> dict[str, int]:
        """Figures: webhooks, folders read so far, deliveries by status, and those dropped since the start.

        Raises:
            HooksError: the registry does not run, or its database cannot be read.
        """
        database, sender, _ = self._running

        def transaction(connection: sqlite3.Connection) -> dict[str, int]:
            webhooks = self._store.all(connection)
            return {
                "webhooks": len(webhooks),
                "webhooks_disabled": sum(bool(one.disabled) for one in webhooks),
                "folders_known": connection.execute("SELECT count(*) FROM folders").fetchone()[0],
                **{f"deliveries_{status}": count for status, count in delivery_log.counts(connection).items()},
            }

        return await database.run(transaction) | {"deliveries_dropped_since_start": sender.dropped}


def _tell_of_defect(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("%s ended", task.get_name(), exc_info=task.exception())
