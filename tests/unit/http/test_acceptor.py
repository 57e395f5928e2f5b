"""Acceptance of connections, with real sockets and protocols that record what they receive."""

import asyncio
import errno
import socket
from typing import Any, cast

import pytest

from service.http import server
from service.http.limits import Connections
from service.http.server import CONNECTIONS_PER_TURN, Acceptor, listen

pytestmark = pytest.mark.timed

STOP = b"POST /sessions/a/emergency_stop HTTP/1.1\r\nHost: x\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Port:
    """Port with an acceptor. ``made`` lists its protocols in the order of creation."""

    def __init__(self, limits=None, patience=30.0, listener=None):
        self.listener = listener or listen("127.0.0.1", 0)
        self.limits, self.made, self.received, self.turns, self.sockets = (
            Connections() if limits is None else limits,
            [],
            [],
            [],
            [],
        )
        self.acceptor = Acceptor(self.listener, self.limits, lambda: cast(Any, RecordingProtocol(self)), patience)
        self.acceptor.start(1024)

    async def call(self, *messages):
        """Open a connection for each message and send it, all before the next turn of the acceptor."""
        address, made = self.listener.getsockname(), []
        for message in messages:
            connection = socket.create_connection(address)
            connection.setblocking(False)
            if message:
                connection.send(message)
            made.append(connection)
        self.sockets += made
        return made

    def close_clients(self):
        for connection in self.sockets:
            connection.close()

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                before = len(self.made)
                await asyncio.sleep(0)
                self.turns.append(len(self.made) - before)

    def close(self):
        self.close_clients()
        self.acceptor.close()
        self.listener.close()


class RecordingProtocol(asyncio.Protocol):
    def __init__(self, port):
        self.port = port
        self.transport: asyncio.Transport | None = None
        port.made.append(self)

    def set_peer(self, address, is_spare):
        self.address, self.is_spare = address, is_spare

    def connection_made(self, transport):
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data):
        self.port.received.append(data)

    def connection_lost(self, exc):
        if not self.is_spare:
            self.port.limits.leave(self.address)

    def abort(self):
        if self.transport is not None:
            self.transport.abort()


async def test_a_stop_passes_hundreds_of_waiting_connections():
    port = Port()
    await port.call(*[GET] * 300, STOP)
    await port.until(lambda: len(port.received) == 301)
    assert port.received.index(STOP) < 100
    assert max(port.turns) <= CONNECTIONS_PER_TURN
    assert {protocol.address for protocol in port.made} == {"127.0.0.1"}
    port.close_clients()
    await port.until(lambda: not len(port.limits))
    port.close()


async def test_a_silent_connection_is_counted_and_closed_after_a_timeout(monkeypatch):
    monkeypatch.setattr(server, "SWEEP_INTERVAL", 0.05)
    port = Port(patience=0.2)
    silent, closed, late = await port.call(b"", b"", b"")
    closed.close()
    await port.until(lambda: len(port.limits) == 2)
    assert not port.made
    late.send(GET)
    await port.until(lambda: port.received == [GET])
    await port.until(lambda: len(port.limits) == 1)
    assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
    port.close()


async def test_a_surplus_connection_is_429_or_may_only_stop_robots():
    port = Port(Connections(total=2, spare=1))
    await port.call(b"", b"")
    await port.until(lambda: len(port.limits) == 2)
    first, newest = await port.call(b"", b"")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        assert await loop.sock_recv(first, 100) == b"", "the newest connection gets the spare slot"
    newest.send(STOP)
    await port.until(lambda: port.received == [STOP])
    assert port.made[0].is_spare
    port.close()

    port = Port(Connections(total=0))
    [refused] = await port.call(b"")
    assert (await loop.sock_recv(refused, 100)).startswith(b"HTTP/1.1 429")
    port.close()


async def test_waiting_requests_per_caller_are_limited_except_stops(monkeypatch):
    monkeypatch.setattr(server, "MAX_READY", 20)
    monkeypatch.setattr(server, "ACCEPT_SECONDS", 5.0)  # One turn accepts all connections.
    port = Port()
    sockets = await port.call(*[GET] * 60, STOP)
    await port.until(lambda: len(port.received) == 21)
    assert STOP in port.received
    answers = [await asyncio.get_running_loop().sock_recv(connection, 12) for connection in sockets[20:60]]
    assert answers == [b"HTTP/1.1 429"] * 40
    port.close_clients()
    await port.until(lambda: not len(port.limits))
    await port.call(*[GET] * 20)  # The closed connections no longer count.
    await port.until(lambda: len(port.received) == 41)
    port.close()


async def test_an_acceptor_without_descriptors_retries_after_a_pause(monkeypatch, caplog):
    class Exhausted:
        def __init__(self, real):
            self.real, self.tries, self.is_out = real, 0, True

        def __getattr__(self, name):
            return getattr(self.real, name)

        def accept(self):
            self.tries += 1
            if self.is_out:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.real.accept()

    monkeypatch.setattr(server, "RETRY_DELAY", 0.1)
    listener = Exhausted(listen("127.0.0.1", 0))
    port = Port(listener=listener)
    await port.call(GET)
    await asyncio.sleep(0.25)
    assert 1 <= listener.tries <= 4
    assert "no connection can be accepted" in caplog.text
    listener.is_out = False
    await port.until(lambda: port.received == [GET])
    port.close()
