"""A target of deliveries, for those who send and for those who keep the registry."""

from collections.abc import AsyncIterator

import pytest

from tests.testing.target import TargetServer, target_server


@pytest.fixture
async def target() -> AsyncIterator[TargetServer]:
    async with target_server() as made:
        yield made
