"""RobotIO: timing, input, output and inference tasks of the controller of one robot."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping

import numpy as np

from service.control.chunk_scheduler import COMPILING, ChunkRequest
from service.control.controller import ControlEvent, Controller, TickResult
from service.control.joints import JointTable
from service.control.observers import SessionObservers, Tick
from service.control.policy_runner import PolicyRunner
from service.control.watchdog import JOINTS_UNITS
from service.errors import PolicyFailed
from service.inference.loaded_policy import INSTRUCTION_UNREAD, FrameSizes, LoadedPolicy, add_plan
from service.logging import sanitize_text
from service.stage import Move
from service.transport.link import EmergencyStop, JointValue, Link, LinkEvent, RobotLatch

_INPUT_ROUNDS = 8  # Rounds of the event loop from a readable socket to the session: reading, waking, parsing.
_MAX_DECISION_TIME = 0.1  # Seconds after which the decision of a tick is outdated; usual are less than 1 ms.
# Codes of obstacles: no engine has the policy; the robot's own program obeys no command after an emergency stop.
ENGINE_LOST, ROBOT_LATCHED = "engine_lost", "robot_latched"


class RobotIO:
    """Input and output of one robot: sleeps, sends and starts tasks for its controller, as the inbox of a link.

    Attributes:
        commands_sent, commands_refused: number of commands that the link took and refused.
        commands_withheld: number of commands of a dry run.
        is_dry_run: whether commands are withheld.
        broken: fails when the link raises, which ends the session.
        is_held: whether a hold reached the link since the robot was halted.
        robot_latch: reason of the emergency stop that the robot's own program has latched, or None.
    """

    def __init__(
        self,
        table: JointTable,
        controller: Controller,
        runner: PolicyRunner,
        *,
        observers: SessionObservers | None = None,
        is_dry_run: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """Create it with a monotonic ``clock`` in seconds; ``sleep`` may wake early."""
        self.table = table
        self.controller = controller
        self.runner = runner
        self.buffer = controller.buffer
        self.observers = SessionObservers() if observers is None else observers
        self.is_dry_run = is_dry_run
        if is_dry_run:
            controller.watchdog.joints = None  # Commands do not move the robot.
        self.is_held = False
        self.robot_latch: str | None = None
        self.commands_sent = self.commands_refused = self.commands_withheld = 0
        self._last_command: tuple[JointValue, ...] = ()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._sleep = sleep
        self._link: Link | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._is_latched = False
        self._engine_lost_at: float | None = None
        self._events: deque[ControlEvent] = deque()
        self._has_events = asyncio.Event()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()

    async def run(self, link: Link) -> None:
        """Control the robot of this link until cancelled."""
        self._link = link
        controller = self.controller
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            previous = None
            try:
                while True:
                    if controller.is_idle:
                        self._idle.set()
                        self._wake.clear()
                        await self._wake.wait()
                        previous = None
                        continue
                    deadline = controller.clock.next_deadline(now := self._clock())
                    # Repeat, because timers of uvloop count in whole milliseconds and may fire early.
                    while now < deadline:
                        await self._sleep(deadline - now)
                        now = self._clock()
                    if previous is not None and now - previous > 2 * controller.period:
                        # The event loop was blocked, so read received input, such as a stop, before sending.
                        for _ in range(_INPUT_ROUNDS):
                            await asyncio.sleep(0)
                        now = self._clock()
                    previous = now
                    self._check_engine(now)
                    result = controller.tick(now)
                    self.apply(result, is_tick=True, is_overtaken=self._clock() - now > _MAX_DECISION_TIME)
            finally:
                self._tasks = None  # A group that ends must not get tasks.

    def _check_engine(self, now: float) -> None:
        """Hold the robot while no engine has its policy; its session fails after ``engine_timeout``."""
        if not self.runner.is_engine_lost:
            if self._engine_lost_at is not None:
                self._engine_lost_at = None
                self.controller.clear(ENGINE_LOST)
        elif self._engine_lost_at is None:
            self._engine_lost_at = now
            text = "the engine that ran the policy has ended; the robot moves again when another engine has the policy"
            self.controller.obstruct(ENGINE_LOST, text)
        elif self.controller.is_running and now - self._engine_lost_at > (limit := self.runner.engine_timeout):
            text = f"no engine had the policy for {limit:g} s (engine_patience); restart the session when an engine has"
            self.apply(self.controller.fail(text, now))

    # Input.

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        """Take a frame, uint8 (h, w, 3), RGB."""
        sizes = self.buffer.sizes
        if self.buffer.put_frame(camera, image, observed_at):
            self.controller.watchdog.note_frame(camera, image, observed_at)
            if self.observers.attached:
                self.observers.notify_frame(camera, image, observed_at)
        if self.buffer.sizes is not sizes and len(self.buffer.sizes) == len(self.buffer.frames):
            newest, loaded = self.get_input_sizes(), self.runner.loaded
            if newest != loaded.requirements.cameras and not loaded.is_compiled(newest):
                self._prepare(newest)

    def get_input_sizes(self, *, with_plan: bool | None = None) -> FrameSizes:
        """Return the sizes of the inputs that select the policy's program.

        Before every camera has sent a frame, these are the sizes that the policy was trained with.

        Args:
            with_plan: whether the policy also gets the rest of the plan. Defaults to the present ``overlap``.
        """
        sizes, requirements = self.buffer.sizes, self.runner.loaded.requirements
        if len(sizes) < len(self.buffer.frames):
            sizes = requirements.cameras
        sends_plan = self.controller.config.overlap.sends_plan if with_plan is None else with_plan
        return add_plan(sizes, requirements) if sends_plan else sizes

    def on_joints(self, values: Mapping[str, float], observed_at: float) -> None:
        """Take a partial joint update: wire name to value."""
        unusable = self.buffer.put_joints(values, observed_at)
        if unusable:
            self.apply(self.controller.take_bad_input(unusable, observed_at))

    def on_event(self, event: LinkEvent) -> None:
        """Take an event of the link."""
        if isinstance(event, EmergencyStop):
            self.emergency_stop()
            reason = f"{sanitize_text(event.reason) or 'no reason given'} (from {sanitize_text(event.source)})"
            self.apply(TickResult(events=(ControlEvent(Move.EMERGENCY_STOP, reason),)))
            return
        if isinstance(event, RobotLatch):
            self.robot_latch = event.reason
            if event.reason is None:
                self.controller.clear(ROBOT_LATCHED)
            else:
                text = (
                    f"the robot's own program holds it after an emergency stop ({event.reason}); the robot moves again "
                    "when that program reports that its latch is released"
                )
                self.controller.obstruct(ROBOT_LATCHED, text)
            return
        room = getattr(event, "room", None)
        carries_joints = self._link is None or room == self._link.rooms.joint_input
        self.apply(self.controller.take_link_event(event, self._clock(), carries_joints=carries_joints))

    # Output.

    def apply(self, result: TickResult, *, is_tick: bool = False, is_overtaken: bool = False) -> None:
        """Apply a decision of the controller. Every command to the robot passes here. Never raises.

        Args:
            is_tick: whether this is a tick or a stop.
            is_overtaken: whether the command is outdated because the process paused during the decision.
        """
        is_sent = False
        if result.command is not None:
            try:
                joints = self.table.to_commands(result.command, self.buffer.pose)
                if self.is_dry_run:
                    self.commands_withheld += 1
                elif self._link is None or is_overtaken or not self._link.send(joints):
                    self.commands_refused += 1
                else:
                    is_sent = True
                    self.commands_sent += 1
                    self.is_held = not self.controller.is_running
                    self._last_command = joints
            except Exception as error:
                # Not raised, because a stop of several robots must reach all robots.
                if not self.broken.done():
                    self.broken.set_exception(error)
            is_news = not is_sent or self.controller.refused_since is not None
            if is_news and not (self.is_dry_run or self.controller.lost_rooms or self._link is None):
                self.controller.confirm(is_sent, self._clock())
        if self.observers.attached and (is_tick or result.command is not None):
            hold = self.controller.hold
            self.observers.notify_tick(
                Tick(self._clock(), result.command, is_sent, self.buffer.pose, hold.code if hold else None)
            )
        if result.request is not None:
            assert self._tasks is not None, "only a tick requests a chunk"
            self._tasks.create_task(self._infer(result.request))
        if result.events:
            self._events.extend(result.events)
            self._has_events.set()
            self.wake()

    async def _infer(self, request: ChunkRequest) -> None:
        """Run the policy on a request, and give the controller its answer."""
        answer = await self.runner.ask(request)
        outcome = self.controller.accept(answer, self._clock())
        self.runner.follow_up(answer, outcome)
        if outcome.is_accepted and self.observers.attached:
            assert isinstance(answer.chunk, np.ndarray)
            self.observers.notify_chunk(answer.chunk[0], request.snapshot.observed_at, self._clock())
        if answer.error is not None and answer.error[0] == COMPILING:
            self._prepare(request.snapshot.sizes)
        self.apply(outcome)

    def _prepare(self, sizes: FrameSizes) -> None:
        """Start to compile the policy for frames of these sizes; the next chunk is requested after that."""
        if self._tasks is not None and self._preparing is None:
            self._preparing = self._tasks.create_task(self._run_prepare(dict(sizes)))

    async def _run_prepare(self, sizes: FrameSizes) -> None:
        try:
            await self.runner.prepare(sizes)
        except PolicyFailed as error:
            self.apply(self.controller.fail(str(error), self._clock()))
        finally:
            self._preparing = None
            self.controller.clear(COMPILING)

    # Calls of the session.

    def begin(self) -> None:
        """Let the robot move."""
        self.is_held = False
        self._engine_lost_at = None  # The time limit of a missing engine starts now.
        self.controller.clear(ENGINE_LOST)
        self.controller.begin(self._clock())
        self.wake()

    def wake(self) -> None:
        """Wake ``run``, which may have commands to send."""
        self._idle.clear()
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until all repeats of a halted robot's hold are sent."""
        await self._idle.wait()

    def halt(self, *, always_hold: bool = False) -> None:
        """Stop the robot: send the hold now, and its repeats at the next ticks. Never raises."""
        self.is_held = False
        self.apply(self.controller.halt(self._clock(), always_hold=always_hold), is_tick=True)
        self.wake()

    def emergency_stop(self) -> None:
        """Stop the robot and hold it at its pose, even if it rests.

        A latched robot gets no second hold, because a client could move it with a false pose and another stop.
        """
        if not (self._is_latched and self.is_held):
            # A hold that cannot be sent now must not be sent later.
            self.halt(always_hold=self._link is not None)
        self._is_latched = True

    def announce_latch(self, reason: str | None) -> None:
        """Announce a latched emergency stop to the robot's room, or None after a reset."""
        self._is_latched = reason is not None
        if self._link is not None:
            self._link.latch(reason)

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` may have an event; this costs less than an iterator."""
        return self._has_events.is_set()

    def take_events(self) -> Iterator[ControlEvent]:
        """Yield the robot's events since the last call, oldest first, after the robot was stopped for them."""
        self._has_events.clear()
        while self._events:
            yield self._events.popleft()

    async def wait_for_events(self) -> None:
        """Wait until ``take_events`` has an event."""
        await self._has_events.wait()

    def instruct(self, instruction: str | None) -> None:
        """Give the policy another instruction.

        A moving robot requests a chunk at the next tick and drops an answer to the old instruction. It executes the old
        plan until the new chunk joins it.
        """
        if instruction == self.runner.instruction:
            return
        self.runner.instruct(instruction)
        if not self.controller.is_running:
            self.runner.followed = instruction
        elif self.runner.loaded.requirements.language:
            # `Controller.request_soon` would also reset the number of failures.
            self.controller.scheduler.request_soon()

    def take_over(self, loaded: LoadedPolicy, fade: int = 0, *, at_once: bool = False) -> asyncio.Future[None]:
        """Run another policy from the next chunk on, or with ``at_once`` from the next tick on."""
        done = self.runner.take_over(loaded, fade, at_once=at_once or not self.controller.is_running)
        if at_once:
            self.controller.request_soon()
        return done

    def detach(self) -> None:
        """Stop sending; the figures stay readable."""
        self._link = None
        self.broken.cancel()
        self.runner.cancel_take_over()

    # Figures.

    @property
    def last_command(self) -> dict[str, float]:
        """Wire name to last sent value."""
        return {joint.name: joint.value for joint in self._last_command}

    def link_health(self) -> Mapping[str, object]:
        """Return the link's own counters."""
        return {} if self._link is None else self._link.health()

    def get_watchdog_stats(self, now: float) -> dict[str, object]:
        """Return the watchdog's input; JSON-ready."""

        def age(since: float | None) -> float | None:
            return None if since is None else round((now - since) * 1e3, 1)

        controller = self.controller
        in_flight = controller.scheduler.in_flight
        return {
            "frame_age_ms": {camera: age(observed_at) for camera, observed_at in self.buffer.observed_at.items()},
            "camera_frozen": sorted(controller.watchdog.frozen),
            "units": None if self.buffer.units is None else self.buffer.units.describe(),
            "chunk_age_ms": age(controller.queue.observed_at if controller.queue.left else None),
            "inference_age_ms": age(in_flight and in_flight.requested_at),
            "links_lost": dict(controller.lost_rooms),
            "bad_inputs": controller.watchdog.count_bad_inputs(now),
            "is_blind": controller.is_blind and controller.is_running,
        }

    def get_warnings(self, now: float) -> dict[str, str]:
        """Return code to text of warnings, which do not hold the robot."""
        ranges = {joint.name: f"{joint.low:g}..{joint.high:g}" for joint in self.table.joints}
        odd = ", ".join(f"{name} {value:.4g} (range {ranges[name]})" for name, value in self.buffer.odd.items())
        warnings = {"joints_odd": f"the robot may report in another unit: {odd}"} if odd else {}
        units, pose = self.buffer.units, self.buffer.pose
        if units is not None and pose is not None:
            text = self.buffer.units_mismatch or units.warn_of_radians(pose)
            warnings |= {} if text is None else {JOINTS_UNITS: text}
        if (cut := self.runner.describe_cut()) is not None:
            warnings["instruction_cut"] = cut
        if self.runner.instruction is not None and not self.runner.loaded.requirements.language:
            warnings["instruction_unread"] = INSTRUCTION_UNREAD
        return warnings | self.controller.watchdog.get_warnings(now)
