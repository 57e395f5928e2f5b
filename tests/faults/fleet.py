"""Robots of one server that move during a fault or an attack, and a client that calls STOP continuously."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count, pairwise
from typing import Any

import aiohttp

from service.transport.link import Rooms
from tests.faults.meter import Meter
from tests.faults.processes import ROOT, Process
from tests.faults.robot import JOINTS, living_robot

logger = logging.getLogger(__name__)

SHIPPED = ROOT / "robojax" / "sim" / "policy"
STOP = 0.05  # Seconds within which STOP must be answered.
PERIOD = 0.02  # Seconds between two commands.
_numbers = count(1)


class Fleet:
    """Robots of one server, and a client that continuously calls STOP of another session.

    Attributes:
        meter: lateness of this machine for the server.
        sender: lateness of this machine for this process, which encodes the frames; a robot without frames is held.
        commands: times of the commands of each robot.
        stops: begin, seconds and connection (`existing` or `new`) of each STOP.
    """

    def __init__(self, process: Process, http: aiohttp.ClientSession, meter: Meter):
        self.process, self.http, self.meter = process, http, meter
        self.sender = Meter(lambda: [os.getpid()])
        self.commands: dict[str, list[float]] = {}
        self.stops: list[tuple[float, float, str]] = []
        self.presses_stop: asyncio.Task[None]

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self.http.request(method, self.process.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def engines(self) -> dict[str, int]:
        """Return the process of each engine by its name."""
        listed = (await self.call("GET", "/cluster"))["engines"]["engines"]
        return {one["engine"]: one["process"] for one in listed}

    async def press_stop(self) -> None:
        """Call STOP on an existing connection and on new ones."""
        path = f"{self.process.url}/sessions/stopped/emergency_stop"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as new:
            while True:
                for http, connection in ((self.http, "existing"), (new, "new")):
                    began = time.monotonic()
                    async with http.post(path) as answer:
                        assert answer.status == 200
                    self.stops.append((began, time.monotonic() - began, connection))
                await asyncio.sleep(0.02)

    def check_stops(self, since: float) -> None:
        """Assert that each STOP since then was answered in time, except for the lateness of this machine."""
        late = self.meter.worst(since, ways=2)
        for connection in ("existing", "new"):
            taken = sorted(took for began, took, kind in self.stops if began >= since and kind == connection)
            logger.info("STOP on %s: %d times, worst %.1f ms", connection, len(taken), taken[-1] * 1e3)
        worst = max(took for began, took, _ in self.stops if began >= since)
        logger.info("worst gap %.1f ms; machine late by %.1f ms", self.worst_gap(since) * 1e3, late * 1e3)
        assert worst <= STOP + late, f"STOP took {worst:.3f} s; the machine was {late:.3f} s late"

    def check_commands(self, since: float) -> None:
        """Assert that no command since then was late by more than a period and the lateness of this machine."""
        gap, late = self.worst_gap(since), self.meter.worst(since, ways=2) + self.sender.worst(since, ways=0)
        assert gap <= 2 * PERIOD + late, f"no command for {gap:.3f} s; the machine was {late:.3f} s late"

    async def session(self, name: str) -> dict[str, Any]:
        return await self.call("GET", f"/sessions/{name}")

    async def until_moving(self, within: float) -> None:
        """Wait until each robot receives commands again."""
        began = time.monotonic()
        for name, times in self.commands.items():
            while not [at for at in times if at > began + 0.2]:
                assert time.monotonic() < began + within, await self.session(name)
                await asyncio.sleep(0.02)

    def worst_gap(self, since: float) -> float:
        """Return the longest time without a command of any robot since then."""
        until = time.monotonic()
        return max(
            later - earlier
            for times in self.commands.values()
            for earlier, later in pairwise([since, *(at for at in times if at > since), until])
        )

    async def add_robot(self, stack: AsyncExitStack, **more: Any) -> str:
        """Add a robot that lives until the stack ends, and return the id of its session."""
        name, url = f"robot{next(_numbers)}", self.process.url
        body = {"policy_path": str(SHIPPED), "camera_names": ["front"], "rate": 50.0, **more}
        found = await self.call("POST", "/sessions", {**body, "session_id": name, "transport_server_url": url})
        places = ("workspace_id", "camera_room_ids", "joint_input_room_id", "joint_output_room_id")
        times = self.commands[name] = []
        robot = living_robot(
            url,
            Rooms(*(found[place] for place in places)),
            on_command=lambda values, at: times.append(time.monotonic()),
            pose=lambda now: dict.fromkeys(JOINTS, 5 + now % 1),
        )
        try:
            await stack.enter_async_context(robot)
            await self.call("POST", f"/sessions/{name}/start")
        except BaseException:
            await self.remove_robot(name)
            raise
        return name

    async def remove_robot(self, name: str) -> None:
        """Delete a robot's session."""
        await self.call("DELETE", f"/sessions/{name}")
        del self.commands[name]


@asynccontextmanager
async def moving_fleet(process: Process, robots: int) -> AsyncIterator[Fleet]:
    """Yield robots that move at 50 Hz with the shipped policy."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        meter = Meter(lambda: [process.pid])
        made = Fleet(process, http, meter)
        stopped = {"session_id": "stopped", "policy_path": str(SHIPPED), "camera_names": ["front"]}
        await made.call("POST", "/sessions", {**stopped, "transport_server_url": "direct"})
        for _ in range(robots):
            await made.add_robot(stack)
        made.presses_stop = asyncio.create_task(made.press_stop())
        tasks = [*(asyncio.create_task(each.run()) for each in (meter, made.sender)), made.presses_stop]
        try:
            await made.until_moving(60)  # Each engine compiles the policy first, which takes 30 s on a busy machine.
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
