"""Faults F12 and F15 to F19 while a robot runs on the same server: a full disk, and strangers who mean harm or do not
know better.

Which test covers what else of the facts' table, and where the real process is not needed:

    F10  service/test_loading.py (files by name, the child that reads them), F11 likewise (a child out of memory)
    F12  service/recording/test_recorder.py (misses beside an unrecorded session)
    F14  benchmarks/crash_recovery.py (200 kills), service/test_interrupted.py
    F15  service/test_hostile_requests.py (hundreds), benchmarks/hostile_requests.py (10,000)
    F16  service/test_hostile_requests.py::test_what_confuses_servers_has_one_answer
    F17  service/test_limits.py::test_hundreds_of_half_open_requests_keep_nobody_waiting
    F18  service/transport/test_transport_server.py (frames, floods, slow readers), service/auth (Origin, tokens)
    F19  service/transport/link (decoder, sizes)
    F20  service/test_records.py::test_the_wall_clock_orders_nothing_and_ends_nothing
    F21  service/test_sessions_random_walk.py (every order of moves and faults)
    F23  jaxmodels/test_hub.py (a stub of the Hub: away, busy, half a file)
"""

import asyncio
import json
import random
import resource
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.faults.arm import Arm, is_moving
from tests.faults.processes import Process, server
from tests.faults.script import Script

Make = Callable[..., Any]

ATTACKS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "no method": (b"GARBAGE\r\n\r\n", (400,)),
    "a long header": (b"GET /health HTTP/1.1\r\nHost: [::1]\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", (400, 413, 431)),
    "a huge length": (b"POST /sessions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 99999999999\r\n\r\n", (413,)),
    "a negative length": (b"POST /sessions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: -1\r\n\r\n", (400,)),
    "two lengths": (
        b"POST /sessions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 2\r\nContent-Length: 5\r\n\r\n{}xyz",
        (400,),
    ),
    "a length and chunks": (
        b"POST /sessions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        (400,),
    ),
    "200,000 brackets": (
        b"POST /sessions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
        + b"[" * 200_000,
        (400, 422),
    ),
    "a NUL in the path": (b"GET /%00..%2f..%2fetc/passwd HTTP/1.1\r\nHost: [::1]\r\n\r\n", (400, 404)),
}


async def _is_unmoved(arm: Arm, since: float) -> None:
    """The robot went on as if nothing had happened."""
    await arm.moves(10)
    times = [at for at, _ in arm.history.motions(since)]
    gap = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    late = arm.meter.worst(since, ways=2)
    assert gap <= 0.1 + late, f"it stood for {gap:.3f} s; the machine was {late:.3f} s late"
    await arm.until(is_moving, within=0.5)


