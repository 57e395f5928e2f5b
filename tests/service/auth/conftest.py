"""The real server on a loopback port with keys in a file, scripted policies, and the real rooms beside it."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from service.app import create_app
from service.auth.keys import KeyFile
from service.auth.roles import Role
from service.engine.scripted_policy import ScriptedLoader
from service.routes.context import App
from service.serving import listen, serving
from service.settings import Settings
from service.transport.memory import MemoryTransport


@dataclass
class Server:
    """A running server, its keys by name, and a client without any."""

    app: App
    url: str
    http: aiohttp.ClientSession
    file: KeyFile
    keys: dict[str, str]

    async def call(self, method: str, path: str, by: str | None = None, **more: Any) -> tuple[int, Any]:
        """Status and JSON (or text) of one call with the key of this name."""
        headers = {"x-api-key": self.keys[by]} if by else {}
        async with self.http.request(method, path, headers=headers | more.pop("headers", {}), **more) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def create(self, session_id: str, by: str, **more: Any) -> tuple[int, Any]:
        body = {"session_id": session_id, "policy_path": "policies/act", "transport_server_url": self.url} | more
        return await self.call("POST", "/sessions", by, json=body)


Serve = Callable[..., AbstractAsyncContextManager[Server]]
KEYS = {"eve": Role.VIEWER, "alice": Role.OPERATOR, "bob": Role.OPERATOR, "root": Role.ADMIN}


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def start(names: Any = KEYS, real_rooms: bool = False, **settings: Any) -> AsyncIterator[Server]:
        file = KeyFile(tmp_path / "state" / "keys.json")
        keys = {name: file.new(name, KEYS[name], name, time.time()) for name in names}
        load = ScriptedLoader()
        transport = None if real_rooms else MemoryTransport()
        known = Settings(state=str(tmp_path / "state"), policy_owners=("policies",), **settings)
        app = create_app(known, transport=transport, load=load)
        async with (
            serving(app, listen("127.0.0.1", 0)) as url,
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60)) as http,
        ):
            yield Server(app, url, http, file, keys)

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server
