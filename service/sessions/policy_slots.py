"""Policy slots of a session: the running, the previous and the staged policy."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from jaxmodels.errors import JaxModelsError
from service.control.joints import have_same_joints
from service.control.robot_io import RobotIO
from service.errors import MoveRefused, PolicyError
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy, LoadPolicy, RenamedPolicy
from service.sessions.request import NewSession


@dataclass(frozen=True)
class HeldPolicy:
    """A policy in memory, its commit (None if unknown), and the stack that returns it to the engine when closed."""

    loaded: LoadedPolicy
    commit: str | None
    stack: AsyncExitStack


class PolicySlots:
    """Up to three policies with the same requirements, and the swaps between them; ``changes`` counts the swaps."""

    def __init__(
        self,
        new: NewSession,
        engine: Engine,
        load: LoadPolicy,
        robot_io: Callable[[], RobotIO],
        on_swap: Callable[[LoadedPolicy], None] = lambda loaded: None,
    ):
        """Start with empty slots.

        Args:
            robot_io: returns the session's robot; raises MoveRefused while the session runs no policy.
            on_swap: called with each policy that takes over from another.
        """
        self.running: HeldPolicy | None = None
        self.previous: HeldPolicy | None = None
        self.staged: HeldPolicy | None = None
        self.changes = 0
        self._new = new
        self._engine = engine
        self._load = load
        self._robot_io = robot_io
        self._on_swap = on_swap
        self._changing = asyncio.Lock()
        self._releasing: set[asyncio.Task[None]] = set()

    async def load_first(self, on_progress: Callable[[str], None]) -> LoadedPolicy:
        """Load the session's first policy.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        self.running = await self._acquire(self._new.revision, on_progress)
        return self.running.loaded

    async def stage(self, commit: str, folder: str, on_progress: Callable[[str], None]) -> LoadedPolicy:
        """Load another policy next to the running one, and compile it for the frames that arrive.

        Args:
            folder: holds the verified files of this commit.

        Raises:
            IncompatiblePolicy: its requirements differ from the running policy's.
            PolicyError: it cannot be loaded.
            MoveRefused: the session runs no policy.
        """
        async with self._changing:
            robot_io, running = self._robot_io(), self.running
            await self._discard()
            held = await self._acquire(commit, on_progress, folder=folder, like=running)
            if running is None or self.running is not running:
                await held.stack.aclose()
                raise MoveRefused("the session changed its policy, or ended, while another policy was loaded")
            if misfits := list_differences(running.loaded, held.loaded, self._new.joint_names):
                await held.stack.aclose()
                raise IncompatiblePolicy("; ".join(misfits) + "; create a new session for it")
            # The name that the files were verified under, not what a folder happens to be called.
            self.staged = HeldPolicy(held.loaded, commit, held.stack)
            await self._compile(robot_io, held.loaded, on_progress)
            return held.loaded

    async def discard(self) -> None:
        """Release the staged policy."""
        async with self._changing:
            await self._discard()

    async def swap(self, fade: int, timeout: float) -> None:
        """Let the staged policy take over at the next chunk boundary, and wait for that.

        Args:
            fade: number of its first actions that are blended with the old plan.
            timeout: seconds to wait for the boundary.

        Raises:
            ServiceError: nothing is staged, the session ended, or there was no boundary in time.
        """
        async with self._changing:
            robot_io, held = self._robot_io(), self.staged
            if held is None:
                raise MoveRefused(f"session {self._new.session_id!r} has no staged policy")
            # Frames may have another size than when it was staged.
            await self._compile(robot_io, held.loaded)
            if self._robot_io() is not robot_io or self.staged is not held:
                raise MoveRefused(f"session {self._new.session_id!r} has no staged policy any more")
            await self._take_over(robot_io, held, fade, timeout)

    def restore(self, fade: int) -> None:
        """Let the previous policy take over again now; an answer that is pending is discarded.

        Raises:
            MoveRefused: there is none, or the session ended.
        """
        robot_io, held = self._robot_io(), self.previous
        if held is None:
            raise MoveRefused(f"session {self._new.session_id!r} has no policy from before")
        robot_io.runner.cancel_take_over()
        if self.staged is not None:
            self._release(self.staged)
            self.staged = None
        robot_io.take_over(held.loaded, fade, at_once=True)
        left, self.running, self.previous = self.running, held, None
        self._finish_swap(left)

    async def close(self) -> None:
        """Release all policies."""
        for held in (self.staged, self.previous, self.running):
            if held is not None:
                await held.stack.aclose()
        self.staged = self.previous = self.running = None

    async def _take_over(self, robot_io: RobotIO, held: HeldPolicy, fade: int, timeout: float) -> None:
        taken = robot_io.take_over(held.loaded, fade)
        if taken.done():
            self._on_promoted(taken)
        else:
            taken.add_done_callback(self._on_promoted)  # also if the caller no longer waits
        name = f"session {self._new.session_id!r}"
        try:
            async with asyncio.timeout(timeout):
                await taken
        except TimeoutError:
            if taken.done() and not taken.cancelled():
                return  # at the very last moment
            hold = robot_io.controller.hold.text if robot_io.controller.hold else "waiting for the policy"
            why = f"it is held: {hold}" if robot_io.controller.is_running else "it is stopped"
            raise MoveRefused(f"{name} asked for no chunk in {timeout:g} s ({why})") from None
        except asyncio.CancelledError:
            if not taken.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise MoveRefused(f"{name} ended, or another policy came first") from None

    def _on_promoted(self, taken: asyncio.Future[None]) -> None:
        if taken.cancelled():
            return
        oldest, self.previous, self.running, self.staged = self.previous, self.running, self.staged, None
        self._finish_swap(oldest)

    def _finish_swap(self, released: HeldPolicy | None) -> None:
        self.changes += 1
        if self.running is not None:
            self._on_swap(self.running.loaded)
        self._release(released)

    def _release(self, held: HeldPolicy | None) -> None:
        if held is not None:
            self._releasing.add(task := asyncio.create_task(held.stack.aclose()))
            task.add_done_callback(self._releasing.discard)

    async def _discard(self) -> None:
        if self.staged is not None:
            held, self.staged = self.staged, None
            await held.stack.aclose()

    async def compile_plans(self) -> None:
        """Compile the programs that continue plans, before the robot sends its first plan.

        Raises:
            PolicyFailed: a policy cannot be compiled.
            MoveRefused: the session runs no policy.
        """
        robot_io = self._robot_io()
        for held in filter(None, (self.running, self.previous, self.staged)):
            sizes = robot_io.get_input_sizes(with_plan=True)
            if not held.loaded.is_compiled(sizes):
                await self._engine.compile(held.loaded, sizes)

    async def _compile(
        self, robot_io: RobotIO, loaded: LoadedPolicy, on_progress: Callable[[str], None] = lambda stage: None
    ) -> None:
        sizes = robot_io.get_input_sizes()
        if not loaded.is_compiled(sizes):
            on_progress("compiling")
            await self._engine.compile(loaded, sizes)

    async def _acquire(
        self,
        revision: str | None,
        on_progress: Callable[[str], None],
        *,
        folder: str | None = None,
        like: HeldPolicy | None = None,
    ) -> HeldPolicy:
        stack = AsyncExitStack()
        policy = like.loaded.policy if like else None
        loaded = await stack.enter_async_context(
            self._engine.policy_cache.open_policy(
                self._load, self._new.policy_path, revision, on_progress, folder=folder, like=policy
            )
        )
        try:
            return HeldPolicy(rename_loaded(loaded, self._new.rename), loaded.commit, stack)
        except PolicyError:
            await stack.aclose()
            raise


