"""Long bodies, read and written in pieces that keep nothing waiting."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from sanic import HTTPResponse, Request

from service.errors import TooLarge

_AT_ONCE = 1 << 18


async def read_pieces(request: Request[Any, Any], most: int, setting: str) -> Sequence[bytes]:
    """The body of a streamed route.

    Raises:
        TooLarge: it has more than ``most`` bytes, which ``setting`` says; found from its head when that tells.
    """
    pieces: list[bytes] = []
    async for piece in _pieces(request, most, setting):
        pieces.append(piece)
    return pieces


async def discard(request: Request[Any, Any], most: int) -> None:
    """Read on a body that is not looked at: a client that sends before it listens would not hear the answer."""
    # Who asks before sending will not send.
    if request.headers.get("expect") is None:
        with suppress(TooLarge):
            async for _ in _pieces(request, most, "it is not looked at"):
                pass


async def _pieces(request: Request[Any, Any], most: int, setting: str) -> AsyncIterator[bytes]:
    refusal = f"the body has more than {most} bytes ({setting})"
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise TooLarge(refusal)
    count = 0
    # Sanic calls the type of its own stream Stream, which is less than it is.
    async for piece in cast(AsyncIterator[bytes], request.stream):
        count += len(piece)
        if count > most:
            raise TooLarge(refusal)
        yield piece


async def send_pieces(
    request: Request[Any, Any],
    pieces: Sequence[bytes | memoryview],
    content_type: str,
    headers: Mapping[str, str],
    *,
    within: float,
) -> HTTPResponse | None:
    """Answer 200 with these bytes; None when they are sent already. A client that does not read is cut.

    Args:
        within: seconds in which it must have read a long answer.
    """
    size = sum(len(piece) for piece in pieces)
    if size <= _AT_ONCE:
        return HTTPResponse(b"".join(pieces), headers=dict(headers), content_type=content_type)
    length = {"content-length": str(size)}
    response = HTTPResponse(headers={**headers, **length}, content_type=content_type)
    await request.respond(response)
    try:
        async with asyncio.timeout(within):
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(view), _AT_ONCE):
                    await response.send(bytes(view[start : start + _AT_ONCE]), end_stream=False)
    except TimeoutError:
        cast(asyncio.Transport, request.transport).abort()
    return None
