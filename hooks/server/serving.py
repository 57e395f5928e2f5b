"""Server of a Sanic app in a background thread, and its public address through an installed tunnel program."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from sanic import HTTPResponse, Request, Sanic
from sanic.config import Config
from sanic.exceptions import BadRequest, SanicException
from sanic.http import Http, Stage
from sanic.response import json
from sanic.server.protocols.websocket_protocol import WebSocketProtocol

from hooks.errors import HooksError
from hooks.receiver.receiver import close_after_answer

try:
    import uvloop
except ImportError:  # there is no uvloop for Windows
    uvloop = None

logger = logging.getLogger(__name__)

FIRST_PORT = 7860  # gradio's port, which huggingface_hub's server uses
PORTS = 100
HOST, PORT = "GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT"
REQUEST_TIMEOUT = 20  # seconds for the first line and the headers of a request
DRAIN_TIMEOUT = 2.0  # seconds for running requests when the server stops
# Connections that wait to be accepted; clients above this number retry a second later. Sanic's default is 100.
BACKLOG = 1024
STOP_TIMEOUT = 15.0  # seconds for the whole stop: handlers, tunnel, database


class CannotListen(HooksError, OSError):
    """The server cannot listen on the address; the text says what to do."""


def choose_address(
    host: str | None, port: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, tuple[int, ...]]:
    """Choose the host and the ports to try: the arguments, ``GRADIO_SERVER_*``, or the first free port from 7860."""
    is_space = bool(environment.get("SPACE_ID"))
    host = host or environment.get(HOST) or ("0.0.0.0" if is_space else "127.0.0.1")
    if port is None:
        text = environment.get(PORT)
        if not text:
            # A Space is reachable only on this port.
            return host, (FIRST_PORT,) if is_space else tuple(range(FIRST_PORT, FIRST_PORT + PORTS))
        try:
            port = int(text)
        except ValueError:
            raise CannotListen(f"{PORT} is {text!r}; wanted a number from 0 to 65535") from None
    if not 0 <= port <= 65535:
        raise CannotListen(f"port {port}: wanted a number from 0 to 65535 (0: any free port)")
    return host, (port,)


def open_listener(host: str, ports: tuple[int, ...]) -> socket.socket:
    """Open a listening socket on the first free port of these; raise ``CannotListen`` if all ports are taken."""
    refused: OSError | None = None
    for port in ports:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except OSError as error:
            raise CannotListen(
                f"host {host!r} is not an address of this machine ({error.strerror or error})"
            ) from error
        try:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            refused = error
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    reason = os.strerror(refused.errno) if refused is not None and refused.errno else "no port"
    raise CannotListen(
        f"cannot listen on {host}, port {tried}: {reason}; "
        "end the program that listens there, or choose another port (port=0: any free port)"
    ) from refused


def build_url(listener: socket.socket) -> str:
    """Build the URL for clients on this machine."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(bound), str(bound))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_until_signal(stop: threading.Event, is_running: Callable[[], bool], close: Callable[[], object]) -> None:
    """Wait until ``stop`` is set, the server has ended, or SIGINT or SIGTERM arrives; then call ``close``.

    Only the main thread receives signals. A second signal ends the process at once, also during ``close``.
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
        # The wait has a timeout, because signals do not interrupt it on Windows.
        while is_running() and not stop.wait(1.0):
            pass
    finally:
        try:
            close()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def has_running_loop() -> bool:
    """Whether the caller runs in an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Http(Http):
    __slots__ = ()

    def create_empty_request(self) -> None:
        """Create the request of an error response; Sanic's method fails for a URL that cannot be parsed."""
        try:
            super().create_empty_request()
        except BadRequest:
            self.url = None
            super().create_empty_request()


