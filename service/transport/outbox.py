"""What waits to be written to sockets: bounded for each, so that a peer which does not read is cut off and delays
nobody, and for all of them together, so that a message to a thousand participants keeps no robot waiting.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sanic.exceptions import WebsocketClosed
from sanic.server.websockets.impl import WebsocketImplProtocol
from websockets.protocol import State

from service.edge.fair_queue import FairQueue

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


class WriteQueue:
    """The sockets that have something to write, in turn: at most ``SLICE`` seconds of writing at a time, and as long a
    pause after it, so that writing takes half of the event loop at most."""

    SLICE = 0.001

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._ready: deque[Outbox | asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def add(self, outbox: "Outbox") -> None:
        """Write what waits in this outbox when its turn comes."""
        self._ready.append(outbox)
        self._schedule()

    async def turn(self) -> None:
        """Return when all that stood in the queue before has been written: whoever sends to many waits for it, so that
        the next message is not read before."""
        if self._ready:
            written = asyncio.get_running_loop().create_future()
            self._ready.append(written)
            await written

    def _schedule(self, pause: float = 0.0) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(pause, self._write)

    def _write(self) -> None:
        self._is_scheduled = False
        began = now = self._clock()
        while self._ready and now - began < self.SLICE:
            first = self._ready.popleft()
            if isinstance(first, Outbox):
                first.take_turn()
            elif not first.done():
                first.set_result(None)
            now = self._clock()
        FairQueue.here().spend(now - began)
        if self._ready:
            self._schedule(now - began)


class Outbox:
    """The writing half of one socket. ``put`` and ``close`` never wait; ``run`` is the task that writes to a peer which
    reads slowly.

    Args:
        queue: shared by all sockets of a server.
    """

    def __init__(self, socket: WebsocketImplProtocol, limits: OutboxLimits, queue: WriteQueue):
        self._socket = socket
        self._limits = limits
        self._queue = queue
        self._is_queued = False
        self._waiting: deque[str] = deque()
        self._size = 0
        self._wake = asyncio.Event()
        self._reason: str | None = None
        self._is_writing = False
        self.is_cut = False

    def put(self, text: str, is_urgent: bool = True) -> None:
        """Write one frame, or queue it behind others; a socket that is over its limits is cut instead.

        Args:
            is_urgent: whether it is written in this turn of the loop, when nothing is ahead of it.
        """
        if self.is_cut or self._reason is not None:
            return
        if is_urgent and not self._waiting and self._write_now(text):
            return
        if len(self._waiting) >= self._limits.messages or self._size + len(text) > self._limits.size:
            self.cut(f"{len(self._waiting)} frames, {self._size} characters unread")
            return
        self._waiting.append(text)
        self._size += len(text)
        if not self._is_queued and not self._is_writing:
            self._is_queued = True
            self._queue.add(self)

    def take_turn(self) -> None:
        """Write what waits; the task goes on with it when the peer does not read as fast."""
        self._is_queued = False
        while self._waiting and self._write_now(self._waiting[0]):
            self._size -= len(self._waiting.popleft())
        if self._waiting or self._reason is not None:
            self._wake.set()

    def _write_now(self, text: str) -> bool:
        """Write a frame in this turn of the loop when nothing is ahead of it.

        Waking the task for each frame of each participant took ten times as long.
        """
        connection = None if self._socket.io_proto is None else self._socket.io_proto.transport
        if (
            self._is_writing
            or connection is None
            or connection.is_closing()
            or connection.get_write_buffer_size()
            or self._socket.ws_proto.state is not State.OPEN
        ):
            return False
        self._socket.ws_proto.send_text(text.encode())
        for data in self._socket.ws_proto.data_to_send():
            connection.write(data)
        return True

    def close(self, reason: str) -> None:
        """Close the socket after what is queued."""
        if self._reason is None:
            self._reason = reason
            if not self._is_queued:
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
            self._is_writing = True
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await self._socket.send(text)
            finally:
                self._is_writing = False

    async def _finish(self, reason: str) -> None:
        try:
            async with asyncio.timeout(self._limits.seconds):
                await self._socket.close(1000, reason)
                # The reader's end is what says that the peer has closed too; it cancels this task.
                await self._socket.wait_for_connection_lost()
        except (TimeoutError, WebsocketClosed, ConnectionError):
            self.cut(f"{reason}, and the peer did not close")
