"""Polling for events in other threads or processes that cannot notify the test."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import psutil

Found = TypeVar("Found")


async def until(claim: Callable[[], Found | Awaitable[Found]], within: float = 30.0) -> Found:
    """Return the value of ``claim``, awaited if necessary, as soon as it is true."""
    end = time.monotonic() + within
    while not (found := cast(Found, await one if inspect.isawaitable(one := claim()) else one)):
        assert time.monotonic() < end, f"the condition did not become true within {within:g} s"
        await asyncio.sleep(0.002)
    return found


def wait_until(claim: Callable[[], Found], within: float = 60.0) -> Found:
    """Return the value of ``claim`` as soon as it is true, for tests without an event loop."""
    end = time.monotonic() + within
    while not (found := claim()):
        assert time.monotonic() < end, f"the condition did not become true within {within:g} s"
        time.sleep(0.01)
    return found


def lives(process: int) -> bool:
    """Return whether a process with this id is alive and not a zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
