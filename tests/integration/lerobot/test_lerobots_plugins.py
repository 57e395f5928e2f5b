"""LeRobot's robots in ``robojax robot``, and the policy plugin in ``lerobot-rollout``, with a server process."""

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from robojax.client import AsyncClient
from tests.testing.lerobot_process import ROOT, running
from tests.testing.peers import LEROBOT_PYTHON, require_peers
from tests.testing.waiting import until

pytestmark = [pytest.mark.needs_peers, pytest.mark.timed]
require_peers("lerobot")
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
POLICY = ROOT / "plugins" / "lerobot_policy_robojax"
HALF = (3195 - 900) / 2 * 360 / 4095  # Degrees of half the calibrated range.


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Any, str]]:
    """Start a server; return its process and its URL."""
    serve = (sys.executable, "-m", "robojax.cli", "serve", "--port", "0", "--state", "off")
    async with running(*serve, folder=tmp_path, cwd=ROOT) as process:
        assert process.stdout is not None
        (url,) = re.findall(r"serves at (\S+)", (await process.stdout.readline()).decode())
        yield process, url


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Install both plugins for LeRobot's Python, and calibrate the robot; return the robot's flags."""
    for name in ("lerobot_robot_simulated", "lerobot_policy_robojax"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    shutil.copy(ROOT / "tests" / "testing" / "lerobot_robot_simulated.py", tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, POLICY, tmp_path))))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    joint = {"drive_mode": 0, "homing_offset": 0, "range_min": 900, "range_max": 3195}
    calibration = {name: {"id": number, **joint} for number, name in enumerate(JOINTS, 1)}
    (tmp_path / "arm.json").write_text(json.dumps(calibration))
    values = {"type": "simulated_plugin", "id": "arm", "calibration_dir": tmp_path, "actions": tmp_path / "actions"}
    return tuple(f"--robot.{name}={value}" for name, value in values.items())


def read_events(folder: Path) -> list[dict[str, Any]]:
    file = folder / "actions"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def targets(events: list[dict[str, Any]], joint: str) -> list[float]:
    return [event[f"{joint}.pos"] for event in events if event["event"] == "action"]


async def test_robot_of_a_plugin_stays_in_limits_and_holds(
    server: tuple[Any, str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    process, url = server
    command = (str(LEROBOT_PYTHON), "-m", "robojax.cli", "robot", "--lerobot", *flags, "--limit=shoulder_lift=-95:-60")
    command += (f"--server={url}", "--policy.path=robojax/sim/policy")

    check = await asyncio.create_subprocess_exec(
        *command, "--check", "--json", cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    findings = json.loads((await asyncio.wait_for(check.communicate(), 120))[0])
    levels = {finding["name"]: finding["level"] for finding in findings}
    assert levels | {"shoulder_lift": "ok", "camera front": "ok", "joints": "ok", "units": "warn"} == levels
    assert [event["event"] for event in read_events(tmp_path)] == ["disconnect"]

    async def expect_hold() -> None:
        """Wait until the robot gets no action for a second; its last action is then the pose that it had."""
        await until(lambda: read_events(tmp_path)[-1]["time"] < time.time() - 1, within=30)

    async with running(*command, folder=tmp_path, cwd=ROOT) as robot, AsyncClient(url) as client:
        session = client.session("arm")
        await until(lambda: -60.0 in targets(read_events(tmp_path), "shoulder_lift"), within=120)
        await session.stop()
        await expect_hold()
        before = len(read_events(tmp_path))
        await session.start()
        await until(lambda: len(read_events(tmp_path)) > before + 20, within=30)

        process.kill()
        await expect_hold()
        assert robot.returncode is None
        robot.terminate()
        assert await asyncio.wait_for(robot.wait(), 30) == 0
    events = read_events(tmp_path)
    assert events[-1]["event"] == "disconnect"
    ranges = {joint: (-HALF, HALF) for joint in JOINTS} | {"shoulder_lift": (-95, -60), "gripper": (0, 100)}
    for joint, (low, high) in ranges.items():
        assert low <= min(targets(events, joint)) <= max(targets(events, joint)) <= high
    elbow = targets(events, "elbow_flex")
    assert elbow[0] == 90.0  # The first action holds the robot where it was.
    assert min(elbow) < 70
    assert max(abs(after - before) for before, after in pairwise(elbow)) <= HALF / 5 + 0.01


async def test_rollout_executes_actions_of_the_server(
    server: tuple[Any, str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    _, url = server
    rollout = (str(LEROBOT_PYTHON), "-m", "lerobot.scripts.lerobot_rollout", "--strategy.type=base", *flags)
    rollout += ("--policy.type=robojax", f"--policy.server={url}", f"--policy.joint_names=[{','.join(JOINTS)}]")
    rollout += ("--fps=25", "--duration=3", "--task=lift the cube", "--return_to_initial_position=false")

    async def run(*more: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(*rollout, *more, cwd=tmp_path, stderr=asyncio.subprocess.PIPE)
        _, errors = await asyncio.wait_for(process.communicate(), 120)
        return process.returncode, errors.decode()

    code, errors = await run("--policy.policy_path=robojax/sim/policy", "--policy.fps=25")
    assert code == 0, errors
    elbow = targets(read_events(tmp_path), "elbow_flex")
    assert len(elbow) > 20
    assert elbow[0] != elbow[-1]
    assert max(elbow) - min(elbow) > 1  # Degrees.
    async with AsyncClient(url) as client:
        assert await client.sessions() == []  # The plugin removed its session.

    code, errors = await run(f"--policy.policy_path={tmp_path / 'missing'}")
    assert code != 0
    assert "RequestRefused" in errors
    assert str(tmp_path / "missing") in errors
