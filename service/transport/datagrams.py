"""What strangers send to a peer's UDP sockets: how much of it reaches aiortc, and what is dropped before it is read.

Everybody who can reach a port can send to it, before and after the handshake, and aiortc 1.16 believes them: an empty
datagram ended a connection, one of 64 kB that calls itself STUN was parsed for 25 ms, and what came before the
handshake waited in a queue without end. Here each datagram costs a few microseconds until it is worth more.
"""

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiortc import RTCPeerConnection

from service.transport.candidates import MAX_CANDIDATES, refusal

MAX_DATAGRAM = 2048  # bytes; whoever sends media or a handshake keeps to 1500, the size of an Ethernet frame
# Datagrams that all peers together hand on in one turn of the event loop, where uvloop alone reads 32 of each socket,
# and the seconds that all of them together are decrypted and read in one. STUN takes 0.15 ms, a packet of video 0.1
# ms, and one that is made to be slow (300 parts of H.264) 1 ms.
PER_TURN = 16
TURN_TIME = 0.004
MAX_WAITING = 256  # of one peer, for the next turns
# (a second, at once) of one peer. 8 Mbit/s of video are 1,000 packets a second, and a keyframe has 300.
MEDIA = (3000, 1500)
HANDSHAKE = (100, 50)
CHECKS = (100, 100)  # STUN of addresses that have proved who they are or were named to us
STRANGERS = (50, 50)  # STUN of anybody else: the first check of a peer behind a NAT is among them
# Seconds of the CPU that the media of one peer may take, a second and at once: 1,000 packets of a camera take 0.1.
MEDIA_TIME = (0.4, 0.4)
MAX_SOURCES = 16  # SSRCs of one peer; a camera has one, its retransmissions a second. libsrtp keeps each for good
COOKIE = b"\x21\x12\xa4\x42"  # stands at byte 4 of every STUN message (RFC 8489)


class Bucket:
    """A token bucket: so much a second, and so much at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic):
        self._rate = rate
        self._burst = self._left = float(burst)
        self._clock = clock
        self._at = clock()

    def take(self, cost: float = 1.0) -> bool:
        """Whether there was so much left; then it is taken."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < cost:
            return False
        self._left -= cost
        return True

    def owe(self, cost: float) -> None:
        """Take so much afterwards, if it was not there too."""
        self._left = max(self._left - cost, -self._burst)


