"""Faults F1 to F6 and F24 of what a session hears and says: rooms, cameras, joints, and a server that was paused."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.arm import Arm, is_moving
from tests.faults.processes import Process, rooms
from tests.faults.proxy import fault_proxy
from tests.faults.script import Script

Make = Callable[..., Any]
LONGEST_BACKOFF = 10.0
FRAME_AGE = 0.35  # what the facts allow of 300 ms


async def went_blind(arm: Arm, last_frame: float) -> None:
    """HOLD `camera_stale`, at most 350 ms after the last frame, and nothing more until it sees again."""
    session = await arm.until(lambda session: session["stats"]["hold_code"] == "camera_stale", within=2)
    assert session["status"] == "running"
    moved = arm.history.motions(last_frame)
    late = arm.meter.worst(last_frame)
    assert moved[-1][0] - last_frame <= FRAME_AGE + late, f"moved on for {moved[-1][0] - last_frame:.3f} s"


async def test_f01_a_killed_transport_is_a_hold_until_it_is_back_and_a_fresh_frame_was_seen(
    scripted: Process, script: Callable[..., Script], arms: Make, tmp_path: Path, moment: random.Random
) -> None:
    """HOLD `link_lost`; status `reconnecting`; at once on RST; rooms made again, within one backoff of the return."""
    with rooms(tmp_path) as transport:
        arm: Arm = await arms(scripted, script())
        arm.transport_url = transport.url
        await arm.go()
        await asyncio.sleep(moment.uniform(0.1, 0.6))
        transport.kill()
        killed = time.monotonic()
        arm.history.breaks.append(killed)
        session = await arm.until(lambda session: session["status"] == "reconnecting", within=0.5)
        session = await arm.until(lambda session: session["stats"]["hold_code"] == "link_lost", within=0.2)
        sent = session["stats"]["commands_sent"]
        await asyncio.sleep(killed + 5 - time.monotonic())
        assert arm.session["stats"]["commands_sent"] == sent, "a link that is lost takes nothing"
        assert arm.session["status"] == "reconnecting"
        began = time.monotonic()
        await asyncio.to_thread(transport.start)
        back = time.monotonic()
        arm.history.breaks.append(back)
        await arm.until(is_moving, within=LONGEST_BACKOFF + 1)
        await arm.moves()
        first = arm.history.pose.read(arm.history.motions(began)[0][1])
        assert first is not None
        assert first.seen_at > back, "what it planned before the link was lost is not done any more"


async def test_f02_a_half_open_link_is_noticed_by_its_heartbeat_within_11_s(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """As F1, by a missed heartbeat's answer, at most 11 s."""
    arm: Arm = await arms(scripted, script())
    async with fault_proxy(scripted.url) as proxy:
        arm.transport_url = proxy.url
        await arm.create()
        await arm.connect(scripted.url)
        await arm.ask("start")
        await arm.moves()
        await asyncio.sleep(moment.uniform(0.1, 0.6))
        proxy.is_half_open = True
        cut = time.monotonic()
        arm.history.breaks.append(cut)
        await arm.until(lambda session: session["status"] == "reconnecting", within=11)
        assert time.monotonic() - cut <= 11 + arm.meter.worst(cut)
        session = await arm.until(lambda session: session["stats"]["hold_code"] == "link_lost", within=0.2)
        sent = session["stats"]["commands_sent"]
        await asyncio.sleep(0.5)
        assert arm.session["stats"]["commands_sent"] == sent
        proxy.heal()
        healed = time.monotonic()
        await arm.until(is_moving, within=LONGEST_BACKOFF + 1)
        arm.history.breaks.append(healed)
        await arm.moves()
        first = arm.history.pose.read(arm.history.motions(healed)[0][1])
        assert first is not None
        assert first.seen_at > healed


async def test_f03_a_stalled_camera_holds_within_350_ms(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """HOLD `camera_stale` at 300 ms, at most 350; no target meanwhile; goes on by itself when fresh."""
    arm: Arm = await arms(scripted, script())
    await arm.go()
    await asyncio.sleep(moment.uniform(0.1, 0.6))
    arm.life.camera = "stalled"
    last = arm.life.shown_at
    await went_blind(arm, last)
    held = time.monotonic()
    await asyncio.sleep(0.5)
    assert arm.history.motions(held) == []
    arm.life.camera = "live"
    fresh = time.monotonic()
    first = arm.history.pose.read(arm.history.motions(await arm.moves())[0][1])
    assert first is not None
    assert first.seen_at > fresh - 0.1
    assert is_moving(arm.session) or await arm.until(is_moving, within=1)
    assert arm.session["stats"]["holds"]["camera_stale"] == 1
