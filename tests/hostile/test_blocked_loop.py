"""A robot moves while the server's event loop is blocked in Python or in C, or the whole process is paused."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from robojax.robot.arm import normalize_joint_name
from robojax.robot.arm_thread import JointTracker
from service import signal_guard
from tests.faults.arm import Arm, arm, is_moving
from tests.faults.processes import ROOT, Process, process, rooms, server
from tests.faults.proxy import fault_proxy
from tests.faults.robot import JOINTS, PERIOD
from tests.faults.script import Script, load, read
from tests.testing.rig import REAL, expect_refusal, started

BLOCK = 0.9  # Seconds: longer than the robot's own hold timeout of 0.5 s.
PATIENCE = 0.5  # Hold timeout of the robot's side, in seconds.
PAUSE = float(os.environ.get("FAULTS_PAUSE", "1.5"))  # Seconds for which the whole process is paused.
_numbers = count(1)


@dataclass
class Place:
    folder: Path
    server: Process
    rooms: Process

    def block(self, how: str, seconds: float) -> float:
        """Block the event loop and return the time at which the block began."""
        (self.folder / "block").write_text(f"{how} {seconds}")
        self.server.send(signal.SIGUSR1)
        return time.monotonic()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("blocked")
    with ExitStack() as own:
        transport = own.enter_context(rooms(folder))
        blocked = own.enter_context(server(folder / "server", env={"FAULTS_BLOCK": str(folder / "block")}))
        yield Place(folder, blocked, transport)


@pytest.fixture
async def moving(place: Place) -> AsyncIterator[tuple[Arm, Script]]:
    if not place.server.is_alive:
        await place.server.start_again()
    async with AsyncExitStack() as stack:
        policy = Script(place.folder / f"policy{next(_numbers)}")
        made = await stack.enter_async_context(arm(place.server, policy, f"arm{next(_numbers)}"))
        made.route_through(place.rooms)
        await made.go()
        yield made, policy


async def _figures(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        lines = re.findall(r"^robojax_((?:loop|process)_\w+) (\S+)$", await answer.text(), re.MULTILINE)
    return {name: float(value) for name, value in lines}


async def _until_logged(place: Place, since: int, text: str) -> str:
    deadline = time.monotonic() + 20
    while not (found := re.search(f".*{text}.*", place.server.words()[since:])):
        assert time.monotonic() < deadline, place.server.words()[since:]
        await asyncio.sleep(0.02)
    return found[0]


async def _followed(arm: Arm, tracker: JointTracker, until: float) -> float | None:
    """Return the time at which the robot's side held the arm, as the tracker receives its motion."""
    received, pose = len(arm.history.commands), dict.fromkeys(map(normalize_joint_name, JOINTS), 0.0)
    while (now := time.monotonic()) < until:
        for command in arm.history.commands[received:]:
            received += 1
            tracker.command(command.values, command.at)
        tracker.compute_goal(pose, now)
        if tracker.commands and tracker.hold is not None:
            return now
        await asyncio.sleep(0.005)
    return None


@pytest.mark.parametrize("how", ["sleep", "held"])
async def test_blocked_loop_is_logged_while_the_robot_holds(place: Place, moving: tuple[Arm, Script], how: str) -> None:
    arm, _ = moving
    before, logged = await _figures(place.server.url), len(place.server.words())
    tracker = JointTracker(map(normalize_joint_name, JOINTS), PATIENCE)
    following = asyncio.create_task(_followed(arm, tracker, time.monotonic() + 20))
    await arm.moves(3)
    began = place.block(how, BLOCK)
    held_at = await following
    assert held_at is not None
    assert tracker.hold == "no command for 500 ms"
    assert held_at - began <= PATIENCE + 0.2 + arm.meter.worst(began)
    assert " in block (faults/scripted_server.py:" in await _until_logged(place, logged, "loop has been blocked for")
    await _until_logged(place, logged, "loop was blocked for")
    # The first request after the block may be answered before the first tick after it.
    await arm.until(lambda session: is_moving(session) and "paused" in session["stats"]["holds"])
    after = await _figures(place.server.url)
    assert after["loop_blocked_total"] >= before["loop_blocked_total"] + 1
    assert after["loop_blocked_seconds_total"] - before["loop_blocked_seconds_total"] >= 0.5 * BLOCK
    assert arm.session["stats"]["holds"]["paused"] == 1


