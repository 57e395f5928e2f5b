"""Waiting for what tells nobody that it happened: it may be another thread, or another process, that makes it so."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import psutil

Found = TypeVar("Found")


async def until(claim: Callable[[], Found | Awaitable[Found]], within: float = 30.0) -> Found:
    """What is claimed, and awaited when it has to be, as soon as there is something to it."""
    end = time.monotonic() + within
    while not (found := cast(Found, await one if inspect.isawaitable(one := claim()) else one)):
        assert time.monotonic() < end, f"it did not come true within {within:g} s"
        await asyncio.sleep(0.002)
    return found


def wait_until(claim: Callable[[], Found], within: float = 30.0) -> Found:
    """As `until`, for a test without an event loop."""
    end = time.monotonic() + within
    while not (found := claim()):
        assert time.monotonic() < end, f"it did not come true within {within:g} s"
        time.sleep(0.01)
    return found


def lives(process: int) -> bool:
    """Whether there is such a process, other than one that has ended and that nobody asked about."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
