"""Why somebody asks for an emergency stop; nothing that is wrong with a body may keep robots moving."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

from sanic import Request
from sanic.exceptions import SanicException

from service.edge.bounded_json import loads
from service.routes.body import LARGEST, VALUES
from service.words import printable

# Seconds that a stop waits for the rest of a body; a client that sends it at once sends it with the head.
PATIENCE = 0.05

# No types: nothing that is sent is refused.
REASON = {"properties": {"reason": {"title": "Reason", "description": "Text that each session's status then shows."}}}


async def reason_in(request: Request[Any, Any]) -> str:
    """What the body of a streamed route says, as far as it is there: a stop waits for nobody, and refuses no length."""
    body = bytearray()
    with suppress(TimeoutError, SanicException):
        async with asyncio.timeout(PATIENCE):
            # Sanic calls the type of its own stream Stream, which is less than it is.
            async for piece in cast(AsyncIterator[bytes], request.stream):
                body += piece
                if len(body) > LARGEST:
                    break
    return reason_of(bytes(body))


def reason_of(body: bytes) -> str:
    """The printable text of ``{"reason": "..."}``, or what stands in for it."""
    try:
        found = loads(body, VALUES) if 0 < len(body) <= LARGEST else None
    except (ValueError, RecursionError):
        found = None
    reason = found.get("reason") if isinstance(found, dict) else None
    if not isinstance(reason, str) or not reason.strip():
        return "asked for over HTTP"
    return printable(reason)
