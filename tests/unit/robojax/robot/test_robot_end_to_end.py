"""``robojax robot`` with a real server in a process of its own, and servos on a pseudo-terminal."""

import asyncio
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from safetensors.numpy import load_file, save_file

import robojax
from robojax.client import AsyncClient, Refused
from robojax.robot import bus, runner
from robojax.robot.arm import JOINTS
from robojax.robot.cameras import CameraConfig
from robojax.robot.checks import check_robot
from robojax.robot.config import RobotConfig
from robojax.robot.errors import ArmLost, RobotError
from robojax.robot.runner import RobotRunner, run
from robojax.robot.simulated_bus import SimulatedBus
from tests.faults import processes
from tests.faults.proxy import FaultProxy, fault_proxy
from tests.faults.script import Script
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy
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


async def test_policy_without_joint_names_needs_the_flag(config: RobotConfig, servos: SimulatedBus) -> None:
    needs = replace(SO100_REQUIREMENTS, joint_names=None)
    load = ScriptedLoader(lambda: ScriptedPolicy(needs))
    told: list[str] = []
    async with started(transport=REAL, load=load, parts={"read_requirements": lambda path, revision: needs}) as server:
        program = RobotRunner(config, server.url, session="arm", policy="policies/act", is_started=False)
        with pytest.raises(RobotError, match="send 6 names in the order of the policy's actions") as error:
            await run(program, told.append)
        assert error.value.then.endswith(f"--policy.joint_names={','.join(JOINTS)}")
        found = await asyncio.to_thread(lambda: list(check_robot(program)))
        assert [(each.level, each.fix) for each in found if each.name == "joints"] == [("fail", error.value.then)]
        assert load.loads == []
        assert all(servos.servo(servo)[bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())

        names = tuple(reversed(JOINTS))
        robot = asyncio.create_task(run(replace(program, joint_names=names), told.append))
        await until(lambda: any(line.startswith("ready") for line in told), f"ready; {told}")
        assert server.app.ctx.sessions.get("arm").new.joint_names == names
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(robot, 60)


class Rig:
    """The robot's program in session "arm" of a real server, with a person at its keys and another one at a client."""

    def __init__(self, servos: SimulatedBus, client: AsyncClient, url: str):
        self.servos, self.client, self.url = servos, client, url
        self.session = client.session("arm")
        self.keys: asyncio.Queue[str] = asyncio.Queue()
        self.told: list[str] = []

    async def create(self, transport: str) -> None:
        url = self.client.url if transport == "rooms" else transport
        await self.client.create("arm", "policies/act", camera_names=("front",), rate=50.0, transport_server_url=url)

    @asynccontextmanager
    async def running(self, config: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
        @asynccontextmanager
        async def keys() -> AsyncIterator["asyncio.Queue[str]"]:
            yield self.keys

        monkeypatch.setattr(runner, "keys", keys)
        program = RobotRunner(config, self.url, session="arm", rate=50.0, command_timeout=PATIENCE)
        robot = asyncio.create_task(run(program, self.told.append))
        try:
            yield
        finally:
            self.keys.put_nowait("q")
            await asyncio.wait_for(robot, 60)

    async def until_moving(self) -> None:
        count = self.goals
        await until(lambda: self.goals > count + 10, f"moving; {self.told}")

    async def until_told(self, text: str) -> None:
        await until(lambda: any(text in line for line in self.told), f"saying {text!r}; {self.told}")

    @property
    def goals(self) -> int:
        return len(self.servos.servo(1).written)

    async def until_latched(self, is_latched: bool) -> None:
        async def agree() -> bool:
            stats = (await self.session.status()).stats
            return (stats["robot_latched"] is not None, stats["emergency_stop"] is not None) == (is_latched,) * 2

        deadline = time.monotonic() + 60
        while not await agree():
            assert time.monotonic() < deadline, self.told
            await asyncio.sleep(0.02)


@asynccontextmanager
async def rig(servos: SimulatedBus, tmp_path: Path) -> AsyncIterator[tuple[Rig, FaultProxy]]:
    settings: dict[str, Any] = {"state": str(tmp_path / "state"), "policy_owners": ("policies",)}
    async with (
        started(transport=REAL, **settings) as server,
        fault_proxy(server.url) as wire,
        AsyncClient(server.url) as client,
    ):
        yield Rig(servos, client, wire.url), wire


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["server", "key"])
@pytest.mark.parametrize("transport", ["direct", "rooms"])
async def test_a_reset_of_the_session_releases_the_robots_latch(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, by: str
) -> None:
    async with rig(servos, tmp_path) as (it, _):
        await it.create(transport)
        async with it.running(config, monkeypatch):
            await it.until_moving()
            if by == "key":
                it.keys.put_nowait(" ")
            else:
                await it.session.emergency_stop("a person")
            if transport == "direct":
                await it.until_latched(True)
            await it.until_told("robojax reset arm")
            status = await it.session.status()
            assert status.status == "stopped"
            assert status.stats["emergency_stop"] == {"key": "key at the robot", "server": "a person"}[by]
            with pytest.raises(Refused, match="emergency stop is latched"):
                await it.session.start()

            await it.session.reset()
            await it.until_told("robojax start arm moves")
            count = it.goals
            await asyncio.sleep(0.3)
            assert it.goals == count  # a reset moves nothing
            await it.session.start()
            await it.until_moving()
            assert (await it.session.status()).stats["hold_code"] is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["server", "key"])
