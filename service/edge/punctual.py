"""An HTTP connection that waits for nobody: a request has a deadline, and so has an answer that is not read."""

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import Any, cast

from sanic import Request
from sanic.exceptions import BadRequest, RequestTimeout, SanicException
from sanic.http import Http, Stage
from sanic.server.protocols.websocket_protocol import WebSocketProtocol
from sanic.server.websockets.impl import WebsocketImplProtocol
from websockets.protocol import Event, State

from service.edge.limits import Connections

log = logging.getLogger(__name__)

HEAD_LIMIT = 8192  # bytes of a request's first line and headers
_CHUNKS = 64  # of a body, that are read at a stretch
_BREATH = 0.001  # seconds from an answer to the next of requests that were sent at once
# Of a WebSocket, bytes that are read at a stretch, and frames a second: all at once, and as many in the long run.
_PIECE = 512
_FRAMES, _FRAMES_PER_SECOND = 2000, 1000
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_FAREWELL = 1.0  # seconds in which a late client can read why it is cut
# Bytes of an answer that a reader takes in each `REQUEST_DEADLINE`, or it is cut: 3 kB/s, less than any modem.
_LEAST_READ = 32_768
FULL = b'{"detail":"Too many connections (setting max_connections); close some","code":"too_many_requests"}'
_SPARE = 5.0  # seconds that one connection too many has for a stop
_FULL_HEAD = (
    "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
    f"content-length: {len(FULL)}\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
).encode()


class _Http(Http):
    # Of this class, because Sanic's own holds one number for all apps of a process.
    HEADER_MAX_SIZE = HEAD_LIMIT
    __slots__ = ("_chunks", "_is_pipelined")

    def init_for_request(self) -> None:
        super().init_for_request()
        self._chunks = 0
        self._is_pipelined = bool(self.recv_buffer)
        cast(PunctualProtocol, self.protocol).next_request(self._is_pipelined)

    async def read(self) -> bytes | None:
        # All that is in the buffer is read without waiting for anything: a body in chunks of one byte, of which 360 kB
        # hold 60,000, kept the loop for 0.3 s.
        self._chunks += 1
        if self._chunks % _CHUNKS == 0:
            await asyncio.sleep(_BREATH)
        return await super().read()

    async def http1_request_header(self) -> None:
        if self._is_pipelined:
            # What is in the buffer is answered without waiting for anything: thousands of requests at a stretch, while
            # robots and emergency stops wait.
            await asyncio.sleep(_BREATH)
        await super().http1_request_header()
        # "Content-Length : 5" is no such header to Sanic, but it is to others: they would see another request's end.
        # Nor is a bare carriage return the end of a line to all that may stand before this server.
        if not all(
            _NAME.fullmatch(name) and not _CONTROL.search(value) for name, value in self.request.headers.items()
        ):
            raise BadRequest("Bad Request")

    def create_empty_request(self) -> None:
        try:
            super().create_empty_request()
        except BadRequest:
            # It stands in for a request whose URL could not be parsed, and would not be parsed either.
            self.url = None
            super().create_empty_request()


