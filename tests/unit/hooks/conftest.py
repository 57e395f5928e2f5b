"""Fixtures: a target of deliveries, and a function that runs a queue."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from hooks.queue import QueueRunner
from tests.testing.target import TargetServer, target_server


@pytest.fixture
async def target() -> AsyncIterator[TargetServer]:
    async with target_server() as made:
        yield made


async def run_due(runner: QueueRunner) -> None:
    """Run all due rows without the loop of the queue, until none is due."""
    while True:
        await runner.begin_due()
        if not runner._running:
            return
        await asyncio.wait(list(runner._running))
        await asyncio.sleep(0)  # Let the callbacks that remove ended rows run.
