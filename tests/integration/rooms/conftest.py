"""A transport server on loopback that can be killed, its clients, sessions and robots in rooms, and a proxy."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest

from service.transport.client.connection import TransportTimeouts
from service.transport.client.robot import OnCommand, Robot, connect_robot
from service.transport.client.rooms_link import RoomsTransport
from service.transport.link import Link, LinkEvent, LinkRequest, Rooms, Transport
from service.transport.server.app import RoomsSettings
from tests.faults.proxy import FaultProxy, fault_proxy
from tests.testing.rooms_server import serve_transport
from tests.testing.waiting import until

PATIENCE = 30.0


@dataclass
class Socket:
    raw: aiohttp.ClientWebSocketResponse

    async def send(self, message: Any) -> None:
        await self.raw.send_str(message if isinstance(message, str) else json.dumps(message))

    async def next(self) -> Any:
        """Return the next message, or None if the server closed."""
        frame = await self.raw.receive(PATIENCE)
        return json.loads(frame.data) if frame.type is aiohttp.WSMsgType.TEXT else None

    async def until(self, kind: str) -> Any:
        while (message := await self.next()) is not None:
            if message["type"] == kind:
                return message
        raise AssertionError(f"closed before {kind}")

    async def is_silent(self) -> bool:
        """Return whether no message arrived so far: the response to a heartbeat must be the next message."""
        await self.send({"type": "heartbeat"})
        return (await self.next())["type"] == "heartbeat_ack"

    async def close(self) -> None:
        await self.raw.close()


@dataclass
class Caller:
    """Client of one server, under ``/`` or ``/api``."""

    session: aiohttp.ClientSession
    base: str
    prefix: str = ""
    opened: list[Socket] = field(default_factory=list)  # Kept, because garbage collection would close them.

    def under(self, prefix: str) -> "Caller":
        return Caller(self.session, self.base, prefix, self.opened)

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        # Use a stream, because aiohttp warns about large bodies of bytes.
        stream = None if data is None else io.BytesIO(data)
        async with self.session.request(method, self.base + self.prefix + path, data=stream, **more) as response:
            return response.status, json.loads(await response.read())

    async def signal(self, path: str, client_id: str, **message: Any) -> tuple[int, Any]:
        return await self.call("POST", f"{path}/webrtc/signal", {"client_id": client_id, "message": message})

    async def room(self, kind: str, room: str, workspace: str = "w", **body: Any) -> str:
        status, answer = await self.call("POST", f"/{kind}/workspaces/{workspace}/rooms", {"room_id": room, **body})
        assert status == 200, answer
        return f"/{kind}/workspaces/{workspace}/rooms/{room}"

    async def open(self, path: str, **more: Any) -> Socket:
        self.opened.append(Socket(await self.session.ws_connect(f"{self.base}{self.prefix}{path}/ws", **more)))
        return self.opened[-1]

    async def open_socket(self, path: str, participant_id: str, role: str, **more: Any) -> Socket:
        """Open a socket and send the join without reading the response."""
        socket = await self.open(path, **more)
        await socket.send({"participant_id": participant_id, "role": role})
        return socket

    async def join(self, path: str, participant_id: str, role: str, **more: Any) -> Socket:
        socket = await self.open_socket(path, participant_id, role, **more)
        await socket.until("joined")
        return socket

    async def pair(self, kind: str, room: str = "r") -> tuple[str, Socket, Socket]:
        """Create a room and return its path, its producer ``p`` and its consumer ``c`` after both have joined."""
        path = await self.room(kind, room)
        producer, consumer = await self.join(path, "p", "producer"), await self.join(path, "c", "consumer")
        if kind == "video":
            await producer.until("participant_joined")
        return path, producer, consumer

    async def settled(self, path: str, **expected: Any) -> Any:
        for _ in range(int(PATIENCE / 0.01)):
            _, answer = await self.call("GET", path)
            participants = answer["room"]["participants"]
            if all(participants[key] == value for key, value in expected.items()):
                return answer["room"]
            await asyncio.sleep(0.01)
        raise AssertionError(f"wanted {expected}, found {participants}")


@dataclass
class RecordingInbox:
    """An ``Inbox`` that stores all events."""

    frames: list[tuple[str, np.ndarray, float]] = field(default_factory=list)
    poses: list[dict[str, float]] = field(default_factory=list)
    posed_at: list[float] = field(default_factory=list)
    events: list[LinkEvent] = field(default_factory=list)

    def on_frame(self, camera: str, image: np.ndarray, observed_at: float) -> None:
        self.frames.append((camera, image, observed_at))

    def on_joints(self, values, observed_at: float) -> None:
        self.poses.append(dict(values))
        self.posed_at.append(observed_at)

    def on_event(self, event: LinkEvent) -> None:
        self.events.append(event)

    @property
    def pose(self) -> dict[str, float]:
        return {name: value for pose in self.poses for name, value in pose.items()}

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def seen() -> RecordingInbox:
    return RecordingInbox()


Serve = Callable[..., AbstractAsyncContextManager[Caller]]


@pytest.fixture
def serve() -> Serve:
    """``async with serve(join_timeout=1.0) as caller``: a server with these settings."""

    @asynccontextmanager
    async def served(**settings: Any) -> AsyncIterator[Caller]:
        async with serve_transport(RoomsSettings(**settings)) as base, aiohttp.ClientSession() as session:
            caller = Caller(session, base)
            yield caller
            await asyncio.gather(*(socket.close() for socket in caller.opened))

    return served


@pytest.fixture
async def caller(serve: Serve) -> AsyncIterator[Caller]:
    async with serve() as caller:
        yield caller


# Fast, with a margin for a busy machine: a link is lost after 1.05 s.
QUICK = TransportTimeouts(
    join=2.0, request=2.0, heartbeat=0.5, retry_first=0.02, retry_longest=0.1, leave=0.5, greet=0.05, connect=5.0
)


class Server:
    """A transport server that can be killed and restarted on the same port."""

    def __init__(self, stack: AsyncExitStack):
        self.url = ""
        self._outer = stack
        self._life: AsyncExitStack | None = None
        self._port = 0

    async def start(self, **settings: Any) -> None:
        self._life = AsyncExitStack()
        self.url = await self._life.enter_async_context(serve_transport(RoomsSettings(**settings), port=self._port))
        self._port = int(self.url.rsplit(":", 1)[1])

    async def kill(self) -> None:
        if self._life is not None:
            await self._life.aclose()
            self._life = None

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + path, json=body) as answer:
            return answer.status, await answer.json()

    async def rooms(self, kind: str, workspace: str) -> set[str]:
        _, answer = await self.call("GET", f"/{kind}/workspaces/{workspace}/rooms")
        return {room["id"] for room in answer["rooms"]}


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with AsyncExitStack() as stack:
        server = Server(stack)
        await server.start()
        yield server
        await server.kill()


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(server.url, chunk=4096) as proxy:
        yield proxy


@pytest.fixture
def connect(server: Server, seen: Any, quick: TransportTimeouts) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """``async with connect("front") as link``: a session's link with these cameras."""

    def link(*cameras: str, url: str = "", inbox: Any = seen, pace: TransportTimeouts = quick,
             workspace_id: str | None = "w", session_id: str = "s") -> AbstractAsyncContextManager[Link]:  # fmt: skip
        transport: Transport = RoomsTransport(timeouts=pace)
        return transport.connect(LinkRequest(url or server.url, session_id, cameras, workspace_id, inbox))

    return link


@pytest.fixture
def join_robot(server: Server, quick: TransportTimeouts) -> Callable[..., AbstractAsyncContextManager[Robot]]:
    """``async with join_robot(link.rooms) as robot``: a robot in these rooms."""

    def robot(
        rooms: Rooms, on_command: OnCommand = lambda values, at: None, pace: TransportTimeouts = quick, **more: Any
    ):
        return connect_robot(server.url, rooms, on_command=on_command, pace=pace, **more)

    return robot


@pytest.fixture
def both(
    connect, join_robot, quick: TransportTimeouts
) -> Callable[..., AbstractAsyncContextManager[tuple[Any, Robot]]]:
    """``async with both("front") as (link, robot)``: a session's link and its robot."""

    @asynccontextmanager
    async def joined(*cameras: str, pace: TransportTimeouts = quick, **more: Any) -> AsyncIterator[tuple[Any, Robot]]:
        async with connect(*cameras, pace=pace) as link, join_robot(link.rooms, pace=pace, **more) as robot:
            yield link, robot

    return joined


@pytest.fixture
def quick() -> TransportTimeouts:
    return QUICK


@pytest.fixture(name="until")
def until_() -> Callable[..., Any]:
    return until
