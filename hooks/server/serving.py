"""Serving of a Sanic app on an event loop in a thread of its own."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import Any

from sanic import HTTPResponse, Request, Sanic
from sanic.config import Config
from sanic.exceptions import BadRequest, SanicException
from sanic.http import Http, Stage
from sanic.http.http1 import HTTP_CONTINUE
from sanic.response import json
from sanic.server.protocols.websocket_protocol import WebSocketProtocol

from hooks.errors import HooksError

FIRST_PORT = 7860  # gradio's, so that what was set up for huggingface_hub's server finds this one
PORTS = 100
HOST, PORT = "ROBOJAX_WEBHOOKS_HOST", "ROBOJAX_WEBHOOKS_PORT"


class CannotListen(HooksError, OSError):
    """The address cannot be listened on; the text says what to do."""


def choose_address(
    host: str | None, port: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, tuple[int, ...]]:
    """Choose the host, and the ports to try in order.

    Arguments win over ``ROBOJAX_WEBHOOKS_HOST`` and ``ROBOJAX_WEBHOOKS_PORT``, those over gradio's
    ``GRADIO_SERVER_NAME`` and ``GRADIO_SERVER_PORT``. A port that was named is the only one; else it is the first free
    one from 7860 on.

    Raises:
        CannotListen: a port in the environment is no port.
    """
    is_space = bool(environment.get("SPACE_ID"))
    configured = environment.get(HOST) or environment.get("GRADIO_SERVER_NAME")
    host = host or configured or ("0.0.0.0" if is_space else "127.0.0.1")
    if port is None:
        variable = next((name for name in (PORT, "GRADIO_SERVER_PORT") if environment.get(name)), None)
        if variable is None:
            # A Space is reached on this port only.
            return host, (FIRST_PORT,) if is_space else tuple(range(FIRST_PORT, FIRST_PORT + PORTS))
        try:
            port = int(environment[variable])
        except ValueError:
            raise CannotListen(f"{variable} is {environment[variable]!r}; wanted a number from 0 to 65535") from None
    if not 0 <= port <= 65535:
        raise CannotListen(f"port {port}: wanted a number from 0 to 65535 (0: any free one)")
    return host, (port,)


def open_listener(host: str, ports: tuple[int, ...]) -> socket.socket:
    """Open a listening socket on the first free one of these ports.

    Raises:
        CannotListen: none is, or the host is no address of this machine.
    """
    refused: OSError | None = None
    for port in ports:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError as error:
            raise CannotListen(f"host {host!r} is no address of this machine ({error.strerror or error})") from error
        listener = socket.socket(family, kind, protocol)
        try:
            # One that ended a moment ago does not block its port; one that listens does.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError as error:
            listener.close()
            refused = error
        else:
            return listener
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise CannotListen(
        f"cannot listen on {host}, port {tried}: {refused.strerror if refused else 'no port'}; "
        f"end what listens there, or choose another port (port=0 or {PORT}=0: any free one)"
    ) from refused


def build_url(listener: socket.socket) -> str:
    """Build the URL for clients on this machine."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(bound), str(bound))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH = re.compile(r"[0-9]{1,19}")
_TARGET = re.compile(r"[!\"$-~]+")  # letters that can be seen, and no "#", of which a server never hears
_CHUNK_LINE = 64  # bytes before a chunk
_CHUNK = re.compile(rb"\r\n[0-9A-Fa-f]{1,16}[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_PIECES = 64  # of a body that are read at a stretch


class PlainHttp(Http):
    """HTTP parser that accepts plain requests only, as ``service.http.protocol`` does; neither may import the other."""

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
        """Whether every other reader of the same bytes would see the same request."""
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
        """Read some of the body; yields to the loop now and then, because a chunk may be a single byte.

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


class DeadlineProtocol(WebSocketProtocol):
    """Sanic's protocol with deadlines per request; its own time limits start anew with every byte.

    Here ``REQUEST_TIMEOUT`` is for a whole head, and ``RESPONSE_TIMEOUT`` for a body and its answer.
    """

    HTTP_CLASS = PlainHttp
    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request or of a WebSocket."""
        has_begun = self.http is not None and self.http.stage is not Stage.IDLE
        started_at = self._time
        super().data_received(data)
        if has_begun:
            self._time = started_at


def serve_until_signal(stop: threading.Event, is_running: Callable[[], bool], close: Callable[[], object]) -> None:
    """Wait until ``stop`` is set, nothing runs any more, or SIGINT or SIGTERM arrives; then call ``close``.

    Only the main thread is told of signals. A second one ends the process at once, also while it closes.
    """
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        for known in before:
            signal.signal(known, signal.SIG_DFL)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, ask)
    try:
        # With a time limit, because Windows would not let a signal in.
        while is_running() and not stop.wait(1.0):
            pass
    finally:
        try:
            close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def has_running_loop() -> bool:
    """Whether the caller is a coroutine or a callback, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 2.0  # seconds in which answers under way may end
# Connections that wait to be accepted; of a burst above it each tries again a second later (Sanic's own is 100).
BACKLOG = 1024
STOP_TIMEOUT = 15.0  # and for everything: handlers, tunnel, database

Companion = Callable[[], AbstractAsyncContextManager[object]]


class BackgroundServer:
    """Server of an app in a background thread; it answers as soon as it is made.

    Raises:
        Exception: whatever kept the app from starting.
    """

    def __init__(self, app: Sanic[Any, Any], listener: socket.socket, companion: Companion = contextlib.nullcontext):
        """Start the server and wait until it answers.

        Args:
            listener: a bound socket, which this takes over.
            companion: what is open for as long as the app answers.
        """
        self._app = app
        self._listener = listener
        self._companion = companion
        self._has_started = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        # A daemon: a script that started a server beside its own work ends when that is done.
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._thread.start()
        try:
            self._has_started.wait()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            self._thread.join(STOP_TIMEOUT)
            raise self._error

    @property
    def is_running(self) -> bool:
        """Whether the server still answers."""
        return self._thread.is_alive()

    def stop(self) -> bool:
        """Stop the server; return whether it ended in time. From its own thread, only ask it to."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            # When it has ended already its loop is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("the webhooks server did not end within %g s and is left behind", STOP_TIMEOUT)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._has_started.is_set():
                logger.exception("the webhooks server ended by an error")
            self._error = error
        finally:
            self._has_started.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serve_app(self._app, self._listener), self._companion():
            self._has_started.set()
            await self._stop.wait()


