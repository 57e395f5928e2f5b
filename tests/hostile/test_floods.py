"""Floods by sixty sockets: no turn of the server's loop is long, and a stop is prompt.

``python -m tests.hostile.test_floods`` measures processor time of the loop's thread, in its own process.
"""

import asyncio
import gc
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.faults.meter import stolen_seconds
from tests.faults.processes import ROOT, server
from tests.faults.script import Script
from tests.hostile.flood import FLOODS, ROOM
from tests.testing.child_process import child_process
from tests.testing.doubles import SO100_REQUIREMENTS
from tests.testing.rig import expect_ok, started

SOCKETS = 60
PERIOD = 0.02  # Seconds between commands of a robot at 50 Hz.
STOP = 0.1
ROUNDS = 3  # A single long turn may come from the machine; a long turn of the server recurs in each round.
TROUBLE = re.compile(r"Traceback|Task was|never retrieved|in its chamber| ERROR ")
SHORT = ("connects", "calls", "handshakes")


def flood(kind: str, url: str, path: str, seconds: float, sockets: int = SOCKETS):
    host, port = url.removeprefix("http://").split(":")
    arguments = ("-m", "tests.hostile.flood", kind, host, port, path, str(sockets), str(seconds))
    return child_process(sys.executable, *arguments, cwd=ROOT)


class Turns:
    """Longest turn of the loop in processor seconds, without garbage collection; ``where`` has stacks of long turns."""

    def __init__(self) -> None:
        self.longest, self.where = 0.0, list[str]()
        self._collected = 0.0
        self._collecting = time.thread_time()
        self._loop, self._thread, self._over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
        gc.callbacks.append(self._collect)
        self._begin()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _begin(self) -> None:
        self._collected, self._stolen = 0.0, stolen_seconds()
        self._began, self._at = time.monotonic(), time.thread_time()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        took = time.thread_time() - self._at - self._collected
        self.longest = max(self.longest, took - (stolen_seconds() - self._stolen))
        self._begin()

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting

    def _watch(self) -> None:
        while not self._over.wait(PERIOD / 4):
            frame = sys._current_frames().get(self._thread)
            if time.monotonic() - self._began > PERIOD and len(self.where) < 20:
                self.where.append("".join(traceback.format_stack(frame, 4)))

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        self._handle.cancel()
        gc.callbacks.remove(self._collect)


@asynccontextmanager
async def server_with_a_session():
    parts = {"read_requirements": lambda path, revision: SO100_REQUIREMENTS}
    async with started(parts=parts, max_sessions=4) as made:
        expect_ok(await made.create("direct", transport_server_url="direct"))
        for number in range(SOCKETS):
            await made.call("POST", "/robotics/workspaces/w/rooms", json={"room_id": f"r{number}"})
        gc.collect()
        gc.freeze()  # A server does this, too. Scanning the modules that tests import takes 0.2 s.
        try:
            yield made.app, made.url
        finally:
            gc.unfreeze()


async def measure(app: Any, url: str, what: str, path: str) -> dict[str, Any]:
    """Return the durations of five stops during a flood, and the longest turn of the loop with its stacks."""
    async with flood(what, url, path, 20.0):
        for _ in range(3000):
            if len(app.config.CONNECTIONS) > SOCKETS // 2 or what in SHORT:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        stops, turns = list[float](), Turns()
        for _ in range(5):
            async with aiohttp.ClientSession(url) as other:
                began = time.thread_time()
                async with other.post("/sessions/direct/emergency_stop") as answer:
                    assert answer.status == 200, await answer.text()
                stops.append(time.thread_time() - began)
            await asyncio.sleep(0.05)
        turns.close()
    return {"longest": turns.longest, "where": turns.where, "stops": stops}


async def measure_all() -> None:
    """Print the name and the measurements of each round of each kind as one line; exceptions go to stderr."""
    logging.basicConfig(level=logging.ERROR)
    async with server_with_a_session() as (app, url):
        for kind, (what, path) in FLOODS.items():
            for _ in range(ROUNDS):
                found = await measure(app, url, what, path)
                sys.stdout.write(json.dumps({"kind": kind} | found) + "\n")
                if is_prompt(found):
                    break


def is_prompt(found: dict[str, Any]) -> bool:
    return found["longest"] < PERIOD and max(found["stops"]) < STOP


def test_floods_of_sixty_sockets_delay_neither_ticks_nor_stops():
    ran = subprocess.run(
        [sys.executable, "-m", "tests.hostile.test_floods"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert not TROUBLE.search(ran.stderr), ran.stderr[-3000:]
    rounds = [json.loads(line) for line in ran.stdout.splitlines()]
    prompt = {found["kind"] for found in rounds if is_prompt(found)}
    assert not [found for found in rounds if found["kind"] not in prompt]
    assert prompt == set(FLOODS)


async def test_stop_over_a_new_connection_passes_earlier_requests():
    """The test counts the requests that are answered before the stop; it does not measure time."""
    stop, answered = "POST /sessions/direct/emergency_stop", list[str]()

    async def call(line: str, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        answered.append(line)
        writer.close()
        await writer.wait_closed()

    async with server_with_a_session() as (_, url):
        port = int(url.rpartition(":")[2])
        calls = [asyncio.ensure_future(call(line, port)) for line in ["GET /health"] * 300 + [stop]]
        await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert answered.index(stop) < 100


async def test_clients_that_leave_during_a_flood_log_no_error(tmp_path: Path):
    with server(tmp_path) as running:
        async with aiohttp.ClientSession(running.url) as http:
            await http.post("/robotics/workspaces/w/rooms", json={"room_id": "r"})
            body = {"session_id": "direct", "policy_path": str(Script(tmp_path / "p").folder)}
            async with http.post("/sessions", json=body | {"transport_server_url": "direct"}) as answer:
                assert answer.status == 200
        room = ROOM.replace("r{n}", "r")
        kinds = {"pings reset": room, "joints reset": room, "handshakes": room, "chunks": "/"}
        kinds["stream pings reset"] = "/sessions/direct/stream"
        async with AsyncExitStack() as floods:
            for kind, path in kinds.items():
                await floods.enter_async_context(flood(kind, running.url, path, 20.0, SOCKETS // len(kinds)))
            await asyncio.sleep(2.0)
            running.send(signal.SIGTERM)
            assert await asyncio.to_thread(running.ended, 30.0) == 0
        found = [line for line in running.words().splitlines() if TROUBLE.search(line)]
    assert not found, running.words()[-3000:]


if __name__ == "__main__":
    asyncio.run(measure_all())
