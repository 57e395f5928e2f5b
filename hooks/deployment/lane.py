"""The one lane on which deployments go, one after the other; each ends in its record, whatever happens."""

import asyncio
import logging
from collections.abc import Callable

from hooks.deployment.deployment import Deployment, Ended
from hooks.deployment.journal import Journal
from hooks.deployment.purposes import Purpose
from hooks.deployment.records import Record
from hooks.deployment.rollout import Rollout
from hooks.deployment.settings import DeploymentSettings
from hooks.deployment.source import Source
from hooks.deployment.standing import Standing
from hooks.deployment.trigger import Target
from hooks.errors import SourceError

logger = logging.getLogger(__name__)


class Lane:
    """Deploys for a purpose; the next waits until it is through."""

    def __init__(
        self,
        sources: Callable[[str], Source],
        rollout: Rollout,
        settings: DeploymentSettings,
        standing: Standing,
        journal: Journal,
    ):
        self._sources = sources
        self._rollout = rollout
        self._settings = settings
        self._standing = standing
        self._journal = journal
        self._lock = asyncio.Lock()
        self._current: Deployment | None = None
        self._target: Target | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing goes on."""
        return not self._lock.locked()

    def preparing(self, target: Target) -> Deployment | None:
        """The deployment of what is followed that is not felt by a robot yet, if it is the present one."""
        one = self._current
        return one if one is not None and self._target == target and one.is_preparing and one.record.sha else None

    def give_up(self, session: str, reason: str, text: str, *, is_asked: bool = False) -> None:
        """Make way for a request about a session that the present deployment only prepares, by itself or as asked."""
        one = self._current
        if one is not None and (is_asked or self._target is not None) and session in one.record.sessions:
            one.give_up(reason, text)

    async def deploy(self, record: Record, purpose: Purpose) -> None:
        """All the way."""
        async with self._lock:
            try:
                await self._go(record, purpose)
            except Ended as ended:
                record.end(ended.result, ended.reason, ended.text)
                if ended.is_commits_fault:
                    await self._journal.isolate(record)
            except SourceError as error:
                record.end("failed", error.code, str(error))
            except asyncio.CancelledError:
                record.end("failed", "interrupted", "the service ended before the deployment did")
                self._journal.save_now(record)
                raise
            except Exception as error:
                logger.exception("deployment %s crashed", record.id)
                record.end("failed", "crash", f"{type(error).__name__}; the service's log says more")
            finally:
                self._current = self._target = None
            # That what is followed did not move is no news.
            if record.result != "noop" or purpose.target is None:
                await self._journal.finish(record)

    async def _go(self, record: Record, purpose: Purpose) -> None:
        source = self._sources(record.repo)
        deployment = Deployment(record, source, self._rollout, self._settings, self._journal.save)
        self._current, self._target = deployment, purpose.target
        record.begin("resolving")
        record.sha = resolved = await source.head(record.repo, record.ref)
        aims = await purpose.choose(source, record.repo, record.sha)
        if not aims:
            return record.end("noop", text="it runs already")
        record.sessions = [aim.session for aim in aims]
        await self._journal.save(record)
        if purpose.target is None and await self._is_swapped_from_stage(deployment, aims[0].session):
            return record.end("swapped")
        folder = await deployment.fetched()
        if record.sha != resolved:
            aims = await purpose.choose(source, record.repo, record.sha)
            if not aims:
                return record.end("noop", text="it runs already")
        deployment.check_given_up()
        for aim in aims:
            if (staged := self._standing.staged.pop(aim.session, None)) is not None:
                await self._rollout.discard(aim.session, staged)
        try:
            await deployment.roll_out(
                aims,
                folder,
                lambda: purpose.check(deployment.sha),
                lambda session: purpose.wants(session, deployment.sha),
            )
        finally:
            results = {session: figures.get("result") for session, figures in record.figures.items()}
            staged = {session: deployment.sha for session, result in results.items() if result == "staged"}
            self._standing.staged |= staged
        return record.end("swapped" if "swapped" in results.values() else "staged")

    async def _is_swapped_from_stage(self, deployment: Deployment, session: str) -> bool:
        """Swap to what is prepared already; False when it is not, or not any more."""
        if self._standing.staged.get(session) != deployment.sha:
            return False
        del self._standing.staged[session]
        deployment.is_preparing = False
        try:
            await deployment.swapped(session)
        except Ended as ended:
            if ended.reason != "not_staged":
                raise
            deployment.is_preparing = True
            return False
        await deployment.proved(session)
        return True
