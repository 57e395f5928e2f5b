"""Runs a robot in its session, from connecting to releasing the arm."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from robojax.client import AsyncClient, AsyncSession, RequestRefused, RobojaxError
from robojax.robot.arm import JOINTS, compute_ranges
from robojax.robot.arm_thread import ArmThread, JointTracker
from robojax.robot.cameras import Camera
from robojax.robot.config import RobotConfig, load_calibration, open_arm
from robojax.robot.errors import RobotError, SessionTaken
from robojax.robot.fit import compare_joint_names, compare_joints, compare_units, read_policy_fit, suggest_cameras
from robojax.robot.lerobot_arm import LeRobotArm
from robojax.robot.links import OnEvent, Pictures, RobotRoomsLink, StreamLink, describe_status, run_until_first_ends


@asynccontextmanager
async def keys() -> AsyncIterator["asyncio.Queue[str]"]:
    """Provide a queue of pressed keys; Ctrl-C keeps its meaning, and the terminal is restored on exit.

    The queue stays empty without a terminal, and in a background job, which the system stops when it reads a terminal.
    """
    pressed: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty() or os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
        yield pressed
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = b""
        with contextlib.suppress(OSError):
            typed = os.read(terminal, 64)
        if not typed:
            loop.remove_reader(terminal)  # A closed terminal would stay readable forever.
        for key in typed.decode(errors="replace"):
            pressed.put_nowait(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)


POLL_PERIOD = 0.1  # seconds between checks of the arm
LEAVE = 3.0  # seconds to stop or remove the session at the end
EMERGENCY, QUIT = " ", "q"
# SIGHUP: the terminal was closed, or the connection to it was lost.
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ON_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class RobotRunner:
    """Settings of a robot's run: robot, server, session, policy, rate.

    Attributes:
        server: URL of the server; None for this machine's server.
        session: id of the session; None for the robot's id.
        policy: a folder on the server's machine or a repo id, for a new session that is removed at the end; None for
            an existing session.
        joint_names: names of the policy's joints in the order of its actions, if its checkpoint has none.
        rename: for a new session, cameras of the policy to different names of the robot.
        transport: "direct", or the URL of the rooms' server. None for direct, or the rooms of the server itself.
        rate: observations (and readings of the arm) per second.
        command_timeout: seconds without a command after which the arm is held.
        is_started: whether to start the session; else it waits for ``robojax start``.
        is_compressed: whether pictures are sent as JPEG; None: unless the server is on this machine.
        simulation: the ``ServoArm`` of a simulated arm; None for a real arm. Not imported here.
        lerobot: LeRobot's robot, which then is the arm and has the cameras; None for an arm that ``robot`` describes.
    """

    robot: RobotConfig
    server: str | None = None
    key: str | None = None
    session: str | None = None
    policy: str | None = None
    revision: str | None = None
    joint_names: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    task: str | None = None
    transport: str | None = None
    rate: float = 30.0
    command_timeout: float = 0.5
    is_started: bool = True
    is_dry_run: bool = False
    is_compressed: bool | None = None
    simulation: Any = None
    lerobot: LeRobotArm | None = None

    @property
    def joints(self) -> tuple[str, ...]:
        """Names of the robot's joints."""
        return tuple(JOINTS if self.lerobot is None else self.lerobot.limits)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the robot's cameras."""
        return tuple(self.robot.cameras) if self.lerobot is None else self.lerobot.cameras

    @property
    def session_id(self) -> str:
        """ID of the session."""
        return self.session or self.robot.id


class _Ended(Exception):
    """A person ended the program before the arm was held."""