@pytest.mark.parametrize("gives_up", [False, True])
async def test_stop_during_a_block_precedes_motion(place: Place, moving: tuple[Arm, Script], gives_up: bool) -> None:
    """A stop takes effect after a block even if the client no longer waits for the response."""
    arm, _ = moving
    for _ in range(10):
        began = place.block("sleep", BLOCK)
        await asyncio.sleep(0.2)
        pressing = arm.call("POST", f"/sessions/{arm.id}/emergency_stop", {"reason": "a hand"}, 0.3 if gives_up else 30)
        if gives_up:
            with pytest.raises(TimeoutError):
                await pressing
        else:
            assert (await pressing)[0] == 200
        session = await arm.until(lambda session: session["status"] == "stopped")
        assert session["stats"]["emergency_stop"] == "a hand"
        await asyncio.sleep(0.2)
        if arm.meter.worst(began) < 0.2 * BLOCK:
            break
        # If this process was paused, the order of the stop and the end of the block is unknown.
        await arm.ask_debug("reset")
        await arm.ask("start")
        await arm.moves(3)
    assert arm.history.motions(began + 0.5 * BLOCK) == []


async def test_f24_robot_of_a_paused_process_replans(place: Place, moving: tuple[Arm, Script]) -> None:
    """Fault F24: one hold, no expired action, reconnected links, and a separate counter for the pause."""
    arm, _ = moving
    before, logged = await _figures(place.server.url), len(place.server.words())
    place.server.send(signal.SIGSTOP)
    await asyncio.sleep(PAUSE)
    resumed = time.monotonic()
    place.server.send(signal.SIGCONT)
    assert arm.first_observation(await arm.moves(20)) > resumed - 0.1
    await _until_logged(place, logged, "this process was paused for")
    after = await _figures(place.server.url)
    assert after["process_paused_total"] == before["process_paused_total"] + 1
    assert after["process_paused_seconds_total"] - before["process_paused_seconds_total"] >= 0.8 * PAUSE
    assert after["loop_blocked_total"] - before["loop_blocked_total"] <= arm.meter.pauses(resumed)
    holds = (await arm.until(is_moving))["stats"]["holds"]
    assert holds.get("paused", 0) + holds.get("link_lost", 0) >= 1
    assert holds.get("paused", 0) <= 1 + arm.meter.pauses(resumed)


@pytest.mark.parametrize("move", ["emergency_stop", "stop", "delete"])
async def test_stop_is_prompt_while_an_inference_hangs(place: Place, moving: tuple[Arm, Script], move: str) -> None:
    """The inference hangs in its thread while the robot executes the previous action chunk."""
    arm, policy = moving
    try:
        policy.set_mode("hang")
        await arm.until(lambda session: session["stats"]["watch"]["inference_age_ms"])
        pressed = time.monotonic()
        method, path = ("DELETE", "") if move == "delete" else ("POST", f"/{move}")
        status, answer = await arm.call(method, f"/sessions/{arm.id}{path}")
        assert status == 200, answer
        if move != "delete":
            answered = time.monotonic() - pressed
            assert answered <= 0.1 + arm.meter.lost(pressed), "the response does not wait for the inference"
            session = await arm.until(lambda session: session["status"] == "stopped")
            assert bool(session["stats"]["emergency_stop"]) == (move == "emergency_stop")
        arm.check_motion_ended(pressed, PERIOD + 0.02)
    finally:
        policy.set_mode("good")


