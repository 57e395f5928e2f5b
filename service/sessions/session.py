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
from service.control.controller import Controller
from service.control.joints import JointTable
from service.control.lease import Leases, robot_of
from service.control.observation_buffer import ObservationBuffer
from service.control.observers import SessionObserver, SessionObservers
from service.control.robot_io import RobotIO
from service.control.shadow import Shadow, shadow_of
from service.errors import MoveRefused, PolicyFailed, ServiceError, UnknownSession
from service.inference.engine import Engine, LoadedPolicy, LoadPolicy, Sizes
from service.inference.progress import Progress
from service.logging import bind_log_context
from service.sessions.base_session import About, BaseSession, joining_of
from service.sessions.compatibility import admitted, fit, limits_of, promised, read_ahead
from service.sessions.policy_slots import PolicySlots
from service.sessions.request import NewSession, SessionSettings
from service.stage import Move, Stage
from service.threads import call_in_thread
from service.transport.link import Link, Made, Rooms, Transport
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

    Further attributes as of `Standing`; `drive` is None before the rooms are joined.
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
        made: Made | None = None,
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
        self.policies = PolicySlots(new, engine, load, self._driven, partial(engine.move_claim, self))
        self._admission: Mapping[str, object] = {}
        self._taps = SessionObservers()
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

    def attach(self, tap: SessionObserver) -> Callable[[], None]:
        """Let somebody look on, before its drive exists and after; what is returned takes the tap off again."""
        return self._taps.attach(tap)

    def _about(self) -> About:
        extra: dict[str, object] = dict(self._admission)
        for figures in self.figures:
            extra |= figures()
        return About(
            new=self.new,
            stage=self.stage,
            reason=self.reason,
            latch=self._life.latch,
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
        self._life.check(Move.STOP)
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
        drive = self._driven()
        if "language_instruction" in changes:
            new = replace(self.new, **changes)  # pyright: ignore[reportArgumentType]
            await read_ahead(drive.thinking.served, new.language_instruction)
            drive = self._driven()  # it may have ended meanwhile
        if changes.get("overlap", ENSEMBLE) != ENSEMBLE:
            changes = {"temporal_ensemble_coeff": None, **changes}  # of the one before
        new = replace(self.new, **changes)  # pyright: ignore[reportArgumentType]
        self._settings.check(new)
        _, asked = fit(drive.thinking.served.requirements, new, self._settings)
        drive.adjust(pace := self._admitted(drive.thinking.served, asked))
        self.new = new
        drive.thinking.instruct(new.language_instruction)
        logger.info("session %s: overlap %s, %d actions of a chunk", self.id, pace.overlap.name, pace.action_steps)

    async def tell(self, instruction: str) -> None:
        """Do something else from the next chunk on, as whoever drives the robot says.

        Raises:
            InvalidRequest: the policy cannot read it; nothing has changed.
            MoveRefused: it runs no policy.
        """
        if instruction == self.new.language_instruction:
            return
        await read_ahead(self._driven().thinking.served, instruction)
        self._driven().thinking.instruct(instruction)
        self.new = replace(self.new, language_instruction=instruction)

    def joining(self) -> dict[str, object]:
        """How it joins chunks and when it asks for them; JSON-ready."""
        return joining_of(self._driven())

    def emergency_stop(self, reason: str) -> None:
        """Stop the robot where it is, until somebody resets."""
        self._life.check(Move.EMERGENCY_STOP)
        self.stops += 1
        # One that is latched and was told to hold is not told so again: whoever may report a pose and press stop would
        # move it there.
        if not (self.is_latched and self.drive is not None and self.drive.is_held):
            self._halt(always_hold=True)
        self._move(Move.EMERGENCY_STOP, reason)
        self._announce_latch()
        logger.warning("session %s: emergency stop: %s", self.id, reason)

    def reset(self) -> None:
        """Take the latch of an emergency stop off; nothing moves by it."""
        self._life.move(Move.RESET)
        self._announce_latch()

    def _announce_latch(self) -> None:
        """Whoever is in the room of the commands learns of the latch, and who comes while it lasts."""
        if self.drive is not None:
            self.drive.announce_latch(self.latch)

    def begin_end(self) -> None:
        """Stop the robot and begin to leave; ``end`` waits for it."""
        self._life.move(Move.DELETE)
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
        self._move(move)
        self._active_since = time.monotonic()
        assert self.drive is not None, "the table lets only loaded sessions start"
        self.drive.begin()
        if self.drive.link_trouble is not None:
            self._life.move(Move.LINK_LOST, self.drive.link_trouble)

    def _halt(self, *, always_hold: bool = False) -> None:
        if self.drive is not None:
            self.drive.halt(always_hold=always_hold)

    def _happened(self, move: Move, reason: str | None) -> None:
        """Something happened by itself; where the table has no such move, it changes nothing."""
        if not self._life.can(move):
            return
        if move is Move.EMERGENCY_STOP:
            self.emergency_stop(reason or "no reason given")
            return
        stage = self._move(move, reason)
        if move in (Move.LINK_BACK, Move.RECOVERED):
            logger.info("session %s goes on", self.id)
        else:
            logger.warning("session %s is %s: %s", self.id, stage, reason)
        if move in (Move.FAILED, Move.EXPIRED):
            self._halt()

    def _driven(self) -> RobotIO:
        """Its live parts, for somebody who wants to change what it runs.

        Raises:
            MoveRefused: it runs no policy.
        """
        if self.drive is None or self.is_over or not self._life.is_loaded:
            raise MoveRefused(f"session {self.id!r} is {self.stage} and runs no policy")
        return self.drive

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
            self._life.is_loaded = False
            self.rooms = None
            self._settled.set()

    async def _live(self) -> None:
        new = self.new
        room = rooms_of(self.id, new.camera_names, new.workspace_id).joint_output
        robot = robot_of(new.transport_server_url, new.workspace_id or "", room)
        try:
            self._leases.take(robot, self)
            served = await self.policies.begin(self.progress.tell)
            table, asked = fit(served.requirements, new, self._settings)
            await read_ahead(served, new.language_instruction)
            pace = self._admitted(served, asked)
            limits = limits_of(table, served.requirements, new, self._settings)
            async with self._shadow(served, table) as shadow:
                buffer = ObservationBuffer(
                    new.camera_names,
                    table,
                    frame_age_limit=self._settings.frame_age_limit,
                    max_pixels=self._settings.max_frame_pixels,
                )
                drive = RobotIO(
                    table=table,
                    buffer=buffer,
                    control=Controller(buffer, pace, limits),
                    engine=self._engine,
                    served=served,
                    notify=self._happened,
                    patience=self._settings.patience.for_frames(self._settings.frame_age_limit),
                    shadow=shadow,
                    taps=self._taps,
                    is_dry=new.dry_run,
                    instruction=new.language_instruction,
                )
                del served  # another one may take over, and then this one's weights are let go
                self.progress.tell("joining rooms")
                async with self._transport.connect(
                    new.transport_server_url,
                    session_id=self.id,
                    cameras=new.camera_names,
                    workspace_id=new.workspace_id,
                    inbox=drive,
                    made=self._made,
                ) as link:
                    self.rooms = link.rooms
                    self.drive = drive
                    await self._drive_robot(drive, link)
        finally:
            self._leases.release(robot, self)
            self._engine.release(self)
            await self.policies.close()

    def _admitted(self, served: LoadedPolicy, asked: ControlConfig) -> ControlConfig:
        pace = admitted(self._engine, self, served, asked, degrade=self.new.degrade, seen=self._seen)
        self._admission = promised(asked, pace)
        return pace

    def _seen(self) -> Sizes | None:
        """The sizes of the frames that come; None before every camera has shown one."""
        if self.drive is None:
            return None
        sizes = self.drive.buffer.sizes()
        return sizes if len(sizes) == len(self.new.camera_names) else None

    def _shadow(self, served: LoadedPolicy, table: JointTable) -> AbstractAsyncContextManager[Shadow | None]:
        return shadow_of(
            self.new.shadow_policy_path,
            self.new.shadow_revision,
            served.requirements,
            table.names,
            engine=self._engine,
            load=self._load,
            tell=lambda stage: self.progress.tell("loading the shadow policy"),
        )

    async def _drive_robot(self, drive: RobotIO, link: Link) -> None:
        driving = asyncio.create_task(drive.run(link), name=f"drive {self.id}")
        watching = asyncio.create_task(self._watch_input(drive), name=f"watch {self.id}")
        ending = asyncio.create_task(self._ending.wait())
        self.progress.finish()
        call_in_thread(self._engine.durations.keep, "durations")
        self._active_since = time.monotonic()
        self._life.is_loaded = True
        self._move(Move.LOADED, self._life.reason)
        self._announce_latch()
        self._settled.set()
        first = [driving, watching, ending, drive.broken]
        try:
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if ending in done:
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await drive.idle()
        finally:
            if not drive.control.is_idle:
                # The drive itself broke, or was cancelled: the robot is told to hold before its rooms are left.
                drive.halt()
            for task in first:
                task.cancel()
            results = await asyncio.gather(driving, watching, drive.broken, return_exceptions=True)
            drive.detach()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch_input(self, drive: RobotIO) -> None:
        patience = self._settings.input_timeout
        while True:
            last = max(self._active_since, drive.buffer.last_input_at or self._active_since)
            left = last + patience - time.monotonic()
            if left <= 0:
                self._happened(Move.EXPIRED, f"no frame or joints for {patience:g} s; restart it when they are back")
            await asyncio.sleep(max(left, patience / 20))

    def _fail(self, error: ServiceError) -> None:
        self._error = self._error or error
        if self._life.can(Move.FAILED):
            self._move(Move.FAILED, str(error))

    def _move(self, move: Move, reason: str | None = None) -> Stage:
        """Go where the table says, and tell whoever wants to know."""
        stage = self._life.move(move, reason)
        notice = notice_of(self.new, stage, move, reason)
        if notice is not None:
            try:
                self._tell_others(*notice)
            except Exception:
                # Whoever stops several robots must reach the others too.
                logger.exception("session %s: nobody is told of %s", self.id, notice[0])
        return stage
