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
from service.http.limits import Connections, source_of

log = logging.getLogger(__name__)

HEAD_LIMIT = 8192  # bytes of a request's first line and headers
_BREATH = 0.001  # seconds from an answer to the next of requests that were sent at once
# Of a WebSocket, bytes that are read at a stretch, and frames a second: all at once, and as many in the long run.
_PIECE = 512
_FRAMES, _FRAMES_PER_SECOND = 2000, 1000
# Of a body in chunks, pieces that are read at a stretch; and the line before each: bytes, and what it is.
_PIECES = 64
_CHUNK_LINE = 64
_CHUNK = re.compile(rb"\r\n[0-9A-Fa-f]{1,16}[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_LENGTH = re.compile(r"[0-9]{1,19}")
_METHOD = _NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_HOST = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=%-]*(?::[0-9]*)?|\[[0-9A-Fa-f:.%A-Za-z]+\](?::[0-9]*)?")  # RFC 3986, 3.2.2
_TARGET = re.compile(r"[!\"$-~]+")  # letters that can be seen, and no "#", of which a server never hears
_FAREWELL = 1.0  # seconds in which a late client can read why it is cut
# Seconds for each byte that is read and thrown away: of a flood uvloop reads 2 MB of each connection in one turn.
_READ = 1e-9
# Bytes of an answer that a reader takes in each `REQUEST_DEADLINE`, or it is cut: 3 kB/s, less than any modem.
_LEAST_READ = 32_768
# A request that stops robots, as its first line says; of such a route (``is_stop``), below whatever path it is served.
STOP_LINE = re.compile(rb"POST [!\"$-~]{0,512}/emergency_stop(?:\?[!\"$-~]{0,512})? HTTP/1\.[01]\r\n")
FULL = b'{"detail":"Too many connections (setting max_connections); close some","code":"too_many_requests"}'
SPARE = 5.0  # seconds that one connection too many has for a stop
FULL_ANSWER = (
    "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
    f"content-length: {len(FULL)}\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
).encode() + FULL


class _Http(Http):
    # Of this class, because Sanic's own holds one number for all apps of a process.
    HEADER_MAX_SIZE = HEAD_LIMIT
    __slots__ = ("_is_pipelined", "_pieces")

    def init_for_request(self) -> None:
        super().init_for_request()
        self._pieces = 0
        self._is_pipelined = cast(DeadlineProtocol, self.protocol).next_request()

    async def http1_request_header(self) -> None:
        try:
            await self._read_head()
        except asyncio.CancelledError:
            if self.request is None:
                self.create_empty_request()  # whose method Sanic logs
            raise

    async def _read_head(self) -> None:
        if self._is_pipelined:
            # What is in the buffer is answered without waiting for anything: thousands of requests at a stretch, while
            # robots and emergency stops wait.
            await asyncio.sleep(_BREATH)
        await self._whole_head()
        await cast(DeadlineProtocol, self.protocol).wait_for_turn(STOP_LINE.match(self.recv_buffer) is not None)
        await super().http1_request_header()
        if not _is_strict(self.request, self.request_body):
            raise BadRequest("Bad Request")

    async def _whole_head(self) -> None:
        """Wait until all of it is there: a turn is for answering, not for waiting."""
        while b"\r\n\r\n" not in self.recv_buffer and len(self.recv_buffer) < HEAD_LIMIT:
            await self._receive_more()

    async def read(self) -> bytes | None:
        """Some of the body; what is in the buffer may be a hundred thousand chunks of a byte each."""
        self._pieces += 1
        if self._pieces % _PIECES == 0:
            await cast(DeadlineProtocol, self.protocol).wait_for_turn()
        if self.request_body == "chunked" and self.request_bytes_left == 0:
            await self._check_chunk()
        return await super().read()

    async def _check_chunk(self) -> None:
        """Refuse a size that is none (RFC 9112, 7.1), which Python's own numbers may be: ``0x2``, `` 2``, ``2_0``.

        And a chunk that does not end where its size says: whoever else reads it would see another request's beginning.
        """
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
        """Answer; nobody who went away before a request was whole."""
        transport = self.protocol.transport
        if self.stage is Stage.REQUEST and (transport is None or transport.is_closing()):
            self.keep_alive = False
            return
        await super().error_response(exception)

    def create_empty_request(self) -> None:
        try:
            super().create_empty_request()
        except BadRequest:
            # It stands in for a request whose URL could not be parsed, and would not be parsed either.
            self.url = None
            super().create_empty_request()


