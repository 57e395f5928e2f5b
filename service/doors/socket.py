"""One WebSocket of a door: large messages go from the kernel into the memory that their arrays stay in.

Sanic's own reads in small pieces and copies each message three times, which is right for the words of a room and takes
ten milliseconds for two pictures. After Sanic's handshake its connection is handed over to this.
"""

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any, cast

from sanic.server.websockets.impl import WebsocketImplProtocol

from service.doors.frames import BINARY, CLOSE, PING, PONG, TEXT, BadFrame, build_head, read_close
from service.doors.incoming import Incoming
from service.edge.fair_queue import MESSAGE, FairQueue
from service.edge.limits import source_of
from service.edge.punctual import PunctualProtocol

log = logging.getLogger(__name__)

_AT_ONCE = 8  # frames read at a stretch
_FRAMES, _FRAMES_PER_SECOND = 2000.0, 1000.0  # all at once, and as many in the long run
_WAITING = 2  # messages that may wait to be taken before nothing more is read
_FAREWELL = 1.0  # seconds in which the peer may answer a close


class SocketClosed(Exception):
    """There will be no more messages."""


@dataclass(frozen=True)
class SocketLimits:
    """Of one socket; times in seconds.

    Attributes:
        bytes: of one message.
        text: likewise, of one that is text.
        unsent: bytes that may wait to be read by the peer; what comes on top is not taken.
        slow: a peer that reads nothing for so long, with something waiting for it, is cut off.
        heartbeat: from one ping to the next; a peer that is not heard of for two of them is cut off.
        message: from a message's first byte to its last; a peer that takes longer is cut off.
    """

    bytes: int = 16 << 20
    text: int = 4 << 20
    unsent: int = 1 << 20
    slow: float = 5.0
    heartbeat: float = 10.0
    message: float = 30.0


