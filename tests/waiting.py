"""Waiting for what tells nobody that it happened: it may be another thread, or another process, that makes it so."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


async def until(claim: Callable[[], Found], within: float = 30.0) -> Found:
    """What is claimed, as soon as there is something to it."""
    end = time.monotonic() + within
    while not (found := claim()):
        assert time.monotonic() < end, f"it did not come true within {within:g} s"
        await asyncio.sleep(0.002)
    return found
