"""A session's data flow: what comes from the rooms goes in, what control decides goes out."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from service.buffer import Buffer, Snapshot
from service.control import Control, Step
from service.control_loop import ControlLoop
from service.engine import Engine, Inference, InferenceStuck, Served, Sizes, in_words
from service.errors import PolicyFailed
from service.joints import JointTable
from service.safety.shadow import Shadow
from service.safety.watchdog import HOLDS, Looked, Patience, Watchdog
from service.stage import Move
from service.stats import Recent
from service.tap import Taps, Tick
from service.transport.base import BadInput, EmergencyStop, Link, LinkDown, LinkEvent, LinkUp

STAGES = ("queue", "to_device", "compute", "to_host", "total")
# Observations that a new policy is tried out on before it may move the robot.
RECENT = 8


@dataclass(frozen=True)
class _Successor:
    served: Served
    fade: int
    then: Callable[[], None]
    taken: asyncio.Future[None]


class Drive:
    """Wires one robot's buffer, control, engine and link; it is the link's inbox.

    Attributes:
        table, buffer, control, served: its parts; ``served`` changes at a chunk boundary, see ``take_over``.
        commands_sent, commands_refused: what the link took, and what it did not.
        commands_withheld: what a dry run would have sent.
        is_dry: whether nothing is sent.
        watchdog: what looks before every tick.
        shadow: a second policy that is asked too, or None.
        asked_at: when the inference that runs was asked for, or None.
        chunk_seen_at: when what the newest chunk belongs to was seen.
        last_command: wire name to value, as last sent.
        inference: seconds per stage of the newest inferences.
        inference_errors: inferences that failed.
        frame_age: how old the oldest picture was that the policy was asked with, in seconds.
        lost: rooms that are down, with the reason.
        broken: fails when the link raises, which ends the session.
        recent: newest observations, each with the chunk that the policy answered.
        taps: who looks on.
        guard: told the code and text of every inference of ``served`` that fails, before anything else is done.
    """

    def __init__(
        self,
        *,
        table: JointTable,
        buffer: Buffer,
        control: Control,
        engine: Engine,
        served: Served,
        notify: Callable[[Move, str | None], None],
        patience: Patience | None = None,
        shadow: Shadow | None = None,
        taps: Taps | None = None,
        is_dry: bool = False,
    ):
        pace = control.pace
        self.watchdog = Watchdog(
            patience or Patience(),
            executed=pace.action_steps / pace.action_rate,
            covered=pace.chunk / pace.action_rate,
        )
        self.shadow = shadow
        self.is_dry = is_dry
        self.asked_at: float | None = None
        self.chunk_seen_at: float | None = None
        self.buffer = buffer
        self.control = control
        self.served = served
        self.commands_sent = self.commands_refused = self.commands_withheld = self.inference_errors = 0
        self.last_command: dict[str, float] = {}
        self.inference = {stage: Recent(control.pace.samples) for stage in STAGES}
        self.frame_age = Recent(control.pace.samples)
        self.lost: dict[str, str] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.recent: deque[tuple[Mapping[str, np.ndarray], np.ndarray]] = deque(maxlen=RECENT)
        self.taps = Taps() if taps is None else taps
        self.guard: Callable[[str, str], None] | None = None
        self.table = table
        self._successor: _Successor | None = None
        self._fading: tuple[Served, int] | None = None
        self._engine = engine
        self._notify = notify
        self._loop = ControlLoop(control, self._do, watch=self._look)
        self._link: Link | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._compiling: frozenset[tuple[str, tuple[int, int]]] | None = None
        self._is_blind = False

    async def run(self, link: Link) -> None:
        """Control the robot behind this link until cancelled."""
        self._link = link
        async with asyncio.TaskGroup() as self._tasks:
            await self._loop.run()

    def begin(self) -> None:
        """Let the robot move."""
        now = time.monotonic()
        self.watchdog.begin(now)
        self._is_blind = False
        self.control.begin(now)
        self._loop.wake()

    def halt(self, *, always_hold: bool = False) -> None:
        """Stop the robot: the hold goes out before this returns, its repeats at the next ticks. Never raises."""
        step = self.control.halt(time.monotonic(), always_hold=always_hold)
        try:
            self._do(step)
        except Exception as error:
            # Whoever stops several robots must reach the others too; this one's session ends by it.
            if not self.broken.done():
                self.broken.set_exception(error)
        self._loop.wake()

    def detach(self) -> None:
        """Nothing goes out any more; the figures stay."""
        self._link = None
        self.broken.cancel()
        self.stay()

    async def idle(self) -> None:
        """Wait until a robot that was halted has all repeats of its hold."""
        await self._loop.idle()

    # What comes in.

    def frame(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        """Take one picture."""
        before = self.buffer.sizes().get(camera)
        if self.buffer.put_frame(camera, image, seen_at):
            self.watchdog.frame(camera, image, seen_at)
            self.taps.saw(camera, image, seen_at)
        sizes = self.buffer.sizes()
        if sizes.get(camera) != before and len(sizes) == len(self.buffer.frames):
            self._make_ready(sizes)

    def joints(self, values: Mapping[str, float], seen_at: float) -> None:
        """Take a partial joint update."""
        self._count_bad(self.buffer.put_joints(values, seen_at), seen_at)

    def _count_bad(self, reasons: Mapping[str, int], now: float) -> None:
        stop = self.watchdog.bad_input(reasons, now) if reasons else None
        if stop is not None and self.control.is_running:
            self._notify(Move.EMERGENCY_STOP, str(stop))

    def event(self, event: LinkEvent) -> None:
        """Take a change of the link, an emergency stop, or that something came that nobody can use."""
        if isinstance(event, EmergencyStop):
            self._notify(Move.EMERGENCY_STOP, f"{event.reason} (from {event.source})")
        elif isinstance(event, BadInput):
            self.buffer.refuse_joints(event.reasons)
            self._count_bad(event.reasons, time.monotonic())
        elif isinstance(event, LinkDown):
            self.lost[event.room] = event.reason
            self.buffer.distrust_frames(time.monotonic())
            if self._link is None or event.room == self._link.rooms.joint_input:
                self.buffer.distrust_joints()
            self.control.obstruct("link_lost", self.link_trouble or "")
            self._notify(Move.LINK_LOST, self.link_trouble)
        elif isinstance(event, LinkUp) and self.lost.pop(event.room, None) is not None:
            if self.lost:
                self.control.obstruct("link_lost", self.link_trouble or "")
            else:
                self.control.clear("link_lost")
                self._notify(Move.LINK_BACK, None)

    @property
    def link_trouble(self) -> str | None:
        """Which rooms are lost and why, or None."""
        return "; ".join(f"room {room!r} is lost: {reason}" for room, reason in sorted(self.lost.items())) or None

    def link_health(self) -> Mapping[str, object]:
        """The link's own counters."""
        return {} if self._link is None else self._link.health()

    # Before each tick.

    def _look(self, now: float) -> None:
        """What the watchdog finds counts for the tick that comes."""
        if not self.control.is_running:
            return
        findings = self.watchdog.look(
            now,
            Looked(
                seen_at=self.buffer.seen_at(),
                lost=tuple(self.lost),
                is_felt=self.buffer.is_felt,
                chunk_seen_at=self.chunk_seen_at if len(self.control.actions) else None,
                asked_at=self.asked_at,
            ),
        )
        for code in HOLDS:
            if code in findings.holds:
                self.control.obstruct(code, findings.holds[code])
            else:
                self.control.clear(code)
        if findings.blind is not None:
            self._notify(Move.BLINDED, findings.blind)
        elif self._is_blind:
            self._notify(Move.RECOVERED, None)
        self._is_blind = findings.blind is not None
        if findings.stop is not None:
            self._notify(Move.EMERGENCY_STOP, str(findings.stop))

    def watch(self, now: float) -> dict[str, object]:
        """What the watchdog looks at, JSON-ready."""

        def age(since: float | None) -> float | None:
            return None if since is None else round((now - since) * 1e3, 1)

        return {
            "frame_age_ms": {camera: age(seen_at) for camera, seen_at in self.buffer.seen_at().items()},
            "camera_frozen": sorted(self.watchdog.frozen),
            "chunk_age_ms": age(self.chunk_seen_at if len(self.control.actions) else None),
            "inference_age_ms": age(self.asked_at),
            "links_lost": dict(self.lost),
            "bad_inputs": self.watchdog.bad_inputs(now),
            "is_blind": self._is_blind and self.control.is_running,
        }

    def _stop_when_wanted(self) -> None:
        """What control finds unsafe stops the robot until somebody resets it."""
        wanted, self.control.stop_wanted = self.control.stop_wanted, None
        if wanted is not None:
            code, text = wanted
            self._notify(Move.EMERGENCY_STOP, f"{code}: {text}")

    # What goes out.

    def _do(self, step: Step) -> None:
        is_sent = step.command is not None and self._send(step.command)
        if self.taps:
            hold = self.control.hold
            tick = Tick(time.monotonic(), step.command, is_sent, self.buffer.pose, hold.code if hold else None)
            self.taps.ticked(tick)
        if step.ask is not None:
            self._infer(step.ask)
        self._stop_when_wanted()

    def _send(self, values: np.ndarray) -> bool:
        """The one way out: every command to the robot, a hold too, passes here."""
        commands = self.table.to_commands(values)
        if self.is_dry:
            self.commands_withheld += 1
            return False
        if self._link is None or not self._link.send(commands):
            self.commands_refused += 1
            return False
        self.commands_sent += 1
        self.last_command = {command.name: command.value for command in commands}
        return True

    # Asking the policy.

    def take_over(
        self, served: Served, fade: int = 0, then: Callable[[], None] = lambda: None, *, at_once: bool = False
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
        if at_once or not self.control.is_running:
            self._change_over()
        if at_once:
            self.control.hurry()
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

    def _infer(self, snapshot: Snapshot) -> None:
        if self._successor is not None and self._successor.served.is_compiled(snapshot.sizes):
            self._change_over()
        if not self._make_ready(snapshot.sizes):
            self.control.withdraw()
            self.asked_at = None
            self.control.obstruct("compiling", f"compiling for {in_words(snapshot.sizes)}")
            return
        assert self._tasks is not None
        self.asked_at = time.monotonic()
        # Named now: before the task begins, another one may have taken over.
        self._tasks.create_task(self._ask(self.served, snapshot))

    async def _ask(self, served: Served, snapshot: Snapshot) -> None:
        observation = seen = snapshot.observation()
        if served.requirements.state is None:
            observation = {name: value for name, value in seen.items() if name != "observation.state"}
        self.frame_age.add(time.monotonic() - snapshot.seen_at)
        try:
            try:
                inference = await self._engine.submit(served, observation)
            finally:
                self.asked_at = None
        except InferenceStuck as error:
            self.inference_errors += 1
            self.control.withdraw()
            self._warn(served, "stuck", str(error))
            self._notify(Move.FAILED, str(error))
            return
        except PolicyFailed as error:
            self.inference_errors += 1
            self._warn(served, "policy_failed", str(error))
            self.control.refuse(str(error), time.monotonic())
        else:
            self._note(inference)
            fade = None
            if served is self.served and self._fading is not None and self._fading[0] is served:
                fade, self._fading = self._fading[1], None
            rejected, chunks = self.control.rejected, self.control.chunks
            self.control.answer(inference.chunk, time.monotonic(), fade=fade)
            if self.control.rejected > rejected and self.control.hold is not None:
                self._warn(served, self.control.rejected_for or "not_finite", self.control.hold.text)
            if self.control.chunks > chunks and served is self.served:
                # Only what was taken: nothing can be compared with what is not finite.
                self.recent.append((observation, inference.chunk))
                self.chunk_seen_at = snapshot.seen_at
                if self.shadow is not None:
                    self.shadow.offer(seen, inference.chunk)
                self.taps.planned(inference.chunk[0], snapshot.seen_at, time.monotonic())
        self._stop_when_wanted()
        if self.control.fault is not None:
            self._notify(Move.FAILED, self.control.fault)

    def _warn(self, served: Served, code: str, text: str) -> None:
        # What the one before was still thinking about is not the fault of the one that is watched.
        if self.guard is not None and served is self.served:
            self.guard(code, text)

    def _note(self, inference: Inference) -> None:
        for stage in STAGES:
            self.inference[stage].add(getattr(inference, stage))

    def _make_ready(self, sizes: Sizes) -> bool:
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
            self.control.clear("compiling")