class RenameRefused(PolicyError):
    """A session's names of cameras do not fit its policy; ``loc`` is their place in the request."""

    loc = ("body", "rename")


def rename_loaded(loaded: LoadedPolicy, rename: Mapping[str, str] | None) -> LoadedPolicy:
    """Return a policy with a robot's names of cameras.

    Raises:
        RenameRefused: they do not fit the policy.
    """
    try:
        return RenamedPolicy(loaded, rename) if rename else loaded
    except JaxModelsError as error:
        raise RenameRefused(str(error)) from error


class IncompatiblePolicy(PolicyError):
    """A policy needs something else than the session has."""


def list_differences(running: LoadedPolicy, other: LoadedPolicy, joint_names: Sequence[str] | None = None) -> list[str]:
    """List what the other policy needs that the running one does not, field by field.

    Args:
        joint_names: names from the session's request, which a policy without names has.
    """
    mine, theirs = running.requirements, other.requirements
    differences = [
        f"{name}: the session has {getattr(mine, name)!r}, the new policy needs {getattr(theirs, name)!r}"
        for name, field in mine.__dataclass_fields__.items()
        if field.compare and name != "joint_names" and getattr(mine, name) != getattr(theirs, name)
    ]
    names, others = mine.joint_names or joint_names, theirs.joint_names or joint_names
    if names != others and (names is None or others is None or not have_same_joints(names, others)):
        what = "names no joints; write them into its robojax.json" if others is None else f"needs {tuple(others)!r}"
        session = "no joint names" if names is None else repr(tuple(names))
        differences.append(f"joint_names: the session has {session}, the new policy {what}")
    return differences