async def test_only_one_of_two_servers_commands_the_robot_of_a_session(place: Place) -> None:
    """Two independent servers use one session id in one workspace: the rooms stay with the first session."""
    policy = Script(place.folder / f"policy{next(_numbers)}")
    async with (
        started(transport=REAL, load=load, parts={"read_requirements": read}) as other,
        fault_proxy(place.rooms.url) as proxy,
        AsyncExitStack() as stack,
    ):
        # A proxy that can fail is between the moving session and the server.
        cut = await stack.enter_async_context(arm(place.server, policy, f"arm{next(_numbers)}"))
        cut.transport_url = proxy.url
        await cut.create(workspace_id=cut.id)
        await cut.connect(place.rooms.url)
        await cut.ask("start")
        await cut.moves(5)

        async def claim() -> tuple[int, Any]:
            body = cut.body(workspace_id=cut.id, session_id=cut.id, transport_server_url=place.rooms.url)
            return await other.call("POST", "/sessions", json=body)

        expect_refusal(await claim(), 409, "robot_taken", "is commanded by participant")
        proxy.is_refusing = True
        proxy.cut()
        await cut.until(lambda session: session["stats"]["watch"]["links_lost"])
        for _ in range(5):  # The room is reserved for its session.
            status, reply = await claim()
            assert status == 502, reply
            assert "only the session that this room belongs to may command its robot" in reply["detail"]
            await asyncio.sleep(0.1)
        proxy.heal()
        async with asyncio.timeout(30):  # The first session moves the robot again.
            await cut.moves(5)
        assert (await claim())[0] in (409, 502)


async def test_sigterm_ends_a_server_blocked_in_c_and_breaks_the_link(place: Place, moving: tuple[Arm, Script]) -> None:
    arm, _ = moving
    logged = len(place.server.words())
    place.block("held", 60)
    await asyncio.sleep(0.2)
    asked = time.monotonic()
    place.server.send(signal.SIGTERM)
    try:
        assert await asyncio.to_thread(place.server.ended, 30) == -signal.SIGKILL
        assert time.monotonic() - asked <= 5 + arm.meter.lost(asked)
    finally:
        place.server.kill()
    words = place.server.words()[logged:]
    assert "its event loop is blocked" in words
    assert re.search(r'scripted_server.py", line \d+ in block', words)
    assert arm.history.motions(asked + 0.1 + arm.meter.worst(asked)) == []

    async def listed() -> set[str]:
        return {arm.id}  # The next server lists the session of a killed server.

    arm.listed = listed


def test_sigterm_ends_a_server_blocked_in_python(tmp_path: Path) -> None:
    (tmp_path / "block").write_text("sleep 60")
    env = {"FAULTS_BLOCK": str(tmp_path / "block")}
    with process(tmp_path / "log", "tests.faults.scripted_server", "transport", "--port", "0", env=env) as running:
        running.send(signal.SIGUSR1)
        time.sleep(0.2)
        for _ in range(2):
            running.send(signal.SIGTERM)
            time.sleep(0.1)
        assert running.ended(30) == -signal.SIGKILL
        assert "its event loop is blocked, and it was signalled again" in running.words()
        assert "in block" in running.words()


# A process that acknowledges SIGTERM or is too busy to, and never ends by itself; its guard has other timeouts.
UNRESPONSIVE = """
import signal, sys, time
from service import signal_guard

signal_guard.__file__ = sys.argv[1]
guard = signal_guard.SignalGuard()
signal.signal(signal.SIGTERM, lambda *_: guard.acknowledge() if sys.argv[2] == "hears" else None)
guard.start((signal.SIGTERM,))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("what", "reaction", "end", "why"),
    [("hears", 20.0, 0.3, "its end takes too long"), ("is busy", 0.3, 20.0, "its event loop is blocked")],
)
def test_process_that_does_not_end_is_killed(tmp_path: Path, what: str, reaction: float, end: float, why: str) -> None:
    text = Path(signal_guard.__file__).read_text()
    for name, before, after in (
        ("REACTION_TIMEOUT", signal_guard.REACTION_TIMEOUT, reaction),
        ("END_TIMEOUT", signal_guard.END_TIMEOUT, end),
    ):
        line = f"\n{name} = {before}\n"
        assert line in text
        text = text.replace(line, f"\n{name} = {after}\n")
    (tmp_path / "guard.py").write_text(text)
    command = [sys.executable, "-c", UNRESPONSIVE, str(tmp_path / "guard.py"), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as running:
        try:
            assert running.stdout.readline() == "ready\n"
            running.send_signal(signal.SIGTERM)
            _, logged = running.communicate(timeout=10)
        finally:
            running.kill()
    assert running.returncode == -signal.SIGKILL
    assert f"robojax: {why}, so process {running.pid} is killed" in logged
