"""Runs a session's policy; a successor takes over between chunks."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from service.control.controller import Controller
from service.control.observation_buffer import Snapshot
from service.control.observers import SessionObservers
from service.control.shadow import Shadow
from service.errors import DeviceAway, PolicyFailed
from service.inference.engine import Engine, InferenceResult, InferenceStuck, LoadedPolicy, Sizes, in_words
from service.inference.loaded_policy import select_features, task_input
from service.stage import Move
from service.stats import Recent

logger = logging.getLogger(__name__)

STAGES = ("queue", "to_device", "compute", "to_host", "total")
# Observations that a new policy is tried out on before it may move the robot.
RECENT = 8
# Seconds that a robot waits at its start for what is just being compiled, which nobody can end.
REST = 10.0


@dataclass(frozen=True)
class _Successor:
    served: LoadedPolicy
    fade: int
    then: Callable[[], None]
    taken: asyncio.Future[None]


class PolicyRunner:
    """Asks the policy for control, one observation at a time.

    Attributes:
        served: the policy; it changes at a chunk boundary, see ``take_over``.
        shadow: a second policy that is asked too, or None.
        seconds: of each stage of the newest inferences.
        errors: inferences that failed.
        frame_age: how old the oldest picture was that the policy was asked with, in seconds.
        asked_at: when the inference that runs was asked for, or None.
        seen_at: when what the newest chunk belongs to was seen.
        instruction: what a policy that reads language is told from the next question on.
        followed: the instruction that the newest chunk follows; what the next one will before there is one.
        recent: newest observations, each with the chunk that the policy answered.
        guard: told the code and text of every inference of ``served`` that fails, before anything else is done.
    """

    def __init__(
        self,
        served: LoadedPolicy,
        *,
        control: Controller,
        engine: Engine,
        shadow: Shadow | None,
        taps: SessionObservers,
        notify: Callable[[Move, str | None], None],
        instruction: str | None = None,
    ):
        self.instruction = self.followed = instruction
        self.served = served
        self.shadow = shadow
        self.seconds = {stage: Recent(control.pace.samples) for stage in STAGES}
        self.errors = 0
        self.frame_age = Recent(control.pace.samples)
        self.asked_at: float | None = None
        self.seen_at: float | None = None
        self.recent: deque[tuple[Mapping[str, np.ndarray], np.ndarray]] = deque(maxlen=RECENT)
        self.guard: Callable[[str, str], None] | None = None
        self._control = control
        self._engine = engine
        self._taps = taps
        self._notify = notify
        self._successor: _Successor | None = None
        self._fading: tuple[LoadedPolicy, int] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._compiling: frozenset[tuple[str, tuple[int, int]]] | None = None
        self._resting: asyncio.Task[None] | None = None

    def run_in(self, tasks: asyncio.TaskGroup) -> None:
        """From now on inferences run, as tasks of this group."""
        self._tasks = tasks

    def instruct(self, instruction: str | None) -> None:
        """Tell the policy something else from the next question on; what was asked before is answered as it was."""
        self.instruction = instruction
        if not self._control.is_running:
            self.followed = instruction

    def take_over(
        self, served: LoadedPolicy, fade: int = 0, then: Callable[[], None] = lambda: None, *, at_once: bool = False
    ) -> asyncio.Future[None]:
        """Ask another policy from the next chunk on; done when it has. What the old one planned is done until then.

        Args:
            served: its requirements are those of the one before, and it is compiled for the frames that come.
            fade: how many of its first actions lead over from the plan of the one before.
            then: called at that very moment, whether or not somebody still waits.
            at_once: the next chunk is asked for at the next tick, and what the old one is thinking about is not done.
        """
        self.stay()
        successor = _Successor(served, fade, then, asyncio.get_running_loop().create_future())
        self._successor = successor
        if at_once or not self._control.is_running:
            self._change_over()
        if at_once:
            self._control.hurry()
        return successor.taken

    def stay(self) -> None:
        """Whatever waits to take over does not."""
        if self._successor is not None:
            self._successor.taken.cancel()

    def _change_over(self) -> None:
        successor, self._successor = self._successor, None
        if successor is None or successor.taken.done():
            return
        self.served = successor.served
        self._fading = (successor.served, successor.fade)
        # What the new one is compared with later is its own.
        self.recent.clear()
        successor.then()
        successor.taken.set_result(None)

    def ask(self, snapshot: Snapshot, due: float | None = None) -> None:
        """Ask what to do about this; the answer goes to control, by ``due`` if the device can."""
        if self._successor is not None and self._successor.served.is_compiled(snapshot.sizes):
            self._change_over()
        if not self.make_ready(snapshot.sizes):
            self._wait_for_compiling(f"compiling for {in_words(snapshot.sizes)}")
            return
        if self._lets_end():
            self._wait_for_compiling("what was being compiled when the robot was started is let end")
            return
        assert self._tasks is not None
        self.asked_at = time.monotonic()
        # Named now: before the task begins, another one may have taken over.
        self._tasks.create_task(self._think(self.served, snapshot, due))

    def _wait_for_compiling(self, text: str) -> None:
        self._control.withdraw()
        self.asked_at = None
        self._control.obstruct("compiling", text)

    def _lets_end(self) -> bool:
        """Whether a program is still being compiled that was begun before, and has been for no longer than REST."""
        if self._engine.is_at_rest or self._tasks is None:
            self._resting = None
            return False
        if self._resting is None:
            self._resting = self._tasks.create_task(self._rest())
        return not self._resting.done()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(REST):
                await self._engine.rest()
        except TimeoutError:
            logger.warning("a program has been compiled for more than %g s; the robot moves beside that", REST)
        finally:
            self._control.clear("compiling")

    async def _think(self, served: LoadedPolicy, snapshot: Snapshot, due: float | None) -> None:
        instruction = self.instruction
        seen = snapshot.observation() | task_input(instruction)
        observation = select_features(served.requirements, seen) | dict(snapshot.prefix)
        self.frame_age.add(time.monotonic() - snapshot.seen_at)
        try:
            try:
                inference = await self._engine.infer(served, observation, due=due, caller=self)
            finally:
                self.asked_at = None
        except InferenceStuck as error:
            self.errors += 1
            self._control.withdraw()
            self._warn(served, "stuck", str(error))
            self._notify(Move.FAILED, str(error))
            return
        except PolicyFailed as error:
            self.errors += 1
            self._warn(served, "busy" if isinstance(error, DeviceAway) else "policy_failed", str(error))
            self._control.refuse(str(error), time.monotonic())
        else:
            self._note(inference)
            fade = None
            if served is self.served and self._fading is not None and self._fading[0] is served:
                fade, self._fading = self._fading[1], None
            rejected, chunks = self._control.rejected, self._control.chunks
            self._control.answer(inference.chunk, time.monotonic(), fade=fade)
            if self._control.rejected > rejected and self._control.hold is not None:
                self._warn(served, self._control.rejected_for or "not_finite", self._control.hold.text)
            if self._control.chunks > chunks and served is self.served:
                # Only what was taken: nothing can be compared with what is not finite.
                self.recent.append((observation, inference.chunk))
                self.seen_at, self.followed = snapshot.seen_at, instruction
                if self.shadow is not None:
                    self.shadow.offer(seen, inference.chunk)
                self._taps.planned(inference.chunk[0], snapshot.seen_at, time.monotonic())
        self.stop_when_wanted()
        if self._control.fault is not None:
            self._notify(Move.FAILED, self._control.fault)

    def stop_when_wanted(self) -> None:
        """What control finds unsafe stops the robot until somebody resets it."""
        wanted, self._control.stop_wanted = self._control.stop_wanted, None
        if wanted is not None:
            code, text = wanted
            self._notify(Move.EMERGENCY_STOP, f"{code}: {text}")

    def _warn(self, served: LoadedPolicy, code: str, text: str) -> None:
        # What the one before was still thinking about is not the fault of the one that is watched.
        if self.guard is not None and served is self.served:
            self.guard(code, text)

    def _note(self, inference: InferenceResult) -> None:
        for stage in STAGES:
            self.seconds[stage].add(getattr(inference, stage))

    def make_ready(self, sizes: Sizes) -> bool:
        """Whether the policy can act on frames of these sizes at once; when not, it is being compiled for them."""
        if self.served.is_compiled(sizes):
            return True
        key = frozenset(sizes.items())
        if self._tasks is not None and self._compiling is None:
            self._compiling = key
            self._tasks.create_task(self._compile(dict(sizes)))
        return False

    async def _compile(self, sizes: Sizes) -> None:
        try:
            await self._engine.compile(self.served, sizes)
        except PolicyFailed as error:
            self._notify(Move.FAILED, str(error))
        finally:
            self._compiling = None
            self._control.clear("compiling")
