"""Deployment of one commit to sessions, canary first, and the queue of deployments."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from hooks.errors import SourceError
from service.rollout.config import DeploymentSettings
from service.rollout.records import Journal, Quarantine, Record
from service.rollout.rollout import INNOCENT, OF_SESSION, FollowerLike, RolloutLike, VerdictLike
from service.rollout.sources import OF_COMMIT, OF_TRANSFER, RefTracker, Source
from service.rollout.triggers import Target

Result = TypeVar("Result")


class Ended(Exception):
    """A deployment stops here, with this result.

    Attributes:
        result, reason, text: of its record.
        is_commits_fault: whether the commit is to be quarantined.
    """

    def __init__(self, result: str, reason: str, text: str, is_commits_fault: bool = False):
        super().__init__(text)
        self.result, self.reason, self.text = result, reason, text
        self.is_commits_fault = is_commits_fault


class Deployment:
    """The steps of one deployment while it goes on.

    Attributes:
        record: what it writes down.
        is_preparing: whether it may still be given up for a newer commit without anybody noticing.
    """

    def __init__(
        self,
        record: Record,
        source: Source,
        rollout: RolloutLike,
        settings: DeploymentSettings,
        keep: Callable[[Record], Awaitable[None]],
    ):
        """Create it; nothing is done yet.

        Args:
            keep: writes the record down as it is; called where somebody wants to know how far it came if the process
                ends there.
        """
        self._keep = keep
        self.record = record
        self.is_preparing = True
        self._source = source
        self._rollout = rollout
        self._settings = settings
        self._news = asyncio.Event()
        self._given_up: tuple[str, str] | None = None

    @property
    def sha(self) -> str:
        """The commit; known once it is resolved."""
        assert self.record.sha is not None, "not resolved yet"
        return self.record.sha

    def give_up(self, reason: str, text: str) -> None:
        """End it as superseded while it is still being prepared; later nothing happens."""
        self._given_up = self._given_up or (reason, text)
        self._news.set()

    async def fetched(self) -> Path:
        """Fetch the commit and return its verified folder; failed transfers are retried, and a changed folder is
        read again.
        """
        pause = self._settings.transfer_pause
        for further in reversed(range(self._settings.transfers)):
            try:
                return await self._unless_given_up(self._source.fetch(self.record.repo, self.sha, self.record.begin))
            except SourceError as error:
                if not further or error.code not in OF_TRANSFER:
                    is_commits_fault = error.code in OF_COMMIT
                    result = "rejected" if is_commits_fault else "failed"
                    raise Ended(result, error.code, str(error), is_commits_fault) from error
                self.record.begin("waiting")
                await self._unless_given_up(asyncio.sleep(pause))
                pause *= 2
                if error.code == "changed_meanwhile":
                    self.record.sha = await self._source.head(self.record.repo, self.record.ref)
        raise AssertionError("the last attempt returns or raises")

    async def prepared(self, session: str, folder: Path) -> None:
        """Load and check the commit beside what the session runs; it is discarded when it does not pass."""
        await self._keep(self.record)
        work = self._rollout.prepare(session, self.record.repo, self.sha, folder, self.record.begin)
        try:
            async with asyncio.timeout(self._settings.preparing):
                verdict = await (self._unless_given_up(work) if self.is_preparing else work)
            self._judge(session, "prepare", verdict, "rejected")
        except TimeoutError:
            await self._rollout.discard(session, self.sha)
            text = f"session {session}: not prepared within {self._settings.preparing:g} s"
            raise Ended("failed", "timeout", text) from None
        except BaseException:
            await self._rollout.discard(session, self.sha)
            raise

    async def swapped(self, session: str) -> None:
        """Let the commit take over, at a moment that the session chooses."""
        self.record.begin("swapping")
        # From here on a robot may act by it, and a process that is killed has to know that afterwards.
        await self._keep(self.record)
        try:
            async with asyncio.timeout(self._settings.swapping):
                verdict = await self._rollout.swap(session, self.sha)
            self._judge(session, "swap", verdict, "failed")
        except TimeoutError:
            await self._rollout.discard(session, self.sha)
            text = f"session {session}: did not take it over within {self._settings.swapping:g} s"
            raise Ended("failed", "timeout", text) from None
        except BaseException:
            await self._rollout.discard(session, self.sha)
            raise
        self.record.figures[session]["result"] = "swapped"

    async def proved(self, session: str) -> None:
        """Wait for the end of its probation."""
        self.record.begin("probation")
        await self._keep(self.record)
        verdict = await self._rollout.probation(session, self.sha)
        self._judge(session, "probation", verdict, "rolled_back")

    async def roll_out(
        self,
        sessions: Sequence[tuple[str, bool]],
        folder: Path,
        check: Callable[[], Awaitable[None]],
        wants: Callable[[str], bool],
    ) -> None:
        """Deploy to one session after the other; nobody follows one that failed by the commit's fault.

        Args:
            sessions: their ids, and whether it is only prepared there.
            check: called when the first is prepared and nothing has changed for a robot yet; may raise `Ended`.
            wants: whether a session is to have it still, when its turn comes.
        """
        left_out: list[Ended] = []
        for session, is_only_staged in sessions:
            if not wants(session):
                continue
            try:
                await self._bring(session, is_only_staged, folder, check)
            except Ended as ended:
                if ended.reason not in OF_SESSION:
                    raise
                # A robot that is held, or gone, must not keep it from the others.
                self.record.figures.setdefault(session, {})["result"] = "failed"
                left_out.append(ended)
        arrived = any(figures.get("result") in ("swapped", "staged") for figures in self.record.figures.values())
        if later := [ended for ended in left_out if ended.reason != "gone"] or ([] if arrived else left_out):
            raise later[0]
        if not arrived:
            raise Ended("superseded", "gone", "no session wants it any more")

    async def _bring(
        self, session: str, is_only_staged: bool, folder: Path, check: Callable[[], Awaitable[None]]
    ) -> None:
        await self.prepared(session, folder)
        if self.is_preparing:
            try:
                self.check_given_up()
                await check()
                self.check_given_up()
            except BaseException:
                await self._rollout.discard(session, self.sha)
                raise
            self.is_preparing = False
        if is_only_staged:
            self.record.figures[session]["result"] = "staged"
            return
        await self.swapped(session)
        await self.proved(session)

    def _judge(self, session: str, step: str, verdict: VerdictLike, result: str) -> None:
        """Record a verdict's figures; a verdict with a reason ends the deployment with this result."""
        figures = self.record.figures.setdefault(session, {})
        if verdict.figures:
            figures[step] = dict(verdict.figures)
        if verdict.reason is None:
            return
        is_innocent = verdict.reason in INNOCENT or result == "failed"
        figures["result"] = "failed" if is_innocent else result
        raise Ended(figures["result"], verdict.reason, f"session {session}: {verdict.text}", not is_innocent)

    async def _unless_given_up(self, work: Awaitable[Result]) -> Result:
        """Return the result of some work, which is cancelled when the deployment is superseded."""
        task = asyncio.ensure_future(work)
        news = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait((task, news), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            news.cancel()
            if not task.done():
                task.cancel()
                # What it raises while it ends is of no interest any more.
                with suppress(asyncio.CancelledError, Exception):
                    await task
        self.check_given_up()
        raise AssertionError("news without a reason")

    def check_given_up(self) -> None:
        """Raise `Ended` when it is superseded."""
        if self._given_up is not None:
            raise Ended("superseded", *self._given_up)


class RolloutState:
    """Staged and declined commits of all sessions.

    Attributes:
        staged: session to the commit that is prepared beside what it runs.
        declined: session to the head that it is not brought to by itself, until another one comes.
    """

    def __init__(self, rollout: RolloutLike):
        self.staged: dict[str, str] = {}
        self.declined: dict[str, str] = {}
        self._rollout = rollout

    def session(self, id: str) -> FollowerLike:
        """Return a session as it is now.

        Raises:
            SourceError: ``unknown_session``.
        """
        for one in self._rollout.followers():
            if one.session_id == id:
                return one
        raise SourceError("unknown_session", f"session {id!r} runs no policy")

    def targets(self) -> Sequence[Target]:
        """Return all refs that sessions follow."""
        followed = (Target.of(one) for one in self._rollout.followers() if one.mode != "off")
        return [*dict.fromkeys(followed)]

    def wanting(self, target: Target, head: str) -> Sequence[FollowerLike]:
        """Return the followers that do not run this head yet; those that really swap come first."""
        found = [
            one
            for one in self._rollout.followers()
            if Target.of(one) == target
            and one.mode != "off"
            and head not in (one.sha, self.declined.get(one.session_id))
            and not (one.mode == "stage" and self.staged.get(one.session_id) == head)
        ]
        return sorted(found, key=lambda one: one.mode != "swap")


WENT_BACK = "somebody went back to the policy before"


class DeployTarget(NamedTuple):
    """A session that gets a commit, and whether it is only staged there."""

    session: str
    is_only_staged: bool


class DeployReason(Protocol):
    """Interface of a reason to deploy.

    Attributes:
        target: what is followed; None when somebody asked, which nothing but another request supersedes.
    """

    @property
    def target(self) -> Target | None: ...

    async def choose(self, source: Source, repo: str, head: str) -> Sequence[DeployTarget]:
        """Choose the sessions that get the commit, in this order; may raise `Ended`."""
        ...

    async def check(self, sha: str) -> None:
        """Raise `Ended` when what was prepared is not wanted any more."""
        ...

    def wants(self, session: str, sha: str) -> bool:
        """Return whether a chosen session should still get the commit."""
        ...


class Followed:
    """Reason to deploy: sessions follow a ref, which may have moved."""

    def __init__(
        self,
        target: Target,
        standing: RolloutState,
        quarantine: Quarantine,
        heads: RefTracker,
        again: Callable[[], None] | None,
    ):
        """Create it; ``again`` asks for another look when the ref has moved on; without it the commit is deployed
        all the same.
        """
        self.target = target
        self._standing = standing
        self._quarantine = quarantine
        self._heads = heads
        self._again = again

    async def choose(self, source: Source, repo: str, head: str) -> Sequence[DeployTarget]:
        """Choose the followers that do not run it yet, unless they are ahead of it."""
        wanting = self._standing.wanting(self.target, head)
        if wanting:
            check_quarantine(self._quarantine, repo, head)
        ahead = [one for one in wanting if one.sha and await source.is_older(repo, head, one.sha)]
        for one in ahead:
            self._standing.declined[one.session_id] = head
        if ahead and len(ahead) == len(wanting):
            raise Ended("rejected", "older", f"{head[:12]} is older than what runs; ask for it if it is meant")
        return [DeployTarget(one.session_id, one.mode == "stage") for one in wanting if one not in ahead]

    async def check(self, sha: str) -> None:
        """Check the head again; when it cannot be known now, what was verified is not worse for that."""
        if self._again is None:
            return
        head = await self._heads.ask(self.target)
        if head not in (None, sha):
            self._again()
            raise Ended("superseded", "newer", f"{head[:12]} came while it was being prepared")

    def wants(self, session: str, sha: str) -> bool:
        """Return whether the session still follows the ref: it may have been made anew."""
        return any(one.session_id == session for one in self._standing.wanting(self.target, sha))


class Asked:
    """Reason to deploy: somebody asked for a commit on one session, newer or older.

    Attributes:
        is_withdrawn: somebody went back to the policy before since then.
    """

    target = None

    def __init__(self, session: str, standing: RolloutState, quarantine: Quarantine, is_forced: bool):
        """Create it; ``is_forced`` allows commits in quarantine."""
        self.is_withdrawn = False
        self.session = session
        self._standing = standing
        self._quarantine = quarantine
        self._is_forced = is_forced

    async def choose(self, source: Source, repo: str, head: str) -> Sequence[DeployTarget]:
        """Choose that session, unless it runs the commit already."""
        if self.is_withdrawn:
            raise Ended("superseded", "rollback", WENT_BACK)
        if self._standing.session(self.session).sha == head:
            return []
        if not self._is_forced:
            check_quarantine(self._quarantine, repo, head)
        return [DeployTarget(self.session, False)]

    async def check(self, sha: str) -> None:
        """Do nothing: whoever asked meant this commit."""

    def wants(self, session: str, sha: str) -> bool:
        """Return True: it holds until somebody asks for another commit."""
        return True


def check_quarantine(quarantine: Quarantine, repo: str, sha: str) -> None:
    """Raise `Ended` for a commit that is in quarantine."""
    if one := quarantine.get(repo, sha):
        raise Ended("rejected", "quarantined", f"{sha[:12]} is in quarantine ({one.reason}: {one.text})")


logger = logging.getLogger(__name__)


class DeploymentQueue:
    """Runs one deployment at a time."""

    def __init__(
        self,
        sources: Callable[[str], Source],
        rollout: RolloutLike,
        settings: DeploymentSettings,
        standing: RolloutState,
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
        """Whether no deployment is under way."""
        return not self._lock.locked()

    def preparing(self, target: Target) -> Deployment | None:
        """Return the running deployment of a ref while no robot is touched by it yet, or None."""
        one = self._current
        return one if one is not None and self._target == target and one.is_preparing and one.record.sha else None

    def give_up(self, session: str, reason: str, text: str, *, is_asked: bool = False) -> None:
        """End the running deployment if it only prepares a session that somebody asks something else for."""
        one = self._current
        if one is not None and (is_asked or self._target is not None) and session in one.record.sessions:
            one.give_up(reason, text)

    async def deploy(self, record: Record, purpose: DeployReason) -> None:
        """Run one deployment to its end."""
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

    async def _go(self, record: Record, purpose: DeployReason) -> None:
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
        """Swap to the commit if it is staged already; False when it is not, or not any more."""
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
