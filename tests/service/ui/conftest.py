"""The real server on a loopback port with scripted policies, rooms in memory, and an arm that obeys."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from jaxmodels import Requirements
from jaxmodels.errors import CheckpointError
from service.app import create_app
from service.auth.keys import KeyFile
from service.auth.roles import Role
from service.engine.scripted_policy import SO100_REQUIREMENTS, ScriptedLoader
from service.routes.context import App
from service.serving import listen, serving
from service.settings import Settings
from service.transport.memory import MemoryLink, MemoryTransport

PERIOD = 0.04


class Arm:
    """It sees a moving square, goes where it is told, and reports where it is."""

    def __init__(self, link: MemoryLink):
        self.link = link
        self.pose = {
            "Rotation": 0.0,
            "Pitch": 10.0,
            "Elbow": 20.0,
            "Wrist_Pitch": 30.0,
            "Wrist_Roll": 40.0,
            "Jaw": 50.0,
        }
        self.is_seeing = True
        self._ticks = 0
        self._obeyed = 0

    async def live(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(PERIOD)

    def step(self) -> None:
        for sent in self.link.sent[self._obeyed :]:
            self.pose.update(sent.values)
        self._obeyed = len(self.link.sent)
        self._ticks += 1
        picture = np.full((48, 64, 3), (40, 60, 90), np.uint8)
        at = self._ticks % 48
        picture[16:32, at : at + 16] = (229, 72, 77)
        if self.is_seeing:
            self.link.deliver_frame("front", picture)
        self.link.deliver_joints(self.pose)


@dataclass
class Server:
    """A running server, what it was made of, and a client."""

    app: App
    url: str
    http: aiohttp.ClientSession
    load: ScriptedLoader
    transport: MemoryTransport
    arms: list[Arm] = field(default_factory=list)
    _living: list["asyncio.Task[None]"] = field(default_factory=list)

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.request(method, path, **more) as answer:
            return answer.status, await answer.json()

    async def create(self, session_id: str = "arm", **more: Any) -> Arm:
        """A session that is ready, and its arm."""
        body = {"session_id": session_id, "policy_path": "policies/act", "transport_server_url": "http://rooms.example"}
        status, told = await self.call("POST", "/sessions", json=body | more)
        assert status == 200, told
        return self.connect()

    def connect(self) -> Arm:
        """An arm in the rooms of the newest session."""
        arm = Arm(self.transport.link)
        arm.step()
        self.arms.append(arm)
        self._living.append(asyncio.create_task(arm.live()))
        return arm

    async def until(self, claim: Callable[[], Any], seconds: float = 30.0) -> None:
        """Wait until this is so."""
        async with asyncio.timeout(seconds):
            while not claim():  # noqa: ASYNC110 - of threads and sockets there is no event
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self._living:
            task.cancel()
        await asyncio.gather(*self._living, return_exceptions=True)


Serve = Callable[..., AbstractAsyncContextManager[Server]]


def read_requirements(path: str, revision: str | None) -> Requirements:
    if "missing" in path:
        raise CheckpointError("config.json: cannot be read; wanted it in the folder")
    return replace(SO100_REQUIREMENTS, language="told" in path)


@asynccontextmanager
async def started(port: int = 0, **settings: Any) -> AsyncIterator[Server]:
    load, transport = ScriptedLoader(), MemoryTransport()
    app = create_app(Settings(**settings), transport=transport, load=load, read_requirements=read_requirements)
    async with (
        serving(app, listen("127.0.0.1", port)) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60)) as http,
    ):
        server = Server(app, url, http, load, transport)
        try:
            yield server
        finally:
            await server.close()


@pytest.fixture
def serve() -> Serve:
    return started


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    """A file of keys with one in it, so that a server which is given it wants one."""
    file = KeyFile(tmp_path / "keys.json")
    file.new("first", Role.ADMIN, None, time.time())
    return file