class PunctualProtocol(WebSocketProtocol):
    """Sanic's protocol, whose own request timeout starts anew with every byte: one byte now and then would live on.

    The deadline is the app's ``REQUEST_DEADLINE`` in seconds, from a request's first byte to the last of its body.
    The app's ``CONNECTIONS`` say how many there may be.

    Attributes:
        is_spare: this is one too many, which may stop robots and nothing else.
    """

    HTTP_CLASS = _Http
    __slots__ = (
        "_backlog",
        "_counted",
        "_deadline",
        "_feeding",
        "_frames",
        "_is_handed_over",
        "_reading",
        "_request_deadline",
        "is_spare",
    )

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._request_deadline: float = self.app.config.REQUEST_DEADLINE
        self._counted: str | None = None
        self.is_spare = False
        self._backlog = bytearray()
        self._feeding: asyncio.Task[None] | None = None
        self._is_handed_over = False
        self._frames = (float(_FRAMES), 0.0)  # that may come now, as of when

    def connection_made(self, transport: Any) -> None:
        """Somebody is there; one too many is told so and let go."""
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        if not self._doors.enter(address):
            self.is_spare = self._doors.squeeze_in(self.abort)
            if not self.is_spare:
                transport.write(_FULL_HEAD + FULL)
                transport.close()
                return
            self.loop.call_later(_SPARE, self.abort)
        self._counted = address
        super().connection_made(transport)

    @property
    def _doors(self) -> Connections:
        return self.app.config.CONNECTIONS

    def next_request(self, has_begun: bool) -> None:
        """Whatever came before is read and answered; the next request may be in the buffer already."""
        self._disarm()
        if has_begun:
            self._arm()

    def answer_and_close(self) -> None:
        """The answer that is about to be given is the last one here."""
        if self.http is not None:
            self.http.keep_alive = False

    def data_received(self, data: bytes) -> None:
        """Bytes of a request or of a WebSocket."""
        if self._counted is None:
            return  # it is being let go
        if self._is_handed_over:
            self._backlog += data
            if self.transport is not None:
                self.transport.pause_reading()
            return
        if self.websocket is not None:
            if _is_cut_off(self.websocket):
                return  # it is read so that the peer can read why
            self._backlog += data
            if self._feeding is None:
                count = self._read_piece(self.websocket)
                if not self._backlog:
                    return  # which is what usually happens
                self._feeding = self.loop.create_task(self._feed(self.websocket, count))
            if self.transport is not None:
                self.transport.pause_reading()
            return
        if self._deadline is None:
            self._arm()
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

    async def _feed(self, socket: WebsocketImplProtocol, count: int) -> None:
        """The rest of what came, piece by piece.

        Sanic reads all of it at a stretch: one flood of pings or heartbeats would keep every robot waiting, and every
        stop.
        """
        try:
            while self._backlog and socket.ws_proto.state is not State.CLOSED and not _is_cut_off(socket):
                await asyncio.sleep(self._pause(count))
                count = self._read_piece(socket)
        finally:
            self._feeding = None
            self._backlog.clear()
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def _read_piece(self, socket: WebsocketImplProtocol) -> int:
        """Read so much of what came; how many frames it was."""
        piece = bytes(self._backlog[:_PIECE])
        del self._backlog[:_PIECE]
        socket.ws_proto.receive_data(piece)
        answers, events = socket.ws_proto.data_to_send(), socket.ws_proto.events_received()
        if answers or events:
            self.loop.create_task(socket.async_data_received(answers, events))
        return len(events)

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
        socket.can_pause = False  # it is done here, for pings too
        _end_on_bad_text(socket)
        self._let_refusal_be_read(socket)
        return socket

    def _let_refusal_be_read(self, socket: WebsocketImplProtocol) -> None:
        """Let a peer that still sends when it is cut off read why: what it sends is thrown away for a moment.

        Sanic closes at once. What then arrives unread makes the kernel reset the connection, and the peer loses the
        close frame that it has not read yet (RFC 6455, 7.1.1; RFC 2525, 2.17).
        """
        wait = socket.wait_for_connection_lost

        async def lingering(timeout: float | None = None) -> bool:
            if timeout == 0 and _is_cut_off(socket) and self.transport is not None:
                # Our half is closed.
                self.transport.resume_reading()
                timeout = _FAREWELL
            return await wait(timeout)

        setattr(socket, "wait_for_connection_lost", lingering)  # noqa: B010, an instance attribute in place of the method

    def pause_writing(self) -> None:
        """More of an answer waits than the peer reads now; one that hardly reads keeps memory and a handler."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._forget_reader()

    def check_timeouts(self) -> None:
        """Sanic's own; but a connection that still sends its last answer is not idle."""
        if self.http is not None and self.http.stage is Stage.IDLE and self._unread():
            self._time = time.monotonic()
        super().check_timeouts()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone."""
        if self._counted is None:
            return  # it was never let in
        if self.is_spare:
            self._doors.squeeze_out(self.abort)
        else:
            self._doors.leave(self._counted)
        self._disarm()
        if self._feeding is not None:
            self._feeding.cancel()
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
        http = self.http
        # The timer object stays: a request is late once, and an answered one may take its time.
        if http is None or self._task is None or self.websocket is not None:
            return
        if http.stage in (Stage.IDLE, Stage.REQUEST) or http.request_body:
            http.exception = RequestTimeout("Request Timeout")
            self._task.cancel()
            # Sanic would go on to read the rest of the body; what the client has of the answer by then is enough.
            self._deadline = self.loop.call_later(_FAREWELL, self.abort)


def _is_cut_off(socket: WebsocketImplProtocol) -> bool:
    """Whether the peer was told what it did wrong: nothing that it still sends is of any interest."""
    sent = socket.ws_proto.close_sent
    return sent is not None and sent.code not in (1000, 1001)


def _end_on_bad_text(socket: WebsocketImplProtocol) -> None:
    """Close with 1007 on text that is not UTF-8; Sanic would lose the frame, log it in a traceback and go on."""
    process = socket.process_events

    async def guarded(events: Sequence[Event]) -> None:
        try:
            await process(events)
        except UnicodeDecodeError:
            log.info("a socket is closed: its text is not UTF-8")
            socket.fail_connection(1007, "text is not UTF-8")

    setattr(socket, "process_events", guarded)  # noqa: B010, an instance attribute in place of the method
