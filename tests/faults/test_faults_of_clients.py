"""Faults F12, F17 and F19 while a robot runs on the same server: a full disk, half-open requests, garbage datagrams.

These tests cover other faults of the table, where no real process is needed:

    F10, F11  unit/inference (files by name, the child that reads them, a child out of memory)
    F12  unit/recording (write errors), hostile/test_hostile_recordings.py (a disk that is full at any byte)
    F14  unit/sessions/test_interrupted.py, benchmarks.crash_recovery (200 kills)
    F15, F16  integration/http/test_hostile_requests.py, benchmarks.hostile_requests (10,000)
    F18  integration/rooms/test_transport_server.py (frames), hostile/test_floods.py (next to a robot)
    F20  unit/sessions (the wall clock orders nothing and ends nothing)
    F21  unit/sessions/test_sessions_random_walk.py (every order of moves and faults)
    F23  hostile/test_hostile_hub.py
    F24  hostile/test_blocked_loop.py (a paused server)
"""

import asyncio
import json
import random
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.faults.arm import Arm, is_moving
from tests.faults.processes import Process, server
from tests.faults.script import Script

Make = Callable[..., Any]


async def test_f17_half_open_requests_delay_no_robot(scripted: Process, moving: Arm, moment: random.Random) -> None:
    """500 half-open headers: /health stays below 50 ms, and the robot is undisturbed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    began = time.monotonic()
    opened = []
    try:
        for _ in range(500):
            _, writer = await asyncio.open_connection("127.0.0.1", scripted.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: [::1]\r\nX-a: ")
            opened.append(writer)
        took = []
        async with aiohttp.ClientSession(trust_env=False) as http:
            for _ in range(10):
                asked = time.monotonic()
                async with http.get(f"{scripted.url}/health") as answer:
                    assert answer.status == 200
                    await answer.read()
                took.append(time.monotonic() - asked)
        took.sort()
        assert took[5] <= 0.05 + moving.meter.worst(began), f"/health took {took[5] * 1e3:.0f} ms"
        await moving.moves(10)
        await moving.is_undisturbed(began)
    finally:
        for writer in opened:
            writer.transport.abort()


async def test_f19_garbage_datagrams_do_not_stop_a_robot(scripted: Process, moving: Arm, moment: random.Random) -> None:
    """10,000 packets that are not video, and pictures of wrong sizes: the process survives."""
    began = time.monotonic()
    ports = [one.laddr.port for one in psutil.Process(scripted.pid).net_connections("udp")]
    assert ports
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        for number in range(10_000):
            # The first bytes of RTP and STUN, followed by random bytes.
            head = moment.choice((b"\x80\x60", b"\x80\xe0", b"\x00\x01", b"\x16\xfe"))
            there.sendto(head + moment.randbytes(moment.randrange(1200)), ("127.0.0.1", moment.choice(ports)))
            if number % 100 == 0:
                await asyncio.sleep(0)
    await moving.moves(10)
    await moving.is_undisturbed(began)
    assert scripted.is_alive
    assert moving.history.statuses[-1].ended > began


async def test_f12_full_disk_ends_the_recording_and_not_the_control(
    own: ExitStack, script: Callable[..., Script], arms: Make, tmp_path: Path, moment: random.Random
) -> None:
    """Recording stops, the stats show `disk_full`, and control continues without a missed command."""
    # A disk without any usable byte is full at the first write.
    full = own.enter_context(server(tmp_path / "full", "--recording-free", str(1 << 60)))
    arm: Arm = await arms(full, script())
    await arm.create(record=True)
    await arm.connect()
    began = time.monotonic()
    await arm.ask("start")
    await arm.moves(20)
    await arm.until(lambda session: "disk_full" in json.dumps(session["stats"]["recording"]))
    await arm.until(is_moving, within=0.5)
    await arm.moves(10)
    await arm.is_undisturbed(began)
