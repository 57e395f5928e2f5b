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

    loaded: LoadedPolicy
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
        robot_io: Callable[[], RobotIO],
        took_over: Callable[[LoadedPolicy], None] = lambda loaded: None,
    ):
        """Nothing is loaded yet.

        Args:
            robot_io: gives what controls the robot; raises MoveRefused while the session runs no policy.
            took_over: told of each that takes over from another.
        """
        self.running: Held | None = None
        self.before: Held | None = None
        self.staged: Held | None = None
        self.changes = 0
        self._new = new
        self._engine = engine
        self._load = load
        self._robot_io = robot_io
        self._took_over = took_over
        self._changing = asyncio.Lock()
        self._letting_go: set[asyncio.Task[None]] = set()

    async def begin(self, tell: Callable[[str], None]) -> LoadedPolicy:
        """Load the first one.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        self.running = await self._hold(self._new.revision, tell)
        return self.running.loaded

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
            robot_io, running = self._robot_io(), self.running
            await self._discard()
            held = await self._hold(commit, tell, folder=folder, like=running)
            if running is None or self.running is not running:
                await held.hold.aclose()
                raise MoveRefused("the session changed its policy, or ended, meanwhile")
            if misfits := differences(running.loaded, held.loaded):
                await held.hold.aclose()
                raise Misfit("; ".join(misfits) + "; create a new session for it")
            # The name that the files were verified under, not what a folder happens to be called.
            self.staged = Held(held.loaded, commit, held.hold)
            await self._compile(robot_io, held.loaded, tell)
            return held.loaded

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
            robot_io, held = self._robot_io(), self.staged
            if held is None:
                raise MoveRefused(f"session {self._new.session_id!r} has no staged policy")
            # Frames may have another size than when it was staged.
            await self._compile(robot_io, held.loaded)
            if self._robot_io() is not robot_io or self.staged is not held:
                raise MoveRefused(f"session {self._new.session_id!r} has no staged policy any more")
            await self._take_over(robot_io, held, fade, patience)

    def restore(self, fade: int) -> None:
        """Let the one from before take over again, now; what waits for its turn was judged beside the one that goes.

        Raises:
            MoveRefused: there is none, or the session ended.
        """
        robot_io, held = self._robot_io(), self.before
        if held is None:
            raise MoveRefused(f"session {self._new.session_id!r} has no policy from before")
        robot_io.runner.cancel_take_over()
        if self.staged is not None:
            self._let_go(self.staged)
            self.staged = None
        robot_io.take_over(held.loaded, fade, at_once=True)
        self._restored()

    async def close(self) -> None:
        """Let go of all."""
        for held in (self.staged, self.before, self.running):
            if held is not None:
                await held.hold.aclose()
        self.staged = self.before = self.running = None

    async def _take_over(self, robot_io: RobotIO, held: Held, fade: int, patience: float) -> None:
        taken = robot_io.take_over(held.loaded, fade)
        if taken.done():
            self._promoted(taken)
        else:
            taken.add_done_callback(self._promoted)  # whether or not somebody still waits
        name = f"session {self._new.session_id!r}"
        try:
            async with asyncio.timeout(patience):
                await taken
        except TimeoutError:
            if taken.done() and not taken.cancelled():
                return  # at the very last moment
            hold = robot_io.controller.hold.text if robot_io.controller.hold else "waiting for the policy"
            why = f"it is held: {hold}" if robot_io.controller.is_running else "it is stopped"
            raise MoveRefused(f"{name} asked for no chunk in {patience:g} s ({why})") from None
        except asyncio.CancelledError:
            if not taken.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise MoveRefused(f"{name} ended, or another policy came first") from None

    def _promoted(self, taken: asyncio.Future[None]) -> None:
        if taken.cancelled():
            return
        oldest, self.before, self.running, self.staged = self.before, self.running, self.staged, None
        self._changed(oldest)

    def _restored(self) -> None:
        left, self.running, self.before = self.running, self.before, None
        self._changed(left)

    def _changed(self, left: Held | None) -> None:
        self.changes += 1
        if self.running is not None:
            self._took_over(self.running.loaded)
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
        self, robot_io: RobotIO, loaded: LoadedPolicy, tell: Callable[[str], None] = lambda stage: None
    ) -> None:
        sizes = robot_io.buffer.sizes
        if sizes and len(sizes) == len(robot_io.buffer.frames) and not loaded.is_compiled(sizes):
            tell("compiling")
            await self._engine.compile(loaded, sizes)

    async def _hold(
        self,
        revision: str | None,
        tell: Callable[[str], None],
        *,
        folder: str | None = None,
        like: Held | None = None,
    ) -> Held:
        hold = AsyncExitStack()
        policy = like.loaded.policy if like else None
        loaded = await hold.enter_async_context(
            self._engine.policy(self._load, self._new.policy_path, revision, tell, folder=folder, like=policy)
        )
        return Held(loaded, loaded.commit, hold)


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
