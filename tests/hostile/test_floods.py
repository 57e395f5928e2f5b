"""Sixty sockets that send as fast as they can, beside a robot: no turn of the server's loop is long, and a stop is
prompt.

What is measured is processor time of the loop's own thread: how busy the machine is otherwise does not count.
"""

import asyncio
import gc
import heapq
import re
import signal
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from service.app import create_app
from service.engine.scripted_policy import SO100_REQUIREMENTS, ScriptedLoader
from service.serving import listen, serving
from service.settings import Settings
from service.transport.memory import MemoryTransport
from tests.faults.processes import ROOT, server
from tests.faults.script import Script

SOCKETS = 60
PERIOD = 0.02  # of a robot with 50 commands a second
STOP = 0.1
TROUBLE = re.compile(r"Traceback|Task was|never retrieved|in its chamber| ERROR ")
ROOM = "/robotics/workspaces/w/rooms/r{n}/ws"
FLOODS = {
    "pings": ("pings", ROOM),
    "pongs": ("pongs", ROOM),
    "heartbeats": ("heartbeats", ROOM),
    "joints": ("joints", ROOM),
    "parts of a message": ("fragments", ROOM),
    "joints to sixty who listen": ("joints", "/robotics/workspaces/w/rooms/r0/ws"),
    "pings to a door": ("pings", "/sessions/door/stream"),
    "messages to a door": ("door pings", "/sessions/door/stream"),
    "requests": ("health", "/"),
    "requests at once": ("pipelined", "/"),
    "chunks of a byte": ("chunks", "/"),
    "heads of a byte now and then": ("bytewise", "/"),
    "connections": ("connects", "/"),
}


@asynccontextmanager
async def flood(kind: str, url: str, path: str, seconds: float, sockets: int = SOCKETS):
    """A process that floods for so long, or until this ends."""
    host, port = url.removeprefix("http://").split(":")
    arguments = ("-m", "tests.hostile.flood", kind, host, port, path, str(sockets), str(seconds))
    made = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.communicate()


class Turns:
    """Processor seconds of each turn of the running loop, while it is open."""

    def __init__(self) -> None:
        self._gone = [0.0] * 3
        gc.collect()
        gc.freeze()  # a collection of all that this process of many tests has is no turn of a server's
        self._at = time.thread_time()
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        heapq.heappushpop(self._gone, now - self._at)
        self._at = time.thread_time()
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    @property
    def longest(self) -> float:
        """Of all but two, in which the test's own clients may have begun."""
        return self._gone[0]

    def close(self) -> None:
        self._handle.cancel()
        gc.unfreeze()


@pytest.mark.parametrize("kind", FLOODS)
async def test_sixty_who_flood_keep_no_tick_waiting_and_no_stop(kind, caplog):
    app = create_app(
        Settings(max_sessions=4),
        transport=MemoryTransport(),
        load=ScriptedLoader(),
        read_requirements=lambda path, revision: SO100_REQUIREMENTS,
    )
    async with serving(app, listen("127.0.0.1", 0)) as url, aiohttp.ClientSession(url) as http:
        for number in range(SOCKETS):
            await http.post("/robotics/workspaces/w/rooms", json={"room_id": f"r{number}"})
        body = {"session_id": "door", "policy_path": "p", "transport_server_url": "direct"}
        async with http.post("/sessions", json=body) as answer:
            assert answer.status == 200
        what, path = FLOODS[kind]
        async with flood(what, url, path, 20.0):
            for _ in range(3000):
                if len(app.config.CONNECTIONS) > SOCKETS // 2 or what == "connects":
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            stops, turns = [], Turns()
            for _ in range(5):
                async with aiohttp.ClientSession(url) as other:
                    began = time.thread_time()
                    async with other.post("/sessions/door/emergency_stop") as answer:
                        assert answer.status == 200, await answer.text()
                    stops.append(time.thread_time() - began)
                await asyncio.sleep(0.05)
            turns.close()
    assert turns.longest < PERIOD
    assert max(stops) < STOP
    assert not [record for record in caplog.records if record.exc_info]


async def test_who_goes_away_in_the_midst_of_a_flood_and_an_end_leave_no_trace_in_the_log(tmp_path: Path):
    with server(tmp_path) as running:
        async with aiohttp.ClientSession(running.url) as http:
            await http.post("/robotics/workspaces/w/rooms", json={"room_id": "r"})
            body = {"session_id": "door", "policy_path": str(Script(tmp_path / "p").folder)}
            async with http.post("/sessions", json=body | {"transport_server_url": "direct"}) as answer:
                assert answer.status == 200
        room, door = ROOM.replace("r{n}", "r"), "/sessions/door/stream"
        kinds = {"pings reset": room, "joints reset": room, "door pings reset": door, "handshakes": room, "chunks": "/"}
        async with AsyncExitStack() as floods:
            for kind, path in kinds.items():
                await floods.enter_async_context(flood(kind, running.url, path, 20.0, SOCKETS // len(kinds)))
            await asyncio.sleep(2.0)
            running.send(signal.SIGTERM)
            assert await asyncio.to_thread(running.ended, 30.0) == 0
        found = [line for line in running.words().splitlines() if TROUBLE.search(line)]
    assert not found, running.words()[-3000:]
