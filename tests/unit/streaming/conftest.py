"""The real server on loopback ports, with scripted policies and sessions without rooms."""

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
    """One end of a stream."""

    def __init__(self, socket):
        self.socket = socket

    async def say(self, kind: str, **fields) -> None:
        await self.socket.send(codec.pack({"kind": kind} | fields))

    async def hear(self, kind: str):
        """The next message of this kind."""
        async with asyncio.timeout(30):
            while True:
                raw = await self.socket.recv()
                told = codec.unpack_json(raw) if isinstance(raw, str) else codec.unpack(raw)
                if told["kind"] == kind:
                    return told


@dataclass
class Server(rig.Server):
    """A server with its openpi port beside it, and its one policy."""

    openpi: str = ""
    pose = (0.0, 10.0, -20.0, 30.0, 0.0, 50.0)

    def seen(self, **more: Any) -> dict[str, Any]:
        """An observation."""
        picture = np.full((48, 64, 3), 7, np.uint8)
        return {"images": {"front": picture}, "state": np.array(self.pose, np.float32)} | more

    @property
    def policy(self) -> ScriptedPolicy:
        return self.load.make()

    async def create(self, session_id: str = "arm", by: str | None = None, **more: Any) -> dict[str, Any]:
        """What is told of a session that its client drives."""
        status, told = await super().create(session_id, by, **{"transport_server_url": "direct"} | more)
        assert status == 200, told
        return told

    async def act(self, message: Any, session_id: str = "arm", **more: Any) -> tuple[int, Any]:
        """One act in msgpack."""
        body = codec.pack(message) if isinstance(message, dict) else message
        headers = {"content-type": "application/msgpack"} | more.pop("headers", {})
        async with self.http.post(f"/sessions/{session_id}/act", data=body, headers=headers, **more) as answer:
            told = await answer.read()
            is_packed = answer.content_type == "application/msgpack"
            return answer.status, codec.unpack(told) if is_packed else codec.unpack_json(told)

    async def acted(self, message: Any, **more: Any) -> Any:
        """The answer to an act that is accepted."""
        status, told = await self.act(message, **more)
        assert status == 200, told
        return told

    def stream(self, path: str = "/sessions/arm/stream", **more: Any) -> Any:
        """A client of a library that is not ours."""
        return websockets.connect(self.url.replace("http", "ws") + path, max_size=None, **more)

    @asynccontextmanager
    async def client(self, path: str = "/sessions/arm/stream", **more: Any) -> AsyncIterator[Client]:
        """One end of a stream of the session."""
        async with self.stream(path, **more) as socket:
            yield Client(socket)

    @asynccontextmanager
    async def loading(self, policy_path: str = "policies/act") -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
        """A session whose policy loads until ``load.gate`` is set; the task is the request that makes it."""
        self.load.gate = threading.Event()
        call = super().create("arm", transport_server_url="direct", policy_path=policy_path)
        making = asyncio.create_task(call)
        try:
            await until(lambda: self.load.loads)
            yield making
        finally:
            self.load.gate.set()
            await making


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve() -> Serve:
    @asynccontextmanager
    async def start(key: str | None = None, policy: ScriptedPolicy | None = None, create: bool = True, **settings: Any):
        """A server, with the session "arm" unless ``create`` is false."""
        policy = policy or ScriptedPolicy()
        load, headers = ScriptedLoader(lambda: policy), {} if key is None else {"x-api-key": key}
        settings = {"policy_owners": ("policies",)} | settings
        async with (
            rig.started(Server, load=load, headers=headers, **settings) as server,
            serve_app(create_openpi_app(server.app), listen("127.0.0.1", 0)) as beside,
        ):
            server.openpi = beside.replace("http", "ws")
            if create:
                await server.create()
            yield server

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server
