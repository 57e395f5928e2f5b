"""One commit on its way into the sessions that follow it: fetched, prepared, swapped in, proved; canary first."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hooks.deployment.records import Record
from hooks.deployment.rollout import INNOCENT, OF_SESSION, Rollout, Verdict
from hooks.deployment.settings import DeploymentSettings
from hooks.deployment.source import OF_COMMIT, OF_TRANSFER, Source
from hooks.errors import SourceError

Result = TypeVar("Result")


class Ended(Exception):
    """A deployment that goes no further.

    Attributes:
        result, reason, text: of its record.
        is_commits_fault: whether the commit is to be quarantined.
    """

    def __init__(self, result: str, reason: str, text: str, is_commits_fault: bool = False):
        super().__init__(text)
        self.result, self.reason, self.text = result, reason, text
        self.is_commits_fault = is_commits_fault


class Deployment:
    """The steps of one, as long as it goes on.

    Attributes:
        record: what it writes down.
        is_preparing: whether it may still be given up for a newer commit without anybody noticing.
    """

    def __init__(
        self,
        record: Record,
        source: Source,
        rollout: Rollout,
        settings: DeploymentSettings,
        keep: Callable[[Record], Awaitable[None]],
    ):
        """Nothing is done yet.

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
        """The commit; only once it is resolved."""
        assert self.record.sha is not None, "not resolved yet"
        return self.record.sha

    def give_up(self, reason: str, text: str) -> None:
        """End it as superseded if it is still being prepared; else nothing happens."""
        self._given_up = self._given_up or (reason, text)
        self._news.set()

    async def fetched(self) -> Path:
        """The verified folder; a transfer that went wrong is tried again, a folder that changed is looked at again."""
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
        """Bring the commit up beside what the session runs; it is dropped again when it does not pass."""
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
        """Hand it over, at a moment that the session chooses."""
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
        """Through all steps, one session after the other; nobody follows one that failed by the commit's fault.

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

    def _judge(self, session: str, step: str, verdict: Verdict, result: str) -> None:
        """Keep a verdict's figures; one with a reason ends it all, with this result."""
        figures = self.record.figures.setdefault(session, {})
        if verdict.figures:
            figures[step] = dict(verdict.figures)
        if verdict.reason is None:
            return
        is_innocent = verdict.reason in INNOCENT or result == "failed"
        figures["result"] = "failed" if is_innocent else result
        raise Ended(figures["result"], verdict.reason, f"session {session}: {verdict.text}", not is_innocent)

    async def _unless_given_up(self, work: Awaitable[Result]) -> Result:
        """Its result, unless it is no longer wanted before it is done."""
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
        """Raise `Ended` when it is no longer wanted."""
        if self._given_up is not None:
            raise Ended("superseded", *self._given_up)
