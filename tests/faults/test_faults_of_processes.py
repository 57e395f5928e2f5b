"""Faults F13, F14, F20 to F22 and F25 of the server process: signals, kills, clock changes, concurrent requests."""

import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.arm import Arm
from tests.faults.processes import ROOT, Process, server
from tests.faults.script import Script
from tests.testing.waiting import until

Make = Callable[..., Any]
PERIOD = 0.02
SHIPPED = ROOT / "robojax" / "sim" / "policy"


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]], ids=["SIGTERM", "SIGHUP"])
async def test_f13_signal_holds_all_robots_and_ends_the_server_in_5_s(
    transport: Process,
    mortal: Process,
    script: Callable[..., Script],
    arms: Make,
    moment: random.Random,
    numbers: list[signal.Signals],
) -> None:
    """Each robot gets HOLD in 100 ms, and the server exits with 0 in 5 s. A closed terminal sends SIGHUP twice."""
    ending, policy = mortal, script()
    many: list[Arm] = [await arms(ending, policy) for _ in range(4)]
    for arm in many:
        arm.route_through(transport)
    await asyncio.gather(*(arm.go() for arm in many))
    await asyncio.sleep(moment.uniform(0.1, 0.6))
    began = time.monotonic()
    for number in numbers:
        ending.send(number)
    code = await asyncio.to_thread(ending.ended, 60)
    took = time.monotonic() - began
    assert code == 0, ending.words()[-2000:]
    assert took <= 5 + max(arm.meter.lost(began) for arm in many), f"it took {took:.2f} s"
    async with aiohttp.ClientSession() as http:
        for arm in many:
            arm.history.breaks += [began, began + took]
            late = arm.meter.worst(began)
            arm.check_motion_ended(began, 0.1)
            held = [
                at for at, target in arm.history.targets(began) if (r := arm.history.pose.read(target)) and r.is_hold
            ]
            assert held, "no hold arrived"
            assert held[0] - began <= 0.1 + late
            assert await _rooms_of(http, transport, [arm.rooms.workspace_id]) == [], "rooms are left behind"
    await ending.start_again()


async def test_f14_killed_server_lists_sessions_as_interrupted(
    transport: Process, mortal: Process, script: Callable[..., Script], moment: random.Random
) -> None:
    """SIGKILL at random moments: no session is lost, none starts by itself, orphaned rooms are removed."""
    dying, policy = mortal, script()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        acknowledged: dict[str, bool] = {}  # Session id -> whether it exists; None if unknown.
        doubtful: set[str] = set()
        tried: list[str] = []
        listed: dict[str, Any] = {}
        names = (f"killed{number}" for number in itertools.count())

        async def ask(method: str, path: str, body: Any = None) -> int:
            async with http.request(method, dying.url + path, json=body) as answer:
                await answer.read()
                return answer.status

        async def one(name: str) -> None:
            body = {"session_id": name, "policy_path": str(policy.folder), "transport_server_url": transport.url}
            doubtful.add(name)
            tried.append(name)
            if await ask("POST", "/sessions", {**body, "workspace_id": name}) == 200:
                doubtful.discard(name)
                acknowledged[name] = True
                await ask("POST", f"/sessions/{name}/start")
                if moment.random() < 0.5:
                    doubtful.add(name)
                    assert await ask("DELETE", f"/sessions/{name}") == 200
                    doubtful.discard(name)
                    acknowledged[name] = False

        async def work() -> None:
            for name in names:
                with suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
                    await one(name)

        for _ in range(3):
            working = [asyncio.create_task(work()) for _ in range(3)]
            await asyncio.sleep(moment.uniform(0.05, 0.5))
            dying.kill()
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await dying.start_again()
            async with http.get(f"{dying.url}/sessions") as answer:
                listed = {session["session_id"]: session for session in await answer.json()}
            sure = {name for name, is_there in acknowledged.items() if is_there} - doubtful
            gone = {name for name, is_there in acknowledged.items() if not is_there} - doubtful
            assert sure <= listed.keys(), f"lost: {sorted(sure - listed.keys())}"
            assert not gone & listed.keys(), f"came back: {sorted(gone & listed.keys())}"
            assert {session["status"] for session in listed.values()} <= {"interrupted"}
            # An unanswered request may have taken effect: from here on, the list counts.
            acknowledged = {name: name in listed for name in acknowledged.keys() | listed.keys()}
            doubtful.clear()
        assert acknowledged
        # The rooms of an interrupted session keep its robot; they are removed with the session.
        for name in listed:
            assert await ask("DELETE", f"/sessions/{name}") == 200

        async def is_clean() -> bool:
            return not await _rooms_of(http, transport, tried)

        await until(is_clean)