async def run(runner: RobotRunner, on_event: OnEvent) -> None:
    """Run the robot until Ctrl-C, SIGTERM, SIGHUP or the key q; the arm is held at the end.

    Args:
        on_event: receives a line of text about each event.

    Raises:
        RobotError: a part of the robot cannot be used, or was lost. The remaining joints are held.
        RobojaxError: the server does not respond, or refuses.
    """
    end_requested = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ENDS:
        loop.add_signal_handler(number, end_requested.set)
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(runner.server, key=runner.key))
            cameras = await asyncio.to_thread(_open_cameras, runner, stack)
            servos = None if runner.simulation is None else runner.simulation.servos
            if runner.lerobot is None:
                arm = stack.enter_context(open_arm(runner.robot, servos))
                pictures = partial(_read_pictures, cameras)
            else:
                arm = runner.lerobot
                pictures = partial(getattr, arm, "pictures")
            session = await stack.enter_async_context(_session(client, runner, end_requested, on_event))
            if end_requested.is_set():
                raise _Ended
            await asyncio.to_thread(arm.enable_torque)
            on_event("the arm is held where it is")
            tracker = JointTracker(runner.joints, runner.command_timeout, runner.robot.max_relative_target)
            with ArmThread(arm, tracker, runner.rate) as arm_thread:
                ended = await _run_linked(runner, client, session, arm_thread, pictures, end_requested, on_event)
            if arm_thread.failure is not None:
                raise arm_thread.failure
            if runner.robot.disable_torque_on_disconnect:
                arm.disable_torque()
                on_event("the arm's torque is off")
            else:
                on_event("the arm is held; put a hand under it before you switch its power off")
            if ended is not None:
                raise ended
    except _Ended:
        on_event("ended; the arm got no command")
    finally:
        for number in ENDS:
            loop.remove_signal_handler(number)


async def _run_linked(
    runner: RobotRunner,
    client: AsyncClient,
    session: AsyncSession,
    arm_thread: ArmThread,
    pictures: Pictures,
    end_requested: asyncio.Event,
    on_event: OnEvent,
) -> Exception | None:
    """Run the arm until the end; return the error that ended it, or None if a person ended it."""
    linked, simulation, rate, is_taken = asyncio.Event(), runner.simulation, runner.rate, False
    if (await session.status()).rooms.joint_output:
        transport = client.url if runner.transport in (None, "direct") else runner.transport
        link = RobotRoomsLink(session, transport, arm_thread, pictures, rate, on_event)
    else:
        is_near = urlsplit(client.url).hostname in ON_THIS_MACHINE
        is_compressed = not is_near if runner.is_compressed is None else runner.is_compressed
        link = StreamLink(session, arm_thread, pictures, rate, is_compressed, on_event)
    try:
        async with keys() as pressed:
            await run_until_first_ends(
                link.run(linked),
                _start_session(runner, session, linked, on_event),
                _wait_for_failure(arm_thread, session.id, on_event),
                _keys(pressed, session, arm_thread, end_requested, on_event),
                end_requested.wait(),
                *([] if simulation is None else [simulation.play(session, arm_thread, on_event)]),
            )
    except (RobotError, RobojaxError) as error:
        is_taken = isinstance(error, SessionTaken)
        return error
    finally:
        arm_thread.stop("the program ends", is_latched=True)
        with contextlib.suppress(RobojaxError, TimeoutError):
            async with asyncio.timeout(LEAVE):
                if not is_taken:  # The other client's robot moves on.
                    await session.stop()
    return None


@asynccontextmanager
async def _session(
    client: AsyncClient, runner: RobotRunner, end_requested: asyncio.Event, on_event: OnEvent
) -> AsyncIterator[AsyncSession]:
    """Provide the session; a new session is removed at the end."""
    session = client.session(runner.session_id)
    if runner.policy is None:
        status = await session.status()
        if missing := sorted(set(status.camera_names) - set(runner.cameras)):
            raise RobotError(
                f"session {session.id} has cameras {', '.join(status.camera_names)}; {', '.join(missing)} not given",
                "name them as the policy does in --robot.cameras",
            )
        if status.status == "interrupted":
            on_event(f"session {session.id} was interrupted and is loaded again")
            await session.restart()
        status = await session.status()
        if unknown := compare_joint_names(tuple(status.stats.get("measured_joints") or runner.joints), runner.joints):
            raise RobotError(f"session {session.id}: {unknown}", "join a session of a policy for an arm like this one")
        on_event(describe_status(status))
        yield session
        return
    request = build_check(runner)
    checking = client.request("POST", "/policies/check", request, timeout=600)
    fit = read_policy_fit(await _run_unless_ended(end_requested, checking))
    arm = runner.lerobot
    ranges = compute_ranges(load_calibration(runner.robot)) if arm is None else arm.limits
    for finding in (
        compare_joints(fit, runner.joint_names, runner.joints),
        compare_units(fit, runner.robot.use_degrees, ranges),
    ):
        if finding.level == "fail":
            raise RobotError(f"the policy does not fit this robot: {finding.found}", finding.fix)
        if finding.level == "warn":
            on_event(f"{finding.name}: {finding.found}")
    if not fit.fits:
        raise RobotError(f"the policy does not fit this robot: {'; '.join(fit.misfits)}", suggest_cameras(fit))
    on_event(f"loading {runner.policy} ...")
    making = client.create(
        session.id,
        runner.policy,
        transport_server_url=runner.transport or "direct",
        camera_names=runner.cameras,
        policy_type=fit.policy_type,
        revision=runner.revision,
        language_instruction=runner.task,
        dry_run=runner.is_dry_run,
        rename=dict(runner.rename) or None,
        joint_names=runner.joint_names or None,
    )
    created = await _run_unless_ended(end_requested, making, lambda: _remove_session(session))
    try:
        yield created
    finally:
        await _remove_session(created)


