"""A server that can be killed and come back, and a wire that can be cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from service.transport.client.connection import TransportTimeouts
from service.transport.client.robot import OnCommand, Robot, connect_robot
from service.transport.client.rooms_link import RoomsTransport
from service.transport.link import Link, Rooms, Transport
from service.transport.server.app import TransportSettings, serve_transport

# Quick, but with room for a busy machine: a link is lost after 1.05 s.
QUICK = TransportTimeouts(
    join=2.0, request=2.0, heartbeat=0.5, retry_first=0.02, retry_longest=0.1, leave=0.5, greet=0.05, connect=5.0
)


async def until(claim: Callable[[], Any], within: float = 30.0) -> Any:
    """Wait until something is so."""
    for _ in range(int(within / 0.005)):
        if found := claim():
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {within} s: {claim}")


class Server:
    """A transport server that can die and come back at the same port."""

    def __init__(self, stack: AsyncExitStack):
        self.url = ""
        self._outer = stack
        self._life: AsyncExitStack | None = None
        self._port = 0

    async def start(self, **settings: Any) -> None:
        self._life = AsyncExitStack()
        self.url = await self._life.enter_async_context(serve_transport(TransportSettings(**settings), port=self._port))
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


class Proxy:
    """A TCP proxy that can stop carrying bytes without closing, stop reading from the client, and cut."""

    def __init__(self, target: str):
        host, port = target.removeprefix("http://").split(":")
        self.target = (host, int(port))
        self.url = ""
        self.carries = asyncio.Event()
        self.carries.set()
        self._writers: list[asyncio.StreamWriter] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(*self.target)
        self._writers += [writer, there[1]]
        with contextlib.suppress(ConnectionError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pipe(reader, there[1]))
                group.create_task(self._pipe(there[0], writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                await self.carries.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.url)
    carrying: set[asyncio.Task[None]] = set()

    async def carry(reader, writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        try:
            await proxy.carry(reader, writer)
        finally:
            carrying.discard(task)

    # A small window, so that a peer that does not read is felt after a few kilobytes.
    listener = await asyncio.start_server(carry, "127.0.0.1", 0, limit=4096)
    proxy.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        listener.close()
        proxy.carries.set()
        proxy.cut()
        for task in list(carrying):
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)
        await listener.wait_closed()


@pytest.fixture
def connect(server: Server, seen: Any, quick: TransportTimeouts) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """``async with connect("front") as link``: a session's link, with these cameras."""

    def link(*cameras: str, url: str = "", inbox: Any = seen, pace: TransportTimeouts = quick,
             workspace_id: str | None = "w", session_id: str = "s") -> AbstractAsyncContextManager[Link]:  # fmt: skip
        transport: Transport = RoomsTransport(pace=pace)
        return transport.connect(
            url or server.url, session_id=session_id, cameras=cameras, workspace_id=workspace_id, inbox=inbox
        )

    return link


@pytest.fixture
def join_robot(server: Server, quick: TransportTimeouts) -> Callable[..., AbstractAsyncContextManager[Robot]]:
    """``async with join_robot(link.rooms) as robot``: one that is in these rooms."""

    def robot(
        rooms: Rooms, on_command: OnCommand = lambda values, at: None, pace: TransportTimeouts = quick, **more: Any
    ):
        return connect_robot(server.url, rooms, on_command=on_command, pace=pace, **more)

    return robot


@pytest.fixture
def both(
    connect, join_robot, quick: TransportTimeouts
) -> Callable[..., AbstractAsyncContextManager[tuple[Any, Robot]]]:
    """``async with both("front") as (link, robot)``: a session's link, and its robot."""

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