async def _rooms_of(http: aiohttp.ClientSession, transport: Process, workspaces: Any) -> list[str]:
    found = []
    for workspace in workspaces:
        for kind in ("robotics", "video"):
            async with http.get(f"{transport.url}/{kind}/workspaces/{workspace}/rooms") as answer:
                found += [f"{workspace}/{room['id']}" for room in (await answer.json())["rooms"]]
    return found


async def test_f14_interrupted_session_moves_only_after_restart_and_start(
    transport: Process, mortal: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    dying = mortal
    arm: Arm = await arms(dying, script())
    arm.route_through(transport)
    await arm.go(workspace_id="kept")
    await asyncio.sleep(moment.uniform(0.1, 0.6))
    dying.kill()
    killed = time.monotonic()
    arm.history.breaks.append(killed)
    await dying.start_again()
    arm.history.breaks.append(time.monotonic())
    await arm.until(lambda session: session["status"] == "interrupted")
    await arm.ask("restart")
    await arm.until(lambda session: session["status"] == "ready")
    await asyncio.sleep(0.3)
    assert arm.history.motions(killed + 0.1) == [], "an interrupted session does not move by itself"
    await arm.ask("start")
    await arm.moves()


async def test_f20_clock_jump_of_an_hour_has_no_effect(
    own: ExitStack, script: Callable[..., Script], arms: Make, tmp_path: Path, moment: random.Random
) -> None:
    """Wall-clock jumps of +1 h and -1 h have no effect, because only monotonic time is used."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    jumping = own.enter_context(server(tmp_path / "jumping", env={"FAULTS_CLOCK": str(clock)}))
    arm: Arm = await arms(jumping, script())
    await arm.go()
    for jump in (3600, -3600):
        await asyncio.sleep(moment.uniform(0.1, 0.4))
        began = time.monotonic()
        clock.write_text(str(jump))
        await asyncio.sleep(0.7)
        await arm.is_undisturbed(began - 0.2)
        holds = arm.session["stats"]["holds"]
        assert sum(holds.values()) - holds.get("camera_missing", 0) <= arm.meter.pauses(0.0), holds


async def test_f21_concurrent_creates_and_starts_make_one_loop(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """Two starts, start and stop during load, delete during inference, 50 creates of one id: one loop; 409/200."""
    arm: Arm = await arms(scripted, script(loading=0.3))
    creating = [asyncio.create_task(arm.call("POST", "/sessions", arm.body(workspace_id=arm.id))) for _ in range(50)]
    await asyncio.sleep(moment.uniform(0.05, 0.25))
    moves = await asyncio.gather(
        *(arm.call("POST", f"/sessions/{arm.id}/{move}") for move in ("start", "stop", "restart", "reset"))
    )
    assert {status for status, _ in moves} <= {404, 409}, moves
    answers = await asyncio.gather(*creating)
    assert sorted(status for status, _ in answers) == [200] + [409] * 49
    made = next(answer for status, answer in answers if status == 200)
    arm.take_rooms(made)
    await arm.connect()
    starts = await asyncio.gather(*(arm.call("POST", f"/sessions/{arm.id}/start") for _ in range(2)))
    assert sorted(status for status, _ in starts) == [200, 409]
    await arm.moves(1)
    first, session = arm.history.statuses[-1], arm.session
    await asyncio.sleep(1)
    # Use the server's own count, because delayed commands arrive in a burst.
    count = (await arm.until(lambda session: True))["stats"]["commands_sent"] - session["stats"]["commands_sent"]
    seconds = arm.history.statuses[-1].ended - first.began
    assert 0 < count <= 1.1 * seconds / PERIOD, "one loop sends one command a period"
    deletes = await asyncio.gather(*(arm.call("DELETE", f"/sessions/{arm.id}") for _ in range(5)))
    assert sorted(status for status, _ in deletes) == [200, 404, 404, 404, 404]


async def test_f22_emergency_stop_of_a_blocked_server_survives_a_kill(
    transport: Process, mortal: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """Latched STOP within one period + 20 ms of its arrival; it survives a restart until its reset."""
    blocked = mortal
    arm: Arm = await arms(blocked, script())
    arm.route_through(transport)
    await arm.go()
    await asyncio.sleep(moment.uniform(0.1, 0.6))
    blocked.send(signal.SIGSTOP)
    await asyncio.sleep(0.15)
    assert arm.robot.emergency_stop("a hand in the way")
    await asyncio.sleep(0.1)
    arrived_at = time.monotonic()
    blocked.send(signal.SIGCONT)
    session = await arm.until(lambda session: session["status"] == "stopped")
    assert "a hand in the way" in session["stats"]["emergency_stop"]
    await asyncio.sleep(0.3)
    arm.check_motion_ended(arrived_at, PERIOD + 0.02)
    blocked.kill()
    arm.history.breaks.append(time.monotonic())
    await blocked.start_again()
    arm.history.breaks.append(time.monotonic())
    session = await arm.until(lambda session: session["status"] == "interrupted")
    assert "a hand in the way" in json.dumps(session)
    await arm.call("POST", f"/sessions/{arm.id}/restart")
    status, answer = await arm.call("POST", f"/sessions/{arm.id}/start")
    assert status == 409, answer
    assert arm.history.motions(arrived_at + 0.5) == []
    await arm.ask_debug("reset")
    await arm.call("POST", f"/sessions/{arm.id}/restart")
    await arm.until(lambda session: session["status"] in ("ready", "stopped"))
    await arm.ask("start")
    await arm.moves()


async def test_f25_running_does_not_compile(own: ExitStack, arms: Make, tmp_path: Path, moment: random.Random) -> None:
    """A real policy on the real server moves at its rate; no program is compiled during `running`."""
    real = own.enter_context(server(tmp_path / "real", scripted=False, env={"JAX_LOG_COMPILES": "1"}))
    arm: Arm = await arms(real, None)
    await arm.create(policy=str(SHIPPED))
    assert "ompil" in real.words(), "the log reports compilations"
    await arm.connect(size=(96, 96))
    await arm.ask("start")
    await arm.moves(3)
    # The newest status may be from before the motion.
    session = await arm.until(lambda session: session["stats"]["commands_sent"] >= 3)
    compiled, waited = real.words().count("ompiling "), session["stats"]["holds"].get("compiling", 0)
    began, sent = arm.history.statuses[-1].began, session["stats"]["commands_sent"]
    await asyncio.sleep(moment.uniform(1.0, 1.5))
    session = await arm.until(lambda session: session["inference_stats"]["inference_count"] >= 3)
    took = arm.history.statuses[-1].ended - began
    rate = (session["stats"]["commands_sent"] - sent) / (took - min(arm.meter.lost(began), 0.5 * took))
    assert rate >= 0.85 * 25, "the policy's own rate is 25 Hz"
    assert real.words().count("ompiling ") == compiled, real.words()[-2000:]
    # A larger batch whose compilation started earlier was finished before the robot moved.
    assert arm.session["stats"]["holds"].get("compiling", 0) == waited <= 1 + arm.meter.pauses(0.0)
