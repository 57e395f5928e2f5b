"""The demo's arm behind simulated servos: motions pass through units, steps and packets."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

import robojax.sim  # noqa: F401 - it selects MuJoCo's renderer before MuJoCo is imported
from robojax.client import AsyncClient
from robojax.robot.cameras import Camera, CameraConfig
from robojax.robot.config import RobotConfig, open_arm
from robojax.robot.errors import RobotError
from robojax.robot.runner import RobotRunner, run
from tests.testing.rig import REAL, started
from tests.testing.waiting import until, wait_until

pytest.importorskip("mujoco", reason="the extra 'sim' is not installed")
from robojax.sim import servos as simulated
from robojax.sim.servos import ServoArm

FRONT = CameraConfig("simulated", None, 64, 48, 25)


CONFIG = RobotConfig("simulated", cameras={"front": FRONT})


@pytest.fixture
def scene() -> ServoArm:
    return ServoArm(CONFIG)


def test_scene_follows_the_servos_and_the_camera_sees_it(scene: ServoArm) -> None:
    with scene, open_arm(RobotConfig("simulated"), scene.servos) as arm:
        folded = arm.read_pose()
        assert folded["shoulder_lift"] < -30  # The demo starts folded.
        time.sleep(0.2)
        assert arm.read_pose() == pytest.approx(folded, abs=1)  # An arm without torque does not move.
        arm.enable_torque()
        camera = Camera("front", FRONT, scene.open_camera)
        try:
            before = camera.newest(time.monotonic())
            arm.move({"shoulder_pan": 60.0})
            wait_until(lambda: (arm.read_pose() or folded)["shoulder_pan"] >= 55)
            pictures = camera.pictures
            wait_until(lambda: camera.pictures >= pictures + 2)
            after = camera.newest(time.monotonic())
        finally:
            camera.close()
    assert before.shape == (48, 64, 3)
    assert np.abs(before.astype(int) - after).max() > 50


def test_unknown_camera_is_refused_with_the_known_ones(scene: ServoArm) -> None:
    with pytest.raises(RobotError, match="no camera 'wrist'") as refused:
        Camera("wrist", FRONT, scene.open_camera)
    assert "front, top, side" in refused.value.then
    Camera("wrist", CameraConfig("simulated", "top", 32, 24, 25), scene.open_camera).close()


@pytest.mark.timeout(300)
async def test_new_cube_after_each_episode(scene: ServoArm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "EPISODE", 0.3)
    messages: list[str] = []

    cubes = [scene._arm.cube.tolist()]
    async with (
        started(transport=REAL, state=str(tmp_path), policy_owners=("policies",)) as server,
        AsyncClient(server.url) as client,
    ):
        await client.create("my_arm", "policies/act", camera_names=("front",), rate=25.0)
        session = client.session("my_arm")
        with scene:
            program = RobotRunner(CONFIG, server.url, session="my_arm", simulation=scene)
            robot = asyncio.create_task(run(program, messages.append))
            await until(lambda: scene.score.done == 2)
            cubes.append(scene._arm.cube.tolist())
            assert messages.count("moving") == 2
            # A new cube does not undo a person's stop.
            monkeypatch.setattr(simulated, "SETTLE", 1.0)
            await until(lambda: messages[-1].startswith("held: a new cube"))
            await session.stop()
            await until(lambda: any("robojax start my_arm continues" in line for line in messages))
            assert (await session.status()).status == "stopped"
            assert (scene.score.done, scene.score.lifted) == (2, 0)
            await session.start()
            await until(lambda: scene.score.done == 3)
            robot.cancel()
            await asyncio.gather(robot, return_exceptions=True)
    assert cubes[0] != cubes[1]
