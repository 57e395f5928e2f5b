"""Session: from loading its policy to leaving its rooms."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from service.control.aggregation import ENSEMBLE
from service.control.config import ControlConfig
from service.control.controller import ControlEvent, Controller
from service.control.joints import JointTable
from service.control.lease import Leases, find_robot
from service.control.observation_buffer import ObservationBuffer, ObservationHistory
from service.control.observers import SessionObserver, SessionObservers
from service.control.policy_runner import PolicyRunner
from service.control.robot_io import RobotIO
from service.control.shadow import Shadow, load_shadow
from service.errors import MoveRefused, PolicyFailed, ServiceError, UnknownSession
from service.inference.engine import Engine, LoadedPolicy, LoadPolicy, Sizes
from service.inference.progress import Progress
from service.logging import bind_log_context
from service.sessions.base_session import About, BaseSession, joining_of
from service.sessions.compatibility import admitted, fit, limits_of, promised, read_ahead
from service.sessions.policy_slots import PolicySlots
from service.sessions.request import NewSession, SessionSettings
from service.stage import Lifecycle, Move, Stage
from service.threads import call_in_thread
from service.transport.link import CreatedRooms, Link, Rooms, Transport
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
Tell: TypeAlias = Callable[[str, dict[str, object]], None]


def notice_of(new: NewSession, stage: Stage, move: Move, reason: str | None) -> tuple[str, dict[str, object]] | None:
    """The event that a move to this stage is, and what it says; None for a move that nobody is told of."""
    if move not in EVENTS:
        return None
    about: dict[str, object] = {
        "session_id": new.session_id,
        "status": str(stage),
        "policy_path": new.policy_path,
    }
    if reason is not None:
        about["reason"] = reason
    if move is Move.EMERGENCY_STOP:
        about["emergency_stop"] = True
    return EVENTS[move], about


logger = logging.getLogger(__name__)


class Session(BaseSession):
    """One robot's session.

    Attributes:
        progress: what it is doing while it initializes.
        rooms: its rooms, or None before they are made and after they are left.
        policies: those it holds.
        stops: how often somebody stopped it. Whoever controls its robot from outside has to begin anew after each.

    Further attributes as of `BaseSession`; `robot_io` is None before the rooms are joined.
    """

    def __init__(
        self,
        new: NewSession,
        *,
        transport: Transport,
        engine: Engine,
        load: LoadPolicy,
        settings: SessionSettings,
        tell: Tell = lambda event, about: None,
        leases: Leases | None = None,
        made: CreatedRooms | None = None,
        latch: str | None = None,
        claim: str | None = None,
    ):
        """It begins at once.

        Args:
            leases: of all sessions of this process: no other one may command the same robot.
            made: knows which rooms are this server's from before, and is told of those it makes now.
            latch: an emergency stop of this id that nobody has reset yet: it is stopped when it is ready.
            claim: what it says to the server of its rooms; a new one when None.
        """
        super().__init__(new, latch, claim)
        self.progress = Progress("@".join(filter(None, (new.policy_path, new.revision))), engine.durations)
        self.rooms: Rooms | None = None
        self.stops = 0
        self.policies = PolicySlots(new, engine, load, self._require_robot_io, partial(engine.move_claim, self))
        self._admission: Mapping[str, object] = {}
        self._observers = SessionObservers()
        self._reporting: RobotIO | None = None  # also while its rooms are joined
        self._transport = transport
        self._engine = engine
        self._load = load
        self._settings = settings
        self._tell_others = tell
        self._made = made
        self._leases = Leases() if leases is None else leases
        self._active_since = self.created_at
        self._settled = asyncio.Event()
        self._ending = asyncio.Event()
        self._error: ServiceError | None = None
        self._task = asyncio.create_task(self._run(), name=f"session {new.session_id}")

    @property
    def is_over(self) -> bool:
        """Whether it has no rooms, no policy and no task any more."""
        return self._task.done()

    def attach(self, observer: SessionObserver) -> Callable[[], None]:
        """Let somebody observe it, before its rooms are joined and after; what is returned detaches the observer."""
        return self._observers.attach(observer)

    def _about(self) -> About:
        extra: dict[str, object] = dict(self._admission)
        for figures in self.figures:
            extra |= figures()
        return About(
            new=self.new,
            stage=self.stage,
            reason=self.reason,
            latch=self.latch,
            is_over=self.is_over,
            progress=self.progress,
            age=time.monotonic() - self.created_at,
            rooms=self.rooms,
            policies=self.policies,
            figures=extra,
        )

    # What may be asked of it.

    async def ready(self) -> None:
        """Wait until it is ready or has failed. Giving up waiting does not end the session.

        Raises:
            ServiceError: why it failed.
        """
        await self._settled.wait()
        if self._error is not None:
            raise self._error

    def start(self) -> None:
        """Let it move the robot."""
        self._set_going(Move.START)

    def restart(self) -> None:
        """Stop and start in one: plans, holds and failures of before are forgotten."""
        self._set_going(Move.RESTART)

    def stop(self) -> None:
        """Stop the robot where it is."""
        self._current().check(Move.STOP)
        self.stops += 1
        self._halt()
        self._move(Move.STOP)

    async def adjust(self, changes: Mapping[str, object]) -> None:
        """Join chunks, or ask for them, in another way, or do something else, from the next chunk on.

        Args:
            changes: fields of what was asked for: overlap, temporal_ensemble_coeff, ask_ahead, action_steps,
                language_instruction.

        Raises:
            InvalidRequest: this policy cannot do that; nothing has changed.
            MoveRefused: it runs no policy.
        """
        robot_io = self._require_robot_io()
        if "language_instruction" in changes:
            new = replace(self.new, **changes)  # pyright: ignore[reportArgumentType]
            await read_ahead(robot_io.runner.loaded, new.language_instruction)
            robot_io = self._require_robot_io()  # it may have ended meanwhile
        if changes.get("overlap", ENSEMBLE) != ENSEMBLE:
            changes = {"temporal_ensemble_coeff": None, **changes}  # of the one before
        new = replace(self.new, **changes)  # pyright: ignore[reportArgumentType]
        self._settings.check(new)
        _, asked = fit(robot_io.runner.loaded.requirements, new, self._settings)
        robot_io.adjust(config := self._admitted(robot_io.runner.loaded, asked))
        self.new = new
        robot_io.instruct(new.language_instruction)
        logger.info("session %s: overlap %s, %d actions of a chunk", self.id, config.overlap.name, config.action_steps)

    async def tell(self, instruction: str) -> None:
        """Do something else from the next chunk on, as whoever controls the robot says.

        Raises:
            InvalidRequest: the policy cannot read it; nothing has changed.
            MoveRefused: it runs no policy.
        """
        if instruction == self.new.language_instruction:
            return
        await read_ahead(self._require_robot_io().runner.loaded, instruction)
        self._require_robot_io().instruct(instruction)
        self.new = replace(self.new, language_instruction=instruction)

    def joining(self) -> dict[str, object]:
        """How it joins chunks and when it asks for them; JSON-ready."""
        return joining_of(self._require_robot_io())

    def emergency_stop(self, reason: str) -> None:
        """Stop the robot where it is, until somebody resets."""
        self._current().check(Move.EMERGENCY_STOP)
        if self.robot_io is not None:
            self.robot_io.emergency_stop()
        self._follow(ControlEvent(Move.EMERGENCY_STOP, reason))

    def reset(self) -> None:
        """Take the latch of an emergency stop off; nothing moves by it."""
        self._current().move(Move.RESET)
        self._announce_latch()

    def _announce_latch(self) -> None:
        """Whoever is in the room of the commands learns of the latch, and who comes while it lasts."""
        if self.robot_io is not None:
            self.robot_io.announce_latch(self.latch)

    def begin_end(self) -> None:
        """Stop the robot and begin to leave; ``end`` waits for it."""
        self._current().move(Move.DELETE)
        self._halt()
        self._ending.set()
        if not self._settled.is_set():
            self._error = UnknownSession(f"session {self.id!r} was deleted while it was initializing")
            self._task.cancel()

    async def end(self) -> bool:
        """Wait until rooms and policy are given back; False when a link hung and was abandoned."""
        _, hanging = await asyncio.wait([self._task], timeout=self._settings.close_within)
        if hanging:
            self._task.cancel()
            _, hanging = await asyncio.wait([self._task], timeout=0.5)
        if hanging:
            logger.error("session %s: its link does not let go; it is abandoned", self.id)
        return not hanging

    def _set_going(self, move: Move) -> None:
        self._current().check(move)
        self._move(move)
        self._active_since = time.monotonic()
        assert self.robot_io is not None, "the table lets only loaded sessions start"
        self.robot_io.begin()
        trouble = self.robot_io.controller.link_trouble
        if trouble is not None:
            self._lifecycle.move(Move.LINK_LOST, trouble)

    def _halt(self) -> None:
        if self.robot_io is not None:
            self.robot_io.halt()

    def _current(self) -> Lifecycle:
        """Its lifecycle after all that happened to the robot so far: nobody sees or moves an older stage."""
        if self._reporting is not None:
            for event in self._reporting.take_events():
                self._follow(event)
        return self._lifecycle

    def _follow(self, event: ControlEvent) -> None:
        """Go where an event leads to, for which the robot was stopped already if it had to be."""
        move, reason = event
        if not self._lifecycle.can(move):
            return
        if move is Move.EMERGENCY_STOP:
            self.stops += 1
            self._move(move, reason or "no reason given")
            self._announce_latch()
            logger.warning("session %s: emergency stop: %s", self.id, reason)
            return
        stage = self._move(move, reason)
        if move in (Move.LINK_BACK, Move.RECOVERED):
            logger.info("session %s goes on", self.id)
        else:
            logger.warning("session %s is %s: %s", self.id, stage, reason)

    async def _follow_events(self, robot_io: RobotIO) -> None:
        while True:
            await robot_io.wait_for_events()
            self._current()

    def _require_robot_io(self) -> RobotIO:
        """Its live parts, for somebody who wants to change what it runs.

        Raises:
            MoveRefused: it runs no policy.
        """
        if self.robot_io is None or self.is_over or not self._current().is_loaded:
            raise MoveRefused(f"session {self.id!r} is {self.stage} and runs no policy")
        return self.robot_io

    # Its life.

    async def _run(self) -> None:
        # Not the request that made it: that one is answered soon, and this goes on for long.
        bind_log_context(session=self.id, request=None)
        try:
            await self._live()
        except ServiceError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("session %s failed", self.id)
            self._fail(PolicyFailed(f"session {self.id!r} failed ({type(error).__name__}); the server's log says more"))
        finally:
            self._current().is_loaded = False
            self.rooms = None
            self._settled.set()

    async def _live(self) -> None:
        new = self.new
        room = rooms_of(self.id, new.camera_names, new.workspace_id).joint_output
        robot = find_robot(new.transport_server_url, new.workspace_id or "", room)
        try:
            self._leases.take(robot, self)
            loaded = await self.policies.begin(self.progress.tell)
            table, asked = fit(loaded.requirements, new, self._settings)
            await read_ahead(loaded, new.language_instruction)
            config = self._admitted(loaded, asked)
            limits = limits_of(table, loaded.requirements, new, self._settings)
            async with self._shadow(loaded, table) as shadow:
                buffer = ObservationBuffer(
                    new.camera_names,
                    table,
                    frame_age_limit=self._settings.control.frame_age_limit,
                    max_pixels=self._settings.max_frame_pixels,
                    history=ObservationHistory(loaded.requirements.observation_steps, 1 / config.action_rate),
                )
                runner = PolicyRunner(
                    loaded,
                    engine=self._engine,
                    samples=config.samples,
                    shadow=shadow,
                    instruction=new.language_instruction,
                )
                robot_io = RobotIO(
                    table,
                    Controller(buffer, config, limits),
                    runner,
                    observers=self._observers,
                    is_dry=new.dry_run,
                )
                self._reporting = robot_io
                del loaded  # another one may take over, and then this one's weights are let go
                self.progress.tell("joining rooms")
                async with self._transport.connect(
                    new.transport_server_url,
                    session_id=self.id,
                    cameras=new.camera_names,
                    workspace_id=new.workspace_id,
                    inbox=robot_io,
                    created_rooms=self._made,
                ) as link:
                    self.rooms = link.rooms
                    self.robot_io = robot_io
                    await self._control_robot(robot_io, link)
        finally:
            self._leases.release(robot, self)
            self._engine.release(self)
            await self.policies.close()

    def _admitted(self, loaded: LoadedPolicy, asked: ControlConfig) -> ControlConfig:
        config = admitted(self._engine, self, loaded, asked, degrade=self.new.degrade, seen=self._seen)
        self._admission = promised(asked, config)
        return config

    def _seen(self) -> Sizes | None:
        """The sizes of the frames that come; None before every camera has shown one."""
        if self.robot_io is None:
            return None
        sizes = self.robot_io.buffer.sizes
        return sizes if len(sizes) == len(self.new.camera_names) else None

    def _shadow(self, loaded: LoadedPolicy, table: JointTable) -> AbstractAsyncContextManager[Shadow | None]:
        return load_shadow(
            self.new.shadow_policy_path,
            self.new.shadow_revision,
            loaded.requirements,
            table.names,
            engine=self._engine,
            load=self._load,
            notify=lambda stage: self.progress.tell("loading the shadow policy"),
        )

    async def _control_robot(self, robot_io: RobotIO, link: Link) -> None:
        controlling = asyncio.create_task(robot_io.run(link), name=f"control {self.id}")
        following = asyncio.create_task(self._follow_events(robot_io), name=f"follow {self.id}")
        watching = asyncio.create_task(self._watch_input(robot_io), name=f"watch {self.id}")
        ending = asyncio.create_task(self._ending.wait())
        self.progress.finish()
        call_in_thread(self._engine.durations.keep, "durations")
        self._active_since = time.monotonic()
        self._current().is_loaded = True
        self._move(Move.LOADED, self._current().reason)
        self._announce_latch()
        self._settled.set()
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
            self._current()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch_input(self, robot_io: RobotIO) -> None:
        patience = self._settings.control.input_timeout
        while True:
            last = max(self._active_since, robot_io.buffer.last_input_at or self._active_since)
            left = last + patience - time.monotonic()
            if left <= 0:
                self._expire(f"no frame or joints for {patience:g} s; restart it when they are back")
            await asyncio.sleep(max(left, patience / 20))

    def _expire(self, reason: str) -> None:
        if self._current().can(Move.EXPIRED):
            self._follow(ControlEvent(Move.EXPIRED, reason))
            self._halt()

    def _fail(self, error: ServiceError) -> None:
        self._error = self._error or error
        if self._current().can(Move.FAILED):
            self._move(Move.FAILED, str(error))

    def _move(self, move: Move, reason: str | None = None) -> Stage:
        """Go where the table says, and tell whoever wants to know."""
        stage = self._lifecycle.move(move, reason)
        notice = notice_of(self.new, stage, move, reason)
        if notice is not None:
            try:
                self._tell_others(*notice)
            except Exception:
                # Whoever stops several robots must reach the others too.
                logger.exception("session %s: nobody is told of %s", self.id, notice[0])
        return stage
