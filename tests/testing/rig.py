"""The real server on a loopback port, in the process of a test: scripted policies, rooms in memory, keys in a file."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from service.api.context import App
from service.app import create_app
from service.auth.caller import Role
from service.auth.keys import KeyFile
from service.http.server import listen, serve_app
from service.settings import Settings
from service.testing import MemoryLink, MemoryTransport, ScriptedLoader
from tests.testing.waiting import until

REAL: Any = object()  # what a server has that is told nothing
ROOMS = "http://rooms.example"
JOINTS = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
OBSERVATION = {
    "observation.images.front": np.zeros((1, 48, 64, 3), np.uint8),
    "observation.state": np.zeros((1, 6), np.float32),
}
POSE = {name: float(number) for number, name in enumerate(JOINTS, 1)}


def body(session_id: str = "arm", **more: Any) -> dict[str, Any]:
    """What is sent to make a session."""
    return {"session_id": session_id, "policy_path": "policies/act", "transport_server_url": ROOMS} | more


def address_of(url: str) -> tuple[str, int]:
    """Where a socket reaches a server."""
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def show(link: MemoryLink, size: tuple[int, int] = (48, 64), period: float = 0.01) -> None:
    """A robot that sees black and stands in `POSE`, until it is cancelled."""
    while True:
        for camera in link.rooms.cameras:
            link.deliver_frame(camera, np.zeros((*size, 3), np.uint8))
        link.deliver_joints(POSE)
        await asyncio.sleep(period)


@dataclass
class Server:
    """A running server, what it was made of, its keys by name, and a client."""

    app: App
    url: str
    http: aiohttp.ClientSession
    load: Any
    transport: MemoryTransport
    file: KeyFile
    keys: dict[str, str] = field(default_factory=dict)

    async def call(self, method: str, path: str, by: str | None = None, **more: Any) -> tuple[int, Any]:
        """Status and JSON (or text) of one call, with the key of this name."""
        headers = ({"x-api-key": self.keys[by]} if by else {}) | more.pop("headers", {})
        async with self.http.request(method, path, headers=headers, **more) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def create(self, session_id: str = "arm", by: str | None = None, **more: Any) -> Any:
        """Status and answer of making a session."""
        return await self.call("POST", "/sessions", by, json=body(session_id, **more))

    async def until_loading(self) -> None:
        """A policy is being loaded (in a thread of its own, so there is no event to wait for)."""
        await until(lambda: self.load.loads)

    @property
    def address(self) -> tuple[str, int]:
        return address_of(self.url)


Kind = TypeVar("Kind", bound=Server)


@asynccontextmanager
async def started(
    kind: type[Kind] = Server,  # pyright: ignore[reportArgumentType] - PEP 696 would say that it is the default
    *,
    transport: Any = None,
    load: Any = None,
    parts: Mapping[str, Any] | None = None,
    roles: Mapping[str, Role] | None = None,
    headers: Mapping[str, str] | None = None,
    port: int = 0,
    prepare: Callable[[App], object] = lambda app: None,
    **settings: Any,
) -> AsyncIterator[Kind]:
    """A server with these settings.

    Args:
        kind: what is given of it.
        transport: rooms in memory when None; REAL are those of the server itself, or of others.
        load: how policies are loaded; a ScriptedLoader when None; REAL is from folders and the Hub.
        parts: more of what ``create_app`` takes.
        roles: keys that are made in the folder of the setting ``state``.
        headers: of every call.
        prepare: is given the app before it starts.
    """
    transport, load = transport or MemoryTransport(), load or ScriptedLoader()
    file = KeyFile(Path(settings.get("state", "nowhere")) / "keys.json")
    keys = {name: file.create(name, role, name, time.time()) for name, role in (roles or {}).items()}
    given = {name: None if part is REAL else part for name, part in (("transport", transport), ("load", load))}
    app = create_app(Settings(**settings), **given, **(parts or {}))
    prepare(app)
    async with (
        serve_app(app, listen("127.0.0.1", port)) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60), headers=headers) as http,
    ):
        yield kind(app, url, http, load, transport, file, keys)
