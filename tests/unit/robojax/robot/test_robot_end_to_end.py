"""``robojax robot`` with a real server in another process, and servos on a pseudo-terminal."""

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

import robojax
from robojax.client import AsyncClient, AsyncSession, RequestRefused
from robojax.robot import bus, runner
from robojax.robot.arm import JOINTS
from robojax.robot.cameras import CameraConfig
from robojax.robot.checks import check_robot
from robojax.robot.config import RobotConfig
from robojax.robot.errors import ArmLost, RobotError, SessionTaken
from robojax.robot.lerobot_arm import LeRobotArm, configure_lerobot_arm
from robojax.robot.runner import RobotRunner, run
from robojax.robot.simulated_bus import SimulatedBus
from tests.faults import processes
from tests.faults.proxy import FaultProxy, fault_proxy
from tests.faults.script import Script
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
from tests.testing.rig import REAL, started
from tests.testing.waiting import until
from tests.unit.robojax.robot.conftest import CALIBRATION
from tests.unit.robojax.robot.test_lerobot_arm import FakeRobot

PATIENCE = 0.3


@pytest.fixture
def config(servos: SimulatedBus, tmp_path: Path) -> RobotConfig:
    """Return the config of an arm that looks real to the program."""
    (tmp_path / "mine.json").write_text(json.dumps({name: asdict(joint) for name, joint in CALIBRATION.items()}))
    cameras = {"front": CameraConfig("simulated", None, 64, 48, 30)}
    return RobotConfig("so101_follower", servos.port, "mine", False, cameras, tmp_path)


