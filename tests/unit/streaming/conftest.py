"""Fixtures: the real server on loopback ports, with scripted policies and sessions without rooms."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import websockets

from service.api.websockets import create_openpi_app
from service.http.server import listen, serve_app
from service.streaming import codec
from tests.testing import rig
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy
from tests.testing.waiting import until


class Client:
    """Client of a stream."""

    def __init__(self, socket):
        self.socket = socket

    async def send(self, kind: str, **fields) -> None:
        await self.socket.send(codec.pack({"kind": kind} | fields))

    async def receive(self, kind: str):
        """Return the next message of this kind."""
        async with asyncio.timeout(30):
            while True:
                raw = await self.socket.recv()
                message = codec.unpack_json(raw) if isinstance(raw, str) else codec.unpack(raw)
                if message["kind"] == kind:
                    return message


@dataclass
class Server(rig.Server):
    """Server with its openpi port and its only policy."""

    openpi: str = ""
    pose = (0.0, 10.0, -20.0, 30.0, 0.0, 50.0)

    def observe(self, **more: Any) -> dict[str, Any]:
        """Return an observation with these changes."""
        image = np.full((48, 64, 3), 7, np.uint8)
        return {"images": {"front": image}, "state": np.array(self.pose, np.float32)} | more

    @property
    def policy(self) -> ScriptedPolicy:
        return self.load.make()

    async def create(self, session_id: str = "arm", by: str | None = None, **more: Any) -> dict[str, Any]:
        """Create a session that its client drives, and return the answer."""
        status, answer = await super().create(session_id, by, **{"transport_server_url": "direct"} | more)
        assert status == 200, answer
        return answer

    async def act(self, message: Any, session_id: str = "arm", **more: Any) -> tuple[int, Any]:
        """Send an act in msgpack and return the status and the answer."""
        body = codec.pack(message) if isinstance(message, dict) else message
        headers = {"content-type": "application/msgpack"} | more.pop("headers", {})
        async with self.http.post(f"/sessions/{session_id}/act", data=body, headers=headers, **more) as response:
            answer = await response.read()
            is_packed = response.content_type == "application/msgpack"
            return response.status, codec.unpack(answer) if is_packed else codec.unpack_json(answer)

    async def acted(self, message: Any, **more: Any) -> Any:
        """Return the answer to an act that must be accepted."""
        status, answer = await self.act(message, **more)
        assert status == 200, answer
        return answer

    def stream(self, path: str = "/sessions/arm/stream", **more: Any) -> Any:
        """Connect with an independent WebSocket library."""
        return websockets.connect(self.url.replace("http", "ws") + path, max_size=None, **more)

    @asynccontextmanager
    async def client(self, path: str = "/sessions/arm/stream", **more: Any) -> AsyncIterator[Client]:
        """Connect a client to a stream of the session."""
        async with self.stream(path, **more) as socket:
            yield Client(socket)

    @asynccontextmanager
    async def loading(self, policy_path: str = "policies/act") -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
        """Create a session whose policy loads until ``load.gate`` is set, and yield the task of the request."""
        self.load.gate = threading.Event()
        call = super().create("arm", transport_server_url="direct", policy_path=policy_path)
        creating = asyncio.create_task(call)
        try:
            await until(lambda: self.load.loads)
            yield creating
        finally:
            self.load.gate.set()
            await creating


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve() -> Serve:
    @asynccontextmanager
    async def start(key: str | None = None, policy: ScriptedPolicy | None = None, create: bool = True, **settings: Any):
        """Start a server with the session "arm" unless ``create`` is false."""
        policy = policy or ScriptedPolicy()
        load, headers = ScriptedLoader(lambda: policy), {} if key is None else {"x-api-key": key}
        settings = {"policy_owners": ("policies",)} | settings
        async with (
            rig.started(Server, load=load, headers=headers, **settings) as server,
            serve_app(create_openpi_app(server.app), listen("127.0.0.1", 0)) as openpi_url,
        ):
            server.openpi = openpi_url.replace("http", "ws")
            if create:
                await server.create()
            yield server

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server