async def test_stop_during_a_lost_link_reaches_the_other_side(
    config: RobotConfig, servos: SimulatedBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    async with rig(servos, tmp_path) as (it, wire):
        await it.create("direct")
        async with it.running(config, monkeypatch):
            await it.until_moving()
            wire.is_refusing = True
            wire.cut()
            await it.until_told("server is gone")
            if by == "key":
                it.keys.put_nowait(" ")
                await it.until_told("could not be reached")
                assert (await it.session.status()).stats["emergency_stop"] is None
            else:
                await it.session.emergency_stop("a person")
            wire.heal()
            await it.until_latched(True)
            if by == "key":
                assert (await it.session.status()).stats["emergency_stop"] == "emergency stop by key"
                # A lost link does not release the latch.
                wire.cut()
                await until(lambda: it.told[-1].startswith("session arm: stopped"), f"link back; {it.told}")
                await it.until_latched(True)
            await it.session.reset()
            await it.until_latched(False)
            await it.session.start()
            await it.until_moving()


async def test_robot_ended_before_its_server_answers_is_limp(config: RobotConfig, servos: SimulatedBus) -> None:
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


async def test_policy_in_another_unit_is_refused_before_a_servo_is_touched(
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
    assert all(servos.servo(servo)[bus.TORQUE_ENABLE] == 0 for servo in JOINTS.values())


@pytest.mark.usefixtures("even_cameras")
def test_check_names_all_faults_and_moves_nothing(config: RobotConfig, servos: SimulatedBus, tmp_path: Path) -> None:
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
        "readings": "ok",
        "camera front": "ok",
        "server": "fail",
    } | dict.fromkeys(("policy", "joints", "units", "rate"), "warn")
    assert "3.0 V" in found["shoulder_lift"][1]
    assert "it is too hot" in found["wrist_roll"][1]
    assert before[1] == bytes(servos.servo(1).memory)

    # Servos that are missing, and a calibration that is, hide nothing of the others.
    servos.line.silent |= {3, 4}
    (tmp_path / "mine.json").unlink()
    found = look()
    assert (found["elbow_flex"][0], found["wrist_flex"][0]) == ("fail", "fail")
    assert (found["calibration"][0], found["port"][0], found["shoulder_pan"][0]) == ("fail", "ok", "ok")
    assert "3.0 V" in found["shoulder_lift"][1]
    assert "camera front" in found
    assert all(servos.servo(servo).written == [] for servo in JOINTS.values())


# Runs the second program as a background job of a terminal, as a shell does with "&".
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


def test_a_background_job_leaves_the_terminal_alone() -> None:
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
