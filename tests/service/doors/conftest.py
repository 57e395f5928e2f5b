"""The real server on loopback ports, with scripted policies and sessions without rooms."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import pytest
import websockets

from service.app import create_app
from service.doors import packing
from service.doors.sockets import openpi_app
from service.engine.scripted_policy import ScriptedLoader, ScriptedPolicy
from service.routes.context import App
from service.serving import listen, serving
from service.settings import Settings
from service.transport.memory import MemoryTransport


@dataclass
class Server:
    """A running server, what it was made of, and a client."""

    app: App
    url: str
    openpi: str
    http: aiohttp.ClientSession
    policy: ScriptedPolicy
    pose = (0.0, 10.0, -20.0, 30.0, 0.0, 50.0)

    def seen(self, **more: Any) -> dict[str, Any]:
        """An observation."""
        picture = np.full((48, 64, 3), 7, np.uint8)
        return {"images": {"front": picture}, "state": np.array(self.pose, np.float32)} | more

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self.http.request(method, path, **more) as answer:
            return answer.status, await answer.json()

    async def create(self, session_id: str = "arm", **more: Any) -> dict[str, Any]:
        body = {"session_id": session_id, "policy_path": "policies/act", "transport_server_url": "direct"} | more
        status, told = await self.call("POST", "/sessions", json=body)
        assert status == 200, told
        return told

    async def act(self, message: Any, session_id: str = "arm", **more: Any) -> tuple[int, Any]:
        """One act in msgpack."""
        body = packing.pack(message) if isinstance(message, dict) else message
        headers = {"content-type": "application/msgpack"} | more.pop("headers", {})
        async with self.http.post(f"/sessions/{session_id}/act", data=body, headers=headers, **more) as answer:
            told = await answer.read()
            is_packed = answer.content_type == "application/msgpack"
            return answer.status, packing.unpack(told) if is_packed else packing.unpack_json(told)

    def stream(self, path: str = "/sessions/arm/stream", **more: Any) -> Any:
        """A client of a library that is not ours."""
        return websockets.connect(self.url.replace("http", "ws") + path, max_size=None, **more)


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve() -> Serve:
    @asynccontextmanager
    async def start(key: str | None = None, policy: ScriptedPolicy | None = None, **settings: Any):
        policy = policy or ScriptedPolicy()
        app = create_app(
            Settings(policy_owners=("policies",), **settings),
            transport=MemoryTransport(),
            load=ScriptedLoader(lambda: policy),
        )
        headers = {} if key is None else {"x-api-key": key}
        async with (
            serving(app, listen("127.0.0.1", 0)) as url,
            serving(openpi_app(app), listen("127.0.0.1", 0)) as beside,
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20), headers=headers) as http,
        ):
            yield Server(app, url, beside.replace("http", "ws"), http, policy)

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        await server.create()
        yield server