@asynccontextmanager
async def serve_app(app: Sanic[Any, Any], listener: socket.socket) -> AsyncIterator[None]:
    """Serve the app on the running loop within this context; takes the socket over."""
    with listener:
        # Sanic would listen before its router is ready.
        server = await app.create_server(
            sock=listener,
            protocol=DeadlineProtocol,
            backlog=BACKLOG,
            return_asyncio_server=True,
            access_log=False,
            asyncio_server_kwargs={"start_serving": False},
        )
        assert server is not None
        assert server.server is not None
        try:
            await server.startup()
            try:
                await server.before_start()
                app.ctx.loop = asyncio.get_running_loop()
                await server.server.start_serving()
                await server.after_start()
                yield
            finally:
                app.ctx.loop = None
                await server.before_stop()
                server.server.close()
                await _drain_connections(server.connections)
                await server.after_stop()
        finally:
            server.server.close()


async def _drain_connections(connections: set[Any]) -> None:
    """Let requests under way end for a while, then close their connections."""
    deadline = asyncio.get_running_loop().time() + DRAIN_TIMEOUT
    while connections and asyncio.get_running_loop().time() < deadline:
        for connection in list(connections):
            connection.close_if_idle()
        await asyncio.sleep(0.01)
    for connection in list(connections):
        connection.abort()


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

REQUEST_DEADLINE = 20  # seconds of a request's head; the receiver has a stricter limit for a body


class WebhooksApp(Sanic[Any, Any]):
    """Sanic app whose ASGI calls from other loops are carried out on its server's loop.

    Test clients of Starlette and httpx call from a loop of their own, where nothing of the receiver lives. An ASGI
    server may run it by itself too: it then sends ``lifespan`` first, and all happens on its loop.
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Loop that the app runs on; Sanic knows it only when it made the loop itself."""
        return getattr(self.ctx, "loop", None) or super().loop

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one ASGI call."""
        serving: asyncio.AbstractEventLoop | None = getattr(self.ctx, "loop", None)
        here = asyncio.get_running_loop()
        if scope["type"] == "lifespan" and serving is not None:
            # It has begun before, and goes on when this caller ends.
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
            return
        if serving is None or serving is here:
            if scope["type"] == "http" and not self.state.is_started:
                raise RuntimeError(
                    "this app does not run: call server.launch(prevent_thread_lock=True) before, or give the client "
                    "the app as a context (lifespan events)"
                )
            await super().__call__(_add_raw_path(scope), receive, send)
            return

        async def receive_on_loop() -> Message:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run_on_loop(receive), here))

        async def send_on_loop(message: Message) -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_run_on_loop(send, message), here))

        answered = super().__call__(_add_raw_path(scope), receive_on_loop, send_on_loop)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answered, serving))


async def _run_on_loop(call: Callable[..., Awaitable[Any]], *arguments: Message) -> Any:
    return await call(*arguments)


def _add_raw_path(scope: Message) -> Message:
    """Add the optional ``raw_path`` of ASGI, which Sanic needs."""
    if scope.get("raw_path") is None and "path" in scope:
        return {**scope, "raw_path": scope["path"].encode()}
    return scope


def build_app(max_body: int) -> WebhooksApp:
    """Build an app without routes whose errors are JSON that reveals nothing internal."""
    # Without a prefix nothing is read from the environment.
    config = Config(env_prefix="")
    config.update(
        REQUEST_MAX_SIZE=max_body,
        REQUEST_TIMEOUT=REQUEST_DEADLINE,
        KEEP_ALIVE_TIMEOUT=15,
        GRACEFUL_SHUTDOWN_TIMEOUT=3,
        FALLBACK_ERROR_FORMAT="json",
        AUTO_EXTEND=False,
        MOTD=False,
        TOUCHUP=False,  # it rewrites Sanic's classes from their source: a second app of one process would not start
    )
    app = WebhooksApp(f"webhooks-{secrets.token_hex(4)}", config=config, configure_logging=False)
    # Sanic keeps every app in a registry; servers are made and thrown away.
    Sanic.unregister_app(app)
    app.error_handler.add(Exception, _answer_error)
    return app


def _answer_error(request: Request | None, error: Exception) -> HTTPResponse:
    if isinstance(error, SanicException):
        status = error.status_code or 500
        text = str(error) if status < 500 else "The server cannot answer this now."
        return json({"error": text}, status=status, headers=error.headers)
    logger.error("%s %s failed", *(("?", "?") if request is None else (request.method, request.path)), exc_info=error)
    return json({"error": "Internal Server Error"}, status=500)