class Intake:
    """The way from one peer connection's sockets into aiortc.

    Attributes:
        dropped: datagrams that aiortc never saw, or could make nothing of, by reason.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, int] = dict.fromkeys(("size", "stranger", "rate", "sources", "malformed"), 0)
        self.waiting: deque[Callable[[], None]] = deque()
        self._media, self._handshake = Bucket(*MEDIA), Bucket(*HANDSHAKE)
        self._checks, self._strangers = Bucket(*CHECKS), Bucket(*STRANGERS)
        self._time = Bucket(*MEDIA_TIME)
        self._sources: set[bytes] = set()
        self._known: tuple[int, frozenset[tuple[str, int]]] = (0, frozenset())

    def guard(self, connection: RTCPeerConnection) -> None:
        """Take what comes from the transports of a connection that has not gathered its candidates yet."""
        for transport in transports_of(connection):
            transport._handle_rtp_data = self._guarded(transport._handle_rtp_data, 8)
            transport._handle_rtcp_data = self._guarded(transport._handle_rtcp_data, 4)
            transport.transport._recv = self._paced(transport.transport._recv)

    def guard_sockets(self, ice: Any) -> None:
        """Take what comes from the sockets that aioice has opened for one transport."""
        for protocol in ice._protocols:
            if "datagram_received" not in vars(protocol):
                protocol.datagram_received = partial(self._receive, ice, protocol, protocol.datagram_received)

    def refuses(self, ice: Any, transactions: Any, data: bytes, source: tuple[str, int]) -> str | None:
        """Why a datagram is dropped; None when it is handed on."""
        if not 0 < len(data) <= MAX_DATAGRAM:
            return "size"
        is_known = source in self._addresses(ice)
        if data[0] < 4:
            if len(data) < 20 or data[4:8] != COOKIE:
                return "malformed"
            if data[0] & 1 and data[8:20] not in transactions:
                return "stranger"  # an answer to what was never asked
            if is_known:
                return None if self._checks.take() else "rate"
            if not self._strangers.take():
                return "rate"
            is_one_more = len(ice._remote_candidates) < MAX_CANDIDATES and refusal(*source) is None
            return None if is_one_more or data[0] & 1 else "stranger"
        if not is_known:
            return "stranger"
        if ice._queue.qsize() >= MAX_WAITING:
            return "rate"
        if not 128 <= data[0] < 192:
            return None if self._handshake.take() else "rate"
        source_id = data[4:8] if len(data) > 1 and 192 <= data[1] <= 208 else data[8:12]
        if len(self._sources) >= MAX_SOURCES and source_id not in self._sources:
            return "sources"
        return None if self._time.take(0) and self._media.take() else "rate"

    def _addresses(self, ice: Any) -> frozenset[tuple[str, int]]:
        remote = ice._remote_candidates
        if self._known[0] != len(remote):
            # They are only ever added, and keep their address.
            self._known = len(remote), frozenset((each._network_host, each.port) for each in remote)
        return self._known[1]

    def _receive(self, ice: Any, protocol: Any, plain: Callable[..., None], data: bytes, address: tuple) -> None:
        why = self.refuses(ice, protocol.transactions, data, (address[0], address[1]))
        if why is None and not _turn_of(asyncio.get_running_loop()).admit(
            self, partial(self._pass, plain, data, address)
        ):
            why = "rate"
        if why is not None:
            self.dropped[why] += 1

    def _pass(self, plain: Callable[..., None], data: bytes, address: tuple) -> None:
        try:
            plain(data, address)
        except Exception:  # aioice reads STUN with struct and dicts: nearly anything can be raised
            self.dropped["malformed"] += 1

    def _paced(self, plain: Callable[[], Awaitable[bytes]]) -> Callable[[], Awaitable[bytes]]:
        """What aiortc's task waits in for the next datagram: it takes all that are there without giving way."""
        began: tuple[float, float] | None = None

        async def receive() -> bytes:
            nonlocal began
            turn = _turn_of(asyncio.get_running_loop())
            if began is not None:
                turn.spend(time.perf_counter() - began[0])
                self._time.owe(time.thread_time() - began[1])
                began = None
            data = await plain()
            while turn.is_over():  # noqa: ASYNC110 - the event is the next turn of the loop
                await asyncio.sleep(0)
            began = time.perf_counter(), time.thread_time()
            return data

        return receive

    def _guarded(self, plain: Callable[..., Awaitable[None]], source_at: int) -> Callable[..., Awaitable[None]]:
        async def handle(data: bytes, *arguments: Any, **more: Any) -> None:
            # Only here is it known that the other side made it, so only its own sources are counted.
            if len(self._sources) < MAX_SOURCES:
                self._sources.add(data[source_at : source_at + 4])
            try:
                await plain(data, *arguments, **more)
            except ConnectionError:
                raise
            except Exception:  # as above; aiortc would end the connection, and say so with a traceback
                self.dropped["malformed"] += 1

        return handle


class _Turn:
    """Shares out the datagrams of one turn of the event loop among all peers on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._left = PER_TURN
        self._time = 0.0
        self._is_counting = False
        self._queue: deque[Intake] = deque()

    def admit(self, intake: Intake, work: Callable[[], None]) -> bool:
        """Do it now, or in one of the next turns; False when too much waits already."""
        self._count()
        if self._left and not intake.waiting:
            self._left -= 1
            work()
        elif len(intake.waiting) >= MAX_WAITING:
            return False
        else:
            if not intake.waiting:
                self._queue.append(intake)
            intake.waiting.append(work)
        return True

    def spend(self, seconds: float) -> None:
        """So long was worked in this turn."""
        self._count()
        self._time += seconds

    def is_over(self) -> bool:
        """Whether the rest is for the next turn."""
        return self._time >= TURN_TIME

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting = True
            self._soon()

    def _soon(self) -> None:
        loop = self._loop()
        if loop is not None:
            loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._left, self._time = PER_TURN, 0.0
        while self._left and self._queue:
            intake = self._queue.popleft()
            self._left -= 1
            intake.waiting.popleft()()
            if intake.waiting:
                self._queue.append(intake)
        self._is_counting = bool(self._queue)
        if self._is_counting:
            self._soon()


_TURNS: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn]" = weakref.WeakKeyDictionary()


def _turn_of(loop: asyncio.AbstractEventLoop) -> _Turn:
    turn = _TURNS.get(loop)
    if turn is None:
        turn = _TURNS[loop] = _Turn(loop)
    return turn


def transports_of(connection: RTCPeerConnection) -> set[Any]:
    """The DTLS transports of a connection, that of a data channel too."""
    found: set[Any] = {each.receiver.transport for each in connection.getTransceivers()}
    if connection.sctp is not None:
        found.add(connection.sctp.transport)
    return found