@pytest.mark.timeout(300)
async def test_servos_follow_the_policy_and_hold_in_each_failure(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAVE", 30.0)  # A server on a busy machine ends a session later.
    messages: list[str] = []
    shoulder = servos.line.servos[1]

    async def moves() -> None:
        """Wait until the policy moves the joints up in small steps."""
        before, first = len(shoulder.written), shoulder[bus.GOAL_POSITION]
        await until(lambda: len(shoulder.written) > before + 20, within=60)
        await until(lambda: shoulder[bus.GOAL_POSITION] > first, within=60)

    def is_silent() -> bool:
        return time.monotonic() > shoulder.written[-1][0] + 2 * PATIENCE

    async def expect_hold() -> None:
        """Wait until the goals stop after the watchdog's time, and check that each servo holds its last goal."""
        await until(is_silent, within=60)
        with servos.lock:
            now = time.monotonic()
            for servo in (servos.line.servos[number] for number in JOINTS.values()):
                written, goal = servo.written[-1]
                assert now - written > PATIENCE
                assert abs(goal - servo[bus.PRESENT_POSITION]) <= 4
                assert servo[bus.TORQUE_ENABLE] == 1

    script = Script(tmp_path / "policy")
    with processes.server(tmp_path / "server") as server:
        program = RobotRunner(
            config, server.url, session="arm", policy=str(script.folder), rate=50.0, command_timeout=PATIENCE
        )
        robot = asyncio.create_task(run(program, messages.append))
        async with AsyncClient(server.url) as client:
            session = client.session("arm")
            await moves()

            await session.stop()
            await expect_hold()
            await session.start()
            await moves()

            server.kill()
            await expect_hold()
            await until(lambda: any("server is gone" in line for line in messages), within=60)

            server.start()
            await session.restart()
            await session.start()
            await moves()

            # When a servo fails, the others stop.
            servos.line.silent.add(3)
            with pytest.raises(ArmLost, match="servo 3") as lost:
                await asyncio.wait_for(robot, 60)
            assert "held are shoulder_pan, shoulder_lift, wrist_flex" in str(lost.value)
            count = len(shoulder.written)
            assert abs(shoulder.written[-1][1] - shoulder[bus.PRESENT_POSITION]) <= 4
            assert await client.sessions() == []
            assert len(shoulder.written) == count

        # The program also holds the arm after SIGTERM and after Ctrl-C.
        servos.line.silent.clear()
        robot = asyncio.create_task(run(program, messages.append))
        await moves()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(robot, 60)
        assert messages[-1].startswith("the arm is held")
        await expect_hold()


async def test_policy_without_joint_names_needs_the_flag(config: RobotConfig, servos: SimulatedBus) -> None:
    needs = replace(SO100_REQUIREMENTS, joint_names=None)
    load = ScriptedLoader(lambda: ScriptedPolicy(needs))
    messages: list[str] = []
    async with started(transport=REAL, load=load, parts={"read_requirements": lambda path, revision: needs}) as server:
        program = RobotRunner(config, server.url, session="arm", policy="policies/act", is_started=False)
        with pytest.raises(RobotError, match="send 6 names in the order of the policy's actions") as error:
            await run(program, messages.append)
        assert error.value.then.endswith(f"--policy.joint_names={','.join(JOINTS)}")
        found = await asyncio.to_thread(lambda: list(check_robot(program)))
        assert [(each.level, each.fix) for each in found if each.name == "joints"] == [("fail", error.value.then)]
        assert load.loads == []
        assert all(servos.line.servos[servo][bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())

        names = tuple(reversed(JOINTS))
        robot = asyncio.create_task(run(replace(program, joint_names=names), messages.append))
        await until(lambda: any(line.startswith("ready") for line in messages), within=60)
        assert server.app.ctx.sessions.get("arm").new.joint_names == names
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(robot, 60)


@dataclass
class Rig:
    """The robot's program in session "arm" of a real server, with its keys and a client of the session."""

    config: RobotConfig
    servos: SimulatedBus
    client: AsyncClient
    wire: FaultProxy
    monkeypatch: pytest.MonkeyPatch
    keys: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    messages: list[str] = field(default_factory=list)

    @property
    def session(self) -> AsyncSession:
        return self.client.session("arm")

    async def create(self, transport: str) -> None:
        url = self.client.url if transport == "rooms" else transport
        await self.client.create("arm", "policies/act", camera_names=("front",), rate=50.0, transport_server_url=url)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.monkeypatch.setattr(runner, "keys", lambda: nullcontext(self.keys))
        program = RobotRunner(self.config, self.wire.url, session="arm", rate=50.0, command_timeout=PATIENCE)
        robot = asyncio.create_task(run(program, self.messages.append))
        try:
            yield
        finally:
            self.keys.put_nowait("q")
            await asyncio.wait_for(robot, 60)

    async def until_moving(self) -> None:
        count = self.goals
        await until(lambda: self.goals > count + 10, within=60)

    async def until_reported(self, text: str) -> None:
        await until(lambda: any(text in line for line in self.messages), within=60)

    @property
    def goals(self) -> int:
        return len(self.servos.line.servos[1].written)

    async def until_latched(self, is_latched: bool) -> None:
        async def agree() -> bool:
            stats = (await self.session.status()).stats
            return (stats["robot_latched"] is not None, stats["emergency_stop"] is not None) == (is_latched,) * 2

        await until(agree, within=60)


@pytest.fixture
async def rig(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    settings: dict[str, Any] = {"state": str(tmp_path / "state"), "policy_owners": ("policies",)}
    async with (
        started(transport=REAL, **settings) as server,
        fault_proxy(server.url) as wire,
        AsyncClient(server.url) as client,
    ):
        yield Rig(config, servos, client, wire, monkeypatch)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["server", "key"])
@pytest.mark.parametrize("transport", ["direct", "rooms"])
async def test_reset_of_the_session_releases_the_latch_of_the_robot(rig: Rig, transport: str, by: str) -> None:
    await rig.create(transport)
    async with rig.running():
        await rig.until_moving()
        if by == "key":
            rig.keys.put_nowait(" ")
        else:
            await rig.session.emergency_stop("a person")
        if transport == "direct":
            await rig.until_latched(True)
        await rig.until_reported("robojax reset arm")
        status = await rig.session.status()
        assert status.status == "stopped"
        assert status.stats["emergency_stop"] == {"key": "key at the robot", "server": "a person"}[by]
        with pytest.raises(RequestRefused, match="emergency stop is latched"):
            await rig.session.start()

        await rig.session.reset()
        await rig.until_reported("robojax start arm moves")
        count = rig.goals
        await asyncio.sleep(0.3)
        assert rig.goals == count  # A reset does not move the arm.
        await rig.session.start()
        await rig.until_moving()
        assert (await rig.session.status()).stats["hold_code"] is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["server", "key"])
async def test_stop_during_a_lost_link_is_delivered_later(rig: Rig, by: str) -> None:
    await rig.create("direct")
    async with rig.running():
        await rig.until_moving()
        rig.wire.is_refusing = True
        rig.wire.cut()
        await rig.until_reported("server is gone")
        if by == "key":
            rig.keys.put_nowait(" ")
            await rig.until_reported("could not be reached")
            assert (await rig.session.status()).stats["emergency_stop"] is None
        else:
            await rig.session.emergency_stop("a person")
        rig.wire.heal()
        await rig.until_latched(True)
        if by == "key":
            assert (await rig.session.status()).stats["emergency_stop"] == "emergency stop by key"
            # A lost link does not release the latch.
            rig.wire.cut()
            await until(lambda: rig.messages[-1].startswith("session arm: stopped"), within=60)
            await rig.until_latched(True)
        await rig.session.reset()
        await rig.until_latched(False)
        await rig.session.start()
        await rig.until_moving()


async def test_second_robot_of_a_session_does_not_stop_the_first(rig: Rig) -> None:
    await rig.create("direct")
    async with rig.running():
        await rig.session.start()
        await rig.until_moving()
        arm = LeRobotArm(FakeRobot(list(JOINTS)[:-1]), {})
        with pytest.raises(SessionTaken, match="another client"):
            await run(RobotRunner(configure_lerobot_arm(arm), rig.client.url, session="arm", lerobot=arm), str)
        assert (await rig.session.status()).is_moving
        await rig.until_moving()


async def test_robot_that_ends_before_its_server_answers_is_limp(config: RobotConfig, servos: SimulatedBus) -> None:
    asked, messages = asyncio.Event(), []

    async def send_no_response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(send_no_response, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        robot = asyncio.create_task(run(RobotRunner(config, url, policy="p"), messages.append))
        await asyncio.wait_for(asked.wait(), 60)
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(robot, 60)
    assert messages == ["ended; the arm got no command"]
    assert all(servos.line.servos[servo][bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())


async def test_policy_in_another_unit_is_refused_before_motion(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(Path(robojax.__file__).parent / "sim" / "policy", folder)
    (folder / "robojax.json").write_text(json.dumps({"rate": 25.0, "joint_names": list(JOINTS)}))
    statistics = folder / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
    tensors = load_file(statistics)
    tensors["action.max"][0] = 120.0
    save_file(tensors, statistics)
    async with started(transport=REAL, state=str(tmp_path / "state"), policy_roots=(str(tmp_path),)) as server:
        program = RobotRunner(config, server.url, policy=str(folder))
        with pytest.raises(RobotError) as refused:
            await run(program, lambda text: None)
        found = await asyncio.to_thread(lambda: {each.name: each for each in check_robot(program)})
    flag = "--robot.use_degrees=true"
    assert flag in f"{refused.value} {refused.value.then}"
    assert (found["units"].level, flag in found["units"].found + found["units"].fix) == ("fail", True)
    assert all(servos.line.servos[servo][bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())


@pytest.mark.usefixtures("even_cameras")
def test_check_names_all_faults_without_motion(config: RobotConfig, servos: SimulatedBus, tmp_path: Path) -> None:
    def look() -> dict[str, tuple[str, str]]:
        program = RobotRunner(config, "http://127.0.0.1:9")
        return {each.name: (each.level, each.found) for each in check_robot(program)}

    before = {servo: bytes(servos.line.servos[servo].memory) for servo in JOINTS.values()}
    servos.line.servos[2][bus.PRESENT_VOLTAGE] = 30
    servos.line.servos[4][bus.HOMING_OFFSET] = 9
    servos.line.servos[5].status = 4
    servos.line.servos[6][bus.PRESENT_TEMPERATURE] = 65
    found = look()
    wanted = {
        "ok": ("calibration", "port", "shoulder_pan", "elbow_flex", "readings", "camera front"),
        "warn": ("gripper", "policy", "joints", "units", "rate"),
        "fail": ("shoulder_lift", "wrist_flex", "wrist_roll", "server"),
    }
    assert {name: level for name, (level, _) in found.items()} == {
        name: level for level, names in wanted.items() for name in names
    }
    assert "3.0 V" in found["shoulder_lift"][1]
    assert "it is too hot" in found["wrist_roll"][1]
    assert before[1] == bytes(servos.line.servos[1].memory)

    # Missing servos and a missing calibration do not hide findings about the others.
    servos.line.silent |= {3, 4}
    (tmp_path / "mine.json").unlink()
    found = look()
    assert (found["elbow_flex"][0], found["wrist_flex"][0]) == ("fail", "fail")
    assert (found["calibration"][0], found["port"][0], found["shoulder_pan"][0]) == ("fail", "ok", "ok")
    assert "3.0 V" in found["shoulder_lift"][1]
    assert "camera front" in found
    assert all(servos.line.servos[servo].written == [] for servo in JOINTS.values())


# Run the second program as a background job of a terminal, as a shell does with "&".
BACKGROUND_JOB = """
import fcntl, os, signal, subprocess, sys, termios

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
job = subprocess.Popen([sys.executable, "-c", sys.argv[1]], process_group=0)
status = os.waitpid(job.pid, os.WUNTRACED)[1]
if os.WIFSTOPPED(status):
    os.kill(job.pid, signal.SIGKILL)
sys.exit("the system stopped the job" if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status))
"""
WITH_KEYS = """
import asyncio
from robojax.robot.runner import keys

async def main():
    async with keys() as pressed:
        print(pressed.qsize(), "keys")

asyncio.run(main())
"""


def test_background_job_does_not_use_the_terminal() -> None:
    terminal, its_side = pty.openpty()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", BACKGROUND_JOB, WITH_KEYS],
            stdin=its_side,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(terminal)
        os.close(its_side)
    assert (ended.returncode, ended.stdout) == (0, "0 keys\n"), ended.stderr
