"""Exceptions of the client."""


class RobojaxError(Exception):
    """Base class of the client's exceptions; the text says what to do.

    Example:
        >>> try:
        ...     with Client("http://127.0.0.1:1") as client:
        ...         client.session("arm").start()
        ... except RobojaxError as error:
        ...     print(type(error).__name__)
        ServerUnreachable
    """


class InvalidArgument(RobojaxError, ValueError):
    """An argument (an address, a key, an observation) cannot be sent; nothing was sent.

    Example:
        >>> Client("gpu-box:8001")
        Traceback (most recent call last):
        robojax.client.errors.InvalidArgument: 'gpu-box:8001' is not the URL of a server: ...; try http://gpu-box:8001
    """


class RequestRefused(RobojaxError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        code: the server's stable name of the error, for programs; "" if the response has no code.
        text: the server's text.
        retry_after: seconds after which the request may be repeated; None if the server did not say.

    Example:
        >>> with Client() as client:
        ...     client.session("missing").start()
        Traceback (most recent call last):
        robojax.client.errors.RequestRefused: ... (404 unknown_session)
    """

    def __init__(self, status: int, code: str, text: str, retry_after: float | None = None):
        super().__init__(f"{text} ({status}{f' {code}' if code else ''})")
        self.status, self.code, self.text, self.retry_after = status, code, text, retry_after


class ServerUnreachable(RobojaxError):
    """The server did not answer.

    Attributes:
        why: short description of the failure.
        may_have_arrived: whether the server may have received the request. Only safe requests are then repeated.

    Example:
        >>> with Client("http://127.0.0.1:1") as client:
        ...     client.session("arm").start()
        Traceback (most recent call last):
        robojax.client.errors.ServerUnreachable: no robojax server answers at http://127.0.0.1:1: ...
    """

    def __init__(self, text: str, why: str, may_have_arrived: bool):
        super().__init__(text)
        self.why, self.may_have_arrived = why, may_have_arrived


class ProtocolError(RobojaxError):
    """The response cannot be decoded, or a robojax server would not send it.

    Example:
        >>> with Client() as client:
        ...     client.request("GET", "/ui")
        Traceback (most recent call last):
        robojax.client.errors.ProtocolError: the response is not JSON; is this a robojax server?
    """


class StreamClosed(RobojaxError):
    """The stream is closed.

    Attributes:
        code: close code of the WebSocket; 1006 when the connection broke.
        reason: the server's text.

    Example:
        >>> print(StreamClosed(4409, ""))
        the stream was closed: another client drives this robot (4409)
    """

    def __init__(self, code: int, reason: str):
        super().__init__(f"the stream was closed: {reason or MEANINGS.get(code, 'no reason given')} ({code})")
        self.code, self.reason = code, reason


MEANINGS = {
    1000: "normal end",
    1001: "the session or its server ended",
    1006: "the connection broke",
    1007: "a message could not be decoded",
    1008: "the key is no longer valid",
    1009: "a message was too large",
    4409: "another client drives this robot",
}
