"""The body of a streamed request, held to a size and a time while it comes in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast

from sanic import Request
from sanic.exceptions import SanicException

DRAINED = 1 << 26  # bytes that are read and thrown away so that a sender hears why it is refused
DRAINED_WITHIN = 2.0


class TooLarge(Exception):
    """It has more bytes than it may have."""


class TooSlow(Exception):
    """It did not come in time; no more of it is waited for."""


class Broken(Exception):
    """Its encoding is broken, or its sender has gone."""


def declared(request: Request) -> int:
    """Bytes that it says it has; 0 when it does not say."""
    text = request.headers.get("content-length", "0")
    return int(text[:20]) if text.isdecimal() else 0


async def read(request: Request, most: int, within: float) -> bytes:
    """All of it.

    Raises:
        TooLarge, TooSlow, Broken: it cannot be had.
    """
    pieces: list[bytes] = []
    count = 0
    try:
        async with asyncio.timeout(within):
            async for piece in _pieces(request):
                count += len(piece)
                if count > most:
                    raise TooLarge
                pieces.append(piece)
    except TimeoutError:
        raise TooSlow from None
    except SanicException as error:
        raise Broken from error
    return b"".join(pieces)


async def discard(request: Request) -> None:
    """Read on what is not looked at: a sender that writes before it listens would not hear the answer."""
    stream = cast(Any, request.stream)
    if getattr(stream, "expecting_continue", False):
        # Who asks before sending is not told to go on, and will not send.
        leave(request)
        return
    count = 0
    with suppress(TimeoutError, SanicException):
        async with asyncio.timeout(DRAINED_WITHIN):
            async for piece in _pieces(request):
                count += len(piece)
                if count > DRAINED:
                    break
            else:
                return
    leave(request)


def leave(request: Request) -> None:
    """Close the connection after the answer, without what may still come of the body."""
    stream = cast(Any, request.stream)
    if stream is not None:
        stream.expecting_continue = False
        stream.request_body = None
        stream.keep_alive = False


def _pieces(request: Request) -> AsyncIterator[bytes]:
    if request.stream is None:
        return _whole(request.body)
    # Sanic calls the type of its own stream Stream, which is less than it is.
    return cast(Any, request.stream).__aiter__()


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body
