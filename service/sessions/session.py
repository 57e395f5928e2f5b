"""Session: from loading its policy to leaving its rooms."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from service.control.aggregation import ENSEMBLE, RTC
from service.control.config import ControlConfig
from service.control.controller import ControlEvent, Controller
from service.control.lease import Leases, find_robot
from service.control.observation_buffer import ObservationBuffer, ObservationHistory
from service.control.observers import SessionObserver, SessionObservers
from service.control.policy_runner import PolicyRunner
from service.control.robot_io import RobotIO
from service.control.shadow import load_shadow
from service.control.units import create_units
from service.errors import MoveRefused, PolicyFailed, ServiceError, UnknownSession
from service.inference.engine import Engine
from service.inference.loaded_policy import FrameSizes, LoadedPolicy, LoadPolicy, add_plan
from service.inference.progress import LoadProgress
from service.logging import bind_log_context
from service.sessions.base_session import BaseSession, SessionState
from service.sessions.compatibility import configure_control, make_limits, prepare_instruction, reserve_rate
from service.sessions.policy_slots import PolicySlots
from service.sessions.request import NewSession, SessionSettings
from service.stage import Lifecycle, Move, Stage
from service.threads import call_in_thread
from service.transport.link import CreatedRooms, Link, LinkRequest, Transport
from service.transport.protocol import rooms_of

EVENTS = {
    Move.LOADED: "session.created",
    Move.START: "session.started",
    Move.RESTART: "session.started",
    Move.STOP: "session.stopped",
    Move.EMERGENCY_STOP: "session.stopped",
    Move.FAILED: "session.error",
    Move.EXPIRED: "session.error",
}


@dataclass(frozen=True)
class SessionEvent:
    """Event of a session, for its clients, recordings and webhooks.

    Attributes:
        name: value of `EVENTS`, or ``session.deleted``.
        session: the session that the event is about.
        state: state of the session after the event.
        payload: what webhooks and clients receive; JSON-ready.
    """

    name: str
    session: BaseSession
    state: SessionState
    payload: Mapping[str, object]


OnEvent: TypeAlias = Callable[[SessionEvent], None]

logger = logging.getLogger(__name__)


class Session(BaseSession):
    """One robot's running session. `robot_io` is None before its rooms are joined.

    Attributes:
        stops: how often it was stopped; a client that controls the robot itself starts again after each stop.
    """

    def __init__(
        self,
        new: NewSession,
        *,
        transport: Transport,
        engine: Engine,
        load: LoadPolicy,
        settings: SessionSettings,
        on_event: OnEvent = lambda event: None,
        leases: Leases | None = None,
        made: CreatedRooms | None = None,
        latch: str | None = None,
        claim: str | None = None,
    ):
        """Create the session and begin to load its policy.

        Args:
            leases: leases of all sessions of this process; only one session commands a robot.
            made: records the rooms that this server makes.
            latch: text of an emergency stop of this id that has not been reset; the session starts stopped.
            claim: secret for the server of its rooms; None for a new one.
        """
        super().__init__(new, latch, claim)
        self.progress = LoadProgress("@".join(filter(None, (new.policy_path, new.revision))), engine.durations)
        self.stops = 0
        self.policies = PolicySlots(new, engine, load, self.require_robot_io, self._follow_policy)
        self._admission: Mapping[str, object] = {}
        self._observers = SessionObservers()
        self._event_source: RobotIO | None = None  # also while its rooms are joined
        self._transport = transport
        self._engine = engine
        self._load = load
        self._settings = settings
        self._on_event = on_event
        self._made = made
        self._leases = Leases() if leases is None else leases
        self._active_since = self.created_at
        self._ready_or_failed = asyncio.Event()
        self._close_requested = asyncio.Event()
        self._error: ServiceError | None = None
        self._task = asyncio.create_task(self._run(), name=f"session {new.session_id}")

    @property
    def is_closed(self) -> bool:
        """Whether its rooms, its policies and its task are gone."""
        return self._task.done()

    def attach(self, observer: SessionObserver) -> Callable[[], None]:
        """Attach an observer, before its rooms are joined or later; call what is returned to detach it."""
        return self._observers.attach(observer)

    def _kind_stats(self) -> dict[str, object]:
        return {"stops": self.stops, **self._admission}

    async def ready(self) -> None:
        """Wait until it is ready, or raise the ServiceError of its failure. Cancellation does not end the session."""
        await self._ready_or_failed.wait()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Start to move the robot."""
        self._start_moving(Move.START)

    def restart(self) -> None:
        """Stop and start in one step, without earlier plans, holds and failures."""
        self._start_moving(Move.RESTART)

    def stop(self) -> None:
        """Stop the robot where it is."""
        self._current_lifecycle().check(Move.STOP)
        self.stops += 1
        self._halt()
        self._move(Move.STOP)

    async def adjust(self, changes: Mapping[str, object]) -> None:
        """Change fields of the session's request.

        Args:
            changes: name to value of fields in `service.sessions.request.ADJUSTABLE`.

        Raises:
            InvalidRequest: this policy cannot do that; nothing has changed.
            PolicyFailed: the program that continues plans cannot be compiled.
            MoveRefused: it runs no policy.
        """
        robot_io, cut = self.require_robot_io(), None
        if "language_instruction" in changes:
            new = replace(self.new, **changes)  # pyright: ignore[reportArgumentType]
            cut = await prepare_instruction(robot_io.runner.loaded, new.language_instruction, new.prompt_cut)
            robot_io = self.require_robot_io()  # raises if the session has ended
        if changes.get("overlap") == RTC and robot_io.runner.loaded.requirements.takes_prefix:
            await self.policies.compile_plans()
            robot_io = self.require_robot_io()
        if changes.get("overlap", ENSEMBLE) != ENSEMBLE:
            changes = {"temporal_ensemble_coeff": None, **changes}  # the coefficient of the previous overlap
        new = replace(self.new, **changes)  # pyright: ignore[reportArgumentType]
        self._settings.check(new)
        _, asked = configure_control(robot_io.runner.loaded.requirements, new, self._settings)
        robot_io.controller.adjust(config := self._reserve_rate(robot_io.runner.loaded, asked))
        self.new = new
        self._set_units(robot_io, robot_io.runner.loaded)
        robot_io.instruct(new.language_instruction)
        if cut is not None:
            robot_io.runner.tokens_cut = cut
        logger.info("session %s: overlap %s, %d actions of a chunk", self.id, config.overlap.name, config.action_steps)

    async def instruct(self, instruction: str) -> None:
        """Change the instruction from the next chunk on.

        Raises:
            InvalidRequest: the policy cannot read it; nothing has changed.
            MoveRefused: it runs no policy.
        """
        if instruction == self.new.language_instruction:
            return
        loaded = self.require_robot_io().runner.loaded
        cut = await prepare_instruction(loaded, instruction, self.new.prompt_cut)
        robot_io = self.require_robot_io()
        robot_io.instruct(instruction)
        robot_io.runner.tokens_cut = cut
        self.new = replace(self.new, language_instruction=instruction)

    def emergency_stop(self, reason: str) -> None:
        """Stop the robot where it is, and latch that until a reset."""
        self._current_lifecycle().check(Move.EMERGENCY_STOP)
        if self.robot_io is not None:
            self.robot_io.emergency_stop()
        self._apply_event(ControlEvent(Move.EMERGENCY_STOP, reason))

    def reset(self) -> None:
        """Reset the latch of an emergency stop; the robot stays stopped."""
        self._current_lifecycle().move(Move.RESET)
        self._announce_latch()

    def _announce_latch(self) -> None:
        """Announce the latch in the room of the commands."""
        if self.robot_io is not None:
            self.robot_io.announce_latch(self.latch)

    def begin_close(self) -> None:
        """Stop the robot and begin to leave the rooms; ``wait_closed`` waits for it."""
        self._current_lifecycle().move(Move.DELETE)
        self._halt()
        self._close_requested.set()
        if not self._ready_or_failed.is_set():
            self._error = UnknownSession(f"session {self.id!r} was deleted while it was initializing")
            self._task.cancel()

    async def wait_closed(self) -> bool:
        """Wait until rooms and policies are released; False when a link hung and was abandoned."""
        _, hanging = await asyncio.wait([self._task], timeout=self._settings.close_within)
        if hanging:
            self._task.cancel()
            _, hanging = await asyncio.wait([self._task], timeout=0.5)
        if hanging:
            logger.error("session %s: its link does not let go; it is abandoned", self.id)
        return not hanging

    def _start_moving(self, move: Move) -> None:
        self._current_lifecycle().check(move)
        assert self.robot_io is not None, "the table lets only loaded sessions start"
        requirements = self.robot_io.runner.loaded.requirements
        if not requirements.controls_joints:
            raise MoveRefused(
                f"session {self.id!r} has a policy whose actions ({requirements.action} values) are no targets of the "
                f"joints that its state ({requirements.state} values) measures, so the server's control loop cannot "
                "limit the motion from the measured pose; let the client ask for chunks (act, the stream or openpi's "
                "protocol) and execute them"
            )
        self._move(move)
        self._active_since = time.monotonic()
        self.robot_io.begin()
        trouble = self.robot_io.controller.link_trouble
        if trouble is not None:
            self._lifecycle.move(Move.LINK_LOST, trouble)

    def _halt(self) -> None:
        if self.robot_io is not None:
            self.robot_io.halt()

    def _current_lifecycle(self) -> Lifecycle:
        """Return its lifecycle after all events of the robot so far."""
        if self._event_source is not None and self._event_source.has_events:
            for event in self._event_source.take_events():
                self._apply_event(event)
        return self._lifecycle

    def _apply_event(self, event: ControlEvent) -> None:
        """Make the move of an event; the robot was stopped before, if the event requires it."""
        move, reason = event
        if not self._lifecycle.is_allowed(move):
            return
        if move is Move.EMERGENCY_STOP:
            self.stops += 1
            self._move(move, reason or "no reason given")
            self._announce_latch()
            logger.warning("session %s: emergency stop: %s", self.id, reason)
            return
        stage = self._move(move, reason)
        if move in (Move.LINK_BACK, Move.RECOVERED):
            logger.info("session %s continues", self.id)
        else:
            logger.warning("session %s is %s: %s", self.id, stage, reason)

    async def _apply_events(self, robot_io: RobotIO) -> None:
        while True:
            await robot_io.wait_for_events()
            self._current_lifecycle()

    def require_robot_io(self) -> RobotIO:
        """Return the controlled robot, or raise MoveRefused if the session runs no policy."""
        if self.robot_io is None or self.is_closed or not self._current_lifecycle().is_loaded:
            then = "wait until it is ready" if self.stage is Stage.INITIALIZING else "delete it and create it again"
            raise MoveRefused(f"session {self.id!r} is {self.stage} and runs no policy; {then}")
        return self.robot_io

    # From the load of the policy to the end.

    async def _run(self) -> None:
        # The session outlives the request that made it.
        bind_log_context(session=self.id, request=None)
        try:
            await self._load_and_control()
        except ServiceError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("session %s failed", self.id)
            self._fail(PolicyFailed(f"session {self.id!r} failed ({type(error).__name__}); the server's log says more"))
        finally:
            self._current_lifecycle().is_loaded = False
            self.rooms = None
            self._ready_or_failed.set()

    async def _load_and_control(self) -> None:
        new = self.new
        room = rooms_of(self.id, new.camera_names, new.workspace_id).joint_output
        robot = find_robot(new.transport_server_url, new.workspace_id or "", room)
        try:
            self._leases.take(robot, self)
            loaded = await self.policies.load_first(self.progress.report)
            table, asked = configure_control(loaded.requirements, new, self._settings)
            cut = await prepare_instruction(loaded, new.language_instruction, new.prompt_cut)
            if asked.overlap.sends_plan:
                self.progress.report("compiling")
                await self._engine.compile(loaded, add_plan(loaded.requirements.cameras, loaded.requirements))
            config = self._reserve_rate(loaded, asked)
            limits = make_limits(table, loaded.requirements, new, self._settings)
            async with load_shadow(
                new.shadow_policy_path,
                new.shadow_revision,
                loaded.requirements,
                table.names,
                engine=self._engine,
                load=self._load,
                notify=lambda stage: self.progress.report("loading the shadow policy"),
                rename=new.rename,
            ) as shadow:
                buffer = ObservationBuffer(
                    new.camera_names,
                    table,
                    frame_age_limit=self._settings.control.frame_age_limit,
                    max_pixels=self._settings.max_frame_pixels,
                    history=ObservationHistory(loaded.requirements.observation_steps, 1 / config.action_rate),
                    units=create_units(loaded.requirements, table, is_accepted=self.new.accept_units),
                )
                runner = PolicyRunner(
                    loaded,
                    engine=self._engine,
                    samples=config.samples,
                    shadow=shadow,
                    instruction=new.language_instruction,
                    prompt_cut=new.prompt_cut,
                )
                runner.tokens_cut = cut
                robot_io = RobotIO(
                    table,
                    Controller(buffer, config, limits),
                    runner,
                    observers=self._observers,
                    is_dry_run=new.dry_run,
                )
                self._event_source = robot_io
                del loaded  # frees the weights when another policy takes over
                self.progress.report("joining rooms")
                request = LinkRequest(
                    new.transport_server_url,
                    self.id,
                    new.camera_names,
                    new.workspace_id,
                    robot_io,
                    self._made,
                    owner=new.owner,
                    claim=self.claim,
                )
                async with self._transport.connect(request) as link:
                    self.rooms = link.rooms
                    self.robot_io = robot_io
                    await self._control_robot(robot_io, link)
        finally:
            self._leases.release(robot, self)
            self._engine.reservations.release(self)
            await self.policies.close()

    def _follow_policy(self, loaded: LoadedPolicy) -> None:
        """Move the reservation, and compare the robot's state with this policy's statistics from now on."""
        self._engine.reservations.move(self, loaded)
        if self.robot_io is not None:
            self._set_units(self.robot_io, loaded)

    def _set_units(self, robot_io: RobotIO, loaded: LoadedPolicy) -> None:
        units = create_units(loaded.requirements, robot_io.table, is_accepted=self.new.accept_units)
        robot_io.buffer.set_units(units)

    def _reserve_rate(self, loaded: LoadedPolicy, asked: ControlConfig) -> ControlConfig:
        requirements, with_plan = loaded.requirements, asked.overlap.sends_plan

        def read_sizes() -> FrameSizes | None:
            sizes = self._frame_sizes()
            return add_plan(sizes or requirements.cameras, requirements) if with_plan else sizes

        config = reserve_rate(self._engine, self, loaded, asked, degrade=self.new.degrade, read_sizes=read_sizes)
        self._admission = {
            "inferences_per_second": round(config.action_rate / config.action_steps, 3),
            "is_degraded": config.action_steps > asked.action_steps,
        }
        return config

    def _frame_sizes(self) -> FrameSizes | None:
        """Return the sizes of the frames that come; None before every camera has sent one."""
        if self.robot_io is None:
            return None
        sizes = self.robot_io.buffer.sizes
        return sizes if len(sizes) == len(self.new.camera_names) else None

    async def _control_robot(self, robot_io: RobotIO, link: Link) -> None:
        controlling = asyncio.create_task(robot_io.run(link), name=f"control {self.id}")
        following = asyncio.create_task(self._apply_events(robot_io), name=f"follow {self.id}")
        watching = asyncio.create_task(self._watch_input(robot_io), name=f"watch {self.id}")
        ending = asyncio.create_task(self._close_requested.wait())
        self.progress.finish()
        call_in_thread(self._engine.durations.save, "durations")
        self._active_since = time.monotonic()
        self._current_lifecycle().is_loaded = True
        self._move(Move.LOADED, self._current_lifecycle().reason)
        self._announce_latch()
        self._ready_or_failed.set()
        first = [controlling, following, watching, ending, robot_io.broken]
        try:
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await robot_io.wait_idle()
        finally:
            if not robot_io.controller.is_idle:
                # Its control broke, or was cancelled: the robot is held before its rooms are left.
                robot_io.halt()
            for task in first:
                task.cancel()
            results = await asyncio.gather(*first, return_exceptions=True)
            robot_io.detach()
            self._current_lifecycle()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch_input(self, robot_io: RobotIO) -> None:
        timeout = self._settings.control.input_timeout
        while True:
            last = max(self._active_since, robot_io.buffer.last_input_at or self._active_since)
            left = last + timeout - time.monotonic()
            if left <= 0:
                self._expire(f"no frame or joints for {timeout:g} s; restart it when they are back")
            await asyncio.sleep(max(left, timeout / 20))

    def _expire(self, reason: str) -> None:
        # The client of a direct session that was never started may pause for any time.
        if self.new.is_direct and self.stage is Stage.READY:
            return
        if self._current_lifecycle().is_allowed(Move.EXPIRED):
            self._apply_event(ControlEvent(Move.EXPIRED, reason))
            self._halt()

    def _fail(self, error: ServiceError) -> None:
        self._error = self._error or error
        if self._current_lifecycle().is_allowed(Move.FAILED):
            self._move(Move.FAILED, str(error))

    def _move(self, move: Move, reason: str | None = None) -> Stage:
        """Move to the next stage by the table, and publish it."""
        stage = self._lifecycle.move(move, reason)
        if (name := EVENTS.get(move)) is not None:
            about = {"session_id": self.new.session_id, "status": str(stage), "policy_path": self.new.policy_path}
            state = SessionState(stage, self._lifecycle.reason, self._lifecycle.latch)
            details = ({} if reason is None else {"reason": reason}) | (
                {"emergency_stop": True} if move is Move.EMERGENCY_STOP else {}
            )
            self._on_event(SessionEvent(name, self, state, {**about, **details}))
        return stage
