"""A registry behind a port, for the real clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sanic import Sanic

from hooks.registry.registry import Registry, RegistrySettings
from service.http.server import listen, serve_app

TOKEN = "hf_" + "t" * 30
SETTINGS = RegistrySettings(
    tokens=(TOKEN,),
    allowed_networks=("127.0.0.0/8",),
    waits=(0.0, 0.05, 0.1),
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
