"""Continuous delivery: hints, polls and requests become deployments, one at a time, each with a record."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hooks.database import Database
from hooks.deployment.debounce import Hint, newest
from hooks.deployment.folder_source import FolderSource
from hooks.deployment.heads import Heads
from hooks.deployment.hints import Hints
from hooks.deployment.journal import Journal, OnEvent
from hooks.deployment.lane import Lane
from hooks.deployment.purposes import WENT_BACK, Asked, Followed
from hooks.deployment.records import SCHEMA, Record, ensure_tables
from hooks.deployment.retries import Retries
from hooks.deployment.rollout import Rollout
from hooks.deployment.settings import DeploymentSettings
from hooks.deployment.source import Source
from hooks.deployment.standing import Standing
from hooks.deployment.trigger import Reading, Target, read
from hooks.errors import SourceError
from hooks.payload import WebhookPayload

logger = logging.getLogger(__name__)

# Seconds for which a rollback that somebody asked for waits until it is written down.
WRITING = 0.1


class Deployments:
    """All of them. A webhook is a hint: what is deployed is the head of the ref at that time, by its sha.

    Attributes:
        quarantine: commits that are not deployed by themselves; `Quarantine.release` lets one go.
    """

    def __init__(
        self,
        *,
        sources: Callable[[str], Source],
        rollout: Rollout,
        database: Database | str | Path | None = None,
        settings: DeploymentSettings | None = None,
        on_event: OnEvent | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """Open it; nothing happens before `run`.

        Args:
            sources: the source of a repo.
            rollout: the sessions.
            database: a file, an open database, or None for memory.
            on_event: told of what happened (``EVENTS``) with the record as JSON.
            now: seconds of the clock that hints are held by.
        """
        self.settings = settings or DeploymentSettings()
        self._database = database if isinstance(database, Database) else Database(database, SCHEMA)
        self._is_ours = self._database is not database
        if not self._is_ours:
            self._database.run_now(ensure_tables)
        self._journal = Journal(self._database, self.settings.kept, on_event)
        self.quarantine = self._journal.quarantine
        self._sources = sources
        self._rollout = rollout
        self._now = now
        self._standing = Standing(rollout)
        self._heads = Heads(sources)
        self._lane = Lane(sources, rollout, self.settings, self._standing, self._journal)
        self._retries = Retries(self.settings.retry, self.settings.retry_longest)
        self._hints = Hints(self.settings.quiet, self.settings.longest, now)
        self._waiting: dict[Target, Hint] = {}
        self._superseded: dict[Target, int] = {}  # in a row
        self._asked: set[Asked] = set()
        self._ripe = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close the database, if it was opened here."""
        if self._is_ours:
            self._database.close()

    def list(self, limit: int = 50) -> Sequence[Record]:
        """Newest first."""
        return self._journal.records.list(limit)

    def get(self, id: str) -> Record:
        """One; KeyError when there is none, or no more."""
        return self._journal.records.get(id)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, waiting or going on."""
        return self._hints.is_empty and self._lane.is_free and not (self._waiting or self._tasks)

    def hint(self, payload: WebhookPayload, delivery_id: str | None) -> Reading:
        """Take a delivery as a reason to look at the heads that it is about. From any thread; never waits."""
        reading = read(payload, self._rollout.followers())
        ids = (delivery_id,) if delivery_id else ()
        for target in reading.targets:
            self._hints.tell(Hint(target, "webhook", payload.webhook.id, ids))
        if reading.alert is not None:
            record = Record(payload.repo.name, None, "webhook", webhook_id=payload.webhook.id, delivery_ids=[*ids])
            record.end("alert", *reading.alert)
            loop = self._loop
            if loop is None:
                self._journal.save_now(record)
            else:
                loop.call_soon_threadsafe(lambda: self._start(self._journal.finish(record)))
        return reading

    def look(self, repo: str) -> None:
        """Take anything else, a changed folder say, as a reason to look at what is followed of a repo."""
        for target in self._standing.targets():
            if target.repo == repo:
                self._hints.tell(self._seen(target))

    async def run(self) -> None:
        """Deploy until cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen())
                group.create_task(self._work())
                group.create_task(self._poll())
        finally:
            self._loop = None
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def deploy(
        self, session_id: str, revision: str | None = None, *, force: bool = False, wait: bool = True
    ) -> Record:
        """Bring a revision to one session, whatever its mode; older ones too.

        Args:
            revision: branch, tag or commit; the ref that the session follows when None.
            force: even if it is in quarantine; it is released if it goes well.
            wait: until the end of its probation; else the record is returned as it begins.

        Raises:
            SourceError: ``unknown_session``.
        """
        one = self._standing.session(session_id)
        record = Record(one.repo, revision or one.ref, "request", sessions=[session_id])
        self._lane.give_up(session_id, "request", "somebody asked for another one")
        await self._journal.save(record)
        task = self._start(self._requested(record, session_id, force))
        if wait:
            await asyncio.shield(task)  # who asked may go away; the robot is not left halfway
        return record

    async def keep(self, record: Record) -> None:
        """Return when it is on the disk as it is now, for whoever is about to tell of it."""
        await self._journal.save(record)

    async def rollback(self, session_id: str) -> Record:
        """Back to the policy before, at once; what ran is put into quarantine.

        Raises:
            SourceError: ``unknown_session``.
        """
        one = self._standing.session(session_id)
        record = Record(one.repo, one.ref, "request", sha=one.sha, sessions=[session_id])
        self._lane.give_up(session_id, "rollback", WENT_BACK, is_asked=True)
        for asked in self._asked:
            asked.is_withdrawn |= asked.session == session_id
        await asyncio.shield(self._start(self._go_back(record, session_id)))  # who asked may go away
        return record

    async def _go_back(self, record: Record, session_id: str) -> None:
        record.begin("swapping")
        # A process that is killed here must not bring back what somebody wanted to be rid of. A disk that is slow, or
        # away, is not waited for: the robot is what matters.
        await asyncio.wait((self._start(self._journal.save(record)),), timeout=WRITING)
        try:
            record.sha = self._standing.session(session_id).sha  # another one may have taken over meanwhile
            verdict = await self._rollout.rollback(session_id)
        except SourceError as error:
            record.end("failed", "gone", str(error))
        except Exception as error:
            logger.exception("deployment %s: the rollback of session %s crashed", record.id, session_id)
            record.end("failed", "crash", f"{type(error).__name__}; the service's log says more")
        else:
            record.figures[session_id] = {"swap": dict(verdict.figures)}
            if verdict.reason is not None:
                record.end("failed", verdict.reason, verdict.text)
            else:
                record.end("rolled_back", "request", f"session {session_id} was rolled back by request")
                await self._journal.isolate(record)
        await self._journal.finish(record)

    async def reconcile(self) -> None:
        """Look at the head of everything that is followed; what is new is held like a delivery."""
        for target in self._standing.targets():
            head = await self._heads.ask(target)
            if (
                head is not None
                and self._standing.wanting(target, head)
                and self.quarantine.get(target.repo, head) is None
                and self._retries.may((target, head), self._now())
            ):
                self._hints.tell(self._seen(target))

    def _seen(self, target: Target) -> Hint:
        return Hint(target, "folder" if isinstance(self._sources(target.repo), FolderSource) else "poll")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _poll(self) -> None:
        if self.settings.poll is None:
            return
        while True:
            try:
                await self.reconcile()
            except Exception:
                logger.exception("looking at the heads crashed; it is done again")
            spread = self.settings.jitter * random.uniform(-1, 1)
            await asyncio.sleep(self.settings.poll * (1 + spread))

    async def _listen(self) -> None:
        while True:
            for hint in await self._hints.due():
                self._waiting[hint.target] = hint.after(self._waiting.get(hint.target))
                self._ripe.set()
                if self._lane.preparing(hint.target):
                    self._start(self._look_for_newer(hint.target))

    def _may_supersede(self, target: Target) -> bool:
        return self._superseded.get(target, 0) < self.settings.superseded

    async def _look_for_newer(self, target: Target) -> None:
        """A hint about what is being prepared right now: the same commit again, or a newer one?"""
        if not self._may_supersede(target):
            return
        head = await self._heads.ask(target)
        deployment = self._lane.preparing(target)
        if head is None or deployment is None:
            return  # the hint stays, and its own deployment says why
        if head != deployment.sha:
            deployment.give_up("newer", f"{head[:12]} came while it was being prepared")
        elif hint := self._waiting.pop(target, None):
            record = deployment.record
            record.delivery_ids = [*newest((*record.delivery_ids, *hint.delivery_ids))]

    async def _work(self) -> None:
        while True:
            await self._ripe.wait()
            self._ripe.clear()
            while self._waiting:
                await self._followed(self._waiting.pop(next(iter(self._waiting))))

    async def _followed(self, hint: Hint) -> None:
        target, ids = hint.target, [*hint.delivery_ids]
        record = Record(target.repo, target.ref, hint.trigger, webhook_id=hint.webhook_id, delivery_ids=ids)
        again = (lambda: self._hints.tell(hint)) if self._may_supersede(target) else None
        await self._lane.deploy(record, Followed(target, self._standing, self.quarantine, self._heads, again))
        is_superseded = record.result == "superseded" and record.reason == "newer"
        self._superseded[target] = self._superseded.get(target, 0) + 1 if is_superseded else 0
        if record.result == "failed":
            self._retries.failed((target, record.sha), self._now())
        elif record.result in ("swapped", "staged"):
            self._retries.forget((target, record.sha))

    async def _requested(self, record: Record, session_id: str, force: bool) -> None:
        asked = Asked(session_id, self._standing, self.quarantine, force)
        self._asked.add(asked)
        try:
            head = await self._heads.ask(Target.of(self._standing.session(session_id)))
            await self._lane.deploy(record, asked)
        except SourceError as error:  # it ended before its turn came
            record.end("failed", "gone", str(error))
            await self._journal.finish(record)
            return
        finally:
            self._asked.discard(asked)
        if record.result != "swapped" or record.sha is None:
            return
        if head is not None:
            # Before anything that waited for this looks: what was asked for stays until something newer is pushed.
            self._standing.declined[session_id] = head
        if force:
            await self.quarantine.release(record.sha, record.repo)
