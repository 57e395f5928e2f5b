"""HTTP server: listens on a port and serves until a signal.

A connection is a bare socket until its peer sends something, because asyncio and uvloop create a transport for each
waiting connection in one turn of the loop, which delays robots.
"""

import asyncio
import errno
import logging
import resource
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop
from sanic import Sanic
from sanic.models.server_types import Signal

from service.http.config import format_url
from service.http.fair_queue import FairQueue
from service.http.limits import Connections, source_key
from service.http.protocol import SPARE_TIMEOUT, STOP_LINE, TOO_MANY_RESPONSE, DeadlineProtocol
from service.loop_watchdog import LoopWatchdog
from service.signal_guard import SIGNALS, SignalGuard

log = logging.getLogger(__name__)

# Seconds of accepting in one turn of the loop, doubled up to the maximum while connections wait in the kernel.
ACCEPT_SECONDS, MOST_ACCEPT_SECONDS = 0.001, 0.004
CONNECTIONS_PER_TURN = 4  # connections created from sockets
MAX_READY = 1024  # sockets of one caller with data that wait for a connection
MAX_READABLE = 64  # sockets with new data handled in one turn
SWEEP_INTERVAL = 1.0  # seconds between checks for silent sockets
RETRY_DELAY = 0.5  # seconds without accepting when the process has no descriptors left
PEEK_BYTES = 1024  # bytes of a request inspected; a stop's first line is shorter
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class _SilentSocket:
    """An accepted socket that has no protocol yet."""

    raw: socket.socket
    address: str
    is_spare: bool
    until: float
    drop: Callable[[], None] = lambda: None


