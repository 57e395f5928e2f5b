"""Accepting connections: as many as come, at little cost each; those that ask for an emergency stop are the first.

uvloop accepts all that wait in one turn of the loop and makes a transport of each, asyncio's own loop as many as its
backlog is long: of a thousand connections either keeps robots and stops waiting. Here a connection is a bare socket,
and costs a few microseconds, until its peer has said something.
"""

import asyncio
import errno
import logging
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from service.edge.fair_queue import FairQueue
from service.edge.limits import Connections, source_of
from service.edge.punctual import FULL_ANSWER, SPARE, STOP_LINE, PunctualProtocol

log = logging.getLogger(__name__)

# Seconds of accepting in one turn of the loop, and connections that are made of sockets in one.
TURN, MAKES = 0.001, 4
READY = 1024  # of one caller, those that have asked for something and wait until connections are made of them
LOOKS = 64  # sockets of which something came, in one turn
SWEEP = 1.0  # seconds between looks for those that never say anything
AGAIN = 0.5  # seconds without accepting when the process has no descriptors left
LINE = 1024  # bytes of a request that are looked at; a stop's first line is shorter
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(eq=False)
class _Newcomer:
    """A socket of which no connection was made yet."""

    raw: socket.socket
    address: str
    is_spare: bool
    until: float
    drop: Callable[[], None] = lambda: None


