"""What waits to be written to one socket: bounded, so that a peer which does not read is cut off and delays nobody."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from sanic.exceptions import WebsocketClosed
from sanic.server.websockets.impl import WebsocketImplProtocol

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutboxLimits:
    """How far a peer may fall behind.

    Attributes:
        messages: frames that may wait. At 50 joint updates a second 256 are five seconds.
        size: characters that may wait.
        seconds: how long one frame, or the closing handshake, may take.
    """

    messages: int = 256
    size: int = 4 << 20
    seconds: float = 10.0


class Outbox:
    """The writing half of one socket. ``put`` and ``close`` never wait; ``run`` is the task that writes."""

    def __init__(self, socket: WebsocketImplProtocol, limits: OutboxLimits):
        self._socket = socket
        self._limits = limits
        self._waiting: deque[str] = deque()
        self._size = 0
        self._wake = asyncio.Event()
        self._reason: str | None = None
        self.is_cut = False

    def put(self, text: str) -> None:
        """Queue one frame; a socket that is over its limits is cut instead."""
        if self.is_cut or self._reason is not None:
            return
        if len(self._waiting) >= self._limits.messages or self._size + len(text) > self._limits.size:
            self.cut(f"{len(self._waiting)} frames, {self._size} characters unread")
            return
        self._waiting.append(text)
        self._size += len(text)
        self._wake.set()

    def close(self, reason: str) -> None:
        """Close the socket after what is queued."""
        if self._reason is None:
            self._reason = reason
            self._wake.set()

    def cut(self, why: str) -> None:
        """Drop the connection now; what waits is lost."""
        if self.is_cut:
            return
        self.is_cut = True
        self._waiting.clear()
        self._wake.set()
        log.warning("a participant's socket is cut: %s", why)
        if self._socket.io_proto is not None and self._socket.io_proto.transport is not None:
            self._socket.io_proto.transport.abort()

    async def run(self) -> None:
        """Write what is queued until the socket is closed or cut."""
        while not self.is_cut:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._drain()
            except (TimeoutError, WebsocketClosed, ConnectionError) as error:
                self.cut(f"a frame could not be written: {type(error).__name__}")
                return
            if self._reason is not None:
                await self._finish(self._reason)
                return

    async def _drain(self) -> None:
        while self._waiting:
            text = self._waiting.popleft()
            self._size -= len(text)
            async with asyncio.timeout(self._limits.seconds):
                await self._socket.send(text)

    async def _finish(self, reason: str) -> None:
        try:
            async with asyncio.timeout(self._limits.seconds):
                await self._socket.close(1000, reason)
                # The reader's end is what says that the peer has closed too; it cancels this task.
                await self._socket.wait_for_connection_lost()
        except (TimeoutError, WebsocketClosed, ConnectionError):
            self.cut(f"{reason}, and the peer did not close")
