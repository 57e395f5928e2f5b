"""Running a queue without its own loop."""

import asyncio

from hooks.queue import QueueRunner


async def run_due(runner: QueueRunner) -> None:
    """Run everything that is due, and wait until nothing due is left."""
    while True:
        await runner.begin_due()
        if not runner._running:
            return
        await asyncio.wait(list(runner._running))
        await asyncio.sleep(0)  # for the callbacks that remove the ended rows