class DeadlineProtocol(WebSocketProtocol):
    """Sanic's protocol, whose own request timeout starts anew with every byte: one byte now and then would live on.

    The deadline is the app's ``REQUEST_DEADLINE`` in seconds, from a request's first byte to the last of its body.
    The app's ``CONNECTIONS`` say how many there may be.

    Attributes:
        is_spare: this is one too many, which may stop robots and nothing else.
    """

    HTTP_CLASS = _Http
    __slots__ = (
        "_address",
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
        self._is_fresh = True  # its first request has not begun
        self._is_known = False  # to the queue
        self._has_waited = False  # for the turn of its first request
        self._frames = (float(_FRAMES), 0.0)  # that may come now, as of when

    def let_in(self, address: str, is_spare: bool) -> None:
        """Before it is made: it is counted."""
        self._counted, self.is_spare = address, is_spare

    def connection_made(self, transport: Any) -> None:
        """Somebody is there, and said something."""
        if self.is_spare:
            self.loop.call_later(SPARE, self.abort)
        self._queue = FairQueue.here()
        self._queue.spend(CONNECTION)
        # No task, and nothing else of an HTTP connection, before there is a request to read: those who come and go as
        # fast as they can take the time that a new connection costs, and one with a stop waits behind them.
        self.transport = transport
        self.connections.add(self)
        self.recv_buffer = bytearray()
        self._time = time.monotonic()
        self._callback_check_timeouts = self.loop.call_later(self.keep_alive_timeout, self._close_unused)

    def _close_unused(self) -> None:
        """Close a connection of which nobody made any use."""
        if self._task is None and not self.recv_buffer:
            self.close()

    def _ask_to_begin(self) -> None:
        """Wait for the turn of the first request, whose head is whole; a stop goes before all others."""
        self._take_flows()
        if STOP_LINE.match(self.recv_buffer) and self._queue.take_urgent(self._asking, REQUEST):
            self._begin()
        else:
            self._queue.enter(self._asking)

    def _take_flows(self) -> None:
        self._asking, self._flow = self._queue.newcomers(source_of(self._counted), self._begin_in_turn, self._step)
        self._flow.unread = self._waiting
        self._is_known = True

    def be_own(self) -> None:
        """It is this server itself that connects: what it says waits behind nobody."""
        self._flow.is_own = True

    def _waiting(self) -> int:
        """Bytes of a WebSocket that came and were not taken."""
        return len(self._backlog) + sum(map(len, self._inbox.messages))

    def _begin_in_turn(self) -> tuple[float, bool]:
        if not self._is_fresh or self._task is not None or self.transport is None or self.transport.is_closing():
            return 0.0, False
        self._begin()
        return REQUEST, False

    def _begin(self) -> None:
        """Be an HTTP connection: there is a request to read."""
        unread = self.recv_buffer
        if self._callback_check_timeouts is not None:
            self._callback_check_timeouts.cancel()
        super().connection_made(self.transport)
        self.recv_buffer += unread

    @property
    def _doors(self) -> Connections:
        return self.app.config.CONNECTIONS

    def next_request(self) -> bool:
        """Whatever came before is read and answered; whether the next request was sent before that."""
        if self._is_fresh:
            self._is_fresh = False  # its deadline is that of its first byte
            return False
        self._disarm()
        if self.recv_buffer:
            self._arm()
        return bool(self.recv_buffer)

    def answer_and_close(self) -> None:
        """The answer that is about to be given is the last one here."""
        if self.http is not None:
            self.http.keep_alive = False

    def data_received(self, data: bytes) -> None:
        """Bytes of a request or of a WebSocket."""
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
                self.transport.pause_reading()  # until the request is read
            if not self._is_known and (len(unread) >= HEAD_LIMIT or b"\r\n\r\n" in unread):
                self._ask_to_begin()
            return
        super().data_received(data)

    def hand_over(self) -> bytes:
        """All that came since the upgrade, for the protocol that takes the connection over.

        Of a route with ``ctx_is_handed_over``; what Sanic would have read of it would be lost, in the midst of a frame.
        """
        early = bytes(self._backlog)
        self._backlog.clear()
        if self.http is not None:
            early = bytes(self.http.recv_buffer) + early
            self.http.recv_buffer.clear()
        return early

    async def wait_for_turn(self, is_stop: bool = False) -> None:
        """Wait until what was asked may be answered: of many who ask as fast as they can, one after the other is.

        Args:
            is_stop: it is to stop robots, and goes before all others; no more often than anybody means it, though.
        """
        if not self._has_waited:
            self._has_waited = True
            return  # it did before there was a task to wait
        if is_stop and self._queue.take_urgent(self._asking, REQUEST):
            return
        await self._queue.turn(self._asking, REQUEST)

    async def _receive(self, timeout: float | None = None) -> str | bytes | None:
        """The next message; in place of Sanic's ``recv``, which makes a task for each and one for each piece read.

        Raises:
            WebsocketClosed: there is none any more.
        """
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
            self._end()
            raise WebsocketClosed("there will be no more messages")
        if inbox.messages or self._backlog:
            self._queue.enter(self._flow)
        return message

    def _step(self) -> tuple[float, bool]:
        """Read a piece of what came, or offer the next message."""
        socket, transport, inbox = self.websocket, self.transport, self._inbox
        if socket is None or transport is None or transport.is_closing():
            self._backlog.clear()
            return 0.0, False
        later = 0.0
        if _is_cut_off(socket) or socket.ws_proto.state is State.CLOSED:
            later = len(self._backlog) * _READ
            self._backlog.clear()  # it is read so that the peer can read why
        elif self._backlog and not inbox.messages:
            if self._pausing is not None or not self._can_write.is_set():
                return 0.0, False  # a peer that does not read its pongs is not read either
            self._read_piece(socket)
        if inbox.messages and inbox.offered is None:
            inbox.offer()
            later += MESSAGE
        if inbox.messages:
            return later, False  # whoever takes the one that is offered enters the queue again
        if self._backlog:
            return later, self._pausing is None
        if self._pausing is None and not transport.is_closing():
            transport.resume_reading()
        return later, False

    def _read_piece(self, socket: WebsocketImplProtocol) -> None:
        """Read so much of what came, and answer pings."""
        proto = socket.ws_proto
        is_ending = proto.close_sent is not None  # by this side: then nobody takes messages any more
        proto.receive_data(bytes(self._backlog[:_PIECE]))
        del self._backlog[:_PIECE]
        events = proto.events_received()
        try:
            for event in events:
                if isinstance(event, Frame) and not (is_ending and event.opcode in DATA_OPCODES):
                    self._take_in(socket, event)
        except UnicodeDecodeError:
            log.info("a socket is closed: its text is not UTF-8")
            socket.fail_connection(1007, "text is not UTF-8")
        self._answer(proto.data_to_send())
        pause = self._pause(len(events))
        if pause > 0:
            self._pausing = self.loop.call_later(pause, self._go_on)

    def _take_in(self, socket: WebsocketImplProtocol, frame: Frame) -> None:
        if frame.opcode is Opcode.CLOSE:
            self._inbox.end()
        elif frame.opcode is Opcode.PONG:
            if bytes(frame.data) in socket.pings:
                self.loop.create_task(socket.process_pong(frame))
        elif frame.opcode in DATA_OPCODES:
            self._inbox.put(frame)

    def _answer(self, answers: Sequence[bytes]) -> None:
        """Write what the protocol says: pongs, and the answer to a close, behind which the connection ends."""
        data = b"".join(answers)
        if data and self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)
        if b"" not in answers:
            return
        if self._inbox.is_empty:
            self._end()
        else:
            self.loop.call_later(_FAREWELL, self._end)  # at the latest: a stop right before a close is a stop

    def _end(self) -> None:
        """Let Sanic end the connection, as it does at an end that it reads itself."""
        socket = self.websocket
        if socket is None or self.transport is None:
            return
        finished, closer = socket.data_finished_fut, socket.auto_closer_task
        if closer is None or closer.done() or finished is None or finished.done():
            SanicProtocol.close(self, timeout=1.0)
        else:
            finished.set_result(None)

    def _go_on(self) -> None:
        self._pausing = None
        self._queue.enter(self._flow, is_idle=False)

    def eof_received(self) -> bool | None:
        """The peer sends no more; what it said before is still taken."""
        if self.websocket is None or self._is_handed_over:
            return super().eof_received()
        self.websocket.ws_proto.receive_eof()
        self._inbox.end()
        self._answer([*self.websocket.ws_proto.data_to_send(), b""])
        return not self._inbox.is_empty

    def _pause(self, count: int) -> float:
        """Seconds until more may be read, after so many frames."""
        left, at = self._frames
        now = time.monotonic()
        left = min(left + (now - at) * _FRAMES_PER_SECOND, _FRAMES) - count
        self._frames = (left, now)
        return max(-left / _FRAMES_PER_SECOND, 0.0)

    async def websocket_handshake(self, request: Request[Any, Any], subprotocols: Sequence[str] | None = None) -> Any:
        """An upgrade; one that cannot be understood is the client's error, which Sanic answers with 500."""
        # Before anything may come on it.
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
            self._backlog += self.hand_over()
            self._queue.enter(self._flow)
        return socket

    async def _close_down(self, socket: WebsocketImplProtocol) -> None:
        """End the connection when the WebSocket is over; Sanic's own does not expect that the peer is gone already.

        A peer that still sends when it is cut off can read why: what it sends is thrown away for a moment. What arrives
        unread at a connection that is closed makes the kernel reset it, and the peer loses the close frame that it has
        not read yet (RFC 6455, 7.1.1; RFC 2525, 2.17).
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
                await socket.wait_for_connection_lost(_FAREWELL)
            transport.close()
        if not await socket.wait_for_connection_lost(socket.close_timeout):
            transport.abort()

    def pause_writing(self) -> None:
        """More of an answer waits than the peer reads now; one that hardly reads keeps memory and a handler."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._forget_reader()
        if self._backlog and not self._is_handed_over:
            self._queue.enter(self._flow)

    def check_timeouts(self) -> None:
        """Sanic's own; but a connection that still sends its last answer is not idle."""
        if self.http is not None and self.http.stage is Stage.IDLE and self._unread():
            self._time = time.monotonic()
        super().check_timeouts()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone."""
        if self.is_spare:
            self._doors.squeeze_out(self.abort)
        else:
            self._doors.leave(self._counted)
        self._disarm()
        if self._pausing is not None:
            self._pausing.cancel()
        if self._callback_check_timeouts is not None:
            self._callback_check_timeouts.cancel()
        if self.conn_info is None:  # it has not begun
            self.connections.discard(self)
            self.transport = None
        else:
            super().connection_lost(exc)
        self._forget_reader()

    def _unread(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def _watch_reader(self) -> None:
        self._forget_reader()
        self._reading = self.loop.call_later(self._request_deadline, self._look_at_reader, self._unread())

    def _look_at_reader(self, before: int) -> None:
        # With an answer of pieces the rest is written only once this is read: then this is all there is to look at.
        if self.transport is not None and before - self._unread() < _LEAST_READ:
            log.info("a connection is cut: %d bytes of its answer are not read", self._unread())
            self.transport.abort()
        else:
            self._watch_reader()

    def _forget_reader(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self._request_deadline, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        if self._task is None and self._is_fresh:
            # Half a request, and all that there will be: it is answered as every late one, in a moment.
            if not self._is_known:
                self._take_flows()
            self._begin()
            self._deadline = self.loop.call_later(_BREATH, self._late)
            return
        http = self.http
        # The timer object stays: a request is late once, and an answered one may take its time.
        if http is None or self._task is None or self.websocket is not None:
            return
        if http.stage in (Stage.IDLE, Stage.REQUEST) or http.request_body:
            http.exception = RequestTimeout("Request Timeout")
            self._task.cancel()
            # Sanic would go on to read the rest of the body; what the client has of the answer by then is enough.
            self._deadline = self.loop.call_later(_FAREWELL, self.abort)


def _is_strict(request: Request[Any, Any], body: object) -> bool:
    """Whether others who read the same bytes would see the same request: proxies before it, and policies on origins.

    Sanic takes more than that: "Content-Length : 5" is no such header to it, nor is a bare carriage return the end of a
    line. Where two might see two hosts or two lengths, there is no answer but 400.
    """
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
    """Whether a request names what it is about as it should: a path of the host that it says it is for."""
    target = request.raw_url.decode("latin-1")
    if not _METHOD.fullmatch(request.method) or not _TARGET.fullmatch(target):
        return False
    if target.startswith("/") or (target == "*" and request.method == "OPTIONS"):
        return True
    scheme, _, rest = target.partition("://")
    # RFC 9112, 3.2.2: the host of a whole URL counts; then it has to be the one that origins and guards look at.
    return scheme.lower() in ("http", "https", "ws", "wss") and re.split(r"[/?]", rest)[0].lower() == host.lower()


def _is_cut_off(socket: WebsocketImplProtocol) -> bool:
    """Whether the peer was told what it did wrong: nothing that it still sends is of any interest."""
    sent = socket.ws_proto.close_sent
    return sent is not None and sent.code not in (1000, 1001)


class _Inbox:
    """Messages of one WebSocket between its frames and whoever takes them.

    Attributes:
        messages: those that are whole: of one piece that was read.
        offered: the one that may be taken now; None when it is not its turn yet.
        waiter: who waits for it.
        is_over: there will be no more frames.
    """

    __slots__ = ("_data", "_is_text", "is_over", "messages", "offered", "waiter")

    def __init__(self) -> None:
        self.messages: deque[str | bytes] = deque()
        self.offered: str | bytes | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.is_over = False
        self._data = bytearray()  # one, since a part of a message may be a byte, or none
        self._is_text = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return self.offered is None and not self.messages

    def put(self, frame: Frame) -> None:
        """A part of a message, or all of it.

        Raises:
            UnicodeDecodeError: it is no text.
        """
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._data += frame.data
        if frame.fin:
            whole, self._data = bytes(self._data), bytearray()
            self.messages.append(whole.decode() if self._is_text else whole)

    def offer(self) -> None:
        """Let the oldest be taken."""
        self.offered = self.messages.popleft()
        self.wake()

    def end(self) -> None:
        """No more frames come."""
        self.is_over = True
        if self.is_empty:
            self.wake()

    def wake(self) -> None:
        """Go on, whoever waits."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
