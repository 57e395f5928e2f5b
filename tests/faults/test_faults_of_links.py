"""Faults F1 to F6 of a session's inputs and outputs: rooms, cameras and joints."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.arm import Arm, is_moving
from tests.faults.processes import Process, robot, rooms
from tests.faults.proxy import fault_proxy
from tests.faults.robot import FRAMES

Make = Callable[..., Any]
LONGEST_BACKOFF = 10.0
FRAME_AGE = 0.35  # Seconds: the limit of 300 ms plus the measuring tolerance.


async def expect_camera_stale_hold(arm: Arm, last_frame: float) -> None:
    """Expect HOLD `camera_stale` within 350 ms of the last frame, and no action until new frames arrive."""
    session = await arm.until(lambda session: session["stats"]["hold_code"] == "camera_stale", within=2)
    assert session["status"] == "running"
    arm.check_motion_ended(last_frame, FRAME_AGE)


async def test_f01_killed_transport_holds(scripted: Process, arm: Arm, tmp_path: Path, moment: random.Random) -> None:
    """HOLD `link_lost`, status `reconnecting` at once on RST; rooms are recreated within one backoff of the return."""
    with rooms(tmp_path) as transport:
        arm.route_through(transport)
        await arm.go()
        await asyncio.sleep(moment.uniform(0.1, 0.6))
        transport.kill()
        killed = time.monotonic()
        arm.history.breaks.append(killed)
        session = await arm.until(lambda session: session["status"] == "reconnecting", within=0.5)
        session = await arm.until(lambda session: session["stats"]["hold_code"] == "link_lost", within=0.2)
        sent = session["stats"]["commands_sent"]
        await asyncio.sleep(killed + 5 - time.monotonic())
        assert arm.session["stats"]["commands_sent"] == sent, "a lost link accepts no command"
        assert arm.session["status"] == "reconnecting"
        began = time.monotonic()
        await transport.start_again()
        back = time.monotonic()
        arm.history.breaks.append(back)
        await arm.until(is_moving, within=LONGEST_BACKOFF + 1)
        await arm.moves()
        assert arm.first_observation(began) > back, "no action of a chunk from before the loss"


async def test_f02_heartbeat_finds_a_half_open_link(scripted: Process, arm: Arm, moment: random.Random) -> None:
    """As F1, detected by a missing heartbeat response within 11 s."""
    async with fault_proxy(scripted.url) as proxy:
        arm.transport_url = proxy.url
        await arm.go(straight_to=scripted.url)
        await asyncio.sleep(moment.uniform(0.1, 0.6))
        proxy.is_half_open = True
        cut = time.monotonic()
        arm.history.breaks.append(cut)
        await arm.until(lambda session: session["status"] == "reconnecting", within=11)
        assert time.monotonic() - cut <= 11 + arm.meter.lost(cut)
        session = await arm.until(lambda session: session["stats"]["hold_code"] == "link_lost", within=0.2)
        sent = session["stats"]["commands_sent"]
        await asyncio.sleep(0.5)
        assert arm.session["stats"]["commands_sent"] == sent
        proxy.heal()
        healed = time.monotonic()
        await arm.until(is_moving, within=LONGEST_BACKOFF + 1)
        arm.history.breaks.append(healed)
        await arm.moves()
        # The robot's own link works, so the pose of its newest frame may be one frame older.
        assert arm.first_observation(healed) > healed - 1 / FRAMES


async def test_f03_stalled_camera_holds_within_350_ms(moving: Arm, moment: random.Random) -> None:
    """HOLD `camera_stale` between 300 and 350 ms; no targets during the hold; it ends by itself with fresh frames."""
    await asyncio.sleep(moment.uniform(0.1, 0.6))
    moving.life.camera = "stalled"
    last = moving.life.shown_at
    await expect_camera_stale_hold(moving, last)
    held = time.monotonic()
    await asyncio.sleep(0.5)
    assert moving.history.motions(held + moving.meter.worst(last)) == []
    moving.life.camera = "live"
    fresh = time.monotonic()
    assert moving.first_observation(await moving.moves()) > fresh - 0.1
    assert is_moving(moving.session) or await moving.until(is_moving, within=1)
    # A paused machine did not send frames either.
    assert (
        1 <= moving.session["stats"]["holds"]["camera_stale"] <= 1 + moving.meter.pauses(moving.history.calls[0].began)
    )


async def test_f04_frozen_picture_holds_after_2_s(moving: Arm, moment: random.Random) -> None:
    """HOLD `camera_frozen` after 2 s of an identical picture; it ends when the picture changes."""
    assert not _is_frozen(moving.session)
    await asyncio.sleep(moment.uniform(0.0, 0.4))
    moving.life.camera = "frozen"
    frozen = moving.life.shown_at
    session = await moving.until(lambda session: session["stats"]["hold_code"] == "camera_frozen", within=3)
    assert time.monotonic() - frozen > 1.9
    assert _is_frozen(session)
    assert session["status"] == "running"
    moving.life.camera = "live"
    await moving.until(lambda session: is_moving(session) and not _is_frozen(session), within=1.5)


def _is_frozen(session: dict[str, Any]) -> bool:
    return "camera_frozen" in str(session["stats"].get("warnings"))


async def test_f05_killed_producer_holds(scripted: Process, arm: Arm, tmp_path: Path, moment: random.Random) -> None:
    """The age of the frame decides, not the ICE consent timeout of 30 s; a returning peer's offer is accepted."""
    rooms = await arm.create()
    await arm.add_witness()
    began_at = arm.history.pose.began_at
    with robot(tmp_path, scripted.url, rooms, began_at) as first:
        await arm.ask("start")
        await arm.moves()
        await asyncio.sleep(moment.uniform(0.1, 0.6))
        await asyncio.to_thread(first.kill)
        killed = time.monotonic()
        await expect_camera_stale_hold(arm, killed)
    with robot(tmp_path, scripted.url, rooms, began_at):
        back = time.monotonic()
        await arm.moves()
        assert await arm.until(is_moving, within=2)
        assert arm.first_observation(back) > killed, "the robot moves only after frames of the new producer"


