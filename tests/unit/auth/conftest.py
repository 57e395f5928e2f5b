"""Fixtures: a server whose keys are in a file, with an optional rooms server."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from service.auth.caller import Role
from tests.testing.rig import REAL, Server, started

Serve = Callable[..., AbstractAsyncContextManager[Server]]
KEYS = {"eve": Role.VIEWER, "alice": Role.OPERATOR, "bob": Role.OPERATOR, "root": Role.ADMIN}


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    def start(names: Any = KEYS, real_rooms: bool = False, **settings: Any) -> AbstractAsyncContextManager[Server]:
        options = {"state": str(tmp_path / "state"), "policy_owners": ("policies",)} | settings
        rooms = REAL if real_rooms else None
        return started(transport=rooms, roles={name: KEYS[name] for name in names}, **options)

    return start


@pytest.fixture
async def server(serve: Serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server
