"""Helpers that serve a registry or a receiver on a port and wait for deliveries."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sanic import Sanic

from hooks.receiver.receiver import Receiver
from hooks.registry.api import build_blueprint
from hooks.registry.registry import Registry, RegistrySettings
from service.http.server import listen, serve_app
from tests.testing.waiting import until

TOKEN = "hf_" + "t" * 30
SETTINGS = RegistrySettings(tokens=(TOKEN,), allowed_networks=("127.0.0.0/8",), waits=(0.0, 0.05, 0.1))


@asynccontextmanager
async def serve(part: Registry | Receiver) -> AsyncIterator[str]:
    app: Sanic[Any, Any] = Sanic(f"part-{id(part)}")
    # TOUCHUP rewrites Sanic's own classes once per process, so a second app would not start.
    app.config.update({"MOTD": False, "TOUCHUP": False, "REQUEST_DEADLINE": 10.0})
    app.blueprint(build_blueprint(part) if isinstance(part, Registry) else part.blueprint())
    async with serve_app(app, listen("127.0.0.1", 0)) as url:
        yield url


def settings(**changed: Any) -> RegistrySettings:
    return replace(SETTINGS, **changed)


async def until_finished(registry: Registry, webhook_id: str, attempts: int = 1) -> dict[str, Any]:
    """Return the newest delivery of a webhook when no delivery waits and it had this number of attempts."""

    async def newest() -> dict[str, Any] | None:
        entries = await registry.list_deliveries(webhook_id, 100, None)
        is_finished = all(entry["status"] != "waiting" for entry in entries)
        return entries[0] if entries and is_finished and len(entries[0]["attempts"]) >= attempts else None

    found = await until(newest)
    assert found is not None
    return found
