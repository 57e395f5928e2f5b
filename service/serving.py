"""An app on a port: for a while on the running event loop, or until a signal ends the process."""

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import uvloop
from sanic import Sanic
from sanic.models.server_types import Signal

from service.edge.acceptor import Acceptor
from service.edge.limits import Connections
from service.edge.punctual import PunctualProtocol
from service.loop_watchdog import LoopWatchdog
from service.signal_guard import SIGNALS, SignalGuard

# Answers under way may end, then connections are cut. Together with what the sessions take to hold
# their robots and leave their rooms (3.5 s at most) this stays below five seconds.
PATIENCE = 1.0
# Connections that wait to be accepted, as many as Linux allows without being told: of a burst above it each tries again
# a second later, an emergency stop too. Those that were given up again wait as well (Sanic's own is 100).
BACKLOG = 4096
DESCRIPTORS = 16_384


class CannotListen(Exception):
    """The address cannot be listened on; the text says what to do."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 lets the system choose. Sanic would take 0 for its own default port.

    Raises:
        CannotListen: the port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"host {host!r} is no address of this machine ({error.strerror or error})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror}; end what listens there, or choose another port (0: any)"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL that a client on this machine can use."""
    bound, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(bound), str(bound))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def serving(app: Sanic[Any, Any], listener: socket.socket) -> AsyncIterator[str]:
    """The app on the running loop; yields its URL when it answers. Takes the socket over."""
    try:
        with listener:
            app.config.OWN_ADDRESS = listener.getsockname()[:2]
            app.config.OWN_PORT = listener.getsockname()[1]
            app.config.setdefault("CONNECTIONS", Connections())
            server = await app.create_server(
                sock=listener,
                protocol=PunctualProtocol,
                return_asyncio_server=True,
                access_log=False,
                # Sanic would listen before its router is ready.
                asyncio_server_kwargs={"start_serving": False},
            )
            assert server is not None
            assert server.server is not None
            await server.startup()
            await server.before_start()
            acceptor = Acceptor(
                listener,
                app.config.CONNECTIONS,
                _protocol_of(app, server.connections),
                app.config.KEEP_ALIVE_TIMEOUT,
            )
            acceptor.start(BACKLOG)
            await server.after_start()
            try:
                yield url_of(listener)
            finally:
                await server.before_stop()
                acceptor.close()
                server.server.close()
                await _part(server.connections)
                await server.after_stop()
    finally:
        # Sanic keeps every app in a registry.
        Sanic.unregister_app(app)


def _protocol_of(app: Sanic[Any, Any], connections: set[Any]) -> Callable[[], PunctualProtocol]:
    """What Sanic gives its own server, which does not accept here, to make a protocol of."""
    return partial(
        PunctualProtocol,
        loop=asyncio.get_running_loop(),
        connections=connections,
        signal=Signal(),
        app=app,
        websocket_max_size=app.config.WEBSOCKET_MAX_SIZE,
        websocket_ping_timeout=app.config.WEBSOCKET_PING_TIMEOUT,
        websocket_ping_interval=app.config.WEBSOCKET_PING_INTERVAL,
    )


async def _part(connections: set[Any]) -> None:
    """End idle connections and WebSockets now, the others when they have answered or patience ends."""
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE
    for connection in list(connections):
        if getattr(connection, "websocket", None):
            connection.websocket.fail_connection(code=1001)
    while connections and loop.time() < until:
        for connection in list(connections):
            connection.close_if_idle()
        await asyncio.sleep(0.01)
    for connection in list(connections):
        connection.abort()


def run(
    app: Sanic[Any, Any],
    listener: socket.socket,
    started: Callable[[str], None],
    beside: tuple[Sanic[Any, Any], socket.socket] | None = None,
    watchdog: LoopWatchdog | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP (its terminal is gone; nohup keeps it); ``started`` is told the URL when it
    answers. A second signal ends at once, but for SIGHUP, which a shell sends beside the terminal.

    When the event loop does not react to a signal, the guard beside it kills this process.

    Args:
        beside: an app of the same process on a port of its own, which ends before the first one does.
        watchdog: has the figures of the event loop; one that only logs when None.
    """
    watchdog, guard = watchdog or LoopWatchdog(), SignalGuard()

    async def until_signal() -> None:
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        main = asyncio.current_task()
        is_started = False

        def ask() -> None:
            asked.set()
            guard.acknowledge()
            if main is not None and not is_started:
                main.cancel()
            for number in ends:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)

        ends = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        for number in ends:
            loop.add_signal_handler(number, ask)
        guard.start(ends)
        try:
            async with AsyncExitStack() as served:
                url = await served.enter_async_context(serving(app, listener))
                if beside is not None:
                    await served.enter_async_context(serving(*beside))
                is_started = True
                watchdog.start()  # no robot moves before; what a start imports blocks the loop for longer
                started(url)
                await asked.wait()
        except asyncio.CancelledError:
            if not asked.is_set():
                raise
        finally:
            watchdog.stop()
            guard.acknowledge()  # before the loop takes its own handlers away

    _take_descriptors()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_signal())
    finally:
        guard.close()


def _take_descriptors() -> None:
    """As many open files as the system lets this process have: the usual 1024 are fewer than its connections may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
