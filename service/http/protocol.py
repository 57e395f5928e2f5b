"""HTTP protocol with deadlines for requests and for slow readers."""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from sanic import Request
from sanic.exceptions import BadRequest, RequestTimeout, SanicException, WebsocketClosed
from sanic.http import Http, Stage
from sanic.http.http1 import HTTP_CONTINUE
from sanic.server.protocols.base_protocol import SanicProtocol
from sanic.server.protocols.websocket_protocol import WebSocketProtocol
from sanic.server.websockets.impl import WebsocketImplProtocol
from websockets.frames import DATA_OPCODES, Frame, Opcode
from websockets.protocol import State

from service.http.fair_queue import CONNECTION, MESSAGE, REQUEST, FairQueue
from service.http.limits import Connections, source_key

log = logging.getLogger(__name__)

MAX_HEAD = 8192  # bytes of a request's first line and headers
_PIPELINE_PAUSE = 0.001  # seconds between a response and the next pipelined request
# Bytes of a WebSocket read per turn; frames as a burst, and frames per second.
_READ_BYTES = 512
_FRAMES, _FRAMES_PER_SECOND = 2000, 1000
# Chunks of a body read per turn; and the length and form of a chunk's size line.
_PIECES = 64
_CHUNK_LINE = 64
_CHUNK = re.compile(rb"\r\n[0-9A-Fa-f]{1,16}[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_LENGTH = re.compile(r"[0-9]{1,19}")
_METHOD = _NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%-]*(?::[0-9]*)?|\[[0-9A-Fa-f:.%A-Za-z]+\](?::[0-9]*)?")  # RFC 3986, 3.2.2
_TARGET = re.compile(r"[!\"$-~]+")  # visible ASCII without "#", because clients do not send fragments
_LINGER = 1.0  # seconds in which a late client can read the reason before it is disconnected
_DISCARD_COST = 1e-9  # estimated seconds for each byte that is read and dropped
# Bytes of a response that a client must read in each `REQUEST_DEADLINE`, else it is disconnected (3 kB/s).
_MIN_READ_BYTES = 32_768
# First line of a request that stops robots (``is_stop``), with any path prefix.
STOP_LINE = re.compile(rb"POST [!\"$-~]{0,512}/emergency_stop(?:\?[!\"$-~]{0,512})? HTTP/1\.[01]\r\n")
TOO_MANY_BODY = b'{"detail":"Too many connections (setting max_connections); close some","code":"too_many_requests"}'
SPARE_TIMEOUT = 5.0  # seconds in which a connection beyond the limit must send a stop
TOO_MANY_RESPONSE = (
    "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
    f"content-length: {len(TOO_MANY_BODY)}\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
).encode() + TOO_MANY_BODY


class _Http(Http):
    HEADER_MAX_SIZE = MAX_HEAD  # Sanic's own limit is shared by all apps of a process
    __slots__ = ("_is_pipelined", "_pieces")

    def init_for_request(self) -> None:
        super().init_for_request()
        self._pieces = 0
        self._is_pipelined = cast(DeadlineProtocol, self.protocol).begin_next_request()

    async def http1_request_header(self) -> None:
        try:
            await self._read_head()
        except asyncio.CancelledError:
            if self.request is None:
                self.create_empty_request()  # Sanic logs its method
            raise

    async def _read_head(self) -> None:
        if self._is_pipelined:
            # Pipelined requests are answered without waiting, and many of them would delay robots and emergency stops.
            await asyncio.sleep(_PIPELINE_PAUSE)
        while b"\r\n\r\n" not in self.recv_buffer and len(self.recv_buffer) < MAX_HEAD:
            await self._receive_more()
        await cast(DeadlineProtocol, self.protocol).wait_for_turn(STOP_LINE.match(self.recv_buffer) is not None)
        await super().http1_request_header()
        if not _is_strict(self.request, self.request_body):
            raise BadRequest("Bad Request")

    async def read(self) -> bytes | None:
        """Read a piece of the body; wait for a turn after each ``_PIECES`` pieces."""
        self._pieces += 1
        if self._pieces % _PIECES == 0:
            await cast(DeadlineProtocol, self.protocol).wait_for_turn()
        if self.request_body == "chunked" and self.request_bytes_left == 0:
            await self._check_chunk()
        return await super().read()

    async def _check_chunk(self) -> None:
        """Reject a chunk with a wrong end, or with a size that only Python accepts (``0x2``; RFC 9112, 7.1)."""
        buffer = self.recv_buffer
        if self.expecting_continue:
            self.expecting_continue = False
            await self._send(HTTP_CONTINUE)
        while (end := buffer.find(b"\r\n", 2)) < 0 and len(buffer) <= _CHUNK_LINE:
            await self._receive_more()
        if not 0 <= end <= _CHUNK_LINE or not _CHUNK.fullmatch(buffer, 0, end):
            self.keep_alive = False
            raise BadRequest("Bad chunked encoding")

    async def error_response(self, exception: Exception) -> None:
        """Answer an error, unless the client disconnected before its request was complete."""
        transport = self.protocol.transport
        if self.stage is Stage.REQUEST and (transport is None or transport.is_closing()):
            self.keep_alive = False
            return
        await super().error_response(exception)

    def create_empty_request(self) -> None:
        try:
            super().create_empty_request()
        except BadRequest:
            self.url = None  # it cannot be parsed
            super().create_empty_request()