async def test_f06_twenty_bad_joint_values_a_second_stop(scripted: Process, arm: Arm, moment: random.Random) -> None:
    """Bad values are dropped and counted, and the last good pose is kept. 20 bad values in 1 s -> STOP `bad_input`."""
    async with fault_proxy(scripted.url) as proxy:
        arm.transport_url = proxy.url
        await arm.go(straight_to=scripted.url)
        # The robot sends a valid value; the proxy replaces it with infinity, NaN, text or null.
        proxy.corrupt = (b"12.25", moment.choice([b"1e999", b"  NaN", b'"abc"', b" null"]))
        for number in range(5):
            arm.robot.send_joints({"Elbow": 12.25 + number / 1e5})
            await asyncio.sleep(0.05)
        session = await arm.until(lambda session: _bad_inputs(session) >= 5 and is_moving(session), within=2)
        assert session["stats"]["measured_joints"]["Elbow"] == 30
        await asyncio.sleep(1.0)
        for number in range(500):  # After a pause of the machine, a second may have < 20.
            arm.robot.send_joints({"Elbow": 12.25 + (number + 10) / 1e5})
            await asyncio.sleep(0.02)
            if number > 24 and arm.session["status"] == "stopped":
                break
        session = await arm.until(lambda session: session["status"] == "stopped", within=2)
        assert session["stats"]["emergency_stop"].startswith("bad_input")
        stopped = time.monotonic()
        await arm.expect_no_motion(stopped)
        status, _ = await arm.call("POST", f"/sessions/{arm.id}/start")
        assert status == 409, "a start after a latched stop is refused"


def _bad_inputs(session: dict[str, Any]) -> int:
    return sum(session["stats"]["inputs_dropped"].values())
