"""A receiver on a port of this machine, in the test's own loop."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from sanic import Sanic

from hooks.payload import sample
from hooks.receiver.inbox import Status
from hooks.receiver.receiver import Receiver


@dataclass
class Told:
    """An answer, read."""

    status: int
    json: Any
    headers: Mapping[str, str]


@dataclass
class Sender:
    """What sends to one server."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, payload: object = None, *, method: str = "POST", **more: Any) -> Told:
        """Send; a payload goes as JSON."""
        if payload is not None:
            more["json"] = payload
        async with self.session.request(method, self.url + path, **more) as answer:
            assert answer.content_type == "application/json"
            body = None if method == "HEAD" else await answer.json()
            return Told(answer.status, body, answer.headers)

    async def raw(self, request: bytes, *, whole: bool = False) -> bytes:
        """The first line of the answer to these bytes, or all of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        writer.write(request)
        told = await (reader.read() if whole else reader.readline())
        writer.close()
        return told


@asynccontextmanager
async def serve(
    receiver: Receiver,
    *handler: Any,
    prepare: Callable[[Sanic], None] = lambda app: None,
    **options: Any,
) -> AsyncIterator[Sender]:
    """The receiver's blueprint in an app of its own; a handler is added with its options before."""
    if handler:
        receiver.add(*handler, **options)
    app = Sanic(f"test-{secrets.token_hex(4)}", configure_logging=False)
    app.config.update(TOUCHUP=False, MOTD=False, AUTO_EXTEND=False)
    prepare(app)
    app.blueprint(receiver.blueprint())
    held = ExitStack()
    try:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = await app.create_server(sock=listener, return_asyncio_server=True, access_log=False)
        assert server is not None
        assert server.server is not None
        await server.startup()
        await server.before_start()
        await server.after_start()
        port = server.server.sockets[0].getsockname()[1]
        try:
            async with aiohttp.ClientSession() as session:
                yield Sender(f"http://127.0.0.1:{port}", session)
        finally:
            await server.before_stop()
            server.server.close()
            for connection in list(server.connections):
                connection.abort()
            await server.after_stop()
    finally:
        held.close()
        Sanic.unregister_app(app)


@pytest.fixture
def serving() -> Callable[..., AbstractAsyncContextManager[Sender]]:
    return serve


async def ended(receiver: Receiver, event_id: str | None = None, *, within: float = 60.0) -> None:
    """Wait until this event has ended, or all have."""
    async with asyncio.timeout(within):
        while any(  # noqa: ASYNC110 (only the inbox knows)
            event.status in (Status.WAITING, Status.RUNNING) and event_id in (None, event.id)
            for event in await receiver.events(limit=10_000)
        ):
            await asyncio.sleep(0.002)


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return ended


@pytest.fixture
def make_payload() -> Callable[..., dict[str, Any]]:
    """A delivery of the Hub about a push."""

    def make(
        name: str = "robots/act", *, repo_id: str | None = None, sha: str = "a" * 40, **more: Any
    ) -> dict[str, Any]:
        payload = sample(repo=name, sha=sha)
        payload["repo"]["id"] = repo_id or f"id-of-{name}"
        payload["webhook"]["id"] = "webhook-1"
        return payload | more

    return make
