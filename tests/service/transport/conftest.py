"""A transport server on loopback, a caller that speaks plain HTTP and WebSocket to it, and a session's inbox."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from service.transport.link import LinkEvent
from service.transport.server.app import TransportSettings, serve_transport

PATIENCE = 30.0


@dataclass
class Socket:
    """One WebSocket, read as JSON."""

    raw: aiohttp.ClientWebSocketResponse

    async def send(self, message: Any) -> None:
        await self.raw.send_str(message if isinstance(message, str) else json.dumps(message))

    async def next(self) -> Any:
        """The next message; None when the server closed."""
        frame = await self.raw.receive(PATIENCE)
        return json.loads(frame.data) if frame.type is aiohttp.WSMsgType.TEXT else None

    async def until(self, kind: str) -> Any:
        while (message := await self.next()) is not None:
            if message["type"] == kind:
                return message
        raise AssertionError(f"closed before {kind}")

    async def is_silent(self) -> bool:
        """Nothing was sent to this socket so far: the answer to a heartbeat is the next thing that comes."""
        await self.send({"type": "heartbeat"})
        return (await self.next())["type"] == "heartbeat_ack"

    async def close(self) -> None:
        await self.raw.close()


@dataclass
class Caller:
    """Calls one server, under ``/`` or ``/api``."""

    session: aiohttp.ClientSession
    base: str
    prefix: str = ""
    opened: list[Socket] = field(default_factory=list)  # held, or the collector closes them in mid-test

    def under(self, prefix: str) -> "Caller":
        return Caller(self.session, self.base, prefix, self.opened)

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        # A stream, since aiohttp warns of large bodies that are bytes.
        stream = None if data is None else io.BytesIO(data)
        async with self.session.request(method, self.base + self.prefix + path, data=stream, **more) as response:
            return response.status, json.loads(await response.read())

    async def signal(self, path: str, client_id: str, **message: Any) -> tuple[int, Any]:
        return await self.call("POST", f"{path}/webrtc/signal", {"client_id": client_id, "message": message})

    async def room(self, kind: str, room: str, workspace: str = "w", **body: Any) -> str:
        """Make a room; returns its path."""
        status, answer = await self.call("POST", f"/{kind}/workspaces/{workspace}/rooms", {"room_id": room, **body})
        assert status == 200, answer
        return f"/{kind}/workspaces/{workspace}/rooms/{room}"

    async def open(self, path: str, **more: Any) -> Socket:
        self.opened.append(Socket(await self.session.ws_connect(f"{self.base}{self.prefix}{path}/ws", **more)))
        return self.opened[-1]

    async def knock(self, path: str, participant_id: str, role: str, **more: Any) -> Socket:
        """Open a socket and send the join, without reading what comes back."""
        socket = await self.open(path, **more)
        await socket.send({"participant_id": participant_id, "role": role})
        return socket

    async def join(self, path: str, participant_id: str, role: str, **more: Any) -> Socket:
        socket = await self.knock(path, participant_id, role, **more)
        await socket.until("joined")
        return socket

    async def pair(self, kind: str, room: str = "r") -> tuple[str, Socket, Socket]:
        """A new room's path, its producer ``p`` and its consumer ``c``, of whom both know."""
        path = await self.room(kind, room)
        producer, consumer = await self.join(path, "p", "producer"), await self.join(path, "c", "consumer")
        if kind == "video":
            await producer.until("participant_joined")
        return path, producer, consumer

    async def settled(self, path: str, **wanted: Any) -> Any:
        """The room, once its participants are as wanted."""
        for _ in range(int(PATIENCE / 0.01)):
            _, answer = await self.call("GET", path)
            participants = answer["room"]["participants"]
            if all(participants[key] == value for key, value in wanted.items()):
                return answer["room"]
            await asyncio.sleep(0.01)
        raise AssertionError(f"wanted {wanted}, found {participants}")


@dataclass
class Seen:
    """An ``Inbox`` that keeps what it gets."""

    frames: list[tuple[str, np.ndarray, float]] = field(default_factory=list)
    poses: list[dict[str, float]] = field(default_factory=list)
    posed_at: list[float] = field(default_factory=list)
    events: list[LinkEvent] = field(default_factory=list)

    def frame(self, camera: str, image: np.ndarray, seen_at: float) -> None:
        self.frames.append((camera, image, seen_at))

    def joints(self, values, seen_at: float) -> None:
        self.poses.append(dict(values))
        self.posed_at.append(seen_at)

    def event(self, event: LinkEvent) -> None:
        self.events.append(event)

    @property
    def pose(self) -> dict[str, float]:
        """Everything merged."""
        return {name: value for pose in self.poses for name, value in pose.items()}

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def seen() -> Seen:
    return Seen()


Serve = Callable[..., AbstractAsyncContextManager[Caller]]


@pytest.fixture
def serve() -> Serve:
    """``async with serve(is_odd=True) as caller``: a server of these settings."""

    @asynccontextmanager
    async def served(**settings: Any) -> AsyncIterator[Caller]:
        async with serve_transport(TransportSettings(**settings)) as base, aiohttp.ClientSession() as session:
            caller = Caller(session, base)
            yield caller
            await asyncio.gather(*(socket.close() for socket in caller.opened))

    return served


@pytest.fixture
async def caller(serve: Serve) -> AsyncIterator[Caller]:
    """A server of the default settings."""
    async with serve() as caller:
        yield caller
