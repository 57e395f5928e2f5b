"""``robojax robot`` with a real server in a process of its own, and servos on a pseudo-terminal."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import pytest

from robojax.client import AsyncClient
from robojax.robot import bus, runner
from robojax.robot.arm import JOINTS
from robojax.robot.cameras import CameraConfig
from robojax.robot.checks import check_robot
from robojax.robot.config import RobotConfig
from robojax.robot.errors import ArmLost, RobotError
from robojax.robot.runner import RobotRunner, run
from robojax.robot.simulated_bus import SimulatedBus
from service.testing import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
from tests.faults import processes
from tests.faults.script import Script
from tests.testing.rig import REAL, started
from tests.unit.robojax.robot.conftest import CALIBRATION

PATIENCE = 0.3
Found = TypeVar("Found")


@pytest.fixture
def config(servos: SimulatedBus, tmp_path: Path) -> RobotConfig:
    """A real arm, as far as the program can tell."""
    (tmp_path / "mine.json").write_text(json.dumps({name: asdict(joint) for name, joint in CALIBRATION.items()}))
    cameras = {"front": CameraConfig("simulated", None, 64, 48, 30)}
    return RobotConfig("so101_follower", servos.port, "mine", False, cameras, tmp_path)


async def until(claim: Callable[[], Found | None], what: str, within: float = 60.0) -> Found:
    deadline = time.monotonic() + within
    while not (found := claim()):
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        await asyncio.sleep(0.02)
    return found


@pytest.mark.timeout(300)  # it waits for a server and a robot that start again and again
async def test_the_servos_follow_the_policy_and_stop_whatever_ends_it(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAVE", 30.0)  # a busy machine's server takes longer to let a session go
    told: list[str] = []
    shoulder = servos.servo(1)

    async def moves() -> None:
        """The policy moves every joint up, a little at each action."""
        before, first = len(shoulder.written), shoulder[bus.GOAL_POSITION]
        await until(lambda: len(shoulder.written) > before + 20, f"moving; {told}")
        await until(lambda: shoulder[bus.GOAL_POSITION] > first, f"upwards; {told}")

    def standing() -> list[tuple[float, int, int]] | None:
        """Of each servo how long it was told nothing, how far it is from its goal, and its torque, at one moment."""
        with servos.lock:
            now = time.monotonic()
            if now <= shoulder.written[-1][0] + 2 * PATIENCE:
                return None
            each = [servos.servo(number) for number in JOINTS.values()]
            return [
                (
                    now - servo.written[-1][0],
                    abs(servo.written[-1][1] - servo[bus.PRESENT_POSITION]),
                    servo[bus.TORQUE_ENABLE],
                )
                for servo in each
            ]

    async def stands() -> None:
        """Since the watchdog's time is over, no servo was told anything."""
        for silence, distance, torque in await until(standing, f"standing; {told}"):
            assert silence > PATIENCE
            assert distance <= 4
            assert torque == 1

    script = Script(tmp_path / "policy")
    with processes.server(tmp_path / "server") as server:
        program = RobotRunner(
            config, server.url, session="arm", policy=str(script.folder), rate=50.0, command_timeout=PATIENCE
        )
        robot = asyncio.create_task(run(program, told.append))
        async with AsyncClient(server.url) as client:
            session = client.session("arm")
            await moves()

            await session.stop()
            await stands()
            await session.start()
            await moves()

            server.kill()
            await stands()
            await until(lambda: any("server is gone" in line for line in told), f"saying so; {told}")

            server.start()
            await session.restart()
            await session.start()
            await moves()

            # A servo drops out: nobody moves the others on.
            servos.line.silent.add(3)
            with pytest.raises(ArmLost, match="servo 3") as lost:
                await asyncio.wait_for(robot, 60)
            assert "held are shoulder_pan, shoulder_lift, wrist_flex" in str(lost.value)
            count = len(shoulder.written)
            assert abs(shoulder.written[-1][1] - shoulder[bus.PRESENT_POSITION]) <= 4
            assert await client.sessions() == []
            assert len(shoulder.written) == count

        # It holds after SIGTERM, too, and says so; Ctrl-C is the same.
        servos.line.silent.clear()
        robot = asyncio.create_task(run(program, told.append))
        await moves()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(robot, 60)
        assert told[-1].startswith("the arm is held")
        await stands()


async def test_a_policy_without_joint_names_needs_them_from_the_person(
    config: RobotConfig, servos: SimulatedBus
) -> None:
    needs = replace(SO100_REQUIREMENTS, joint_names=None)
    load = ScriptedLoader(lambda: ScriptedPolicy(needs))
    told: list[str] = []
    async with started(transport=REAL, load=load, parts={"read_requirements": lambda path, revision: needs}) as server:
        program = RobotRunner(config, server.url, session="arm", policy="policies/act", is_started=False)
        with pytest.raises(RobotError, match="send 6 names in the order of the policy's actions") as error:
            await run(program, told.append)
        assert error.value.then.endswith(f"--policy.joint_names={','.join(JOINTS)}")
        found = await asyncio.to_thread(lambda: list(check_robot(program)))
        assert [(each.level, each.fix) for each in found if each.name == "policy"] == [("fail", error.value.then)]
        assert load.loads == []
        assert all(servos.servo(servo)[bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())

        names = tuple(reversed(JOINTS))
        robot = asyncio.create_task(run(replace(program, joint_names=names), told.append))
        await until(lambda: any(line.startswith("ready") for line in told), f"ready; {told}")
        assert server.app.ctx.sessions.get("arm").new.joint_names == names
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(robot, 60)


async def test_a_program_that_is_ended_while_it_waits_for_the_server_touches_no_servo(
    config: RobotConfig, servos: SimulatedBus
) -> None:
    asked, told = asyncio.Event(), []

    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(says_nothing, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        robot = asyncio.create_task(run(RobotRunner(config, url, policy="p"), told.append))
        await asyncio.wait_for(asked.wait(), 60)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(robot, 60)
    assert told == ["ended; the arm got no command"]
    assert all(servos.servo(servo)[bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())


@pytest.mark.usefixtures("even_cameras")
def test_a_look_at_everything_names_what_is_wrong_and_moves_nothing(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path
) -> None:
    def look() -> dict[str, tuple[str, str]]:
        program = RobotRunner(config, "http://127.0.0.1:9")
        return {each.name: (each.level, each.found) for each in check_robot(program)}

    before = {servo: bytes(servos.servo(servo).memory) for servo in JOINTS.values()}
    servos.servo(2)[bus.PRESENT_VOLTAGE] = 30
    servos.servo(4)[bus.HOMING_OFFSET] = 9
    servos.servo(5).status = 4
    servos.servo(6)[bus.PRESENT_TEMPERATURE] = 65
    found = look()
    levels = {name: level for name, (level, _) in found.items()}
    assert levels == {"calibration": "ok", "port": "ok", "shoulder_pan": "ok", "shoulder_lift": "fail"} | {
        "elbow_flex": "ok",
        "wrist_flex": "fail",
        "wrist_roll": "fail",
        "gripper": "warn",
        "camera front": "ok",
        "server": "fail",
    }
    assert "3.0 V" in found["shoulder_lift"][1]
    assert "it is too hot" in found["wrist_roll"][1]
    assert before[1] == bytes(servos.servo(1).memory)

    servos.line.silent |= {3, 4}
    found = look()
    assert (found["elbow_flex"][0], found["wrist_flex"][0]) == ("fail", "fail")
    assert all(servos.servo(servo).written == [] for servo in JOINTS.values())
