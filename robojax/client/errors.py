"""Exceptions of the client."""


class RobojaxError(Exception):
    """Base class of the client's exceptions; the text says what to do."""


class InvalidArgument(RobojaxError, ValueError):
    """An argument (an address, a key, an observation) cannot be sent; nothing was sent."""


class RequestRefused(RobojaxError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        code: the server's stable name of the error, for programs; "" without one.
        text: the server's text.
        retry_after: seconds after which the request may be repeated; None if the server did not say.
    """

    def __init__(self, status: int, code: str, text: str, retry_after: float | None = None):
        super().__init__(f"{text} ({status}{f' {code}' if code else ''})")
        self.status, self.code, self.text, self.retry_after = status, code, text, retry_after


class ServerUnreachable(RobojaxError):
    """The server did not answer.

    Attributes:
        why: short description of the failure.
        may_have_arrived: whether the server may have received the request. Only safe requests are then repeated.
    """

    def __init__(self, text: str, why: str, may_have_arrived: bool):
        super().__init__(text)
        self.why, self.may_have_arrived = why, may_have_arrived


class ProtocolError(RobojaxError):
    """A response is not that of a robojax server, or cannot be read."""


class StreamClosed(RobojaxError):
    """The stream is closed.

    Attributes:
        code: close code of the WebSocket; 1006 when the connection broke.
        reason: the server's text.
    """

    def __init__(self, code: int, reason: str):
        super().__init__(f"the stream was closed: {reason or MEANINGS.get(code, 'no reason given')} ({code})")
        self.code, self.reason = code, reason


MEANINGS = {
    1000: "it was over",
    1001: "the session or its server ended",
    1006: "the connection broke",
    1007: "a message made no sense",
    1008: "the key is no longer good",
    1009: "a message was too large",
    4409: "another client drives this robot",
}
