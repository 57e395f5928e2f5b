"""Does a robot notice sixty clients that send to its server as fast as they can?

    python -m benchmarks.floods                       # every kind, about three minutes
    python -m benchmarks.floods --only pings,cameras --seconds 10

The server is ``robojax serve`` with the shipped policy and one robot at 50 commands a second. In turns there is
nothing else, a process that only burns a core, and each kind of flood (``tests/hostile/flood.py``, and eight cameras
that send valid RTP). Floods are nice processes: they take the server's attention, not its cores.

Target: no command is late by more than a period (a gap of more than two), and an emergency stop of another session
over a new connection takes less than 100 ms. Last figure, AMD EPYC, 2 cores: met (benchmarks/results/floods.json).
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import av
import numpy as np
import psutil
import uvloop
from aiortc.codecs.vpx import Vp8Encoder
from aiortc.rtp import HeaderExtensionsMap, RtpPacket

from benchmarks.load_robots import PATIENT, STILL
from benchmarks.measured import RESULTS, SHIPPED, percentiles, quietness, result, write
from benchmarks.processes import Child, say
from service.transport.client.robot import Robot, connect_robot
from service.transport.link import Rooms
from service.transport.webrtc.ice import transports_of
from tests.hostile.flood import FLOODS

RATE = 50.0
SOCKETS, CAMERAS, NICE = 60, 8, 10
STOP_EVERY = 0.3
SSRC = 4711  # RTP source of the pictures that flood.
BURN = "import os\nos.nice(10)\nwhile True: sum(range(10_000))"


# The cameras: a process of its own.


def payloads() -> list[list[bytes]]:
    """Pictures of noise, each a key frame, as an encoder cuts them."""
    noise = np.random.default_rng(0)
    made = []
    for _ in range(8):
        frame = av.VideoFrame.from_ndarray(noise.integers(0, 256, (96, 96, 3), np.uint8), format="rgb24")
        frame = frame.reformat(format="yuv420p")
        frame.pts, frame.time_base = 0, Fraction(1, 90000)
        made.append(Vp8Encoder().encode(frame, True)[0])
    return made


async def send_pictures(url: str, rooms: list[Rooms], seconds: float) -> None:
    """Connect a camera to each session, then send valid packets as fast as this process can."""
    os.nice(NICE)
    async with AsyncExitStack() as stack:
        robots = [
            await stack.enter_async_context(connect_robot(url, each, on_command=lambda values, at: None, pace=PATIENT))
            for each in rooms
        ]
        peers = []
        while len(peers) < len(robots):
            for robot in robots:
                robot.show("front", np.zeros((96, 96, 3), np.uint8))
            await asyncio.sleep(0.05)
            found = [peer for robot in robots for peer, track in robot._senders["front"]._peers.values() if track.sent]
            peers = [peer for peer in found if peer.connected_at]
        say(event="ready", cameras=len(peers))
        transports = [next(iter(transports_of(peer._pc))) for peer in peers]
        extensions, pictures, sent, number = HeaderExtensionsMap(), payloads(), 0, 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for transport in transports:
                picture = pictures[number % len(pictures)]
                for index, payload in enumerate(picture):
                    packet = RtpPacket(97, int(index == len(picture) - 1), (number + index) % 65536)
                    packet.timestamp, packet.ssrc = number * 3000 % (1 << 32), SSRC
                    packet.payload = payload
                    with contextlib.suppress(ConnectionError):
                        await transport._send_rtp(packet.serialize(extensions))
                    sent += 1
            number += max(map(len, pictures))
            await asyncio.sleep(0)
        say(event="sent", packets=sent)


# The robot, the stops.


class Arrivals:
    """When commands came, while a measurement runs."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def add(self, values: Mapping[str, float], received_at: float) -> None:
        self.at.append(time.monotonic())

    def figures(self, since: float, until: float) -> dict[str, Any]:
        at = [moment for moment in self.at if since <= moment <= until]
        # A silence at either end is a gap like others.
        gaps = [after - before for before, after in pairwise([since, *at, until])]
        return {
            "commands": len(at),
            "a_second": round(len(at) / (until - since), 1),
            "late_by_more_than_a_period": sum(gap > 2 / RATE for gap in gaps),
            "longest_gap_ms": round(1e3 * max(gaps), 1),
        }


async def live(robot: Robot) -> None:
    """It reports and shows, 25 times a second."""
    picture = np.full((96, 96, 3), 60, np.uint8)
    number = 0
    while True:
        number += 1
        picture[:, : 1 + number % 96] = number % 200
        robot.show("front", picture)
        robot.send_joints({**STILL, "Jaw": 60 + 1e-3 * (number % 2)})
        await asyncio.sleep(1 / 25)


async def stop_often(url: str, session: str, took: list[float]) -> None:
    """Emergency stops of a session that is not looked at, each over a new connection."""
    while True:
        async with aiohttp.ClientSession() as http:
            began = time.monotonic()
            async with http.post(f"{url}/sessions/{session}/emergency_stop") as answer:
                assert answer.status == 200, await answer.text()
            took.append(time.monotonic() - began)
        await asyncio.sleep(STOP_EVERY)


