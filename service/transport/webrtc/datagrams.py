"""Filter of datagrams at a peer's UDP sockets, before aiortc.

Anybody can send to an open port, and aiortc 1.16 trusts all data: an empty datagram ended a connection, a fake STUN
message of 64 kB took 25 ms, and early data queued without a limit. The filter costs microseconds per datagram. Accepted
ones share the fair queue (``service.http.fair_queue``).
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiortc import RTCPeerConnection

from service.http.fair_queue import FairQueue, Flow
from service.http.limits import Bucket, source_key
from service.transport.webrtc.candidates import MAX_CANDIDATES, explain_refused_address

MAX_DATAGRAM = 2048  # bytes; media and handshakes keep to 1500, the size of an Ethernet frame
MAX_WAITING = 256  # unread datagrams of one peer
# (a second, at once) of one peer. 8 Mbit/s of video are 1,000 packets a second, and a keyframe has 300.
MEDIA_RATE = (3000, 1500)
HANDSHAKE_RATE = (100, 50)
CHECK_RATE = (100, 100)  # STUN of addresses that have proved who they are or were named to us
STRANGER_RATE = (50, 50)  # other STUN, such as the first check of a peer behind a NAT
# Seconds of the event loop, a second and at once, for one peer's media before it counts as a flood; 1,000 packets of a
# camera take 0.1.
MEDIA_BUDGET = (0.1, 0.05)
MAX_SOURCES = 16  # SSRCs of one peer; a camera has one, its retransmissions a second. libsrtp keeps each for good
STUN_COOKIE = b"\x21\x12\xa4\x42"  # stands at byte 4 of every STUN message (RFC 8489)


class DatagramFilter:
    """Filter between one peer connection's sockets and aiortc; ``dropped`` counts refused datagrams by reason."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = dict.fromkeys(("size", "stranger", "rate", "sources", "malformed"), 0)
        self._waiting_checks: deque[Callable[[], None]] = deque()
        self._check_flow: Flow | None = None
        self._media, self._handshake = Bucket(*MEDIA_RATE), Bucket(*HANDSHAKE_RATE)
        self._checks, self._strangers = Bucket(*CHECK_RATE), Bucket(*STRANGER_RATE)
        self._sources: set[bytes] = set()
        self._known: tuple[int, frozenset[tuple[str, int]]] = (0, frozenset())

    def guard_connection(self, connection: RTCPeerConnection) -> None:
        """Filter what arrives at the transports of a connection that has not gathered its candidates yet."""
        for transport in transports_of(connection):
            transport._handle_rtp_data = self._guard_handler(transport._handle_rtp_data, 8)
            transport._handle_rtcp_data = self._guard_handler(transport._handle_rtcp_data, 4)
            ice = transport.transport
            ice._recv = pace_datagrams(ice._recv, ice._connection)

    def guard_sockets(self, ice: Any) -> None:
        """Filter what arrives at the sockets that aioice has opened for one transport."""
        for protocol in ice._protocols:
            if "datagram_received" not in vars(protocol):
                protocol.datagram_received = partial(self._receive, ice, protocol, protocol.datagram_received)

    def drop_reason(self, ice: Any, transactions: Any, data: bytes, source: tuple[str, int]) -> str | None:
        """Return why a datagram is dropped; None when it is handed on."""
        if not 0 < len(data) <= MAX_DATAGRAM:
            return "size"
        is_known = source in self._addresses(ice)
        if data[0] < 4:
            if len(data) < 20 or data[4:8] != STUN_COOKIE:
                return "malformed"
            if data[0] & 1 and data[8:20] not in transactions:
                return "stranger"  # an answer to what was never asked
            if is_known:
                return None if self._checks.take() else "rate"
            if not self._strangers.take():
                return "rate"
            is_one_more = len(ice._remote_candidates) < MAX_CANDIDATES and explain_refused_address(*source) is None
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
        return None if self._media.take() else "rate"

    def _addresses(self, ice: Any) -> frozenset[tuple[str, int]]:
        remote = ice._remote_candidates
        if self._known[0] != len(remote):
            # They are only ever added, and keep their address.
            self._known = len(remote), frozenset((each._network_host, each.port) for each in remote)
        return self._known[1]

    def _receive(self, ice: Any, protocol: Any, original: Callable[..., None], data: bytes, address: tuple) -> None:
        why = self.drop_reason(ice, protocol.transactions, data, (address[0], address[1]))
        if why is None and data[0] >= 4:
            self._hand_on(original, data, address)  # into the queue of ``pace_datagrams``, which is no work
        elif why is None and not self._queue_check(partial(self._hand_on, original, data, address)):
            why = "rate"
        if why is not None:
            self.dropped[why] += 1

    def _queue_check(self, check: Callable[[], None]) -> bool:
        """Queue a STUN check, to be answered in its turn; False when too many wait already."""
        if len(self._waiting_checks) >= MAX_WAITING:
            return False
        queue = FairQueue.of_running_loop()
        if self._check_flow is None:
            # Whose it is is not known: who asks for the first time has proved nothing, least of all his address.
            self._check_flow = queue.create_flow("checks", self._run_next_check)
        self._waiting_checks.append(check)
        queue.enter(self._check_flow)
        return True

    def _run_next_check(self) -> tuple[float, bool]:
        self._waiting_checks.popleft()()
        return 0.0, bool(self._waiting_checks)

    def _hand_on(self, original: Callable[..., None], data: bytes, address: tuple) -> None:
        try:
            original(data, address)
        except Exception:  # aioice reads STUN with struct and dicts: nearly anything can be raised
            self.dropped["malformed"] += 1

    def _guard_handler(
        self, original: Callable[..., Awaitable[None]], source_at: int
    ) -> Callable[..., Awaitable[None]]:
        async def handle(data: bytes, *arguments: Any, **more: Any) -> None:
            # Only here is it known that the other side made it, so only its own sources are counted.
            source = data[source_at : source_at + 4]
            if len(self._sources) >= MAX_SOURCES and source not in self._sources:
                self.dropped["sources"] += 1  # it waited while there were fewer
                return
            self._sources.add(source)
            try:
                await original(data, *arguments, **more)
            except ConnectionError:
                raise
            except Exception:  # as above; aiortc would end the connection, and say so with a traceback
                self.dropped["malformed"] += 1

        return handle


def pace_datagrams(original: Callable[[], Awaitable[bytes]], ice: Any) -> Callable[[], Awaitable[bytes]]:
    """Wrap the receive call of aiortc's task, which would read all waiting datagrams in one turn.

    Each datagram waits for this peer's turn, and costs the time that the one before it took (0.1 to 1 ms).
    """
    flow: Flow | None = None
    began: float | None = None

    def unread() -> float:
        return MAX_DATAGRAM * ice._queue.qsize()

    async def receive() -> bytes:
        nonlocal flow, began
        took = 0.0 if began is None else time.thread_time() - began
        began, is_idle = None, ice._queue.empty()
        data = await original()
        queue = FairQueue.of_running_loop()
        if flow is None:
            pair = ice._nominated.get(1)  # none while the connection is being closed
            flow = queue.create_flow(source_key(pair.remote_addr[0] if pair else ""), budget=MEDIA_BUDGET)
            flow.unread = unread
        await queue.wait_turn(flow, took, is_idle)
        began = time.thread_time()
        return data

    return receive


def transports_of(connection: RTCPeerConnection) -> set[Any]:
    """Return the DTLS transports of a connection, that of a data channel too."""
    transports: set[Any] = {each.receiver.transport for each in connection.getTransceivers()}
    if connection.sctp is not None:
        transports.add(connection.sctp.transport)
    return transports
