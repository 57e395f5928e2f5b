"""Connections as they come: real sockets, and protocols that only note what they are told."""

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
    """A port with an acceptor; ``made`` are its protocols in the order of their making."""

    def __init__(self, limits=None, patience=30.0, listener=None):
        self.listener = listener or listen("127.0.0.1", 0)
        self.doors, self.made, self.heard, self.turns, self.sockets = (
            Connections() if limits is None else limits,
            [],
            [],
            [],
            [],
        )
        self.acceptor = Acceptor(self.listener, self.doors, lambda: cast(Any, Noting(self)), patience)
        self.acceptor.start(1024)

    async def call(self, *what):
        """Connections that say this, all there before the acceptor's next turn."""
        address, made = self.listener.getsockname(), []
        for words in what:
            one = socket.create_connection(address)
            one.setblocking(False)
            if words:
                one.send(words)
            made.append(one)
        self.sockets += made
        return made

    def hang_up(self):
        for one in self.sockets:
            one.close()

    async def until(self, claim):
        async with asyncio.timeout(20):
            while not claim():
                before = len(self.made)
                await asyncio.sleep(0)
                self.turns.append(len(self.made) - before)

    def close(self):
        self.hang_up()
        self.acceptor.close()
        self.listener.close()


class Noting(asyncio.Protocol):
    def __init__(self, port):
        self.port = port
        self.transport: asyncio.Transport | None = None
        port.made.append(self)

    def set_peer(self, address, is_spare):
        self.address, self.is_spare = address, is_spare

    def connection_made(self, transport):
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data):
        self.port.heard.append(data)

    def connection_lost(self, exc):
        if not self.is_spare:
            self.port.doors.leave(self.address)

    def abort(self):
        if self.transport is not None:
            self.transport.abort()


async def test_a_stop_passes_hundreds_of_waiting_connections():
    port = Port()
    await port.call(*[GET] * 300, STOP)
    await port.until(lambda: len(port.heard) == 301)
    assert port.heard.index(STOP) < 100
    assert max(port.turns) <= CONNECTIONS_PER_TURN
    assert {protocol.address for protocol in port.made} == {"127.0.0.1"}
    port.hang_up()
    await port.until(lambda: not len(port.doors))
    port.close()


async def test_who_says_nothing_costs_no_connection_is_counted_and_is_let_go(monkeypatch):
    monkeypatch.setattr(server, "SWEEP_INTERVAL", 0.05)
    port = Port(patience=0.2)
    silent, gone, late = await port.call(b"", b"", b"")
    gone.close()
    await port.until(lambda: len(port.doors) == 2)
    assert not port.made
    late.send(GET)
    await port.until(lambda: port.heard == [GET])
    await port.until(lambda: len(port.doors) == 1)
    assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""
    port.close()


async def test_a_surplus_connection_is_429_or_may_only_stop_robots():
    port = Port(Connections(total=2, spare=1))
    await port.call(b"", b"")
    await port.until(lambda: len(port.doors) == 2)
    first, newest = await port.call(b"", b"")
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        assert await loop.sock_recv(first, 100) == b""  # the newest has the place
    newest.send(STOP)
    await port.until(lambda: port.heard == [STOP])
    assert port.made[0].is_spare
    port.close()

    port = Port(Connections(total=0))
    [refused] = await port.call(b"")
    assert (await loop.sock_recv(refused, 100)).startswith(b"HTTP/1.1 429")
    port.close()


async def test_of_one_caller_so_many_wait_and_its_stops_are_not_among_them(monkeypatch):
    monkeypatch.setattr(server, "MAX_READY", 20)
    monkeypatch.setattr(server, "ACCEPT_SECONDS", 5.0)  # all are accepted in one
    port = Port()
    sockets = await port.call(*[GET] * 60, STOP)
    await port.until(lambda: len(port.heard) == 21)
    assert STOP in port.heard
    answers = [await asyncio.get_running_loop().sock_recv(one, 12) for one in sockets[20:60]]
    assert answers == [b"HTTP/1.1 429"] * 40
    port.hang_up()
    await port.until(lambda: not len(port.doors))
    await port.call(*[GET] * 20)  # none is counted any more
    await port.until(lambda: len(port.heard) == 41)
    port.close()


async def test_without_descriptors_it_tries_again_and_does_not_spin(monkeypatch, caplog):
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
    await port.until(lambda: port.heard == [GET])
    port.close()
