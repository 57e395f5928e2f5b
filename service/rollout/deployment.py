"""Deployment of one commit to sessions, canary first, and the reasons for a deployment."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from service.rollout.config import DeploymentSettings
from service.rollout.gates import GateVerdict
from service.rollout.records import Quarantine, Record
from service.rollout.rollout import EXCUSED_REASONS, SESSION_REASONS, FollowingSession, Rollout
from service.rollout.sources import COMMIT_ERRORS, TRANSFER_ERRORS, PolicySource, SourceError
from service.rollout.triggers import TriggerTarget

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class DeploymentEnded(Exception):
    """A deployment stops here, with this result, reason and text of its record."""

    def __init__(self, result: str, reason: str, text: str, is_commit_at_fault: bool = False):
        """Create it; a commit at fault is put into quarantine."""
        super().__init__(text)
        self.result, self.reason, self.text = result, reason, text
        self.is_commit_at_fault = is_commit_at_fault


class PolicyDeployment:
    """The steps of one deployment. While it ``is_preparing``, it affects no robot, and can be superseded."""

    def __init__(
        self,
        record: Record,
        source: PolicySource,
        rollout: Rollout,
        settings: DeploymentSettings,
        save: Callable[[Record], Awaitable[None]],
    ):
        """Create it; ``save`` writes the record before each step, for the case that the process ends in that step."""
        self._save = save
        self.record = record
        self.is_preparing = True
        self._source = source
        self._rollout = rollout
        self._settings = settings
        self._superseded_by: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()

    @property
    def sha(self) -> str:
        """The commit, once it is resolved."""
        assert self.record.sha is not None, "not resolved yet"
        return self.record.sha

    def supersede(self, reason: str, text: str) -> None:
        """End it as superseded, if it is still being prepared."""
        if not self._superseded_by.done():
            self._superseded_by.set_result((reason, text))

    async def fetch(self) -> Path:
        """Fetch the commit and return its verified folder. Failed transfers and changed folders are retried."""
        pause = self._settings.transfer_pause
        for further in reversed(range(self._settings.transfers)):
            try:
                return await self._run_unless_superseded(
                    self._source.fetch(self.record.repo, self.sha, self.record.begin_stage)
                )
            except SourceError as error:
                if not further or error.code not in TRANSFER_ERRORS:
                    is_commits_fault = error.code in COMMIT_ERRORS
                    result = "rejected" if is_commits_fault else "failed"
                    raise DeploymentEnded(result, error.code, str(error), is_commits_fault) from error
                self.record.begin_stage("waiting")
                await self._run_unless_superseded(asyncio.sleep(pause))
                pause *= 2
                if error.code == "changed_meanwhile":
                    self.record.sha = await self._source.head(self.record.repo, self.record.ref)
        raise AssertionError("the last attempt returns or raises")

    async def prepare(self, session: str, folder: Path) -> None:
        """Load and check the commit next to the running policy. A commit that fails is discarded."""
        await self._save(self.record)
        async with self._discard_on_failure(session, self._settings.preparing, "not prepared"):
            work = self._rollout.prepare(session, self.record.repo, self.sha, folder, self.record.begin_stage)
            verdict = await (self._run_unless_superseded(work) if self.is_preparing else work)
            self._record_verdict(session, "prepare", verdict, "rejected")

    async def swap(self, session: str) -> None:
        """Let the commit take over, at a moment that the session chooses."""
        self.record.begin_stage("swapping")
        # Saved first: after a kill, the next process must know that the robot may have run this commit.
        await self._save(self.record)
        async with self._discard_on_failure(session, self._settings.swapping, "did not take it over"):
            verdict = await self._rollout.swap(session, self.sha)
            self._record_verdict(session, "swap", verdict, "failed")
        self.record.figures[session]["result"] = "swapped"

    @asynccontextmanager
    async def _discard_on_failure(
        self, session: str, seconds: float | None = None, what: str = ""
    ) -> AsyncIterator[None]:
        """Discard the session's staged commit if the body fails, or takes longer than ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except BaseException as error:
            await self._rollout.discard(session, self.sha)
            if isinstance(error, TimeoutError) and seconds is not None:
                text = f"session {session}: {what} within {seconds:g} s"
                raise DeploymentEnded("failed", "timeout", text) from None
            raise

    async def wait_for_probation(self, session: str) -> None:
        """Wait for the end of the session's probation."""
        self.record.begin_stage("probation")
        await self._save(self.record)
        verdict = await self._rollout.probation(session, self.sha)
        self._record_verdict(session, "probation", verdict, "rolled_back")

    async def roll_out(self, targets: "Sequence[DeployTarget]", folder: Path, reason: "DeployReason") -> None:
        """Deploy to one session after another. A failure by the commit's fault ends the deployment."""
        failures: list[DeploymentEnded] = []
        for session, is_only_staged in targets:
            if not reason.should_deploy(session, self.sha):
                continue
            try:
                await self._roll_out_to(session, is_only_staged, folder, reason)
            except DeploymentEnded as ended:
                if ended.reason not in SESSION_REASONS:
                    raise
                # A held or deleted session must not keep the commit from the others.
                self.record.figures.setdefault(session, {})["result"] = "failed"
                failures.append(ended)
        arrived = any(figures.get("result") in ("swapped", "staged") for figures in self.record.figures.values())
        if later := [ended for ended in failures if ended.reason != "gone"] or ([] if arrived else failures):
            raise later[0]
        if not arrived:
            raise DeploymentEnded("superseded", "gone", "no session wants it any more")

    async def _roll_out_to(self, session: str, is_only_staged: bool, folder: Path, reason: "DeployReason") -> None:
        await self.prepare(session, folder)
        if self.is_preparing:
            async with self._discard_on_failure(session):
                self.raise_if_superseded()
                await reason.check_up_to_date(self.sha)
                self.raise_if_superseded()
            self.is_preparing = False
        if is_only_staged:
            self.record.figures[session]["result"] = "staged"
            return
        await self.swap(session)
        await self.wait_for_probation(session)

    def _record_verdict(self, session: str, step: str, verdict: GateVerdict, result: str) -> None:
        """Record a verdict's figures. A verdict with a reason ends the deployment with this result."""
        figures = self.record.figures.setdefault(session, {})
        if verdict.figures:
            figures[step] = dict(verdict.figures)
        if verdict.reason is None:
            return
        is_innocent = verdict.reason in EXCUSED_REASONS or result == "failed"
        figures["result"] = "failed" if is_innocent else result
        raise DeploymentEnded(figures["result"], verdict.reason, f"session {session}: {verdict.text}", not is_innocent)

    async def _run_unless_superseded(self, work: Awaitable[Result]) -> Result:
        """Return the result of work that is cancelled when the deployment is superseded."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._superseded_by), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
        self.raise_if_superseded()
        raise AssertionError("news without a reason")

    def raise_if_superseded(self) -> None:
        """Raise `DeploymentEnded` when it is superseded."""
        if self._superseded_by.done():
            raise DeploymentEnded("superseded", *self._superseded_by.result())


class RolloutState:
    """Following sessions, heads, and staged, declined and quarantined commits.

    Attributes:
        sources: returns the source of a repo.
        staged: session id to its staged commit.
        declined: session id to the head that is deployed to it only by request.
    """

    def __init__(self, rollout: Rollout, sources: Callable[[str], PolicySource], quarantine: Quarantine):
        self.sources = sources
        self.staged: dict[str, str] = {}
        self.declined: dict[str, str] = {}
        self._rollout, self._quarantine = rollout, quarantine
        self._unknown: set[TriggerTarget] = set()

    def get_session(self, id: str) -> FollowingSession:
        """Return a session, or raise SourceError (``unknown_session``)."""
        for one in self._rollout.list_following():
            if one.session_id == id:
                return one
        raise SourceError("unknown_session", f"session {id!r} runs no policy")

    def list_targets(self) -> Sequence[TriggerTarget]:
        """Return all refs that sessions follow."""
        followed = (TriggerTarget.of_session(one) for one in self._rollout.list_following() if one.mode != "off")
        return [*dict.fromkeys(followed)]

    def list_outdated(self, target: TriggerTarget, head: str) -> Sequence[FollowingSession]:
        """Return the sessions that do not run this head yet; sessions that swap come first."""
        found = [
            one
            for one in self._rollout.list_following()
            if TriggerTarget.of_session(one) == target
            and one.mode != "off"
            and head not in (one.sha, self.declined.get(one.session_id))
            and not (one.mode == "stage" and self.staged.get(one.session_id) == head)
        ]
        return sorted(found, key=lambda one: one.mode != "swap")

    async def get_head(self, target: TriggerTarget) -> str | None:
        """Return the commit that a ref points to, or None if it is unknown now. Log the first of several failures."""
        what = f"{target.repo} at {target.ref!r}"
        try:
            head = await self.sources(target.repo).head(target.repo, target.ref)
        except Exception as error:
            if target not in self._unknown:
                self._unknown.add(target)
                text = "the head of %s is not known; further failures are not logged: %s"
                logger.warning(text, what, error, exc_info=not isinstance(error, SourceError))
            return None
        if target in self._unknown:
            self._unknown.discard(target)
            logger.info("the head of %s can be read again", what)
        return head

    def check_quarantine(self, repo: str, sha: str) -> None:
        """Raise `DeploymentEnded` for a commit that is in quarantine."""
        if one := self._quarantine.get(repo, sha):
            raise DeploymentEnded("rejected", "quarantined", f"{sha[:12]} is in quarantine ({one.reason}: {one.text})")


ROLLED_BACK_TEXT = "a rollback to the policy before was requested"


class DeployTarget(NamedTuple):
    """A session that gets a commit, and whether it is only staged there."""

    session: str
    is_only_staged: bool


@dataclass(frozen=True)
class RefMoved:
    """Reason to deploy: sessions follow a ref, which may have moved."""

    target: TriggerTarget
    state: RolloutState
    requeue: Callable[[], None] | None  # queues the ref again if it has moved on; None deploys the older commit

    async def choose_sessions(self, source: PolicySource, repo: str, head: str) -> Sequence[DeployTarget]:
        """Choose the sessions that do not run it yet, unless they are ahead of it."""
        outdated = self.state.list_outdated(self.target, head)
        if outdated:
            self.state.check_quarantine(repo, head)
        ahead = [one for one in outdated if one.sha and await source.is_older(repo, head, one.sha)]
        for one in ahead:
            self.state.declined[one.session_id] = head
        if ahead and len(ahead) == len(outdated):
            text = f"{head[:12]} is older than the running commit; deploy it by a request if it is intended"
            raise DeploymentEnded("rejected", "older", text)
        return [DeployTarget(one.session_id, one.mode == "stage") for one in outdated if one not in ahead]

    async def check_up_to_date(self, sha: str) -> None:
        """Check that the ref did not move. An unreachable source does not stop a deployment."""
        if self.requeue is None:
            return
        head = await self.state.get_head(self.target)
        if head not in (None, sha):
            self.requeue()
            raise DeploymentEnded("superseded", "newer", f"{head[:12]} came while it was being prepared")

    def should_deploy(self, session: str, sha: str) -> bool:
        """Return whether the session still follows the ref, because it may have been replaced."""
        return any(one.session_id == session for one in self.state.list_outdated(self.target, sha))


@dataclass(eq=False)
class DeployRequest:
    """Reason to deploy: a caller requested a commit on one session, newer or older."""

    session: str
    state: RolloutState
    is_forced: bool  # whether a commit in quarantine is allowed
    is_withdrawn: bool = False  # whether the session was rolled back after the request
    target: None = None

    async def choose_sessions(self, source: PolicySource, repo: str, head: str) -> Sequence[DeployTarget]:
        """Choose that session, unless it runs the commit already."""
        if self.is_withdrawn:
            raise DeploymentEnded("superseded", "rollback", ROLLED_BACK_TEXT)
        if self.state.get_session(self.session).sha == head:
            return []
        if not self.is_forced:
            self.state.check_quarantine(repo, head)
        return [DeployTarget(self.session, False)]

    async def check_up_to_date(self, sha: str) -> None:
        """Do nothing: the caller requested this commit."""

    def should_deploy(self, session: str, sha: str) -> bool:
        """Return True: the request is valid until another request replaces it."""
        return True


# Reasons to deploy a commit. No ref of a request is followed: only another request supersedes it.
DeployReason = RefMoved | DeployRequest
