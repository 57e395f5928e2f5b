"""One session from the view of an operator: API calls, the robot, and the history of both."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import aiohttp

from service.transport.client.robot import Robot
from service.transport.link import EmergencyStop, Rooms
from tests.faults.history import Call, History, Look
from tests.faults.meter import Meter
from tests.faults.processes import Process
from tests.faults.robot import Life, living_robot, witness
from tests.faults.script import Script

LOOK = 0.02  # Seconds between requests for the session's status.


class Arm:
    """A session on a server with its robot; ``session`` is the newest response of ``GET /sessions/{id}``."""

    def __init__(self, server: Process, script: Script | None, session_id: str, http: aiohttp.ClientSession):
        self.server, self.script, self.id = server, script, session_id
        self.chain = [server]
        self.meter = Meter(lambda: [process.pid for process in self.chain if process.is_alive])
        self.history = History(session_id, late=self.meter.worst)
        self.session: dict[str, Any] = {}
        self.stops: list[EmergencyStop] = []
        self.transport_url = server.url
        self.rooms: Rooms | None = None
        self._http = http
        self.life: Life
        self.robot: Robot
        self._robots = AsyncExitStack()

    async def call(self, method: str, path: str, body: Any = None, timeout: float = 60) -> tuple[int, Any]:
        began = time.monotonic()
        status, answer = 0, None
        try:
            patience = aiohttp.ClientTimeout(total=timeout)
            async with self._http.request(method, self.server.url + path, json=body, timeout=patience) as got:
                status, answer = got.status, await got.json(content_type=None)
        finally:
            self.history.calls.append(Call(method, path, began, time.monotonic(), status, answer))
        return status, answer

    def route_through(self, transport: Process) -> None:
        self.transport_url = transport.url
        self.chain.append(transport)

    async def ask(self, move: str) -> None:
        status, answer = await self.call("POST", f"/sessions/{self.id}/{move}")
        assert status == 200, answer

    async def ask_debug(self, move: str) -> None:
        status, answer = await self.call("POST", f"/debug/sessions/{self.id}/{move}")
        assert status == 200, answer

    def body(self, policy: str | None = None, **more: Any) -> dict[str, Any]:
        path = policy or (str(self.script.folder) if self.script else "")
        return {"session_id": self.id, "policy_path": path, "transport_server_url": self.transport_url, **more}

    async def create(self, policy: str | None = None, **more: Any) -> Rooms:
        status, made = await self.call("POST", "/sessions", self.body(policy, **more))
        assert status == 200, made
        return self.take_rooms(made)

    def take_rooms(self, made: dict[str, Any]) -> Rooms:
        self.rooms = Rooms(
            made["workspace_id"], made["camera_room_ids"], made["joint_input_room_id"], made["joint_output_room_id"]
        )
        return self.rooms

    async def connect(self, url: str | None = None, size: tuple[int, int] = (48, 64)) -> Robot:
        """Connect the robot to the rooms directly; the server may use another URL."""
        self.robot, self.life = await self._robots.enter_async_context(
            living_robot(
                url or self.transport_url,
                self.rooms,
                on_command=self.history.record_command,
                on_stop=self.stops.append,
                pose=self.history.pose.at,
                size=size,
                sessions=self.server.url,
            )
        )
        return self.robot

    async def add_witness(self) -> None:
        """Record commands through another participant when the robot runs in another process."""
        await self._robots.enter_async_context(witness(self.transport_url, self.rooms, self.history.record_command))

    async def disconnect(self) -> None:
        await self._robots.aclose()

    async def go(self, moving: int = 5, *, straight_to: str | None = None, **more: Any) -> None:
        """Create the session, connect, start, and wait until the robot moves; `connect` explains ``straight_to``."""
        await self.create(**more)
        await self.connect(straight_to)
        await self.ask("start")
        await self.moves(moving)

    async def watch(self) -> None:
        while True:
            began = time.monotonic()
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self.server.url}/sessions/{self.id}") as got:
                    if got.status == 200:
                        self.session = await got.json()
                        self.history.statuses.append(Look(began, time.monotonic(), self.session["status"]))
            await asyncio.sleep(LOOK)

    async def until(self, claim: Callable[[dict[str, Any]], Any], within: float = 30.0) -> dict[str, Any]:
        """Return the session as soon as ``claim`` is true for it."""
        began = time.monotonic()
        looked_at = 0.0
        while True:
            at = self.history.statuses[-1].ended if self.history.statuses else 0.0
            if at > began and at != looked_at:
                looked_at = at
                if claim(self.session):
                    return self.session
            if (now := time.monotonic()) > began + within:
                late = self.meter.lost(began)
                assert now < began + within + late, f"not within {within} + {late:.3f} s; it is {self.session}"
            await asyncio.sleep(LOOK / 4)

    async def moves(self, count: int = 5, within: float = 30.0) -> float:
        """Wait for ``count`` more actions and return the time of the first."""
        began = time.monotonic()
        while len(found := self.history.motions(began)) < count:
            assert time.monotonic() < began + within, f"no motion in {within} s; the session is {self.session}"
            await asyncio.sleep(LOOK / 4)
        return found[0][0]

    def first_observation(self, since: float) -> float:
        """Return when the robot reported the observation of the first action since then."""
        reading = self.history.pose.read(self.history.motions(since)[0][1])
        return reading.observed_at

    async def is_undisturbed(self, since: float) -> None:
        """Assert that the robot has moved without a pause since then and still moves."""
        times = [at for at, _ in self.history.motions(since)]
        gap = max((later - earlier for earlier, later in pairwise([*times, time.monotonic()])), default=float("inf"))
        late = self.meter.worst(since, ways=2)
        assert gap <= 0.1 + late, f"it did not move for {gap:.3f} s; the machine was {late:.3f} s late"
        await self.until(is_moving, within=0.5)

    def check_motion_ended(self, since: float, within: float) -> None:
        """Assert that the last action arrived by then, plus the lateness of the machine."""
        moved = [at - since for at, _ in self.history.motions(since)]
        assert not moved or moved[-1] <= within + self.meter.worst(since), f"moved on for {moved[-1]:.3f} s"

    async def expect_no_motion(self, since: float, seconds: float = 0.2) -> None:
        """Assert that no action sent after ``since`` arrives during these seconds."""
        await asyncio.sleep(seconds)
        assert self.history.motions(since + 0.05 + self.meter.worst(since)) == []

    async def listed(self) -> set[str]:
        async with self._http.get(f"{self.server.url}/sessions") as got:
            return {session["session_id"] for session in await got.json()}

    async def check(self) -> None:
        wrong = self.history.violations(await self.listed())
        late = f"the machine itself was up to {self.meter.worst():.3f} s late"
        assert not wrong, f"{len(wrong)} violations, {late}:\n" + "\n".join(wrong[:20])


def is_moving(session: dict[str, Any]) -> bool:
    return session["status"] == "running" and session["stats"]["hold"] is None


@asynccontextmanager
async def arm(server: Process, script: Script | None, session_id: str) -> AsyncIterator[Arm]:
    """Yield a watched arm; at the end, delete its session and check its history."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), trust_env=False) as http:
        made = Arm(server, script, session_id, http)
        tasks = [asyncio.create_task(made.meter.run()), asyncio.create_task(made.watch())]
        try:
            yield made
            await made.check()
        finally:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                await made.call("DELETE", f"/sessions/{session_id}", timeout=30)
            await made.disconnect()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
