"""Receiver of deliveries on loopback with scripted responses and a record of the deliveries."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Delivery:
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


@dataclass
class TargetServer:
    """Server that sends each of ``answers`` in turn, then 200; a response may wait for ``gate``."""

    url: str = ""
    answers: list[web.Response] = field(default_factory=list)
    got: list[Delivery] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.got.append(Delivery({name.lower(): value for name, value in request.headers.items()}, body))
        async with self.arrived:
            self.arrived.notify_all()
        await self.gate.wait()
        return self.answers.pop(0) if self.answers else web.Response(text="fine")

    async def wait_for(self, count: int, within: float = 30.0) -> None:
        async with asyncio.timeout(within), self.arrived:
            await self.arrived.wait_for(lambda: len(self.got) >= count)


@asynccontextmanager
async def target_server() -> AsyncIterator[TargetServer]:
    target = TargetServer()
    target.gate.set()
    app = web.Application(client_max_size=16 << 20)
    app.router.add_route("*", "/{path:.*}", target.answer)
    async with TestServer(app) as server:
        target.url = f"http://127.0.0.1:{server.port}"
        yield target
        target.gate.set()
