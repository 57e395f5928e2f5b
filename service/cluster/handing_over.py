"""What another thread found out, on its way to whoever waits for it on the event loop, and may have gone."""

import asyncio
from typing import Any


def hand_over(loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[Any], found: Any) -> None:
    """Settle an outcome of this loop; from any thread."""
    try:
        loop.call_soon_threadsafe(settle, outcome, found)
    except RuntimeError:
        # The loop has ended, and whoever waited with it.
        if not loop.is_closed():
            raise


def settle(outcome: asyncio.Future[Any], found: Any) -> None:
    """Give what was found, or raise it where it is an error; nothing where that was done before."""
    if outcome.done():
        return
    if isinstance(found, BaseException):
        outcome.set_exception(found)
        is_heard(outcome)
    else:
        outcome.set_result(found)


def is_heard(answer: asyncio.Future[Any]) -> None:
    """Whoever waited may have it from elsewhere: an error that nobody takes is none."""
    if not answer.cancelled():
        answer.exception()