class Acceptor:
    """The listening end of a port.

    Args:
        listener: a bound socket; it stays the caller's.
        doors: count connections, and say when there are too many.
        make: a protocol for one connection.
        patience: seconds in which a peer has to say something.
    """

    def __init__(
        self, listener: socket.socket, doors: Connections, make: Callable[[], PunctualProtocol], patience: float
    ):
        self._listener, self._doors, self._make, self._patience = listener, doors, make, patience
        self._loop = asyncio.get_running_loop()
        self._queue = FairQueue.here()
        # Of its own, and watched by the loop as one: a thousand silent sockets cost the loop nothing.
        self._silent = selectors.DefaultSelector()
        self._newcomers: dict[int, _Newcomer] = {}  # silent, the oldest first
        self._stops: deque[_Newcomer] = deque()
        self._ready: deque[_Newcomer] = deque()
        self._waiting: Counter[str] = Counter()  # of the ready ones, how many each caller has
        self._made: set[asyncio.Task[object]] = set()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_planned = False

    def start(self, backlog: int) -> None:
        """Listen and accept; ``backlog``: how many may wait in the kernel."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._loop.add_reader(self._listener, self._accept)
        self._loop.add_reader(self._silent.fileno(), self._look)
        self._sweep()

    def close(self) -> None:
        """Accept no more; whoever has not been read yet is let go."""
        self._loop.remove_reader(self._listener)
        self._loop.remove_reader(self._silent.fileno())
        for timer in self._timers.values():
            timer.cancel()
        for newcomer in [*self._newcomers.values(), *self._stops, *self._ready]:
            self._let_go(newcomer)
        self._newcomers.clear()
        self._stops.clear()
        self._ready.clear()
        self._silent.close()

    def _accept(self) -> None:
        """Take those that wait, for so long."""
        began = now = time.thread_time()
        while now < began + TURN:
            try:
                raw, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("no connection can be accepted: %s; trying again in %s s", error.strerror, AGAIN)
                self._loop.remove_reader(self._listener)
                self._timers["again"] = self._loop.call_later(AGAIN, self._accept_again)
                break
            self._receive(raw, str(peer[0]) if isinstance(peer, tuple) and peer else "")
            now = time.thread_time()
        self._queue.spend(now - began)

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _receive(self, raw: socket.socket, address: str) -> None:
        """Let one in; one too many is told so, or may stay for a moment to stop robots."""
        raw.setblocking(False)
        newcomer = _Newcomer(raw, address, False, time.monotonic() + self._patience)
        if not self._doors.enter(address):
            newcomer.drop = lambda: self._push_out(newcomer)
            if not self._doors.squeeze_in(newcomer.drop):
                with suppress(OSError):
                    raw.send(FULL_ANSWER)
                raw.close()
                return
            newcomer.is_spare, newcomer.until = True, time.monotonic() + SPARE
        self._hear_or_wait(newcomer)

    def _look(self) -> None:
        """Hear those of which something came."""
        began = time.thread_time()
        for key, _ in self._silent.select(0)[:LOOKS]:
            self._silent.unregister(key.fileobj)
            del self._newcomers[key.fd]
            self._hear_or_wait(key.data)
        self._queue.spend(time.thread_time() - began)

    def _hear_or_wait(self, newcomer: _Newcomer) -> None:
        """Look what it says; it stays silent until it says something."""
        try:
            begin = newcomer.raw.recv(LINE, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._newcomers[newcomer.raw.fileno()] = newcomer
            self._silent.register(newcomer.raw, selectors.EVENT_READ, newcomer)
            return
        except OSError:
            begin = b""
        if not begin:
            self._let_go(newcomer)  # it is gone
            return
        caller = source_of(newcomer.address)
        if STOP_LINE.match(begin):
            self._stops.append(newcomer)
        elif self._waiting[caller] < READY:
            self._waiting[caller] += 1
            self._ready.append(newcomer)
        else:
            with suppress(OSError):
                newcomer.raw.send(FULL_ANSWER)
            self._let_go(newcomer)
        self._plan()

    def _plan(self) -> None:
        if not self._is_planned and (self._stops or self._ready):
            self._is_planned = True
            self._loop.call_soon(self._connect)

    def _connect(self) -> None:
        """Make connections of a few."""
        self._is_planned = False
        for _ in range(MAKES):
            if self._stops:
                newcomer = self._stops.popleft()
            elif self._ready:
                newcomer = self._ready.popleft()
                self._count_off(newcomer)
            else:
                return
            protocol = self._make()
            protocol.let_in(newcomer.address, newcomer.is_spare)
            if newcomer.is_spare:
                self._doors.squeeze_out(newcomer.drop)
                self._doors.squeeze_in(protocol.abort)
            task = self._loop.create_task(self._hand_over(newcomer, protocol))
            self._made.add(task)
            task.add_done_callback(self._made.discard)
        self._plan()

    async def _hand_over(self, newcomer: _Newcomer, protocol: PunctualProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, newcomer.raw)
        except OSError:  # the peer is gone, or the process has no descriptors
            if protocol.transport is None:
                newcomer.drop = protocol.abort
                self._let_go(newcomer)

    def _let_go(self, newcomer: _Newcomer) -> None:
        newcomer.raw.close()
        if newcomer.is_spare:
            self._doors.squeeze_out(newcomer.drop)
        else:
            self._doors.leave(newcomer.address)

    def _push_out(self, newcomer: _Newcomer) -> None:
        """A newer one needs the place of this one, which is too many."""
        if self._newcomers.pop(newcomer.raw.fileno(), None) is not None:
            self._silent.unregister(newcomer.raw)
        elif newcomer in self._ready:
            self._ready.remove(newcomer)
            self._count_off(newcomer)
        elif newcomer in self._stops:
            self._stops.remove(newcomer)
        newcomer.raw.close()

    def _count_off(self, newcomer: _Newcomer) -> None:
        caller = source_of(newcomer.address)
        self._waiting[caller] -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _sweep(self) -> None:
        """Close those that have said nothing in time."""
        now = time.monotonic()
        for descriptor, newcomer in list(self._newcomers.items()):
            if newcomer.until <= now:
                del self._newcomers[descriptor]
                self._silent.unregister(newcomer.raw)
                self._let_go(newcomer)
        self._timers["sweep"] = self._loop.call_later(SWEEP, self._sweep)
