"""The demo's arm behind simulated servos: a lift goes through units, steps and packets, and still is a lift."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

import robojax.sim  # noqa: F401 - it chooses how MuJoCo renders, before MuJoCo is imported
from robojax.client import AsyncClient
from robojax.robot import bus
from robojax.robot.arm import JOINTS, Arm, Unit, from_steps, to_steps
from robojax.robot.arm_thread import Follower, normalize_joint_name
from robojax.robot.cameras import Camera, CameraConfig
from robojax.robot.config import RobotConfig, open_arm
from robojax.robot.errors import RobotError
from robojax.robot.runner import RobotRunner, run
from robojax.robot.simulated_bus import SimulatedBus
from tests.testing.rig import REAL, started
from tests.testing.waiting import until
from tests.unit.robojax.robot.conftest import CALIBRATION

pytest.importorskip("mujoco", reason="the extra 'sim' is not installed")
from robojax.sim import servos as simulated
from robojax.sim.servos import ServoArm

FRONT = CameraConfig("simulated", None, 64, 48, 25)
TICK = 0.04  # seconds of the demo's clock
UNITS = {name: Unit.GRIPPER if name == "gripper" else Unit.PERCENT for name in JOINTS}


def test_the_demos_cube_is_lifted_through_the_bus(arm: Arm, servos: SimulatedBus) -> None:
    from robojax.sim.arm import JOINTS as WIRE
    from robojax.sim.arm import Arm as Simulation
    from robojax.sim.expert import Kinematics, interpolate_targets, plan_legs

    simulation = Simulation()
    simulation.reset(5)
    names = [normalize_joint_name(name) for name in WIRE]
    assert names == list(JOINTS)

    def feel() -> None:
        """The servos are where the simulated joints are."""
        with servos.lock:
            for name, value in zip(names, simulation.joints, strict=True):
                servos.servo(JOINTS[name]).set_position(to_steps(float(value), CALIBRATION[name], UNITS[name]))

    feel()
    arm.enable_torque()
    follower = Follower(JOINTS, command_timeout=0.5, max_relative_target=20.0)
    now, farthest = 0.0, 0.0
    for wanted in interpolate_targets(plan_legs(simulation, Kinematics(simulation))):
        command = dict(zip(WIRE, wanted.tolist(), strict=True))
        follower.command(command, now)
        pose = arm.read_pose()
        assert pose is not None
        goal = follower.compute_goal(pose, now).targets
        assert goal is not None
        arm.move(goal)
        assert arm.read_status("gripper") == []  # nobody confirms a target; what is asked after it is answered after it
        with servos.lock:
            told = [
                from_steps(servos.servo(servo)[bus.GOAL_POSITION], CALIBRATION[name], UNITS[name])
                for name, servo in JOINTS.items()
            ]
        farthest = max(farthest, *(abs(each - goal[name]) for each, name in zip(told, names, strict=True)))
        simulation.step(np.array(told))
        feel()
        now += TICK
    assert simulation.is_lifted
    # One step of a servo is 0.074 of -100..100.
    assert farthest < 0.08


@pytest.fixture
def scene() -> ServoArm:
    return ServoArm(RobotConfig("simulated", cameras={"front": FRONT}))


def test_the_scenes_joints_follow_the_servos_and_the_camera_sees_it(scene: ServoArm) -> None:
    with scene, open_arm(RobotConfig("simulated"), scene.servos) as arm:
        folded = arm.read_pose()
        assert folded is not None
        assert folded["shoulder_lift"] < -30  # as the demo begins
        time.sleep(0.2)
        assert arm.read_pose() == pytest.approx(folded, abs=1)  # an arm without torque stays where it is
        arm.enable_torque()
        camera = Camera("front", FRONT, scene.open_camera)
        try:
            before = camera.newest(time.monotonic())
            arm.move({"shoulder_pan": 60.0})
            deadline = time.monotonic() + 60
            while (arm.read_pose() or folded)["shoulder_pan"] < 55:
                assert time.monotonic() < deadline
            pictures = camera.pictures
            while camera.pictures < pictures + 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            after = camera.newest(time.monotonic())
        finally:
            camera.close()
    assert before.shape == (48, 64, 3)
    assert np.abs(before.astype(int) - after).max() > 50


def test_a_camera_that_the_scene_does_not_have_is_refused_with_those_it_has(scene: ServoArm) -> None:
    with pytest.raises(RobotError, match="no camera 'wrist'") as refused:
        Camera("wrist", FRONT, scene.open_camera)
    assert "front, top, side" in refused.value.then
    Camera("wrist", CameraConfig("simulated", "top", 32, 24, 25), scene.open_camera).close()


@pytest.mark.timeout(300)
async def test_a_new_cube_is_laid_after_each_episode_until_a_person_stops_the_session(
    scene: ServoArm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "EPISODE", 0.3)
    told: list[str] = []

    cubes = [scene._arm.cube.tolist()]
    async with (
        started(transport=REAL, state=str(tmp_path), policy_owners=("policies",)) as server,
        AsyncClient(server.url) as client,
    ):
        await client.create("my_arm", "policies/act", camera_names=("front",), rate=25.0)
        session = client.session("my_arm")
        config = RobotConfig("simulated", cameras={"front": FRONT})
        with scene:
            robot = asyncio.create_task(
                run(RobotRunner(config, server.url, session="my_arm", simulation=scene), told.append)
            )
            await until(lambda: scene.score.done == 2)
            cubes.append(scene._arm.cube.tolist())
            assert told.count("moving") == 2
            # A stop by a person while a cube is being laid is not undone.
            monkeypatch.setattr(simulated, "SETTLE", 1.0)
            await until(lambda: told[-1].startswith("held: a new cube"))
            await session.stop()
            await until(lambda: any("robojax start my_arm continues" in line for line in told))
            assert (await session.status()).status == "stopped"
            assert (scene.score.done, scene.score.lifted) == (2, 0)
            await session.start()
            await until(lambda: scene.score.done == 3)
            robot.cancel()
            await asyncio.gather(robot, return_exceptions=True)
    assert cubes[0] != cubes[1]
