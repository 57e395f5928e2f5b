"""Simulated arm of `robojax robot`: MuJoCo turns the shafts of simulated servos and renders what the cameras see.

The servos use the protocol of real servos (``robojax.robot.simulated_bus``), so the robot's program is the same as for
a real arm. After each episode the arm is folded and a new cube is laid, as in the demo.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's names come from a compiled module without stubs.

import asyncio
import threading
import time
from collections.abc import Callable

import mujoco
import numpy as np

from robojax.client import AsyncSession, RobojaxError
from robojax.robot.arm import GRIPPER, Unit, from_steps, normalize_joint_name, to_steps
from robojax.robot.arm import JOINTS as SERVOS
from robojax.robot.arm_thread import ArmThread
from robojax.robot.bus import GOAL_POSITION, PRESENT_POSITION, TORQUE_ENABLE
from robojax.robot.cameras import CameraConfig, PictureSource
from robojax.robot.config import RobotConfig, load_calibration
from robojax.robot.errors import RobotError
from robojax.robot.simulated_bus import Servo
from robojax.sim.arm import HORIZON, JOINTS, RATE, SimulatedArm, open_renderer
from robojax.sim.tasks import PICK, Outcome, Score

FIRST_SEED = 5000  # seed of the first episode's cubes
PERIOD = 0.02  # seconds of one step of the scene
EPISODE = HORIZON / RATE  # seconds in which the arm obeys commands
SETTLE = 0.5  # seconds after a new cube is laid, so that all pictures of the previous cube have arrived
QUIET = 0.2  # seconds without a command after which a stopped session has sent its last command
POLL_PERIOD = 0.05  # seconds


class ServoArm:
    """Arm and cubes in real time behind simulated ``servos`` (by id) and cameras; runs physics in a thread."""

    def __init__(self, config: RobotConfig):
        calibration = load_calibration(config)
        # Names of the joints on the bus and their calibrations, in the order of the scene's joints.
        self._joints = [(name, calibration[name]) for name in map(normalize_joint_name, JOINTS)]
        self.servos = {servo: Servo(speed=None) for servo in SERVOS.values()}
        self.score = Score()
        self._arm = SimulatedArm(PICK)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="physics", daemon=True)
        self._lay_cube()

    def __enter__(self) -> "ServoArm":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def open_camera(self, name: str, config: CameraConfig) -> PictureSource:
        """Open a camera of the scene, which renders in its reader's thread; raise ``RobotError`` if it is unknown."""
        camera, model = str(config.index_or_path or name), self._arm.model
        cameras = [model.camera(number).name for number in range(model.ncam)]
        if camera not in cameras:
            raise RobotError(
                f"camera {name!r}: the simulated scene has no camera {camera!r}",
                f"use the names {', '.join(cameras)}, or give e.g. index_or_path: {cameras[0]}",
            )
        data, due = mujoco.MjData(model), time.monotonic()
        renderers: list[mujoco.Renderer] = []

        def read() -> np.ndarray:
            nonlocal due
            due = max(due + 1 / float(config.fps or RATE), time.monotonic() - PERIOD)
            time.sleep(max(0.0, due - time.monotonic()))
            if not renderers:
                renderers.append(open_renderer(model, int(config.height or 0), int(config.width or 0)))
            with self._lock:
                mujoco.mj_copyData(data, model, self._arm.data)
            renderers[0].update_scene(data, camera)
            return renderers[0].render()

        def close() -> None:
            for renderer in renderers:
                renderer.close()

        return PictureSource(read, close)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._end.wait(max(0.0, due - time.monotonic())):
            # On a slow machine the scene takes longer, but skips no step.
            due = max(due + PERIOD, time.monotonic() - PERIOD)
            with self._lock:
                self._arm.step(self._update_targets(), PERIOD)
                self._turn_shafts()

    def _update_targets(self) -> np.ndarray:
        """Return the goals of the servos as values of the scene's joints; without torque, a joint keeps its target."""
        for position, (name, joint) in enumerate(self._joints):
            servo = self.servos[joint.id]
            if servo[TORQUE_ENABLE]:
                goal = min(max(servo[GOAL_POSITION], joint.range_min), joint.range_max)
                self._targets[position] = from_steps(goal, joint, _unit(name))
        return self._targets

    def _turn_shafts(self) -> None:
        for (name, joint), value in zip(self._joints, self._arm.joints, strict=True):
            self.servos[joint.id].set_position(to_steps(float(value), joint, _unit(name)))

    def _lay_cube(self) -> None:
        """Fold the arm, as by hand, and lay the cubes of the next episode."""
        with self._lock:
            self._arm.reset(FIRST_SEED + self.score.done)
            self._targets = self._arm.joints
            self._turn_shafts()
            for servo in self.servos.values():
                servo[GOAL_POSITION] = servo[PRESENT_POSITION]

    async def play(self, session: AsyncSession, arm_thread: ArmThread, on_event: Callable[[str], None]) -> None:
        """Score an episode whenever the arm has moved for its duration, and lay a new cube; until cancelled."""
        while True:
            await self._wait_moving(arm_thread)
            try:
                status = await session.status()
                if status.status == "running":  # Otherwise a person stopped it just now, and this cube stays.
                    self._score(on_event)
                    await self._begin_episode(session, status.stats.get("stops"), arm_thread, on_event)
            except RobojaxError as error:
                on_event(f"no new cube: {error}")

    def _score(self, on_event: Callable[[str], None]) -> None:
        with self._lock:
            seed = FIRST_SEED + self.score.done
            lifted, wrong, instruction = self._arm.is_lifted, self._arm.wrong, self._arm.target_cube.instruction
        outcome = Outcome(self.score.done + 1, seed, instruction, lifted, wrong, HORIZON)
        self.score.outcomes.append(outcome)
        on_event(f"cube {outcome.number}: {outcome.verdict} ({self.score})")

    async def _wait_moving(self, arm_thread: ArmThread) -> None:
        """Wait until the arm has obeyed commands for the duration of an episode; holds do not count."""
        moved, before = 0.0, time.monotonic()
        while moved < EPISODE:
            await asyncio.sleep(POLL_PERIOD)
            now = time.monotonic()
            moved += now - before if arm_thread.hold is None else 0.0
            before = now

    async def _begin_episode(
        self, session: AsyncSession, stops: object, arm_thread: ArmThread, on_event: Callable[[str], None]
    ) -> None:
        """Stop the session, and start it with a new cube unless ``stops``, its count before, shows a person's stop."""
        await session.stop()
        await _wait_held(arm_thread)
        self._lay_cube()
        await asyncio.sleep(SETTLE)
        status = await session.status()
        if status.status == "stopped" and isinstance(stops, int) and status.stats.get("stops") == stops + 1:
            await session.start()
        else:
            on_event(f"a new cube was laid; the session was stopped: robojax start {session.id} continues")


async def _wait_held(arm_thread: ArmThread) -> None:
    """Wait for the last command, then hold the arm, so that no older command moves the folded arm."""
    commands, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET:
        await asyncio.sleep(POLL_PERIOD)
        if (newest := arm_thread.commands) != commands:
            commands, since = newest, time.monotonic()
    arm_thread.stop("a new cube is being laid")
    pose, readings = arm_thread.pose, 0
    while readings < 2:  # At the second reading, the cycle of the first reading has sent the hold.
        await asyncio.sleep(POLL_PERIOD / 5)
        if arm_thread.pose is not pose:
            pose, readings = arm_thread.pose, readings + 1


def _unit(name: str) -> Unit:
    return Unit.GRIPPER if name == GRIPPER else Unit.PERCENT
