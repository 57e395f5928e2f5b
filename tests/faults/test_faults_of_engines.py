"""Faults F26 to F30 of engines: killed, stopped, and left behind by a server, while robots move and STOP is pressed."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.transport.link import Rooms
from tests.faults.meter import Meter
from tests.faults.processes import Process, server
from tests.faults.robot import JOINTS, living_robot
from tests.faults.test_faults_of_processes import SHIPPED

ROBOTS = 3
HELD = 0.3  # seconds in which a robot is held when its engine is lost
STOP = 0.05  # seconds in which STOP is answered
STUCK_AFTER = 1.5
PATIENCE = 20.0
_numbers = count(1)


class Fleet:
    """Robots of one server, and somebody who presses STOP of another session all the time."""

    def __init__(self, process: Process, http: aiohttp.ClientSession, meter: Meter):
        self.process, self.http, self.meter = process, http, meter
        self.commands: dict[str, list[float]] = {}
        self.stops: list[tuple[float, float]] = []
        self.presses_stop: asyncio.Task[None]

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self.http.request(method, self.process.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def engines(self) -> dict[str, int]:
        """Names and processes of the engines."""
        listed = (await self.call("GET", "/cluster"))["engines"]["engines"]
        return {one["engine"]: one["process"] for one in listed}

    async def press_stop(self) -> None:
        """Press STOP on a connection that exists and on new ones."""
        path = f"{self.process.url}/sessions/stopped/emergency_stop"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as new:
            while True:
                for http in (self.http, new):
                    began = time.monotonic()
                    async with http.post(path) as answer:
                        assert answer.status == 200
                    self.stops.append((began, time.monotonic() - began))
                await asyncio.sleep(0.02)

    def check_stops(self, since: float) -> None:
        """Every STOP since then was answered in time, as far as this machine is not late itself."""
        worst = max(took for began, took in self.stops if began >= since)
        late = self.meter.worst(since, ways=2)
        assert worst <= STOP + late, f"STOP took {worst:.3f} s; the machine was {late:.3f} s late"

    async def session(self, name: str) -> dict[str, Any]:
        return await self.call("GET", f"/sessions/{name}")

    async def until_moving(self, within: float) -> None:
        """Wait until every robot gets commands again."""
        began = time.monotonic()
        for name, times in self.commands.items():
            while not [at for at in times if at > began + 0.2]:
                assert time.monotonic() < began + within, await self.session(name)
                await asyncio.sleep(0.02)

    def worst_gap(self, since: float) -> float:
        """The longest time without a command of any robot since then."""
        until = time.monotonic()
        return max(
            later - earlier
            for times in self.commands.values()
            for earlier, later in pairwise([since, *(at for at in times if at > since), until])
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module", params=["cpu:0", "cpu:0,cpu:0"], ids=["one engine", "two engines"])
def process(place: Path, request: pytest.FixtureRequest) -> Iterator[Process]:
    flags = ("--devices", request.param, "--stuck-after", str(STUCK_AFTER), "--engine-patience", str(PATIENCE))
    with server(place / f"server{next(_numbers)}", *flags, "--frozen", "warn", scripted=False) as running:
        yield running


@pytest.fixture
async def fleet(process: Process) -> AsyncIterator[Fleet]:
    """Robots that move."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        meter = Meter(lambda: [process.pid])
        made = Fleet(process, http, meter)
        shared = {"policy_path": str(SHIPPED), "camera_names": ["front"]}
        await made.call("POST", "/sessions", {**shared, "session_id": "stopped", "transport_server_url": "direct"})
        for _ in range(ROBOTS):
            name = f"robot{next(_numbers)}"
            body = {**shared, "session_id": name, "transport_server_url": process.url, "rate": 50.0}
            rooms = await made.call("POST", "/sessions", body)
            times = made.commands[name] = []
            await stack.enter_async_context(
                living_robot(
                    process.url,
                    Rooms(
                        rooms["workspace_id"],
                        rooms["camera_room_ids"],
                        rooms["joint_input_room_id"],
                        rooms["joint_output_room_id"],
                    ),
                    on_command=lambda values, at, times=times: times.append(time.monotonic()),
                    pose=lambda now: dict.fromkeys(JOINTS, 5 + now % 1),
                )
            )
            await made.call("POST", f"/sessions/{name}/start")
        made.presses_stop = asyncio.create_task(made.press_stop())
        tasks = [asyncio.create_task(meter.run()), made.presses_stop]
        try:
            await made.until_moving(30)
            await asyncio.sleep(0.3)
            yield made
            assert made.presses_stop.cancelling() or not made.presses_stop.done(), "STOP was refused"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for name in ("stopped", *made.commands):
                with suppress(aiohttp.ClientError, AssertionError):
                    await made.call("DELETE", f"/sessions/{name}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_f26_lost_engine_holds_robots_until_another_one_runs(fleet: Fleet, number: signal.Signals) -> None:
    """Robots of a lost engine are held with `engine_lost`, or go on with another engine, and STOP is not delayed.

    A stopped process is noticed when a request has no answer. The limit for slow inferences holds the robots first.
    """
    before = await fleet.engines()
    began = time.monotonic()
    os.kill(next(iter(before.values())), number)
    if len(before) == 1:
        lost_at, expected = None, {"engine_lost"} if number is signal.SIGKILL else {"engine_lost", "inference_slow"}
        while lost_at is None:
            held = [(await fleet.session(name))["stats"]["hold_code"] for name in fleet.commands]
            if set(held) <= expected:
                lost_at = time.monotonic()
            assert time.monotonic() < began + STUCK_AFTER + 5, held
        limit = HELD if number is signal.SIGKILL else STUCK_AFTER + 1
        assert lost_at - began <= limit + fleet.meter.lost(began)
    await fleet.until_moving(PATIENCE)
    for name in fleet.commands:
        session = await fleet.session(name)
        assert (session["status"], session["stats"]["hold_code"]) == ("running", None)
    after = before
    while len(after) < len(before) or len(set(after.values()) - set(before.values())) != 1:
        assert time.monotonic() < began + PATIENCE, after
        await asyncio.sleep(0.1)
        after = await fleet.engines()
    fleet.check_stops(began)
    if len(before) == 2 and number is signal.SIGKILL:
        assert fleet.worst_gap(began) <= HELD + fleet.meter.worst(began, ways=2), "another engine was not used at once"


async def test_f27_jax_is_in_the_engines_which_end_with_a_killed_server(fleet: Fleet) -> None:
    mapped = Path(f"/proc/{fleet.process.pid}/maps").read_text()
    assert not [name for name in ("jaxlib", "tensorstore", "tokenizers") if name in mapped]
    engines = [Path(f"/proc/{process}") for process in (await fleet.engines()).values()]
    assert all("jaxlib" in (engine / "maps").read_text() for engine in engines)
    fleet.presses_stop.cancel()
    began = time.monotonic()
    fleet.process.kill()
    while any((engine / "maps").exists() and (engine / "maps").read_text() for engine in engines):
        assert time.monotonic() < began + 1 + fleet.meter.lost(began)
        await asyncio.sleep(0.01)
