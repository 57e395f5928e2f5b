"""Running, previous and staged policy of a session."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from service.control.robot_io import RobotIO
from service.errors import MoveRefused, PolicyError
from service.inference.engine import Engine, LoadedPolicy, LoadPolicy
from service.sessions.request import NewSession


@dataclass(frozen=True)
class Held:
    """A policy in memory that this session holds.

    Attributes:
        commit: what its files are called, or None when nobody knows.
        hold: gives it back to the engine when closed.
    """

    served: LoadedPolicy
    commit: str | None
    hold: AsyncExitStack


class PolicySlots:
    """Up to three policies with the same requirements, and how one takes over from another.

    Attributes:
        running, before, staged: None where there is none.
        changes: how often another one took over.
    """

    def __init__(
        self,
        new: NewSession,
        engine: Engine,
        load: LoadPolicy,
        driven: Callable[[], RobotIO],
        took_over: Callable[[LoadedPolicy], None] = lambda served: None,
    ):
        """Nothing is loaded yet.

        Args:
            driven: the live parts of the session; raises MoveRefused while it has none.
            took_over: told of each that takes over from another.
        """
        self.running: Held | None = None
        self.before: Held | None = None
        self.staged: Held | None = None
        self.changes = 0
        self._new = new
        self._engine = engine
        self._load = load
        self._driven = driven
        self._took_over = took_over
        self._changing = asyncio.Lock()
        self._letting_go: set[asyncio.Task[None]] = set()

    async def begin(self, tell: Callable[[str], None]) -> LoadedPolicy:
        """Load the first one.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        self.running = await self._hold(self._new.revision, tell)
        return self.running.served

    async def stage(self, commit: str, folder: str, tell: Callable[[str], None]) -> LoadedPolicy:
        """Load another one beside the running one, compiled for the frames that come; nothing changes by it.

        Args:
            folder: holds this commit, verified.

        Raises:
            Misfit: it needs something else than the running one.
            PolicyError: it cannot be loaded.
            MoveRefused: the session is not there for it.
        """
        async with self._changing:
            drive, running = self._driven(), self.running
            await self._discard()
            held = await self._hold(commit, tell, folder=folder, like=running)
            if running is None or self.running is not running:
                await held.hold.aclose()
                raise MoveRefused("the session changed its policy, or ended, meanwhile")
            if misfits := differences(running.served, held.served):
                await held.hold.aclose()
                raise Misfit("; ".join(misfits) + "; create a new session for it")
            # The name that the files were verified under, not what a folder happens to be called.
            self.staged = Held(held.served, commit, held.hold)
            await self._compile(drive, held.served, tell)
            return held.served

    async def discard(self) -> None:
        """Let go of the staged one."""
        async with self._changing:
            await self._discard()

    async def change(self, fade: int, patience: float) -> None:
        """Let the staged one take over at the next chunk boundary; returns when it has.

        Args:
            fade: how many of its first actions lead over from the old plan.
            patience: seconds; a robot that is held for longer than that goes on with the policy it has.

        Raises:
            ServiceError: nothing is staged, the session ended, or the boundary did not come in time.
        """
        async with self._changing:
            drive, held = self._driven(), self.staged
            if held is None:
                raise MoveRefused(f"session {self._new.session_id!r} has no staged policy")
            # Frames may have another size than when it was staged.
            await self._compile(drive, held.served)
            if self._driven() is not drive or self.staged is not held:
                raise MoveRefused(f"session {self._new.session_id!r} has no staged policy any more")
            await self._take_over(drive, held, fade, patience)

    def restore(self, fade: int) -> None:
        """Let the one from before take over again, now; what waits for its turn was judged beside the one that goes.

        Raises:
            MoveRefused: there is none, or the session ended.
        """
        drive, held = self._driven(), self.before
        if held is None:
            raise MoveRefused(f"session {self._new.session_id!r} has no policy from before")
        drive.thinking.stay()
        if self.staged is not None:
            self._let_go(self.staged)
            self.staged = None
        drive.thinking.take_over(held.served, fade, self._before_took_over, at_once=True)

    async def close(self) -> None:
        """Let go of all."""
        for held in (self.staged, self.before, self.running):
            if held is not None:
                await held.hold.aclose()
        self.staged = self.before = self.running = None

    async def _take_over(self, drive: RobotIO, held: Held, fade: int, patience: float) -> None:
        taken = drive.thinking.take_over(held.served, fade, self._staged_took_over)
        name = f"session {self._new.session_id!r}"
        try:
            async with asyncio.timeout(patience):
                await taken
        except TimeoutError:
            if self.running is held:
                return  # at the very last moment
            hold = drive.control.hold.text if drive.control.hold else "waiting for the policy"
            why = f"it is held: {hold}" if drive.control.is_running else "it is stopped"
            raise MoveRefused(f"{name} asked for no chunk in {patience:g} s ({why})") from None
        except asyncio.CancelledError:
            if not taken.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise MoveRefused(f"{name} ended, or another policy came first") from None

    def _staged_took_over(self) -> None:
        oldest, self.before, self.running, self.staged = self.before, self.running, self.staged, None
        self._changed(oldest)

    def _before_took_over(self) -> None:
        left, self.running, self.before = self.running, self.before, None
        self._changed(left)

    def _changed(self, left: Held | None) -> None:
        self.changes += 1
        if self.running is not None:
            self._took_over(self.running.served)
        self._let_go(left)

    def _let_go(self, held: Held | None) -> None:
        if held is not None:
            self._letting_go.add(task := asyncio.create_task(held.hold.aclose()))
            task.add_done_callback(self._letting_go.discard)

    async def _discard(self) -> None:
        if self.staged is not None:
            held, self.staged = self.staged, None
            await held.hold.aclose()

    async def _compile(
        self, drive: RobotIO, served: LoadedPolicy, tell: Callable[[str], None] = lambda stage: None
    ) -> None:
        sizes = drive.buffer.sizes()
        if sizes and len(sizes) == len(drive.buffer.frames) and not served.is_compiled(sizes):
            tell("compiling")
            await self._engine.compile(served, sizes)

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
            self._engine.policy(self._load, self._new.policy_path, revision, tell, folder=folder, like=policy)
        )
        return Held(served, served.commit, hold)


class Misfit(PolicyError):
    """A policy needs something else than the session has."""


def differences(running: LoadedPolicy, other: LoadedPolicy) -> list[str]:
    """What the other policy needs that the running one does not, field by field."""
    mine, theirs = running.requirements, other.requirements
    return [
        f"{name}: the session has {getattr(mine, name)!r}, the new policy needs {getattr(theirs, name)!r}"
        for name, field in mine.__dataclass_fields__.items()
        if field.compare and getattr(mine, name) != getattr(theirs, name)
    ]
