"""An HTTP connection that gives a whole request its time, however its bytes are spread out, and takes only plain ones.

``service.edge.punctual`` has the same rules for the server of robots; neither package may import the other.
"""

import asyncio
import re

from sanic.exceptions import BadRequest
from sanic.http import Http, Stage
from sanic.http.http1 import HTTP_CONTINUE
from sanic.server.protocols.websocket_protocol import WebSocketProtocol

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH = re.compile(r"[0-9]{1,19}")
_TARGET = re.compile(r"[!\"$-~]+")  # letters that can be seen, and no "#", of which a server never hears
_CHUNK_LINE = 64  # bytes before a chunk
_CHUNK = re.compile(rb"\r\n[0-9A-Fa-f]{1,16}[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_PIECES = 64  # of a body that are read at a stretch


class _Http(Http):
    __slots__ = ("_pieces",)

    def init_for_request(self) -> None:
        super().init_for_request()
        self._pieces = 0

    async def http1_request_header(self) -> None:
        try:
            await super().http1_request_header()
        except asyncio.CancelledError:
            if self.request is None:
                self.create_empty_request()  # whose method Sanic logs
            raise
        if not self._is_plain():
            raise BadRequest("Bad Request")

    def create_empty_request(self) -> None:
        try:
            super().create_empty_request()
        except BadRequest:
            # It stands in for a request whose URL could not be parsed, and would not be parsed either.
            self.url = None
            super().create_empty_request()

    def _is_plain(self) -> bool:
        """Whether whoever else reads the same bytes would see the same request."""
        request, headers = self.request, self.request.headers
        hosts, lengths = headers.getall("host", []), headers.getall("content-length", [])
        target = request.raw_url.decode("latin-1")
        return (
            all(_NAME.fullmatch(name) and not _CONTROL.search(value) for name, value in headers.items())
            and (len(hosts) == 1 or (not hosts and request.version == "1.0"))
            and all(_LENGTH.fullmatch(length.rstrip(" \t")) for length in lengths)
            and ("transfer-encoding" not in headers or (self.request_body == "chunked" and request.version == "1.1"))
            and bool(_NAME.fullmatch(request.method) and _TARGET.fullmatch(target))
            and (target.startswith("/") or (target == "*" and request.method == "OPTIONS"))
        )

    async def read(self) -> bytes | None:
        """Some of the body; the loop is others' turn now and then, as a chunk may be a byte.

        A size that only Python reads (``0x2``, `` 2``, ``2_0``) is none, nor is a chunk that goes on behind its end.
        """
        self._pieces += 1
        if self._pieces % _PIECES == 0:
            await asyncio.sleep(0)
        if self.request_body == "chunked" and self.request_bytes_left == 0:
            if self.expecting_continue:
                self.expecting_continue = False
                await self._send(HTTP_CONTINUE)
            while (end := self.recv_buffer.find(b"\r\n", 2)) < 0 and len(self.recv_buffer) <= _CHUNK_LINE:
                await self._receive_more()
            if not 0 <= end <= _CHUNK_LINE or not _CHUNK.fullmatch(self.recv_buffer, 0, end):
                self.keep_alive = False
                raise BadRequest("Bad chunked encoding")
        return await super().read()


class PromptProtocol(WebSocketProtocol):
    """Sanic's protocol, whose time limits start anew with every byte: one byte now and then would live on.

    Here ``REQUEST_TIMEOUT`` is for a whole head, and ``RESPONSE_TIMEOUT`` for a body and its answer.
    """

    HTTP_CLASS = _Http
    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request or of a WebSocket."""
        has_begun = self.http is not None and self.http.stage is not Stage.IDLE
        since = self._time
        super().data_received(data)
        if has_begun:
            self._time = since
