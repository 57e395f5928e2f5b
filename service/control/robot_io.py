"""RobotIO: deadlines, sending, inference tasks around one Controller."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import numpy as np

from service.control.config import ControlConfig
from service.control.controller import CHOKED, Controller, TickResult
from service.control.joints import JointTable
from service.control.observation_buffer import ObservationBuffer
from service.control.observers import SessionObservers, Tick
from service.control.policy_runner import PolicyRunner
from service.control.shadow import Shadow
from service.control.watchdog import HOLDS, Looked, Watchdog, WatchdogTimeouts
from service.inference.engine import Engine, LoadedPolicy
from service.logging import sanitize_text
from service.stage import Move
from service.transport.link import BadInput, EmergencyStop, Link, LinkDown, LinkEvent, LinkUp, RobotLeft

# Rounds of the event loop from a readable socket to the session that hears what came: reading, waking, parsing.
_ROUNDS = 8
# Seconds from a tick's moment to its decision after which that is worth nothing: it takes less than a millisecond.
_OVERTAKEN = 0.1


async def sleep_until(deadline: float) -> None:
    """Sleep on the running loop; never wakes early by more than the grid forgives."""
    # A loop because timers are coarse: uvloop's count in whole milliseconds of a cached clock and may be early.
    while (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left)


class ControlLoop:
    """Absolute deadlines, and what a tick decides is done at once."""

    def __init__(
        self,
        control: Controller,
        act: Callable[[TickResult], None],
        *,
        watch: Callable[[float], None] = lambda now: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = sleep_until,
    ):
        """``watch`` is given the time before each tick: what it finds counts for that tick already."""
        self._control = control
        self._act = act
        self._watch = watch
        self._clock = clock
        self._sleep = sleep
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    def wake(self) -> None:
        """There is something to do again."""
        self._idle.clear()
        self._wake.set()

    async def idle(self) -> None:
        """Wait until there is nothing more to send."""
        await self._idle.wait()

    async def run(self) -> None:
        """Tick until cancelled."""
        before = None
        while True:
            if self._control.is_idle:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                before = None
                continue
            await self._sleep(self._control.next_deadline(self._clock()))
            now = self._clock()
            if before is not None and now - before > 2 * self._control.period:
                # The loop was blocked: what came meanwhile, a stop above all, is heard before anything is sent.
                for _ in range(_ROUNDS):
                    await asyncio.sleep(0)
                now = self._clock()
            before = now
            self._watch(now)
            step = self._control.tick(now)
            if self._clock() - now > _OVERTAKEN:
                step = replace(step, is_overtaken=True)
            self._act(step)


class RobotIO:
    """Wires one robot's buffer, control, engine and link; it is the link's inbox.

    Attributes:
        table, buffer, control, thinking: its parts; what its policy is and does is ``thinking``'s.
        commands_sent, commands_refused: what the link took, and what it did not.
        commands_withheld: what a dry run would have sent.
        is_dry: whether nothing is sent.
        watchdog: what looks before every tick.
        last_command: wire name to value, as last sent.
        lost: rooms that are down, with the reason.
        broken: fails when the link raises, which ends the session.
        taps: who looks on.
        is_held: whether a hold reached the link since it was halted.
    """

    def __init__(
        self,
        *,
        table: JointTable,
        buffer: ObservationBuffer,
        control: Controller,
        engine: Engine,
        served: LoadedPolicy,
        notify: Callable[[Move, str | None], None],
        patience: WatchdogTimeouts | None = None,
        shadow: Shadow | None = None,
        taps: SessionObservers | None = None,
        is_dry: bool = False,
        instruction: str | None = None,
    ):
        pace = control.pace
        self.watchdog = Watchdog(
            patience or WatchdogTimeouts(),
            executed=pace.action_steps / pace.action_rate,
            covered=pace.chunk / pace.action_rate,
            period=control.period,
        )
        self.is_dry = is_dry
        self.is_held = False
        self.buffer = buffer
        self.control = control
        self.commands_sent = self.commands_refused = self.commands_withheld = 0
        self.last_command: dict[str, float] = {}
        self.lost: dict[str, str] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.taps = SessionObservers() if taps is None else taps
        self.table = table
        self.thinking = PolicyRunner(
            served,
            control=control,
            engine=engine,
            shadow=shadow,
            taps=self.taps,
            notify=notify,
            instruction=instruction,
        )
        self._notify = notify
        self._loop = ControlLoop(control, self._do, watch=self._look)
        self._link: Link | None = None
        self._is_blind = False

    async def run(self, link: Link) -> None:
        """Control the robot behind this link until cancelled."""
        self._link = link
        async with asyncio.TaskGroup() as tasks:
            self.thinking.run_in(tasks)
            await self._loop.run()

    def begin(self) -> None:
        """Let the robot move."""
        now = time.monotonic()
        self.watchdog.begin(now)
        self._is_blind = False
        self.control.begin(now)
        self._loop.wake()

    def adjust(self, pace: ControlConfig) -> None:
        """Join chunks, or ask for them, in another way from the next chunk on."""
        self.control.adjust(pace)
        self.watchdog.expect(executed=pace.action_steps / pace.action_rate, covered=pace.chunk / pace.action_rate)

    def halt(self, *, always_hold: bool = False) -> None:
        """Stop the robot: the hold goes out before this returns, its repeats at the next ticks. Never raises."""
        self.is_held = False
        step = self.control.halt(time.monotonic(), always_hold=always_hold)
        try:
            self._do(step)
        except Exception as error:
            # Whoever stops several robots must reach the others too; this one's session ends by it.
            if not self.broken.done():
                self.broken.set_exception(error)
        self._loop.wake()

    def announce_latch(self, reason: str | None) -> None:
        """Tell the robot's room of an emergency stop that is latched now, or that there is none (any more)."""
        if self._link is not None:
            self._link.latch(reason)

    def detach(self) -> None:
        """Nothing goes out any more; the figures stay."""
        self._link = None
        self.broken.cancel()
        self.thinking.stay()

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
            self.thinking.make_ready(sizes)

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
            self._notify(
                Move.EMERGENCY_STOP,
                f"{sanitize_text(event.reason) or 'no reason given'} (from {sanitize_text(event.source)})",
            )
        elif isinstance(event, BadInput):
            self.buffer.refuse_joints(event.reasons)
            self._count_bad(event.reasons, time.monotonic())
        elif isinstance(event, RobotLeft):
            self.buffer.distrust_joints()
            # Its program may have let the motors go, and a jaw that somebody opened meanwhile must not snap shut.
            self.control.release_grip()
            if event.is_replaced:
                # Even when the next one comes before the next tick.
                self.buffer.forget_joints()
                self.control.forget()
        elif isinstance(event, LinkDown):
            self.lost[event.room] = event.reason
            self.buffer.distrust_frames(time.monotonic())
            if self._link is None or event.room == self._link.rooms.joint_input:
                self.buffer.distrust_joints()
            self.control.obstruct("link_lost", self.link_trouble or "")
            self.control.clear(CHOKED)
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
                chunk_seen_at=self.thinking.seen_at if len(self.control.actions) else None,
                asked_at=self.thinking.asked_at,
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
            "chunk_age_ms": age(self.thinking.seen_at if len(self.control.actions) else None),
            "inference_age_ms": age(self.thinking.asked_at),
            "links_lost": dict(self.lost),
            "bad_inputs": self.watchdog.bad_inputs(now),
            "is_blind": self._is_blind and self.control.is_running,
        }

    def warnings(self, now: float) -> dict[str, str]:
        """Code to text of what is odd and holds nothing."""
        ranges = {joint.name: f"{joint.low:g}..{joint.high:g}" for joint in self.table.joints}
        odd = ", ".join(f"{name} {value:.4g} (range {ranges[name]})" for name, value in self.buffer.odd.items())
        found = {"joints_odd": f"the robot may report in another unit: {odd}"} if odd else {}
        return self.watchdog.warnings(now) | found

    # What goes out.

    def _do(self, step: TickResult) -> None:
        is_sent = step.command is not None and self._send(step.command, is_overtaken=step.is_overtaken)
        if step.command is not None and not (self.is_dry or self.lost or self._link is None):
            self.control.acknowledge(is_sent, time.monotonic())
        if self.taps:
            hold = self.control.hold
            tick = Tick(time.monotonic(), step.command, is_sent, self.buffer.pose, hold.code if hold else None)
            self.taps.ticked(tick)
        if step.ask is not None:
            self.thinking.ask(step.ask, step.due)
        self.thinking.stop_when_wanted()

    def _send(self, values: np.ndarray, *, is_overtaken: bool) -> bool:
        """The one way out: every command to the robot, a hold too, passes here."""
        commands = self.table.to_commands(values)
        if self.is_dry:
            self.commands_withheld += 1
            return False
        if self._link is None or is_overtaken or not self._link.send(commands):
            self.commands_refused += 1
            return False
        self.commands_sent += 1
        self.is_held = not self.control.is_running
        self.last_command = {command.name: command.value for command in commands}
        return True
