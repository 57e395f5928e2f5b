"""RFC 6455 WebSocket that receives payloads without copies, on a connection of which Sanic did the handshake.

Sanic's WebSocket takes 10 ms to receive two pictures, and ``picows`` 2.3.1 reads a flood of pings in one turn.
"""

import asyncio
import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any, NamedTuple, cast

import numpy as np
from sanic.server.websockets.impl import WebsocketImplProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import Close, Frame, Opcode

from service.http.fair_queue import MESSAGE, FairQueue
from service.http.limits import source_key
from service.http.protocol import DeadlineProtocol

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
_CONTROL_BIT = 0x8
_TWO, _EIGHT = struct.Struct(">H"), struct.Struct(">Q")


class BadFrame(Exception):
    """A frame that violates the protocol; the socket is closed with ``code``."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class FrameHeader(NamedTuple):
    """Header of one frame: ``size`` bytes of header, then ``length`` bytes of payload combined with the 4-byte mask."""

    opcode: int
    is_final: bool
    size: int
    length: int
    mask: bytes

    @property
    def is_control(self) -> bool:
        """Whether the frame is a close, a ping or a pong."""
        return bool(self.opcode & _CONTROL_BIT)


def read_header(data: memoryview) -> FrameHeader | None:
    """Read the header at the beginning of these bytes; None if it is incomplete.

    Raises:
        BadFrame: a client may not send this header.
    """
    if len(data) < 2:
        return None
    first, second = data[0], data[1]
    opcode, length = first & 0x0F, second & 0x7F
    if first & 0x70 or opcode not in (0, TEXT, BINARY, CLOSE, PING, PONG):
        raise BadFrame(1002, "a frame of an extension that was not agreed on")
    if not second & 0x80:
        raise BadFrame(1002, "a frame without a mask")
    if opcode & _CONTROL_BIT and (length > 125 or not first & 0x80):
        raise BadFrame(1002, "a control frame that is long or in parts")
    size = 2
    if length == 126:
        size = 4
        if len(data) < 4:
            return None
        (length,) = _TWO.unpack_from(data, 2)
    elif length == 127:
        size = 10
        if len(data) < 10:
            return None
        (length,) = _EIGHT.unpack_from(data, 2)
    if len(data) < size + 4:
        return None
    return FrameHeader(opcode, bool(first & 0x80), size + 4, length, bytes(data[size : size + 4]))


def parse_close(data: bytes) -> bytes:
    """Return the answer to a close with this data: its code, if there is a code.

    Raises:
        BadFrame: the code may not be sent, or the reason is not UTF-8.
    """
    try:
        Close.parse(data)
    except ProtocolError:
        raise BadFrame(1002, "a close without a code that may be sent") from None
    except UnicodeDecodeError:
        raise BadFrame(1007, "text is not UTF-8") from None
    return data[:2]


def unmask(data: np.ndarray, mask: bytes) -> None:
    """Unmask (n,) uint8, in place and eight bytes at a time."""
    even = len(data) & ~7
    if even:
        words = data[:even].view(np.uint64)
        np.bitwise_xor(words, np.frombuffer(mask * 2, np.uint64)[0], out=words)
    rest = data[even:]
    if len(rest):
        np.bitwise_xor(rest, np.frombuffer((mask * 2)[: len(rest)], np.uint8), out=rest)


_SCRATCH_BYTES = 2048  # Size of the buffer for headers and short messages.
_MAX_FRAGMENTS = 64  # Largest number of frames of one message.


class FrameReader:
    """Assembles messages from frames, without a clock or connection.

    Attributes:
        messages: complete messages that were not taken yet.
        begun_at: start time of the incomplete message.
        is_over: whether further data is ignored, after the end or an error.
    """

    def __init__(self, max_bytes: int, max_text: int, on_control: Callable[[int, bytes], None]):
        """Create a reader with limits in bytes; ``on_control`` gets the opcode and data of a ping, pong or close."""
        self.messages: deque[memoryview | str] = deque()
        self.begun_at = 0.0
        self.is_over = False
        self._max_bytes = max_bytes
        self._max_text = max_text
        self._on_control = on_control
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0
        self._header: FrameHeader | None = None
        self._data = np.empty(0, np.uint8)
        self._target = memoryview(b"")
        self._filled = 0
        self._fragments: list[np.ndarray] = []
        self._opcode = 0
        self._is_discarding = False

    @property
    def is_in_frame(self) -> bool:
        """Whether the rest of a frame is missing."""
        return self._header is not None

    @property
    def is_in_message(self) -> bool:
        """Whether the rest of a message is missing."""
        return bool(self._fragments) or self._header is not None

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next bytes: the rest of a frame, else a buffer for headers."""
        if self._header is not None and len(self._target) > self._filled:
            return self._target[self._filled :]
        return self._scratch[self._end :]

    @property
    def is_empty(self) -> bool:
        """Whether no received bytes wait to be read."""
        return self._start == self._end

    def add_partial(self, count: int) -> bool:
        """Count received bytes if they do not complete the frame, else return False."""
        if self._header is None or self._filled + count >= len(self._target):
            return False
        self._filled += count
        return True

    def add(self, count: int) -> bool:
        """Count received bytes; False while a frame is incomplete. Raises BadFrame, after which call ``end``."""
        if self._header is not None and len(self._target) > self._filled:
            self._filled += count
            if self._filled < len(self._target):
                return False
            self._finish_frame()
        else:
            self._end += count
        return True

    def next_frame(self, now: float) -> bool:
        """Start the next frame; False if its header is incomplete. Raises BadFrame, after which call ``end``."""
        head = read_header(self._scratch[self._start : self._end])
        if head is not None:
            self._begin_frame(head, now)
        return head is not None

    def compact(self) -> None:
        """Move the rest of the buffer to its beginning."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)

    def discard_messages(self) -> None:
        """Drop all further messages."""
        self._is_discarding = True
        self.messages.clear()

    def end(self) -> None:
        """Ignore all further data; complete messages can still be taken."""
        self.is_over = True
        self._start = self._end = self._opcode = 0
        self._header, self._target, self._data = None, memoryview(b""), np.empty(0, np.uint8)
        self._fragments.clear()

    def _begin_frame(self, head: FrameHeader, now: float) -> None:
        if not head.is_control:
            if not self._opcode:
                self.begun_at = now
            if (head.opcode == 0) != bool(self._opcode):
                raise BadFrame(1002, "a part of a message out of turn")
            held = sum(len(part) for part in self._fragments)
            most = self._max_text if TEXT in (self._opcode, head.opcode) else self._max_bytes
            if head.length + held > most:
                raise BadFrame(1009, f"a message of more than {most} bytes")
        self._header = head
        self._data = np.empty(head.length, np.uint8)
        self._target = self._data.data
        self._start += head.size
        available = min(self._end - self._start, head.length)
        self._target[:available] = self._scratch[self._start : self._start + available]
        self._start += available
        self._filled = available
        if available == head.length:
            self._finish_frame()

    def _finish_frame(self) -> None:
        head, data = self._header, self._data
        assert head is not None
        self._header, self._target, self._data = None, memoryview(b""), np.empty(0, np.uint8)
        unmask(data, head.mask)
        if head.is_control:
            self._on_control(head.opcode, data.tobytes())
            return
        self._opcode = self._opcode or head.opcode
        self._fragments.append(data)
        if len(self._fragments) > _MAX_FRAGMENTS:
            raise BadFrame(1009, f"a message in more than {_MAX_FRAGMENTS} parts")
        if head.is_final:
            kind, parts = self._opcode, self._fragments
            self._opcode, self._fragments = 0, []
            if not self._is_discarding:
                self._finish_message(kind, parts)

    def _finish_message(self, kind: int, parts: list[np.ndarray]) -> None:
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if kind != TEXT:
            self.messages.append(whole.data)
            return
        try:
            self.messages.append(whole.tobytes().decode())
        except UnicodeDecodeError:
            raise BadFrame(1007, "text is not UTF-8") from None


log = logging.getLogger(__name__)

_MAX_FRAMES_PER_TURN = 8  # Frames read in one round of the event loop.
_FRAME_BURST, _FRAME_RATE = 2000.0, 1000.0  # Token bucket of frames: its size, and frames per second.
_MAX_WAITING = 2  # Messages that may wait before reading stops.
_CLOSE_TIMEOUT = 1.0  # Seconds in which the peer may answer a close.


class SocketClosed(Exception):
    """The socket is closed and has no more messages."""


@dataclass(frozen=True)
class SocketLimits:
    """Limits of one socket; times in seconds.

    Attributes:
        bytes, text: largest size of a message, and of a text message, in bytes.
        unsent: bytes that may wait for the peer; further messages are refused.
        slow: time after which a peer that does not read waiting data is cut off.
        heartbeat: time between pings; a peer that is silent for two periods is cut off.
        message: time from a message's first byte to its last.
    """

    bytes: int = 16 << 20
    text: int = 4 << 20
    unsent: int = 1 << 20
    slow: float = 5.0
    heartbeat: float = 10.0
    message: float = 30.0


class StreamSocket(asyncio.BufferedProtocol):
    """WebSocket that receives each message in separate memory, and sends without waiting.

    Attributes:
        received_at: monotonic time of the newest bytes.
        refused: number of messages not sent because the peer does not read.
        handler_seconds: measured time of the newest message's handler (``service.http.fair_queue.measure_steps``);
            None selects the queue's estimate.
    """

    def __init__(self, limits: SocketLimits, on_lost: Callable[[Exception | None], None] = lambda error: None):
        """Create a socket; ``on_lost`` is called when the connection is lost."""
        self.received_at = time.monotonic()
        self.refused = 0
        self.handler_seconds: float | None = None
        self._charged = 0.0  # Seconds charged for the newest message.
        self._limits = limits
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(limits.bytes, limits.text, self._handle_control)
        self._early = memoryview(b"")
        self._waiter: asyncio.Future[None] | None = None
        self._is_closing = self._is_lost = self._is_waiting = self._is_pausing = False
        self._frame_budget, self._frame_budget_at = _FRAME_BURST, self.received_at
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._queue = FairQueue.of_running_loop()
        self._read_flow, self._receive_flow = self._queue.create_flow("", self._step), self._queue.create_flow("")
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @classmethod
    def take_over(cls, socket: WebsocketImplProtocol, limits: SocketLimits) -> "StreamSocket":
        """Take over the connection of an upgraded socket of a route with ``ctx_is_handed_over``."""
        before = cast(DeadlineProtocol, socket.io_proto)
        if before.transport is None or before.transport.is_closing():
            raise SocketClosed
        transport = cast(asyncio.Transport, before.transport)
        taken = cls(limits, before.connection_lost)
        if socket.keepalive_ping_task is not None:
            socket.keepalive_ping_task.cancel()
            socket.keepalive_ping_task = None
        transport.pause_reading()
        transport.set_protocol(taken)
        taken.connection_made(transport)
        taken._early = memoryview(before.take_early_bytes())
        taken._queue_reading()
        return taken

    # Called by asyncio (asyncio.BufferedProtocol).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Prepare the connection."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.unsent // 2)
        peer = transport.get_extra_info("peername")
        caller = source_key(str(peer[0]) if isinstance(peer, tuple) and peer else "")
        self._read_flow, self._receive_flow = (
            self._queue.create_flow(caller, self._step),
            self._queue.create_flow(caller),
        )
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
        self._timers["beat"] = self._loop.call_later(self._limits.heartbeat, self._send_ping)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle received bytes."""
        self.received_at = time.monotonic()
        incoming = self._reader
        if incoming.add_partial(nbytes):
            return
        if not incoming.is_over and self._try_read(partial(incoming.add, nbytes)):
            if incoming.is_empty and len(incoming.messages) < _MAX_WAITING:
                return  # No bytes follow the message.
            self._is_pausing = True
            self._queue.enter(self._read_flow)
            if (self._is_pausing or self._is_waiting) and self._transport is not None:
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Close the connection, because the peer sends no more data."""
        return False

    def pause_writing(self) -> None:
        """Start the deadline of a peer that does not read."""
        self._timers["slow"] = self._loop.call_later(self._limits.slow, self._cut_off, "it does not read")

    def resume_writing(self) -> None:
        """Stop the deadline of a peer that reads again."""
        self._stop_timer("slow")

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection is lost."""
        self._is_lost = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._end_reading()
        self._wake_receiver()
        if not self.lost.done():
            self.lost.set_result(None)
        self._on_lost(exc)

    # Frames.

    def _read_frames(self) -> None:
        """Read the frames in the buffer."""
        incoming, count = self._reader, 0
        while (
            count < _MAX_FRAMES_PER_TURN and len(incoming.messages) < _MAX_WAITING and self._try_read(self._next_frame)
        ):
            count += 1
            if incoming.is_in_frame:
                break  # The rest of the frame is read into its own buffer.
        incoming.compact()
        self._schedule_reading(count)

    def _try_read(self, read: Callable[[], bool]) -> bool:
        """Return the result of ``read``, or False after an invalid frame, which ends reading."""
        if self._reader.is_over:
            return False
        try:
            is_read = read()
        except BadFrame as error:
            log.info("a stream's socket is closed: %s", error)
            self.close(error.code, str(error))
            self._end_reading()
            return False
        if self._reader.messages:
            self._wake_receiver()
        return is_read

    def _next_frame(self) -> bool:
        return self._reader.next_frame(self.received_at)

    def _end_reading(self) -> None:
        self._reader.end()
        self._early = memoryview(b"")

    def _handle_control(self, opcode: int, data: bytes) -> None:
        if opcode == PING:
            self._write(PONG, (data,))
        elif opcode == CLOSE:
            code = parse_close(data)
            self._write(CLOSE, (code,))
            self._is_closing = True
            self._end_reading()
            self._wake_receiver()
            if self._transport is not None:
                self._transport.close()

    def _schedule_reading(self, count: int) -> None:
        """Continue reading now, after a pause, or when a message was taken."""
        now = time.monotonic()
        self._frame_budget = min(self._frame_budget + (now - self._frame_budget_at) * _FRAME_RATE, _FRAME_BURST) - count
        self._frame_budget_at = now
        if self._transport is None or self._reader.is_over:
            return
        if len(self._reader.messages) >= _MAX_WAITING:
            self._is_waiting = True
            self._transport.pause_reading()
        elif count >= _MAX_FRAMES_PER_TURN or self._frame_budget < 0:
            self._is_pausing = True
            self._transport.pause_reading()
            if self._frame_budget < 0:
                self._timers["breath"] = self._loop.call_later(-self._frame_budget / _FRAME_RATE, self._queue_reading)

    def _queue_reading(self) -> None:
        self._stop_timer("breath")
        self._queue.enter(self._read_flow, is_idle=False)

    def _step(self) -> tuple[float, bool]:
        if "breath" not in self._timers:
            self._continue_reading()
        return 0.0, self._is_pausing and "breath" not in self._timers and not self._reader.is_over

    def _continue_reading(self) -> None:
        self._is_pausing = self._is_waiting = False
        self._reader.begun_at = time.monotonic()
        # Read buffered frames first, because the transport needs room in the buffer.
        self._read_frames()
        while self._early and not (self._is_pausing or self._is_waiting or self._reader.is_over):
            buffer = self.get_buffer(len(self._early))
            count = min(len(buffer), len(self._early))
            buffer[:count] = self._early[:count]
            self._early = self._early[count:]
            if self._try_read(partial(self._reader.add, count)):
                self._read_frames()
        if self._transport is None or self._is_lost or self._transport.is_closing():
            return
        if not (self._is_pausing or self._is_waiting):
            self._transport.resume_reading()

    # Called by the routes that own the socket.

    async def receive(self) -> memoryview | str:
        """Return the next message.

        Raises:
            SocketClosed: the socket has no more messages.
        """
        messages = self._reader.messages
        if self._charged and self.handler_seconds is not None:
            self._queue.correct_credit(self.handler_seconds - self._charged)
        if messages:
            # Otherwise hundreds of small messages of one client would block the event loop.
            await asyncio.sleep(0)
            await self._queue.wait_turn(self._receive_flow, MESSAGE)
        while not messages:
            if self._is_lost or self._is_closing:
                raise SocketClosed
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            await self._queue.wait_turn(self._receive_flow, MESSAGE)
        message = messages.popleft()
        self._charged = MESSAGE if self._receive_flow.is_greedy else 0.0
        if self.handler_seconds is not None:
            self.handler_seconds = 0.0
        if self._is_waiting and not self._is_pausing:
            self._is_waiting = False
            self._queue.enter(self._read_flow)
        return message

    def send(self, *pieces: bytes | memoryview, is_text: bool = False) -> bool:
        """Send a message of these pieces; False if the peer does not read or the connection is lost."""
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
        """Number of bytes that wait to be sent."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the socket, and cut off a peer that does not answer."""
        if self._is_closing or self._is_lost or self._transport is None:
            return
        self._write(CLOSE, (struct.pack(">H", code) + reason.encode()[:120].decode(errors="ignore").encode(),))
        self._is_closing = True
        self._reader.discard_messages()
        self._wake_receiver()
        # Read late data, because unread bytes would reset the connection before the peer gets the reason.
        self._timers["farewell"] = self._loop.call_later(_CLOSE_TIMEOUT, self._transport.abort)
        self._loop.call_soon(self._queue_reading)

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_lost(self) -> None:
        """Wait until the connection is lost."""
        await asyncio.shield(self.lost)

    def _write(self, opcode: int, pieces: Sequence[bytes | memoryview]) -> None:
        if self._transport is None or self._transport.is_closing() or self._is_closing:
            return
        self._transport.write(Frame(Opcode(opcode), b"".join(pieces)).serialize(mask=False))

    def _wake_receiver(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _send_ping(self) -> None:
        now = time.monotonic()
        is_reading = not (self._is_waiting or self._is_pausing)
        if is_reading and now - self.received_at > 2 * self._limits.heartbeat:
            self._cut_off("it is silent")
            return
        is_late = self._reader.is_in_message and now - self._reader.begun_at > self._limits.message
        if is_reading and is_late:
            self._cut_off("its message takes too long")
            return
        self._write(PING, (b"",))
        self._timers["beat"] = self._loop.call_later(self._limits.heartbeat, self._send_ping)

    def _cut_off(self, why: str) -> None:
        log.warning("a stream's socket is cut off: %s", why)
        self.abort()

    def _stop_timer(self, name: str) -> None:
        timer: Any = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