class DeadlineProtocol(WebSocketProtocol):
    """Sanic's protocol with deadlines, because Sanic's own request timeout restarts with every byte.

    The app's ``REQUEST_DEADLINE`` (seconds) limits a whole request with its body; ``CONNECTIONS`` limits connections. A
    connection beyond the limits (``is_spare``) may only stop robots.
    """

    HTTP_CLASS = _Http
    __slots__ = (
        "_asking",
        "_backlog",
        "_counted",
        "_deadline",
        "_flow",
        "_frames",
        "_has_waited",
        "_inbox",
        "_is_fresh",
        "_is_handed_over",
        "_is_known",
        "_pausing",
        "_queue",
        "_reading",
        "_request_deadline",
        "is_spare",
    )

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._request_deadline: float = self.app.config.REQUEST_DEADLINE
        self._counted = ""
        self.is_spare = False
        self._backlog = bytearray()
        self._inbox = _Inbox()
        self._pausing: asyncio.TimerHandle | None = None
        self._is_handed_over = False
        self._is_fresh = True  # no request has begun
        self._is_known = False  # whether it has flows in the queue
        self._has_waited = False  # whether the first request had its turn
        self._frames = (float(_FRAMES), 0.0)  # remaining frames, and the time of that count

    def set_peer(self, address: str, is_spare: bool) -> None:
        """Set the address that this connection is counted for, before ``connection_made``."""
        self._counted, self.is_spare = address, is_spare

    def connection_made(self, transport: Any) -> None:
        """Begin a connection whose peer has sent something."""
        if self.is_spare:
            self.loop.call_later(SPARE_TIMEOUT, self.abort)
        self._queue = FairQueue.of_running_loop()
        self._queue.charge_turn(CONNECTION)
        # The first request creates the task and the HTTP state, so that short-lived connections do not delay a stop.
        self.transport = transport
        self.connections.add(self)
        self.recv_buffer = bytearray()
        self._time = time.monotonic()
        self._callback_check_timeouts = self.loop.call_later(self.keep_alive_timeout, self._close_unused)

    def _close_unused(self) -> None:
        """Close a connection that was never used."""
        if self._task is None and not self.recv_buffer:
            self.close()

    def _queue_first_request(self) -> None:
        """Wait for the turn of the first request, whose head is complete; a stop is answered first."""
        self._create_flows()
        if STOP_LINE.match(self.recv_buffer) and self._queue.take_urgent(self._asking, REQUEST):
            self._begin_http()
        else:
            self._queue.enter(self._asking)

    def _create_flows(self) -> None:
        self._asking, self._flow = self._queue.create_new_flows(
            source_key(self._counted), self._begin_in_turn, self._step
        )
        self._flow.unread = self._unread_bytes
        self._is_known = True

    def mark_own(self) -> None:
        """Mark the connection as this server's own, so that its messages are read first."""
        self._flow.is_own = True

    def _unread_bytes(self) -> int:
        """Return the number of received bytes of a WebSocket that no handler has taken."""
        return len(self._backlog) + sum(map(len, self._inbox.messages))

    def _begin_in_turn(self) -> tuple[float, bool]:
        if not self._is_fresh or self._task is not None or self.transport is None or self.transport.is_closing():
            return 0.0, False
        self._begin_http()
        return REQUEST, False

    def _begin_http(self) -> None:
        """Let Sanic read the first request."""
        unread = self.recv_buffer
        if self._callback_check_timeouts is not None:
            self._callback_check_timeouts.cancel()
        super().connection_made(self.transport)
        self.recv_buffer += unread

    @property
    def _connection_counts(self) -> Connections:
        return self.app.config.CONNECTIONS

    def begin_next_request(self) -> bool:
        """Begin the next request after a response; returns whether it was pipelined."""
        if self._is_fresh:
            self._is_fresh = False  # the deadline runs since its first byte
            return False
        self._disarm()
        if self.recv_buffer:
            self._arm()
        return bool(self.recv_buffer)

    def answer_and_close(self) -> None:
        """Close the connection after the next response."""
        if self.http is not None:
            self.http.keep_alive = False

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request or of a WebSocket."""
        if self._is_handed_over or self.websocket is not None:
            self._backlog += data
            if not self._is_handed_over:
                self._queue.enter(self._flow)
            if self._backlog and self.transport is not None:
                self.transport.pause_reading()
            return
        if self._deadline is None:
            self._arm()
        if self._task is None and self._is_fresh:
            self.recv_buffer += data
            unread = self.recv_buffer
            if len(unread) >= self.app.config.REQUEST_BUFFER_SIZE and self.transport is not None:
                self.transport.pause_reading()  # the request is read first
            if not self._is_known and (len(unread) >= MAX_HEAD or b"\r\n\r\n" in unread):
                self._queue_first_request()
            return
        super().data_received(data)

    def take_early_bytes(self) -> bytes:
        """Take the bytes since the upgrade, for the new protocol of a route with ``ctx_is_handed_over``."""
        early = bytes(self._backlog)
        self._backlog.clear()
        if self.http is not None:
            early = bytes(self.http.recv_buffer) + early
            self.http.recv_buffer.clear()
        return early

    async def wait_for_turn(self, is_stop: bool = False) -> None:
        """Wait for the fair turn of this caller's request; emergency stops go first, at a limited rate."""
        if not self._has_waited:
            self._has_waited = True
            return  # the first request had its turn in _queue_first_request
        if is_stop and self._queue.take_urgent(self._asking, REQUEST):
            return
        await self._queue.wait_turn(self._asking, REQUEST)

    async def _receive(self, timeout: float | None = None) -> str | bytes | None:
        """Return the next message or raise WebsocketClosed; Sanic's own ``recv`` creates a task for each message."""
        inbox = self._inbox
        if inbox.offered is None and (inbox.messages or not inbox.is_over):
            waiter = inbox.waiter = self.loop.create_future()
            try:
                async with asyncio.timeout(timeout):
                    await waiter
            except TimeoutError:
                return None
            finally:
                inbox.waiter = None
        message, inbox.offered = inbox.offered, None
        if message is None:
            self._end_connection()
            raise WebsocketClosed("there will be no more messages")
        if inbox.messages or self._backlog:
            self._queue.enter(self._flow)
        return message

    def _step(self) -> tuple[float, bool]:
        """Read a part of the received bytes, or offer the next message."""
        socket, transport, inbox = self.websocket, self.transport, self._inbox
        if socket is None or transport is None or transport.is_closing():
            self._backlog.clear()
            return 0.0, False
        later = 0.0
        if _is_cut_off(socket) or socket.ws_proto.state is State.CLOSED:
            later = len(self._backlog) * _DISCARD_COST
            self._backlog.clear()
        elif self._backlog and not inbox.messages:
            if self._pausing is not None or not self._can_write.is_set():
                return 0.0, False  # nothing is read from a peer that does not read its pongs
            self._read_piece(socket)
        if inbox.messages and inbox.offered is None:
            inbox.offer()
            later += MESSAGE
        if inbox.messages:
            return later, False  # _receive enters the queue again
        if self._backlog:
            return later, self._pausing is None
        if self._pausing is None and not transport.is_closing():
            transport.resume_reading()
        return later, False

    def _read_piece(self, socket: WebsocketImplProtocol) -> None:
        """Parse at most ``_READ_BYTES`` received bytes, and answer pings."""
        proto = socket.ws_proto
        is_ending = proto.close_sent is not None  # messages after this side's close are dropped
        proto.receive_data(bytes(self._backlog[:_READ_BYTES]))
        del self._backlog[:_READ_BYTES]
        events = proto.events_received()
        try:
            for event in events:
                if isinstance(event, Frame) and not (is_ending and event.opcode in DATA_OPCODES):
                    self._handle_frame(socket, event)
        except UnicodeDecodeError:
            log.info("a socket is closed: its text is not UTF-8")
            socket.fail_connection(1007, "text is not UTF-8")
        self._write_answers(proto.data_to_send())
        pause = self._frame_delay(len(events))
        if pause > 0:
            self._pausing = self.loop.call_later(pause, self._resume_reading)

    def _handle_frame(self, socket: WebsocketImplProtocol, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._inbox.end()
        elif frame.opcode is Opcode.PONG:
            if bytes(frame.data) in socket.pings:
                self.loop.create_task(socket.process_pong(frame))
        elif frame.opcode in DATA_OPCODES:
            self._inbox.put(frame)

    def _write_answers(self, answers: Sequence[bytes]) -> None:
        """Write the protocol's answers: pongs, and the answer to a close, after which the connection ends."""
        data = b"".join(answers)
        if data and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)
        if b"" not in answers:
            return
        if self._inbox.is_empty:
            self._end_connection()
        else:
            # The handler may still read a stop that arrived right before the close.
            self.loop.call_later(_LINGER, self._end_connection)

    def _end_connection(self) -> None:
        """Let Sanic end the connection as it does when it reads the close itself."""
        socket = self.websocket
        if socket is None or self.transport is None:
            return
        finished, closer = socket.data_finished_fut, socket.auto_closer_task
        if closer is None or closer.done() or finished is None or finished.done():
            SanicProtocol.close(self, timeout=1.0)
        else:
            finished.set_result(None)

    def _resume_reading(self) -> None:
        self._pausing = None
        self._queue.enter(self._flow, is_idle=False)

    def eof_received(self) -> bool | None:
        """Note that the peer sends no more; messages from before are still delivered."""
        if self.websocket is None or self._is_handed_over:
            return super().eof_received()
        self.websocket.ws_proto.receive_eof()
        self._inbox.end()
        self._write_answers([*self.websocket.ws_proto.data_to_send(), b""])
        return not self._inbox.is_empty

    def _frame_delay(self, count: int) -> float:
        """Count frames, and return the seconds until more may be read."""
        left, at = self._frames
        now = time.monotonic()
        left = min(left + (now - at) * _FRAMES_PER_SECOND, _FRAMES) - count
        self._frames = (left, now)
        return max(-left / _FRAMES_PER_SECOND, 0.0)

    async def websocket_handshake(self, request: Request[Any, Any], subprotocols: Sequence[str] | None = None) -> Any:
        """Upgrade to a WebSocket. A malformed upgrade is answered with 400, where Sanic answers with 500."""
        self._is_handed_over = getattr(request.route and request.route.ctx, "is_handed_over", False)
        try:
            socket = await super().websocket_handshake(request, subprotocols)
        except SanicException as error:
            if error.status_code < 500:
                raise
            raise BadRequest("Bad Request") from error
        setattr(socket, "recv", self._receive)  # noqa: B010, an instance attribute in place of the method
        if socket.auto_closer_task is not None:
            socket.auto_closer_task.cancel()
        socket.auto_closer_task = self.loop.create_task(self._close_down(socket))
        if not self._is_handed_over:
            self._backlog += self.take_early_bytes()
            self._queue.enter(self._flow)
        return socket

    async def _close_down(self, socket: WebsocketImplProtocol) -> None:
        """End the connection after the WebSocket is closed; Sanic's own closer fails if the peer is already gone.

        Data after the close is discarded for a moment, because unread data makes the kernel reset the connection, and
        the peer would lose the reason of the close (RFC 6455, 7.1.1; RFC 2525, 2.17).
        """
        assert socket.data_finished_fut is not None
        assert socket.connection_lost_waiter is not None
        over = (socket.data_finished_fut, socket.connection_lost_waiter)
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        if socket.keepalive_ping_task is not None:
            socket.keepalive_ping_task.cancel()
            socket.keepalive_ping_task = None
        transport = self.transport
        if transport is None:
            return
        if not transport.is_closing():
            with suppress(RuntimeError, OSError):
                transport.write_eof()
            if _is_cut_off(socket):
                transport.resume_reading()
                await socket.wait_for_connection_lost(_LINGER)
            transport.close()
        if not await socket.wait_for_connection_lost(socket.close_timeout):
            transport.abort()

    def pause_writing(self) -> None:
        """Start the deadline of a peer that does not read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the deadline of a peer that reads again."""
        super().resume_writing()
        self._stop_watching_reader()
        if self._backlog and not self._is_handed_over:
            self._queue.enter(self._flow)

    def check_timeouts(self) -> None:
        """Check Sanic's timeouts, except that a connection that still sends a response is not idle."""
        if self.http is not None and self.http.stage is Stage.IDLE and self._unsent_bytes():
            self._time = time.monotonic()
        super().check_timeouts()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection is closed."""
        if self.is_spare:
            self._connection_counts.leave_spare(self.abort)
        else:
            self._connection_counts.leave(self._counted)
        self._disarm()
        if self._pausing is not None:
            self._pausing.cancel()
        if self._callback_check_timeouts is not None:
            self._callback_check_timeouts.cancel()
        if self.conn_info is None:  # no request has begun
            self.connections.discard(self)
            self.transport = None
        else:
            super().connection_lost(exc)
        self._stop_watching_reader()

    def _unsent_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def _watch_reader(self) -> None:
        self._stop_watching_reader()
        self._reading = self.loop.call_later(self._request_deadline, self._check_reader, self._unsent_bytes())

    def _check_reader(self, before: int) -> None:
        if self.transport is not None and before - self._unsent_bytes() < _MIN_READ_BYTES:
            log.info("a connection is cut: %d bytes of its answer are not read", self._unsent_bytes())
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_watching_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self._request_deadline, self._on_deadline)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self._task is None and self._is_fresh:
            # The request is incomplete. It is answered as a late request after Sanic has begun.
            if not self._is_known:
                self._create_flows()
            self._begin_http()
            self._deadline = self.loop.call_later(_PIPELINE_PAUSE, self._on_deadline)
            return
        http = self.http
        # The timer stays set, so that it does not start a second time for this request.
        if http is None or self._task is None or self.websocket is not None:
            return
        if http.stage in (Stage.IDLE, Stage.REQUEST) or http.request_body:
            http.exception = RequestTimeout("Request Timeout")
            self._task.cancel()
            # Sanic would read the rest of the body after the response.
            self._deadline = self.loop.call_later(_LINGER, self.abort)


def _is_strict(request: Request[Any, Any], body: object) -> bool:
    """Return whether proxies and the origin rules read the host and the length of this request as Sanic does."""
    headers = request.headers
    if not all(_NAME.fullmatch(name) and not _CONTROL.search(value) for name, value in headers.items()):
        return False
    hosts, lengths = headers.getall("host", []), headers.getall("content-length", [])
    if len(hosts) > 1 or (not hosts and request.version == "1.1"):
        return False
    if hosts and not _HOST.fullmatch(hosts[0].rstrip(" \t")):
        return False
    if lengths and not _LENGTH.fullmatch(lengths[0].rstrip(" \t")):
        return False
    if "transfer-encoding" in headers and (body != "chunked" or request.version != "1.1"):
        return False
    return _is_target(request, hosts[0].strip() if hosts else "")


def _is_target(request: Request[Any, Any], host: str) -> bool:
    """Return whether the request's target is a path of the host in its Host header."""
    target = request.raw_url.decode("latin-1")
    if not _METHOD.fullmatch(request.method) or not _TARGET.fullmatch(target):
        return False
    if target.startswith("/") or (target == "*" and request.method == "OPTIONS"):
        return True
    scheme, _, rest = target.partition("://")
    # RFC 9112, 3.2.2: the host of a whole URL counts, so it must equal the Host header, which the access guard checks.
    return scheme.lower() in ("http", "https", "ws", "wss") and re.split(r"[/?]", rest)[0].lower() == host.lower()