@asynccontextmanager
async def flooding(kind: str, url: str, watched: list[Rooms], seconds: float) -> AsyncIterator[dict[str, Any]]:
    """Send a flood of a kind for some seconds; its figures are in the yielded dictionary afterwards."""
    host, port = url.removeprefix("http://").split(":")
    sent: dict[str, Any] = {}
    if kind == "nothing":
        yield sent
        return
    if kind == "a process that computes":
        command = ["-c", BURN, str(seconds)]
    elif kind == "cameras":
        rooms = json.dumps([{**vars(each), "cameras": dict(each.cameras)} for each in watched])
        command = ["-m", "benchmarks.floods", "--cameras", url, rooms, "--seconds", str(seconds)]
    else:
        what, path = FLOODS[kind]
        command = ["-m", "tests.hostile.flood", what, host, port, path, str(SOCKETS), str(seconds)]
    child = Child(*command)
    try:
        if kind == "cameras":
            await asyncio.to_thread(child.told, "ready")
        yield sent
        if kind != "a process that computes":
            sent.update(json.loads(await asyncio.to_thread(child.line)))
    finally:
        child.process.kill()
        child.process.wait()


def cpu_seconds(pid: int) -> float:
    """What a process has used until now."""
    return sum(psutil.Process(pid).cpu_times()[:2])


@asynccontextmanager
async def robot_on(url: str, rooms: Rooms, arrivals: Arrivals) -> AsyncIterator[None]:
    async with connect_robot(url, rooms, on_command=arrivals.add, rate=25.0, pace=PATIENT, sessions=url) as robot:
        living = asyncio.create_task(live(robot))
        try:
            yield
        finally:
            living.cancel()


async def measure(kinds: list[str], seconds: float, url: str, pid: int) -> dict[str, Any]:
    """Each kind of flood in turn, next to the same robot."""
    figures: dict[str, Any] = {}
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as http, AsyncExitStack() as stack:

        async def call(path: str, body: object = None) -> Any:
            async with http.post(path, json=body) as answer:
                assert answer.status < 300, await answer.text()
                return await answer.json()

        async def create(name: str, transport: str) -> Rooms:
            made = await call(
                "/sessions",
                {"session_id": name, "policy_path": str(SHIPPED), "transport_server_url": transport, "rate": RATE},
            )
            return Rooms(
                made["workspace_id"],
                made.get("camera_room_ids") or {},
                made["joint_input_room_id"],
                made["joint_output_room_id"],
            )

        rooms = await create("robot", url)
        for name in ("direct", "other"):
            await create(name, "direct")
        watched = [await create(f"watched{number}", url) for number in range(CAMERAS)] if "cameras" in kinds else []
        for number in range(SOCKETS):
            await call("/robotics/workspaces/w/rooms", {"room_id": f"r{number}"})
        arrivals = Arrivals()
        await stack.enter_async_context(robot_on(url, rooms, arrivals))
        await call("/sessions/robot/start")
        while len(arrivals.at) < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for kind in kinds:
            async with flooding(kind, url, watched, seconds + 2) as sent:
                await asyncio.sleep(1.0)
                took: list[float] = []
                stopping = asyncio.create_task(stop_often(url, "other", took))
                since, used = time.monotonic(), cpu_seconds(pid)
                await asyncio.sleep(seconds)
                figures[kind] = arrivals.figures(since, now := time.monotonic())
                figures[kind]["server_cores"] = round((cpu_seconds(pid) - used) / (now - since), 2)
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
                figures[kind]["stop_ms"] = percentiles(took, (50.0,)) | {"count": len(took)}
            figures[kind] |= {f"flood_{name}": sent[name] for name in ("opened", "bytes", "packets") if name in sent}
            print(f"{kind:30}", json.dumps(figures[kind]), flush=True)
            arrivals.at.clear()
            await asyncio.sleep(2.0)
    return figures


def main() -> None:
    kinds = ["nothing", "a process that computes", *FLOODS, "cameras"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="kinds, with commas between: " + ", ".join(kinds))
    parser.add_argument("--seconds", type=float, default=6.0, help="of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS / "floods.json")
    parser.add_argument("--cameras", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cameras:
        url, rooms = options.cameras
        uvloop.run(send_pictures(url, [Rooms(**each) for each in json.loads(rooms)], options.seconds))
        return
    wanted = options.only.split(",") if options.only else kinds
    if unknown := set(wanted) - set(kinds):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    quiet = quietness()
    with tempfile.TemporaryDirectory() as state:
        # The robot stands still, which would hold it as frozen.
        flags = ("--port", "0", "--state", state, "--frozen", "warn")
        server = Child("-m", "robojax.cli", "serve", *flags)
        try:
            found = uvloop.run(measure(wanted, options.seconds, server.url(), server.process.pid))
        finally:
            server.process.terminate()
            server.process.wait(30)
    late = {kind: each["late_by_more_than_a_period"] for kind, each in found.items()}
    slow = {kind: each["stop_ms"].get("max") for kind, each in found.items()}
    question = "Does a robot notice sixty clients that send to its server as fast as they can?"
    told = result(question, "python -m benchmarks.floods", quiet, "uvloop", sockets=SOCKETS, seconds=options.seconds)
    is_met = not any(late[kind] for kind in late) and all(each is not None and each < 100 for each in slow.values())
    write(options.output, told | {"kinds": found, "is_met": is_met})
    print(json.dumps({"late": late, "slowest_stop_ms": slow, "is_met": is_met}))


if __name__ == "__main__":
    main()
