"""An HTTP connection that gives a whole request its time, however its bytes are spread out."""

from sanic.http import Stage
from sanic.server.protocols.websocket_protocol import WebSocketProtocol


class PromptProtocol(WebSocketProtocol):
    """Sanic's protocol, whose time limits start anew with every byte: one byte now and then would live on.

    Here ``REQUEST_TIMEOUT`` is for a whole head, and ``RESPONSE_TIMEOUT`` for a body and its answer.
    """

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request or of a WebSocket."""
        has_begun = self.http is not None and self.http.stage is not Stage.IDLE
        since = self._time
        super().data_received(data)
        if has_begun:
            self._time = since