def _is_cut_off(socket: WebsocketImplProtocol) -> bool:
    """Return whether a close frame with an error was sent; later data of the peer is ignored."""
    sent = socket.ws_proto.close_sent
    return sent is not None and sent.code not in (1000, 1001)


class _Inbox:
    """Complete messages of one WebSocket, the message offered to the handler, and the handler's future."""

    def __init__(self) -> None:
        self.messages: deque[str | bytes] = deque()
        self.offered: str | bytes | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.is_over = False
        self._data = bytearray()
        self._is_text = False

    @property
    def is_empty(self) -> bool:
        """Whether no message waits."""
        return self.offered is None and not self.messages

    def put(self, frame: Frame) -> None:
        """Add one frame of a message; raises UnicodeDecodeError if a text message is not UTF-8."""
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._data += frame.data
        if frame.fin:
            whole, self._data = bytes(self._data), bytearray()
            self.messages.append(whole.decode() if self._is_text else whole)

    def offer(self) -> None:
        """Offer the oldest message to the handler."""
        self.offered = self.messages.popleft()
        self.wake()

    def end(self) -> None:
        """Note that no more frames arrive."""
        self.is_over = True
        if self.is_empty:
            self.wake()

    def wake(self) -> None:
        """Wake the handler that waits for a message."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
