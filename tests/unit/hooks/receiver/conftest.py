"""Helpers that serve a receiver in the event loop of a test and send requests to it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from sanic import Sanic

from hooks.payload import sample
from hooks.receiver.inbox import EventStatus
from hooks.receiver.receiver import Receiver
from hooks.server.serving import build_url, open_listener, serve_app
from tests.testing.waiting import until


@dataclass
class Reply:
    """A response with its parsed body."""

    status: int
    json: Any
    headers: Mapping[str, str]


@dataclass
class Sender:
    """Client of one server."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, payload: object = None, *, method: str = "POST", **more: Any) -> Reply:
        """Send a request, with the payload as JSON."""
        if payload is not None:
            more["json"] = payload
        async with self.session.request(method, self.url + path, **more) as answer:
            assert answer.content_type == "application/json"
            body = None if method == "HEAD" else await answer.json()
            return Reply(answer.status, body, answer.headers)

    async def raw(self, request: bytes, *, whole: bool = False) -> bytes:
        """Send bytes; return the first line of the response, or the whole response."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        writer.write(request)
        response = await (reader.read() if whole else reader.readline())
        writer.close()
        return response


@asynccontextmanager
async def serving(receiver: Receiver, *handler: Any, **options: Any) -> AsyncIterator[Sender]:
    """Serve the receiver in a plain app of Sanic, after adding the handler with its options."""
    if handler:
        receiver.add(*handler, **options)
    app = Sanic(f"test-{id(receiver)}", configure_logging=False)
    app.config.update(TOUCHUP=False, MOTD=False, AUTO_EXTEND=False)
    Sanic.unregister_app(app)
    app.blueprint(receiver.blueprint())
    listener = open_listener("127.0.0.1", (0,))
    async with serve_app(app, listener), aiohttp.ClientSession() as session:
        yield Sender(build_url(listener), session)


async def until_ended(receiver: Receiver, event_id: str | None = None) -> None:
    """Wait until this event has ended, or all events."""

    async def ended() -> bool:
        return not any(
            event.status in (EventStatus.WAITING, EventStatus.RUNNING) and event_id in (None, event.id)
            for event in await receiver.events(limit=10_000)
        )

    await until(ended, within=60.0)


def make_payload(
    name: str = "robots/act", *, repo_id: str | None = None, sha: str = "a" * 40, **more: Any
) -> dict[str, Any]:
    """Return a payload of the Hub about a push."""
    payload = sample(repo=name, sha=sha)
    payload["repo"]["id"] = repo_id or f"id-of-{name}"
    payload["webhook"]["id"] = "webhook-1"
    return payload | more
