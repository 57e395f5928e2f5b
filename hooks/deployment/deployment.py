"""One commit on its way into the sessions that follow it: fetched, prepared, swapped in, proved; canary first."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hooks.deployment.records import Record
from hooks.deployment.rollout import INNOCENT, Follower, Rollout, Verdict
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

    def __init__(self, record: Record, source: Source, rollout: Rollout, settings: DeploymentSettings):
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
                if not further or error.code not in OF_TRANSFER | {"changed_meanwhile"}:
                    is_commits_fault = error.code in OF_COMMIT
                    result = "rejected" if is_commits_fault else "failed"
                    raise Ended(result, error.code, str(error), is_commits_fault) from error
                self.record.begin("waiting")
                await self._unless_given_up(asyncio.sleep(pause))
                pause *= 2
                if error.code == "changed_meanwhile":
                    self.record.sha = await self._source.head(self.record.repo, None)
        raise AssertionError("the last attempt returns or raises")

    async def prepared(self, one: Follower, folder: Path) -> None:
        """Bring the commit up beside what the session runs; it is dropped again when it does not pass."""
        sid = one.session_id
        work = self._rollout.prepare(sid, self.record.repo, self.sha, folder, self.record.begin)
        try:
            async with asyncio.timeout(self._settings.preparing):
                verdict = await (self._unless_given_up(work) if self.is_preparing else work)
        except TimeoutError:
            await self._rollout.discard(sid, self.sha)
            seconds = self._settings.preparing
            raise Ended("failed", "timeout", f"session {sid}: not prepared within {seconds:g} s") from None
        except BaseException:
            await self._rollout.discard(sid, self.sha)
            raise
        try:
            self._note(sid, verdict, "rejected")
        except Ended:
            await self._rollout.discard(sid, self.sha)
            raise

    async def swapped(self, one: Follower) -> None:
        """Hand it over, at a moment that the session chooses."""
        sid = one.session_id
        self.record.begin("swapping")
        try:
            async with asyncio.timeout(self._settings.swapping):
                verdict = await self._rollout.swap(sid, self.sha)
        except TimeoutError:
            await self._rollout.discard(sid, self.sha)
            seconds = self._settings.swapping
            raise Ended("failed", "timeout", f"session {sid}: did not take it over within {seconds:g} s") from None
        try:
            self._note(sid, verdict, "failed")
        except Ended:
            await self._rollout.discard(sid, self.sha)
            raise
        self.record.figures[sid]["result"] = "swapped"

    async def proved(self, one: Follower) -> None:
        """Wait for the end of its probation."""
        self.record.begin("probation")
        self._note(one.session_id, await self._rollout.probation(one.session_id, self.sha), "rolled_back")

    async def roll_out(self, followers: Sequence[Follower], folder: Path, check: Callable[[], Awaitable[None]]) -> None:
        """Through all steps, one session after the other; nobody follows one that failed.

        Args:
            followers: in this order; those of mode ``stage`` are only prepared.
            check: called when the first is prepared and nothing has changed for the robot yet; may raise `Ended`.
        """
        for one in followers:
            await self.prepared(one, folder)
            if self.is_preparing:
                try:
                    await check()
                except BaseException:
                    await self._rollout.discard(one.session_id, self.sha)
                    raise
                self.is_preparing = False
            if one.mode == "stage":
                self.record.figures[one.session_id]["result"] = "staged"
                continue
            await self.swapped(one)
            await self.proved(one)

    def _note(self, sid: str, verdict: Verdict, result: str) -> None:
        """Keep a verdict's figures; one with a reason ends it all."""
        figures = self.record.figures.setdefault(sid, {})
        # Swap and probation count the same things; those of the swap are what it cost.
        figures.update({name: figure for name, figure in verdict.figures.items() if name not in figures})
        if verdict.reason is not None:
            is_commits_fault = verdict.reason not in INNOCENT and result != "failed"
            is_change = result == "rolled_back"
            outcome = result if is_commits_fault or is_change else "failed"
            figures["result"] = outcome
            raise Ended(outcome, verdict.reason, f"session {sid}: {verdict.text}", is_commits_fault)

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