class DeadlineProtocol(WebSocketProtocol):
    """Sanic's protocol with timeouts for a whole request; Sanic restarts its timeouts with every byte."""

    HTTP_CLASS = _Http
    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request or of a WebSocket."""
        has_begun = self.http is not None and self.http.stage is not Stage.IDLE
        started_at = self._time
        super().data_received(data)
        if has_begun:
            self._time = started_at


Companion = Callable[[], AbstractAsyncContextManager[object]]


class BackgroundServer:
    """Server of an app in a background thread; the constructor waits for its start and raises its errors."""

    def __init__(self, app: Sanic[Any, Any], listener: socket.socket, companion: Companion = contextlib.nullcontext):
        """Start the server, which closes the listening socket; ``companion`` is open while the app responds."""
        self._app = app
        self._listener = listener
        self._companion = companion
        self._started: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        # A daemon thread does not keep a script alive after its own work.
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.stop()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the server still responds."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the server and wait for its end; its own thread only requests the stop."""
        if self._loop is not None:
            # After the server has ended, its loop is closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(STOP_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("the webhooks server did not end within %g s and is abandoned", STOP_TIMEOUT)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._started.done():
                logger.exception("the webhooks server ended by an error")
            else:
                self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with serve_app(self._app, self._listener), self._companion():
            self._started.set_result(None)
            await self._stop.wait()


@asynccontextmanager
async def serve_app(app: Sanic[Any, Any], listener: socket.socket) -> AsyncIterator[None]:
    """Serve the app on the running loop within this context, which closes the socket at its end."""
    with listener:
        # Sanic itself would accept connections before its router is ready.
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
                await server.server.start_serving()
                await server.after_start()
                yield
            finally:
                await server.before_stop()
                server.server.close()
                await _drain_connections(server.connections)
                await server.after_stop()
        finally:
            server.server.close()


async def _drain_connections(connections: set[Any]) -> None:
    """Wait a while for running requests, then close their connections."""
    deadline = asyncio.get_running_loop().time() + DRAIN_TIMEOUT
    while connections and asyncio.get_running_loop().time() < deadline:
        for connection in list(connections):
            connection.close_if_idle()
        await asyncio.sleep(0.01)
    for connection in list(connections):
        connection.abort()


def build_app(max_body: int) -> Sanic[Any, Any]:
    """Build an app without routes, whose JSON errors contain no internal details; ``max_body`` is in bytes."""
    # With an empty prefix, Sanic reads no environment variables.
    config = Config(env_prefix="")
    config.update(
        REQUEST_MAX_SIZE=max_body,
        REQUEST_TIMEOUT=REQUEST_TIMEOUT,
        KEEP_ALIVE_TIMEOUT=15,
        GRACEFUL_SHUTDOWN_TIMEOUT=3,
        FALLBACK_ERROR_FORMAT="json",
        AUTO_EXTEND=False,
        MOTD=False,
        TOUCHUP=False,  # It rewrites Sanic's classes from source, so a second app in the process would not start.
    )
    app = Sanic[Any, Any](f"webhooks-{secrets.token_hex(4)}", config=config, configure_logging=False)
    # Otherwise apps of closed servers would accumulate in Sanic's registry.
    Sanic.unregister_app(app)
    app.error_handler.add(Exception, _answer_error)
    return app


def _answer_error(request: Request | None, error: Exception) -> HTTPResponse:
    if isinstance(error, SanicException):
        status = error.status_code or 500
        text = str(error) if status < 500 else "The server cannot answer this now."
        if request is not None and status == 503:
            # After this timeout, Sanic would wait for the rest of the body without a limit.
            close_after_answer(request)
        return json({"error": text}, status=status, headers=error.headers)
    logger.error("%s %s failed", *(("?", "?") if request is None else (request.method, request.path)), exc_info=error)
    return json({"error": "Internal Server Error"}, status=500)


