"""The real server on a loopback port, with scripted policies and rooms in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from service.app import create_app
from service.engine.scripted_policy import ScriptedLoader
from service.routes.context import App
from service.serving import listen, serving
from service.settings import Settings
from service.transport.memory import MemoryTransport


@dataclass
class Server:
    """A running server, what it was made of, and a client."""

    app: App
    url: str
    http: aiohttp.ClientSession
    load: ScriptedLoader
    transport: MemoryTransport

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        """Status and JSON of one call."""
        async with self.http.request(method, path, **more) as answer:
            return answer.status, await answer.json()

    async def create(self, session_id: str = "arm", **more: Any) -> tuple[int, Any]:
        return await self.call("POST", "/sessions", json=body(session_id, **more))

    async def until_loading(self) -> None:
        """A policy is being loaded (in a thread of its own, so there is no event to wait for)."""
        for _ in range(3000):
            if self.load.loads:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("nothing was loaded")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)


def body(session_id: str = "arm", **more: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "policy_path": "policies/act",
        "transport_server_url": "http://rooms.example",
    } | more


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve() -> Serve:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Server]:
        load, transport = ScriptedLoader(), MemoryTransport()
        app = create_app(Settings(**settings), transport=transport, load=load)
        async with (
            serving(app, listen("127.0.0.1", 0)) as url,
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60)) as http,
        ):
            yield Server(app, url, http, load, transport)

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server
