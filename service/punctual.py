"""An HTTP connection that gives a whole request a deadline, however its bytes are spread out."""

import asyncio
from typing import Any, cast

from sanic.exceptions import RequestTimeout
from sanic.http import Http, Stage
from sanic.server.protocols.websocket_protocol import WebSocketProtocol

_FAREWELL = 1.0  # seconds in which a late client can read why it is cut


class _Http(Http):
    __slots__ = ()

    def init_for_request(self) -> None:
        super().init_for_request()
        cast(PunctualProtocol, self.protocol).next_request(bool(self.recv_buffer))


class PunctualProtocol(WebSocketProtocol):
    """Sanic's protocol, whose own request timeout starts anew with every byte: one byte now and then would live on.

    The deadline is the app's ``REQUEST_DEADLINE`` in seconds, from a request's first byte to the last of its body.
    """

    HTTP_CLASS = _Http
    __slots__ = ("_deadline", "_request_deadline")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._request_deadline: float = self.app.config.REQUEST_DEADLINE

    def next_request(self, has_begun: bool) -> None:
        """Whatever came before is read and answered; the next request may be in the buffer already."""
        self._disarm()
        if has_begun:
            self._arm()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request or of a WebSocket."""
        if self._deadline is None and self.websocket is None:
            self._arm()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone."""
        self._disarm()
        super().connection_lost(exc)

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