class DoorSocket(asyncio.BufferedProtocol):
    """Messages in as memory that nobody else writes to, messages out without waiting.

    Attributes:
        heard_at: monotonic time of the newest bytes.
        refused: messages that were not taken because the peer does not read.
        spent: seconds of the loop's time since the newest message was taken, if whoever takes them counts them
            (``service.edge.fair_queue.measured``); else the queue goes by what it reckons for one.
    """

    def __init__(self, limits: SocketLimits, gone: Callable[[Exception | None], None] = lambda error: None):
        """``gone`` is called when the connection is."""
        self.heard_at = time.monotonic()
        self.refused = 0
        self.spent: float | None = None
        self._reckoned = 0.0  # for the newest message, if it was beyond the budget
        self._limits = limits
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._incoming = Incoming(limits.bytes, limits.text, self._control)
        self._early = memoryview(b"")
        self._waiter: asyncio.Future[None] | None = None
        self._is_closing = self._is_lost = self._is_waiting = self._is_pausing = False
        self._frames, self._frames_at = _FRAMES, self.heard_at
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._queue = FairQueue.here()
        self._flow, self._taking = self._queue.flow("", self._step), self._queue.flow("")
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    def take(cls, socket: WebsocketImplProtocol, limits: SocketLimits) -> "DoorSocket":
        """The connection of an upgraded socket of a route with ``ctx_is_handed_over``: Sanic has read nothing of it."""
        before = cast(PunctualProtocol, socket.io_proto)
        if before.transport is None or before.transport.is_closing():
            raise SocketClosed
        transport = cast(asyncio.Transport, before.transport)
        door = cls(limits, before.connection_lost)
        if socket.keepalive_ping_task is not None:
            socket.keepalive_ping_task.cancel()
            socket.keepalive_ping_task = None
        transport.pause_reading()
        transport.set_protocol(door)
        door.connection_made(transport)
        door._early = memoryview(before.hand_over())
        door._enter()
        return door

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It may be read from."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.unsent // 2)
        peer = transport.get_extra_info("peername")
        caller = source_of(str(peer[0]) if isinstance(peer, tuple) and peer else "")
        self._flow, self._taking = self._queue.flow(caller, self._step), self._queue.flow(caller)
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._timers["beat"] = self._loop.call_later(self._limits.heartbeat, self._beat)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._incoming.place()

    def buffer_updated(self, nbytes: int) -> None:
        """So many came."""
        self.heard_at = time.monotonic()
        incoming = self._incoming
        if incoming.fill(nbytes):
            return
        if not incoming.is_over and self._understand(partial(incoming.put, nbytes)):
            if incoming.is_empty and len(incoming.messages) < _WAITING:
                return  # nothing came behind the message
            self._is_pausing = True
            self._queue.enter(self._flow)
            if (self._is_pausing or self._is_waiting) and self._transport is not None:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The peer sends no more: the connection ends."""
        return False

    def pause_writing(self) -> None:
        """The peer does not read."""
        self._timers["slow"] = self._loop.call_later(self._limits.slow, self._cut, "it does not read")

    def resume_writing(self) -> None:
        """It does again."""
        self._stop_timer("slow")

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._is_lost = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._end_reading()
        self._wake()
        if not self.lost.done():
            self.lost.set_result(None)
        self._gone(exc)

    # Frames.

    def _read(self) -> None:
        """Read what lies in the scratch."""
        incoming, count = self._incoming, 0
        while count < _AT_ONCE and len(incoming.messages) < _WAITING and self._understand(self._next_frame):
            count += 1
            if incoming.is_in_frame:
                break  # the rest of its data is read into its own place
        incoming.tidy()
        self._breathe(count)

    def _understand(self, read: Callable[[], bool]) -> bool:
        """What ``read`` returns; False when it makes no sense, which is the end, or when the end was before."""
        if self._incoming.is_over:
            return False
        try:
            is_read = read()
        except BadFrame as error:
            log.info("a door's socket is closed: %s", error)
            self.close(error.code, str(error))
            self._end_reading()
            return False
        if self._incoming.messages:
            self._wake()
        return is_read

    def _next_frame(self) -> bool:
        return self._incoming.next_frame(self.heard_at)

    def _end_reading(self) -> None:
        self._incoming.end()
        self._early = memoryview(b"")

    def _control(self, opcode: int, data: bytes) -> None:
        if opcode == PING:
            self._write(PONG, (data,))
        elif opcode == CLOSE:
            code = read_close(data)
            self._write(CLOSE, (code,))
            self._is_closing = True
            self._end_reading()
            self._wake()
            if self._transport is not None:
                self._transport.close()

    def _breathe(self, count: int) -> None:
        """Read on at once, in a while, or when a message was taken."""
        now = time.monotonic()
        self._frames = min(self._frames + (now - self._frames_at) * _FRAMES_PER_SECOND, _FRAMES) - count
        self._frames_at = now
        if self._transport is None or self._incoming.is_over:
            return
        if len(self._incoming.messages) >= _WAITING:
            self._is_waiting = True
            self._transport.pause_reading()
        elif count >= _AT_ONCE or self._frames < 0:
            self._is_pausing = True
            self._transport.pause_reading()
            if self._frames < 0:
                self._timers["breath"] = self._loop.call_later(-self._frames / _FRAMES_PER_SECOND, self._enter)

    def _enter(self) -> None:
        self._stop_timer("breath")
        self._queue.enter(self._flow, is_idle=False)

    def _step(self) -> tuple[float, bool]:
        if "breath" not in self._timers:
            self._go_on()
        return 0.0, self._is_pausing and "breath" not in self._timers and not self._incoming.is_over

    def _go_on(self) -> None:
        self._is_pausing = self._is_waiting = False
        self._incoming.begun_at = time.monotonic()
        # Before the transport is asked for more: it may have no room for it.
        self._read()
        while self._early and not (self._is_pausing or self._is_waiting or self._incoming.is_over):
            place = self.get_buffer(len(self._early))
            count = min(len(place), len(self._early))
            place[:count] = self._early[:count]
            self._early = self._early[count:]
            if self._understand(partial(self._incoming.put, count)):
                self._read()
        if self._transport is None or self._is_lost or self._transport.is_closing():
            return
        if not (self._is_pausing or self._is_waiting):
            self._transport.resume_reading()

    # What a door does.

    async def receive(self) -> memoryview | str:
        """The next message.

        Raises:
            SocketClosed: there is none any more.
        """
        messages = self._incoming.messages
        if self._reckoned and self.spent is not None:
            self._queue.correct(self.spent - self._reckoned)
        if messages:
            # Else a client that sends hundreds of small ones at once has the loop to itself until all are read.
            await asyncio.sleep(0)
            await self._queue.turn(self._taking, MESSAGE)
        while not messages:
            if self._is_lost or self._is_closing:
                raise SocketClosed
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            await self._queue.turn(self._taking, MESSAGE)
        message = messages.popleft()
        self._reckoned = MESSAGE if self._taking.is_greedy else 0.0
        if self.spent is not None:
            self.spent = 0.0
        if self._is_waiting and not self._is_pausing:
            self._is_waiting = False
            self._queue.enter(self._flow)
        return message

    def send(self, *pieces: bytes | memoryview, is_text: bool = False) -> bool:
        """Send a message of these pieces; False when it is not taken: the peer does not read, or is gone."""
        transport = self._transport
        if transport is None or self._is_closing or self._is_lost:
            return False
        if self.unsent > self._limits.unsent:
            self.refused += 1
            return False
        self._write(TEXT if is_text else BINARY, pieces)
        return True

    @property
    def unsent(self) -> int:
        """Bytes that the network has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Say goodbye; a peer that does not answer is cut off."""
        if self._is_closing or self._is_lost or self._transport is None:
            return
        self._write(CLOSE, (struct.pack(">H", code) + reason.encode()[:120].decode(errors="ignore").encode(),))
        self._is_closing = True
        self._incoming.refuse()
        self._wake()
        # What it still sends is read, and thrown away: a connection that ends over unread bytes is reset, and the peer
        # may never see the reason.
        self._timers["farewell"] = self._loop.call_later(_FAREWELL, self._transport.abort)
        self._loop.call_soon(self._enter)

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def until_lost(self) -> None:
        """Wait until the connection is over."""
        await asyncio.shield(self.lost)

    def _write(self, opcode: int, pieces: Sequence[bytes | memoryview]) -> None:
        if self._transport is None or self._transport.is_closing() or self._is_closing:
            return
        length = sum(len(piece) for piece in pieces)
        self._transport.write(b"".join((build_head(opcode, length), *pieces)))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _beat(self) -> None:
        now = time.monotonic()
        is_reading = not (self._is_waiting or self._is_pausing)
        if is_reading and now - self.heard_at > 2 * self._limits.heartbeat:
            self._cut("it is silent")
            return
        is_late = self._incoming.is_in_message and now - self._incoming.begun_at > self._limits.message
        if is_reading and is_late:
            self._cut("its message takes too long")
            return
        self._write(PING, (b"",))
        self._timers["beat"] = self._loop.call_later(self._limits.heartbeat, self._beat)

    def _cut(self, why: str) -> None:
        log.warning("a door's socket is cut off: %s", why)
        self.abort()

    def _stop_timer(self, name: str) -> None:
        timer: Any = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