TUNNEL_COMMAND = "ROBOJAX_WEBHOOKS_TUNNEL"
# Command lines with {url}, {host} and {port} of the local server, in the order of preference.
KNOWN_TUNNELS = (
    ("cloudflared", "tunnel", "--no-autoupdate", "--url", "{url}"),
    ("ngrok", "http", "{url}", "--log", "stdout", "--log-format", "logfmt"),
)
# Each pattern matches only addresses of tunnels, because the programs also print other links of their vendors.
TUNNEL_PATTERNS = {
    "cloudflared": r"https://(?!api\.)[a-z0-9-]+\.trycloudflare\.com",
    "ngrok": r"(?<=\burl=)https://[^\s\"]+",
    "ssh": r"https://[\w-]+\.(?:lhr\.life|lhr\.rocks|serveo\.net|serveousercontent\.com|[\w.-]*pinggy\.\w+)",
}
ANY_URL = r"https?://[^\s\"'<>]+"
TUNNEL_TIMEOUT = 30.0  # seconds until the program must have printed an address
TUNNEL_END_TIMEOUT = 5.0  # seconds from SIGTERM to SIGKILL
TUNNEL_LINES = 20  # lines of the program's output in an error


class TunnelFailed(HooksError):
    """The tunnel program printed no public address."""


def choose_tunnel(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the tunnel command of the environment or of an installed program; raise ``TunnelFailed`` if none."""
    command = environment.get(TUNNEL_COMMAND)
    if not command:
        for known in KNOWN_TUNNELS:
            if shutil.which(known[0], path=environment.get("PATH")):
                return known
        raise TunnelFailed(
            "share=True needs a tunnel program, and neither cloudflared nor ngrok is installed; "
            f"install one, or set {TUNNEL_COMMAND} to a command, e.g. "
            "'ssh -o ExitOnForwardFailure=yes -R 80:{host}:{port} nokey@localhost.run'"
        )
    try:
        arguments = tuple(shlex.split(command))
    except ValueError as error:
        raise TunnelFailed(f"the tunnel's command cannot be read: {error}") from None
    if not arguments or shutil.which(arguments[0], path=environment.get("PATH")) is None:
        raise TunnelFailed(
            f"the tunnel's program {arguments[:1]} is not installed; install it or choose another program"
        )
    return arguments


@asynccontextmanager
async def open_tunnel(command: Sequence[str], url: str, *, timeout: float = TUNNEL_TIMEOUT) -> AsyncIterator[str]:
    """Open a public address for ``url`` within this context; raise ``TunnelFailed`` after ``timeout`` seconds."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", str(parts.port or "")
    arguments = [part.replace("{url}", url).replace("{host}", host).replace("{port}", port) for part in command]
    name = Path(arguments[0]).name
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Ctrl-C in the terminal goes only to the server, which then ends the program.
        start_new_session=True,
    )
    output: deque[str] = deque(maxlen=TUNNEL_LINES)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(
        _read_output(process, re.compile(TUNNEL_PATTERNS.get(name, ANY_URL)), output, address)
    )
    try:
        await asyncio.wait({address, reading}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            how = f"ended with {await process.wait()}" if reading.done() else f"printed no address within {timeout:g} s"
            last = "".join(f"\n    {line}" for line in output) or " nothing"
            raise TunnelFailed(f"{name} {how}; its output:{last}")
        yield address.result()
    finally:
        reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), TUNNEL_END_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _read_output(
    process: asyncio.subprocess.Process, pattern: re.Pattern[str], output: deque[str], address: asyncio.Future[str]
) -> None:
    """Read the program's output to its end, because a full pipe would block the program."""
    assert process.stdout is not None
    rest = ""
    while part := await process.stdout.read(4096):
        *lines, rest = (rest + part.decode(errors="replace")).split("\n")
        for line in lines:
            output.append(line.strip()[:500])
            if not address.done() and (match := pattern.search(line)):
                address.set_result(match[0].rstrip("/.,"))
        rest = rest[-4096:]
    if address.done():
        logger.warning("the tunnel has ended: %s no longer works; start the server again", address.result())
