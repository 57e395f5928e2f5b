"""The policies of one session: the one it runs, the one it ran before, and one that waits for its turn."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from service.engine import Engine, LoadPolicy, Served
from service.errors import MoveRefused, PolicyError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A policy in memory that this session holds.

    Attributes:
        commit: what its files are called, or None when nobody knows.
        hold: gives it back to the engine when closed.
    """

    served: Served
    commit: str | None
    hold: AsyncExitStack


class Changeover:
    """Holds up to three policies with the same requirements; which of them is asked is ``Drive.take_over``'s business.

    Attributes:
        running, before, staged: None where there is none.
        changes: how often another one took over.
    """

    def __init__(self, engine: Engine, load: LoadPolicy, path: str):
        self.running: Held | None = None
        self.before: Held | None = None
        self.staged: Held | None = None
        self.changes = 0
        self._engine = engine
        self._load = load
        self._path = path

    async def begin(self, revision: str | None, tell: Callable[[str], None]) -> Served:
        """Load the first one.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        self.running = await self._hold(revision, tell)
        return self.running.served

    async def stage(self, commit: str, folder: str, tell: Callable[[str], None]) -> Served:
        """Load another one beside the running one, from a folder that holds this commit; what waited before is let go.

        Raises:
            PolicyError: it cannot be loaded, or needs something else than the running one.
        """
        running = self._running()
        await self.discard()
        held = await self._hold(commit, tell, folder=folder, like=running)
        if self.running is not running:
            await held.hold.aclose()
            raise MoveRefused("the session changed its policy, or ended, meanwhile")
        misfits = differences(running.served, held.served)
        if misfits:
            await held.hold.aclose()
            raise Misfit("; ".join(misfits) + "; create a new session for it")
        # The name that the files were verified under, not what a folder happens to be called.
        self.staged = Held(held.served, commit, held.hold)
        return held.served

    def staged_took_over(self) -> Held | None:
        """The staged one runs now, the one that ran is the one before; one older still is the caller's to close."""
        assert self.staged is not None, "only what is staged takes over"
        oldest, self.before, self.running, self.staged = self.before, self.running, self.staged, None
        self.changes += 1
        return oldest

    def before_took_over(self) -> Held | None:
        """The one before runs again; the one that ran is the caller's to close."""
        assert self.before is not None, "only one that ran can come back"
        left, self.running, self.before = self.running, self.before, None
        self.changes += 1
        return left

    async def discard(self) -> None:
        """Let go of the staged one."""
        if self.staged is not None:
            held, self.staged = self.staged, None
            await held.hold.aclose()

    async def close(self) -> None:
        """Let go of all."""
        for held in (self.staged, self.before, self.running):
            if held is not None:
                await held.hold.aclose()
        self.staged = self.before = self.running = None

    def _running(self) -> Held:
        if self.running is None:
            raise MoveRefused("the session has no policy yet, or none any more")
        return self.running

    async def _hold(
        self,
        revision: str | None,
        tell: Callable[[str], None],
        *,
        folder: str | None = None,
        like: Held | None = None,
    ) -> Held:
        hold = AsyncExitStack()
        policy = like.served.policy if like else None
        served = await hold.enter_async_context(
            self._engine.policy(self._load, self._path, revision, tell, folder=folder, like=policy)
        )
        return Held(served, served.commit, hold)


class Misfit(PolicyError):
    """A policy needs something else than the session has."""


def differences(running: Served, other: Served) -> list[str]:
    """What the other policy needs that the running one does not, field by field."""
    mine, theirs = running.requirements, other.requirements
    return [
        f"{name}: the session has {getattr(mine, name)!r}, the new policy needs {getattr(theirs, name)!r}"
        for name in mine.__dataclass_fields__
        if getattr(mine, name) != getattr(theirs, name)
    ]