class Acceptor:
    """Accepts sockets of a port, and creates connections from the sockets that have sent something.

    Args:
        listener: bound socket, owned by the caller.
        connections: counters and limits of connections.
        make: creates a protocol for one connection.
        timeout: seconds in which a peer must send something.
    """

    def __init__(
        self, listener: socket.socket, connections: Connections, make: Callable[[], DeadlineProtocol], timeout: float
    ):
        self._listener, self._connections, self._make, self._timeout = listener, connections, make, timeout
        self._loop = asyncio.get_running_loop()
        self._queue = FairQueue.of_running_loop()
        # The loop watches this selector as one descriptor, so silent sockets cost the loop nothing.
        self._silent = selectors.DefaultSelector()
        self._newcomers: dict[int, _SilentSocket] = {}  # silent, the oldest first
        self._stops: deque[_SilentSocket] = deque()
        self._ready: deque[_SilentSocket] = deque()
        self._waiting: Counter[str] = Counter()  # ready sockets by caller
        self._made: set[asyncio.Task[object]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_scheduled = False
        self._accept_seconds = ACCEPT_SECONDS

    def start(self, backlog: int) -> None:
        """Listen and accept; ``backlog`` is the number of connections that may wait in the kernel."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._loop.add_reader(self._listener, self._accept)
        self._loop.add_reader(self._silent.fileno(), self._read_ready)
        self._sweep()

    def close(self) -> None:
        """Stop accepting, and close the sockets without a connection."""
        self._loop.remove_reader(self._listener)
        self._loop.remove_reader(self._silent.fileno())
        for timer in self._timers.values():
            timer.cancel()
        for newcomer in [*self._newcomers.values(), *self._stops, *self._ready]:
            self._drop(newcomer)
        self._newcomers.clear()
        self._stops.clear()
        self._ready.clear()
        self._silent.close()

    def _accept(self) -> None:
        """Accept sockets until none waits or this turn's time is used up."""
        began = now = time.thread_time()
        until = began + self._accept_seconds
        self._accept_seconds = min(2 * self._accept_seconds, MOST_ACCEPT_SECONDS)
        while now < until:
            try:
                raw, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._accept_seconds = ACCEPT_SECONDS
                break
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("no connection can be accepted: %s; trying again in %s s", error.strerror, RETRY_DELAY)
                self._loop.remove_reader(self._listener)
                self._timers["again"] = self._loop.call_later(
                    RETRY_DELAY, self._loop.add_reader, self._listener, self._accept
                )
                break
            self._receive(raw, str(peer[0]) if isinstance(peer, tuple) and peer else "")
            now = time.thread_time()
        self._queue.charge_turn(now - began)

    def _receive(self, raw: socket.socket, address: str) -> None:
        """Admit one socket; a socket beyond the limit is refused, or has a moment to stop robots."""
        raw.setblocking(False)
        newcomer = _SilentSocket(raw, address, False, time.monotonic() + self._timeout)
        if not self._connections.enter(address):
            newcomer.drop = lambda: self._evict(newcomer)
            if not self._connections.enter_spare(newcomer.drop):
                with suppress(OSError):
                    raw.send(TOO_MANY_RESPONSE)
                raw.close()
                return
            newcomer.is_spare, newcomer.until = True, time.monotonic() + SPARE_TIMEOUT
        self._peek(newcomer)

    def _read_ready(self) -> None:
        """Handle the sockets that have received something."""
        began = time.thread_time()
        for key, _ in self._silent.select(0)[:MAX_READABLE]:
            self._silent.unregister(key.fileobj)
            del self._newcomers[key.fd]
            self._peek(key.data)
        self._queue.charge_turn(time.thread_time() - began)

    def _peek(self, newcomer: _SilentSocket) -> None:
        """Queue a socket by its first bytes; without any it is silent."""
        try:
            begin = newcomer.raw.recv(PEEK_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._newcomers[newcomer.raw.fileno()] = newcomer
            self._silent.register(newcomer.raw, selectors.EVENT_READ, newcomer)
            return
        except OSError:
            begin = b""
        if not begin:
            self._drop(newcomer)
            return
        caller = source_key(newcomer.address)
        if STOP_LINE.match(begin):
            self._stops.append(newcomer)
        elif self._waiting[caller] < MAX_READY:
            self._waiting[caller] += 1
            self._ready.append(newcomer)
        else:
            with suppress(OSError):
                newcomer.raw.send(TOO_MANY_RESPONSE)
            self._drop(newcomer)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and (self._stops or self._ready):
            self._is_scheduled = True
            self._loop.call_soon(self._connect)

    def _connect(self) -> None:
        """Create connections from a few ready sockets."""
        self._is_scheduled = False
        for _ in range(CONNECTIONS_PER_TURN):
            if self._stops:
                newcomer = self._stops.popleft()
            elif self._ready:
                newcomer = self._ready.popleft()
                self._uncount(newcomer)
            else:
                return
            protocol = self._make()
            protocol.set_peer(newcomer.address, newcomer.is_spare)
            if newcomer.is_spare:
                self._connections.leave_spare(newcomer.drop)
                self._connections.enter_spare(protocol.abort)
            task = self._loop.create_task(self._connect_socket(newcomer, protocol))
            self._made.add(task)
            task.add_done_callback(self._made.discard)
        self._schedule()

    async def _connect_socket(self, newcomer: _SilentSocket, protocol: DeadlineProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, newcomer.raw)
        except OSError:  # the peer is gone, or the process has no descriptors
            if protocol.transport is None:
                newcomer.drop = protocol.abort
                self._drop(newcomer)

    def _drop(self, newcomer: _SilentSocket) -> None:
        newcomer.raw.close()
        if newcomer.is_spare:
            self._connections.leave_spare(newcomer.drop)
        else:
            self._connections.leave(newcomer.address)

    def _evict(self, newcomer: _SilentSocket) -> None:
        """Close a socket above the limit because a newer one needs its place."""
        if self._newcomers.pop(newcomer.raw.fileno(), None) is not None:
            self._silent.unregister(newcomer.raw)
        elif newcomer in self._ready:
            self._ready.remove(newcomer)
            self._uncount(newcomer)
        elif newcomer in self._stops:
            self._stops.remove(newcomer)
        newcomer.raw.close()

    def _uncount(self, newcomer: _SilentSocket) -> None:
        caller = source_key(newcomer.address)
        self._waiting[caller] -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _sweep(self) -> None:
        """Close sockets that have sent nothing in time."""
        now = time.monotonic()
        for descriptor, newcomer in list(self._newcomers.items()):
            if newcomer.until <= now:
                del self._newcomers[descriptor]
                self._silent.unregister(newcomer.raw)
                self._drop(newcomer)
        self._timers["sweep"] = self._loop.call_later(SWEEP_INTERVAL, self._sweep)


# Seconds for responses in progress. The sessions' shutdown takes at most 3.5 s, and both together less than five.
CLOSE_TIMEOUT = 1.0
# Backlog of the listening socket, Linux's limit: a refused client tries again only after a second.
BACKLOG = 4096
MAX_DESCRIPTORS = 16_384


class CannotListen(Exception):
    """The address cannot be listened on; the text says what to do."""


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 lets the system choose.

    Raises:
        CannotListen: the port is taken, or the address is not of this machine.
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
    """Return the URL that a client on this machine can use."""
    return format_url(*listener.getsockname()[:2])


@asynccontextmanager
async def serve_app(app: Sanic[Any, Any], listener: socket.socket) -> AsyncIterator[str]:
    """Serve the app on the running loop, close the socket at the end; yields the URL when the app answers."""
    try:
        with listener:
            app.config.OWN_ADDRESS = listener.getsockname()[:2]
            app.config.OWN_PORT = listener.getsockname()[1]
            app.config.setdefault("CONNECTIONS", Connections())
            server = await app.create_server(
                sock=listener,
                protocol=DeadlineProtocol,
                return_asyncio_server=True,
                access_log=False,
                asyncio_server_kwargs={"start_serving": False},  # Sanic's router is not ready yet
            )
            assert server is not None
            assert server.server is not None
            await server.startup()
            await server.before_start()
            make_protocol = _protocol_factory(app, server.connections)
            acceptor = Acceptor(listener, app.config.CONNECTIONS, make_protocol, app.config.KEEP_ALIVE_TIMEOUT)
            acceptor.start(BACKLOG)
            await server.after_start()
            try:
                yield url_of(listener)
            finally:
                await server.before_stop()
                acceptor.close()
                server.server.close()
                await _close_connections(server.connections)
                await server.after_stop()
    finally:
        Sanic.unregister_app(app)


def _protocol_factory(app: Sanic[Any, Any], connections: set[Any]) -> Callable[[], DeadlineProtocol]:
    """Return a function that creates a protocol with the arguments of Sanic's own server."""
    return partial(
        DeadlineProtocol,
        loop=asyncio.get_running_loop(),
        connections=connections,
        signal=Signal(),
        app=app,
        websocket_max_size=app.config.WEBSOCKET_MAX_SIZE,
        websocket_ping_timeout=app.config.WEBSOCKET_PING_TIMEOUT,
        websocket_ping_interval=app.config.WEBSOCKET_PING_INTERVAL,
    )


async def _close_connections(connections: set[Any]) -> None:
    """End idle connections and WebSockets now, and the others after their response or ``CLOSE_TIMEOUT``."""
    loop = asyncio.get_running_loop()
    until = loop.time() + CLOSE_TIMEOUT
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
    others: Sequence[AbstractAsyncContextManager[object]] = (),
    watchdog: LoopWatchdog | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP (unless under nohup); ``started`` gets the URL when the server answers.

    A second signal ends the process at once, except SIGHUP. If the event loop is blocked, a guard process kills it.

    Args:
        others: servers of other ports of the process, which begin after the app and end before it.
        watchdog: measures the event loop; None only logs.
    """
    # With Python's default, another thread may delay the event loop by 5 ms.
    sys.setswitchinterval(0.001)
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
                url = await served.enter_async_context(serve_app(app, listener))
                for other in others:
                    await served.enter_async_context(other)
                is_started = True
                watchdog.start()  # imports during the start block the loop, but no robot moves before
                started(url)
                await asked.wait()
        except asyncio.CancelledError:
            if not asked.is_set():
                raise
        finally:
            watchdog.stop()
            guard.acknowledge()  # before the loop removes its signal handlers

    _raise_descriptor_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_signal())
    finally:
        guard.close()


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files, because the usual 1024 are fewer than the allowed connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