def build_check(runner: RobotRunner) -> dict[str, object]:
    """Return the body of POST /policies/check for this policy, cameras and given joint names."""
    more = {"rename": dict(runner.rename), "joint_names": list(runner.joint_names or ())}
    request = {"policy_path": runner.policy, "revision": runner.revision, "camera_names": list(runner.cameras)}
    return request | {name: value for name, value in more.items() if value}


async def _remove_session(session: AsyncSession) -> None:
    with contextlib.suppress(RobojaxError, TimeoutError):
        async with asyncio.timeout(LEAVE):
            await session.delete()


async def _run_unless_ended(
    end_requested: asyncio.Event,
    work: Coroutine[Any, Any, Any],
    undo: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Any:
    """Return the result of the work; raise ``_Ended`` if a person ended the program first and the work was undone."""
    task, ended = asyncio.create_task(work), asyncio.create_task(end_requested.wait())
    try:
        await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and undo is not None:
            # Wait for a quick refusal, so that an existing session with the same id is not removed.
            await asyncio.wait((task,), timeout=LEAVE)
        if not end_requested.is_set() or (task.done() and task.exception() is not None):
            return task.result()
        if undo is not None:
            await undo()
        raise _Ended
    finally:
        for waited in (task, ended):
            waited.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)


async def _start_session(runner: RobotRunner, session: AsyncSession, linked: asyncio.Event, on_event: OnEvent) -> None:
    await linked.wait()
    if not runner.is_started:
        on_event(f"ready; robojax start {session.id} lets it move")
    else:
        try:
            await session.start()
        except RequestRefused as error:
            # Another client may have started it.
            if not (await session.status()).is_moving:
                raise error
        end = "releases the arm, which falls," if runner.robot.disable_torque_on_disconnect else "holds the arm"
        on_event(f"started: space is the emergency stop, q or Ctrl-C {end} and ends the program")
    await asyncio.Event().wait()


async def _wait_for_failure(arm_thread: ArmThread, session_id: str, on_event: OnEvent) -> None:
    """Report holds until the arm's thread ends because of a failure."""
    last: str | None = "?"
    clamped: frozenset[str] = frozenset()
    while not arm_thread.is_over:
        if (hold := arm_thread.hold) != last:
            on_event("moving" if hold is None else f"held: {hold}")
            if hold is not None and arm_thread.latch is not None:
                on_event(f"it stays held; when it is safe: robojax reset {session_id}, then robojax start {session_id}")
            last = hold
        if new := arm_thread.clamped - clamped:
            on_event(
                f"targets of {', '.join(sorted(new))} are too far away (max_relative_target); the arm moves slowly"
            )
            clamped |= new
        await asyncio.sleep(POLL_PERIOD)


async def _keys(
    pressed: "asyncio.Queue[str]",
    session: AsyncSession,
    arm_thread: ArmThread,
    end_requested: asyncio.Event,
    on_event: OnEvent,
) -> None:
    while True:
        key = await pressed.get()
        if key == EMERGENCY:
            arm_thread.stop("emergency stop by key", is_latched=True)
            try:
                await session.emergency_stop("key at the robot")
            except RobojaxError as error:
                on_event(f"the arm is held; the server could not be reached: {error}")
        elif key == QUIT:
            end_requested.set()


def _read_pictures(cameras: Mapping[str, Camera]) -> dict[str, np.ndarray]:
    now = time.monotonic()
    return {name: camera.newest(now) for name, camera in cameras.items()}


def _open_cameras(runner: RobotRunner, stack: AsyncExitStack) -> dict[str, Camera]:
    """Open the robot's cameras; ``stack`` closes them."""
    open_simulated = None if runner.simulation is None else runner.simulation.open_camera
    cameras: dict[str, Camera] = {}
    for name, config in runner.robot.cameras.items():
        cameras[name] = Camera(name, config, open_simulated)
        stack.callback(cameras[name].close)
    return cameras
