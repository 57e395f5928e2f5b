"""The server without any settings, and with some."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.testing.rig import Server, started


@pytest.fixture
def serve() -> Any:
    return started


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with started() as server:
        yield server
