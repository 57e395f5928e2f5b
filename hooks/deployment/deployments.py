"""Continuous delivery: hints, polls and requests become deployments, one at a time, each with a record."""

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec

from hooks.database import Database
from hooks.deployment.debounce import Hint
from hooks.deployment.deployment import Deployment, Ended
from hooks.deployment.folder_source import FolderSource
from hooks.deployment.heads import Heads
from hooks.deployment.hints import Hints
from hooks.deployment.quarantine import Quarantine
from hooks.deployment.records import SCHEMA, Record, Records
from hooks.deployment.retries import Retries
from hooks.deployment.rollout import Rollout
from hooks.deployment.settings import DeploymentSettings
from hooks.deployment.source import Source
from hooks.deployment.standing import Standing
from hooks.deployment.trigger import Reading, Target, read
from hooks.errors import SourceError
from hooks.payload import WebhookPayload

Arguments = ParamSpec("Arguments")
OnEvent = Callable[[str, Mapping[str, Any]], Awaitable[None] | None]

EVENTS = {
    "swapped": "policy.swapped",
    "staged": "policy.staged",
    "rejected": "policy.rejected",
    "rolled_back": "policy.rolled_back",
    "failed": "policy.failed",
    "alert": "policy.alert",
}

logger = logging.getLogger(__name__)


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
            self._database.run_now(lambda connection: [connection.execute(one) for one in SCHEMA[0].split(";\n")])
        self._records = Records(self._database, self.settings.kept)
        self.quarantine = Quarantine(self._database)
        self._sources = sources
        self._rollout = rollout
        self._on_event = on_event
        self._now = now
        self._standing = Standing(rollout)
        self._heads = Heads(sources)
        self._hints = Hints(self.settings.quiet, self.settings.longest, now)
        self._waiting: dict[Target, Hint] = {}
        self._retries = Retries(self.settings.retry, self.settings.retry_longest)
        self._lock = asyncio.Lock()
        self._current: tuple[Deployment, Target | None] | None = None
        self._ripe = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close the database, if it was opened here."""
        if self._is_ours:
            self._database.close()

    def list(self, limit: int = 50) -> Sequence[Record]:
        """Newest first."""
        return self._records.list(limit)

    def get(self, id: str) -> Record:
        """One; KeyError when there is none, or no more."""
        return self._records.get(id)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, waiting or going on."""
        return self._hints.is_empty and not (self._waiting or self._tasks or self._lock.locked())

    def hint(self, payload: WebhookPayload, delivery_id: str | None) -> Reading:
        """Take a delivery as a reason to look at the heads that it is about. From any thread; never waits."""
        reading = read(payload, self._rollout.followers())
        ids = (delivery_id,) if delivery_id else ()
        for target in reading.targets:
            self._hints.tell(Hint(target, "webhook", payload.webhook.id, ids))
        if reading.alert is not None:
            record = Record(payload.repo.name, None, "webhook", webhook_id=payload.webhook.id, delivery_ids=[*ids])
            record.end("alert", *reading.alert)
            if self._loop is None:
                self._records.save_now(record)
            else:
                self._loop.call_soon_threadsafe(lambda: self._start(self._finish, record))
        return reading

    def look(self, repo: str) -> None:
        """Take anything else, a changed folder say, as a reason to look at what is followed of a repo."""
        for target in self._standing.targets():
            if target.repo == repo:
                self._hints.tell(Hint(target, self._trigger(repo)))

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
        ref = revision or one.ref
        record = Record(one.repo, ref, "request", sessions=[session_id])
        self._give_up(session_id, "request", "somebody asked for another one")
        await self._records.save(record)
        task = self._start(self._requested, record, session_id, force)
        if wait:
            await asyncio.shield(task)  # who asked may go away; the robot is not left halfway
        return record

    async def rollback(self, session_id: str) -> Record:
        """Back to the policy before, at once; what ran is put into quarantine.

        Raises:
            SourceError: ``unknown_session``.
        """
        one = self._standing.session(session_id)
        record = Record(one.repo, one.ref, "request", sha=one.sha, sessions=[session_id])
        self._give_up(session_id, "rollback", "somebody went back to the policy before")
        record.begin("swapping")
        try:
            verdict = await self._rollout.rollback(session_id)
        except Exception as error:
            logger.exception("deployment %s: the rollback of session %s crashed", record.id, session_id)
            record.end("failed", "crash", f"{type(error).__name__}; the service's log says more")
        else:
            record.figures[session_id] = {"swap": dict(verdict.figures)}
            if verdict.reason is not None:
                record.end("failed", verdict.reason, verdict.text)
            else:
                record.end("rolled_back", "request", f"session {session_id} was rolled back by request")
                await self._isolate(record)
        await self._finish(record)
        return record

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
                self._hints.tell(Hint(target, self._trigger(target.repo)))

    def _trigger(self, repo: str) -> str:
        return "folder" if isinstance(self._sources(repo), FolderSource) else "poll"

    def _start(
        self, work: Callable[Arguments, Coroutine[Any, Any, None]], *given: Arguments.args, **named: Arguments.kwargs
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work(*given, **named))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _give_up(self, session_id: str, reason: str, text: str) -> None:
        """End an automatic deployment that a session is part of, if it is not felt by a robot yet."""
        if self._current is None:
            return
        deployment, target = self._current
        if target is not None and deployment.is_preparing and session_id in deployment.record.sessions:
            deployment.give_up(reason, text)

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
                if self._current is not None and self._current[1] == hint.target:
                    self._start(self._look_for_newer, *self._current)

    async def _look_for_newer(self, deployment: Deployment, target: Target | None) -> None:
        """A hint about what is being prepared right now: the same commit again, or a newer one?"""
        head = await self._heads.ask(target) if target else None
        if target is None or head is None or not deployment.is_preparing:
            return  # the hint stays, and its own deployment says why
        if head != deployment.record.sha:
            deployment.give_up("newer", f"{head[:12]} came while it was being prepared")
        elif hint := self._waiting.pop(target, None):
            known = deployment.record.delivery_ids
            known += [one for one in hint.delivery_ids if one not in known]

    async def _work(self) -> None:
        while True:
            await self._ripe.wait()
            self._ripe.clear()
            while self._waiting:
                hint = self._waiting.pop(next(iter(self._waiting)))
                async with self._lock:
                    await self._followed(hint)

    async def _followed(self, hint: Hint) -> None:
        """Deploy the head of what sessions follow."""
        target = hint.target
        record = Record(
            target.repo, target.ref, hint.trigger, webhook_id=hint.webhook_id, delivery_ids=[*hint.delivery_ids]
        )

        async def choose(source: Source, head: str) -> Sequence[tuple[str, bool]]:
            wanting = self._standing.wanting(target, head)
            if wanting:
                self._check_quarantine(record.repo, head)
            newer = [one for one in wanting if not (one.sha and await source.is_older(record.repo, head, one.sha))]
            for one in wanting:
                if one not in newer:
                    self._standing.declined[one.session_id] = head
            if wanting and not newer:
                record.sessions = [one.session_id for one in wanting]
                raise Ended("rejected", "older", f"{head[:12]} is older than what runs; deploy it by request if meant")
            return [(one.session_id, one.mode == "stage") for one in newer]

        async def check(source: Source) -> None:
            head = await self._heads.ask(target)  # when it is not known, what was verified is not worse for that
            if head not in (None, record.sha):
                self._hints.tell(hint)
                raise Ended("superseded", "newer", f"{head[:12]} came while it was being prepared")

        await self._deploy(record, target, choose, check)
        if record.result == "failed":
            self._retries.failed((target, record.sha), self._now())
        elif record.result in ("swapped", "staged"):
            self._retries.forget((target, record.sha))

    async def _requested(self, record: Record, session_id: str, force: bool) -> None:
        async def choose(source: Source, head: str) -> Sequence[tuple[str, bool]]:
            if self._standing.session(session_id).sha == head:
                return []
            if not force:
                self._check_quarantine(record.repo, head)
            return [(session_id, False)]

        async def check(source: Source) -> None:
            pass

        async with self._lock:
            await self._deploy(record, None, choose, check)
        if record.result != "swapped" or record.sha is None:
            return
        if force:
            await self.quarantine.release(record.sha, record.repo)
        try:
            one = self._standing.session(session_id)
        except SourceError:
            return  # it ended
        # What was asked for stays until something newer is pushed.
        if head := await self._heads.ask(Target(one.repo, one.ref)):
            self._standing.declined[session_id] = head

    def _check_quarantine(self, repo: str, sha: str) -> None:
        if one := self.quarantine.get(repo, sha):
            raise Ended("rejected", "quarantined", f"{sha[:12]} is in quarantine ({one.reason}: {one.text})")

    async def _deploy(
        self,
        record: Record,
        target: Target | None,
        choose: Callable[[Source, str], Awaitable[Sequence[tuple[str, bool]]]],
        check: Callable[[Source], Awaitable[None]],
    ) -> None:
        """All the way; whatever happens is in the record at the end."""
        try:
            await self._attempt(record, target, choose, check)
        except Ended as ended:
            record.end(ended.result, ended.reason, ended.text)
            if ended.is_commits_fault:
                await self._isolate(record)
        except SourceError as error:
            record.end("failed", error.code, str(error))
        except asyncio.CancelledError:
            record.end("failed", "interrupted", "the service ended before the deployment did")
            self._records.save_now(record)
            raise
        except Exception as error:
            logger.exception("deployment %s crashed", record.id)
            record.end("failed", "crash", f"{type(error).__name__}; the service's log says more")
        finally:
            self._current = None
        if record.result == "noop" and record.trigger != "request":
            return
        await self._finish(record)

    async def _attempt(
        self,
        record: Record,
        target: Target | None,
        choose: Callable[[Source, str], Awaitable[Sequence[tuple[str, bool]]]],
        check: Callable[[Source], Awaitable[None]],
    ) -> None:
        source = self._sources(record.repo)
        deployment = Deployment(record, source, self._rollout, self.settings)
        self._current = (deployment, target)
        record.begin("resolving")
        record.sha = await source.head(record.repo, record.ref)
        sessions = await choose(source, record.sha)
        if not sessions:
            record.end("noop", text="it runs already")
            return
        record.sessions = [session for session, _ in sessions]
        await self._records.save(record)
        is_staged = target is None and self._standing.staged.get(record.sessions[0]) == record.sha
        if is_staged and await self._swap_staged(deployment, record.sessions[0]):
            record.end("swapped")
            return
        resolved = record.sha
        folder = await deployment.fetched()
        if record.sha != resolved and not (sessions := await choose(source, record.sha)):
            record.end("noop", text="it runs already")
            return
        deployment.check_given_up()
        for session, _ in sessions:
            if (staged := self._standing.staged.pop(session, None)) is not None:
                await self._rollout.discard(session, staged)
        await deployment.roll_out(sessions, folder, lambda: check(source))
        self._standing.staged |= {session: record.sha for session, is_only_staged in sessions if is_only_staged}
        record.end("staged" if all(is_only_staged for _, is_only_staged in sessions) else "swapped")

    async def _swap_staged(self, deployment: Deployment, session: str) -> bool:
        """Swap to what is prepared already; False when the session has it no more."""
        del self._standing.staged[session]
        deployment.is_preparing = False
        try:
            await deployment.swapped(session)
        except Ended as ended:
            if ended.reason != "not_staged":
                raise
            return False
        await deployment.proved(session)
        return True

    async def _isolate(self, record: Record) -> None:
        if record.sha is not None:
            await self.quarantine.add(record.repo, record.sha, record.reason or "", record.text, record.id)

    async def _finish(self, record: Record) -> None:
        """Keep a record, and tell of it."""
        level = logging.INFO if record.result in ("swapped", "staged", "noop", "superseded") else logging.WARNING
        logger.log(level, "%s", record.in_words())
        await self._records.save(record)
        event = EVENTS.get(record.result or "")
        if event is None or self._on_event is None:
            return
        try:
            answer = self._on_event(event, record.as_json())
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("deployment %s: telling of %s crashed", record.id, event)