async def test_f16_requests_that_confuse_servers_are_refused_and_the_robot_goes_on(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """413/400/404, connection closed; endless chunks are cut; no 5xx, no traceback."""
    arm: Arm = await arms(scripted, script())
    await arm.go()
    began = time.monotonic()
    attacks = list(ATTACKS.items()) * 3
    moment.shuffle(attacks)
    for name, (raw, wanted) in attacks:
        answer = await _answer_to(scripted, raw)
        assert answer.startswith(b"HTTP/1.1 "), name
        assert int(answer.split()[1]) in wanted, f"{name}: {answer[:200]!r}"
        assert b"Traceback" not in answer
    sent = await asyncio.to_thread(_endless_chunks, scripted.port)
    assert sent < 20 << 20, f"{sent} bytes of an endless body were taken"
    await _is_unmoved(arm, began)


async def _answer_to(server: Process, raw: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(raw)
        async with asyncio.timeout(30):
            return await reader.read(4000)
    finally:
        writer.transport.abort()


def _endless_chunks(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as there:
        there.sendall(b"POST /sessions HTTP/1.1\r\nHost: [::1]\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while sent < 40 << 20:
                there.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
                sent += 65536
        except OSError:
            pass
        return sent


async def test_f17_hundreds_who_never_finish_keep_nobody_waiting(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """500 half-open headers: /health below 50 ms meanwhile, and no robot notices."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    arm: Arm = await arms(scripted, script())
    await arm.go()
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
        assert took[5] <= 0.05 + arm.meter.worst(began), f"/health took {took[5] * 1e3:.0f} ms"
        await _is_unmoved(arm, time.monotonic() - 0.3)
    finally:
        for writer in opened:
            writer.transport.abort()


async def test_f18_frames_against_the_protocol_close_their_socket_and_a_strange_page_gets_none(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """2 MiB frame 1009, bad UTF-8 1007, an evil Origin refused; 1,000 fragments and a ping flood change nothing."""
    arm: Arm = await arms(scripted, script())
    await arm.go()
    assert arm.rooms is not None
    room = f"{scripted.url}/robotics/workspaces/{arm.rooms.workspace_id}/rooms/{arm.rooms.joint_input}/ws"
    began = time.monotonic()
    async with aiohttp.ClientSession(trust_env=False) as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(room, headers={"Origin": "http://evil.example"})
        assert refused.value.status == 403
        # Each joins as somebody who listens, so that it may speak.
        join = {"participant_id": f"stranger-{moment.randrange(1 << 30)}", "role": "consumer"}
        for payload, code in ((b"x" * (2 << 20), 1009), (b"\xff\xfe\xfd", 1007)):
            async with http.ws_connect(room) as there:
                await there.send_json(join)
                writer = there._writer
                await writer.send_frame(payload, aiohttp.WSMsgType.TEXT)
                async with asyncio.timeout(30):
                    while not (await there.receive()).type.name.startswith(("CLOS", "ERR")):
                        pass
                assert there.close_code == code
        async with http.ws_connect(room) as there:
            await there.send_json(join)
            for _ in range(2000):
                await there.ping(b"x")
        reader, raw = await asyncio.open_connection("127.0.0.1", scripted.port)
        path = room.removeprefix(scripted.url)
        raw.write(
            f"GET {path} HTTP/1.1\r\nHost: [::1]\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert b"101" in await reader.readline()
        for number in range(1000):
            raw.write(struct.pack("!BBI", 0x01 if number == 0 else 0x00, 0x81, 0) + b"{")
        await raw.drain()
        raw.transport.abort()
    await _is_unmoved(arm, began)


async def test_f19_garbage_for_the_camera_is_nothing_to_a_robot_that_is_seen(
    scripted: Process, script: Callable[..., Script], arms: Make, moment: random.Random
) -> None:
    """10,000 packets that are no video, and pictures of another size and too large: the process lives."""
    arm: Arm = await arms(scripted, script())
    await arm.go()
    began = time.monotonic()
    ports = [one.laddr.port for one in psutil.Process(scripted.pid).net_connections("udp")]
    assert ports
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        for number in range(10_000):
            # RTP's and STUN's first bytes, then anything.
            head = moment.choice((b"\x80\x60", b"\x80\xe0", b"\x00\x01", b"\x16\xfe"))
            there.sendto(head + moment.randbytes(moment.randrange(1200)), ("127.0.0.1", moment.choice(ports)))
            if number % 100 == 0:
                await asyncio.sleep(0)
    await _is_unmoved(arm, time.monotonic() - 0.2)
    assert scripted.is_alive
    assert arm.history.statuses[-1].ended > began


async def test_f12_a_full_disk_ends_the_recording_and_never_the_control(
    own: ExitStack, script: Callable[..., Script], arms: Make, tmp_path: Path, moment: random.Random
) -> None:
    """Recording stops, `disk_full` in the stats, control goes on without a miss."""
    # A disk of which no byte may be used is full as soon as something is to be written.
    full = own.enter_context(server(tmp_path / "full", "--recording-free", str(1 << 60)))
    arm: Arm = await arms(full, script())
    await arm.create(record=True)
    await arm.connect()
    began = time.monotonic()
    await arm.ask("start")
    await arm.moves(20)
    await arm.until(lambda session: "disk_full" in json.dumps(session["stats"]["recording"]))
    await arm.until(is_moving, within=0.5)
    await _is_unmoved(arm, began)
