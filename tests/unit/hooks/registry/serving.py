"""A registry behind a port, for the real clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sanic import Sanic

from hooks.registry.delivery import Schedule
from hooks.registry.registry import Registry, RegistrySettings
from hooks.registry.sender import SenderSettings
from service.http.server import listen, serve_app
from tests.testing.waiting import until

TOKEN = "hf_" + "t" * 30
READ_TOKEN = "hf_" + "r" * 30
QUICK = SenderSettings(schedule=Schedule(waits=(0.0, 0.05, 0.1), jitter=0.0))
SETTINGS = RegistrySettings(
    tokens=(TOKEN,),
    read_tokens=(READ_TOKEN,),
    allowed_networks=("127.0.0.0/8",),
    sender=QUICK,
)


@asynccontextmanager
async def serve(registry: Registry) -> AsyncIterator[str]:
    app: Sanic[Any, Any] = Sanic(f"registry-{id(registry)}")
    app.config.MOTD = False
    app.config.TOUCHUP = False  # it rewrites Sanic's own classes, once per process: a second app would not start
    app.config.REQUEST_DEADLINE = 10.0
    app.blueprint(registry.blueprint())
    async with serve_app(app, listen("127.0.0.1", 0)) as url:
        yield url


def settings(**changed: Any) -> RegistrySettings:
    return replace(SETTINGS, **changed)


async def until_fact(registry: Registry, name: str, value: int) -> None:
    async def is_so() -> bool:
        return (await registry.get_stats()).get(name) == value

    await until(is_so)


async def until_delivered(registry: Registry, count: int) -> None:
    """Until so many deliveries are written down as such."""
    await until_fact(registry, "deliveries_delivered", count)
