"""ICE of a peer: rules for candidates, and a filter of datagrams before aiortc, which trusts all datagrams."""

import ipaddress
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiortc import RTCPeerConnection

from service.http.fair_queue import FairQueue, Flow
from service.http.limits import Bucket, source_key

log = logging.getLogger(__name__)

MAX_CANDIDATES = 32  # Addresses of one connection; a laptop with two networks and a VPN has a dozen.
MAX_CANDIDATE_LENGTH = 512  # Characters; a candidate with an IPv6 address and all extensions has 200.
LOWEST_PORT = 1024  # Peers use no lower port, but services that could be attacked do.


class EarlyCandidates:
    """ICE candidates by sender that arrived before their offer."""

    def __init__(self, max_senders: int = 16, per_sender: int = 64):
        self._max_senders = max_senders
        self._per_sender = per_sender
        self._by_sender: dict[str, deque[Mapping[str, Any]]] = {}

    def keep(self, sender: str, candidate: Mapping[str, Any]) -> None:
        """Keep a candidate, and drop the oldest candidates above the limits."""
        candidates = self._by_sender.pop(sender, None) or deque(maxlen=self._per_sender)
        candidates.append(candidate)
        self._by_sender[sender] = candidates
        while len(self._by_sender) > self._max_senders:
            del self._by_sender[next(iter(self._by_sender))]

    def forget(self, sender: str) -> None:
        """Forget the candidates of a sender that left."""
        self._by_sender.pop(sender, None)

    def for_description(self, sender: str, sdp: str) -> list[Mapping[str, Any]]:
        """Return the sender's candidates with the generation (``usernameFragment``) of this SDP, or with none."""
        fragments = {line.partition(":")[2].strip() for line in sdp.splitlines() if line.startswith("a=ice-ufrag:")}
        return [
            candidate
            for candidate in self._by_sender.get(sender, ())
            if not candidate.get("usernameFragment") or candidate["usernameFragment"] in fragments
        ]


def trim_candidate(candidate: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a candidate without superfluous fields, or None if it is too long."""
    fields = {name: value for name in _FIELDS if isinstance(value := candidate.get(name), str | int)}
    length = sum(len(value) for value in fields.values() if isinstance(value, str))
    return fields if length <= MAX_CANDIDATE_LENGTH else None


def explain_refused_address(host: str, port: int) -> str | None:
    """Return why this address is never used, or None.

    Without this rule, a participant could make this server send connectivity checks to metadata servers, multicast
    groups or local services. Private addresses are allowed, because robots use them.
    """
    if not LOWEST_PORT <= port <= 65535:
        return f"port {port} is not from {LOWEST_PORT} to 65535"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None if host.endswith(".local") else "it is neither an address nor a name of mDNS"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_multicast or address.is_unspecified or address == ipaddress.IPv4Address("255.255.255.255"):
        return "it is not the address of one machine"
    if (address.version == 4 and address.is_link_local) or address in _METADATA:
        return "it is a link-local or metadata address"
    return None


_FIELDS = ("candidate", "sdpMid", "sdpMLineIndex", "usernameFragment")
_METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")})


def split_candidates(sdp: str) -> tuple[str, list[Mapping[str, Any]]]:
    """Split an SDP into a description and its mDNS candidates, because aiortc would resolve each in a second.

    Refused and excess candidates are dropped.
    """
    lines: list[str] = []
    named: list[Mapping[str, Any]] = []
    refused: list[str] = []
    used = 0
    index = -1
    for line in sdp.splitlines():
        if line.startswith("m="):
            index, used = index + 1, 0
        parts = line.split() if line.startswith("a=candidate:") else []
        if len(parts) > 5:
            host, port = parts[4], int(parts[5]) if parts[5].isdecimal() else 0
            why = explain_refused_address(host, port)
            if used >= MAX_CANDIDATES:
                why = f"{MAX_CANDIDATES} others come before it"
            if why is not None:
                refused.append(f"{line!r}: {why}")
                continue
            used += 1
            if host.endswith(".local"):
                named.append({"candidate": line, "sdpMLineIndex": max(index, 0)})
                continue
        lines.append(line)
    if refused:
        log.info("%d candidates not used, of them %s", len(refused), refused[0])
    if named:  # Candidates are added later, and aiortc accepts no candidate after the end.
        lines = [line for line in lines if line != "a=end-of-candidates"]
    return "\r\n".join(lines) + "\r\n", named


MAX_DATAGRAM = 2048  # Bytes; media and handshakes have less than 1500.
MAX_WAITING = 256  # Unread datagrams of one peer.
# Datagrams of one peer, per second and at once. Video of 8 Mbit/s has 1,000 packets a second, and a keyframe 300.
MEDIA_RATE = (3000, 1500)
HANDSHAKE_RATE = (100, 50)
CHECK_RATE = (100, 100)  # STUN of candidates.
STRANGER_RATE = (50, 50)  # Other STUN, such as the first check of a peer behind a NAT.
# Seconds of the event loop for one peer's media, per second and at once; 1,000 packets take 0.1 s.
MEDIA_BUDGET = (0.1, 0.05)
MAX_SOURCES = 16  # SSRCs of one peer, which libsrtp never frees; a camera with retransmissions has two.
STUN_COOKIE = b"\x21\x12\xa4\x42"  # Bytes 4 to 7 of every STUN message (RFC 8489).


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
        """Filter the input of a connection's transports; call it before candidates are gathered."""
        for transport in transports_of(connection):
            transport._handle_rtp_data = self._guard_handler(transport._handle_rtp_data, 8)
            transport._handle_rtcp_data = self._guard_handler(transport._handle_rtcp_data, 4)
            ice = transport.transport
            ice._recv = pace_datagrams(ice._recv, ice._connection)

    def guard_sockets(self, ice: Any) -> None:
        """Filter the input of the sockets that aioice has opened for one transport."""
        for protocol in ice._protocols:
            if "datagram_received" not in vars(protocol):
                protocol.datagram_received = partial(self._receive, ice, protocol, protocol.datagram_received)

    def drop_reason(self, ice: Any, transactions: Any, data: bytes, source: tuple[str, int]) -> str | None:
        """Return why a datagram is dropped, or None."""
        if not 0 < len(data) <= MAX_DATAGRAM:
            return "size"
        is_known = source in self._addresses(ice)
        if data[0] < 4:
            if len(data) < 20 or data[4:8] != STUN_COOKIE:
                return "malformed"
            if data[0] & 1 and data[8:20] not in transactions:
                return "stranger"  # A response without a request.
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
            # aioice only adds candidates, and their addresses do not change.
            self._known = len(remote), frozenset((each._network_host, each.port) for each in remote)
        return self._known[1]

    def _receive(self, ice: Any, protocol: Any, original: Callable[..., None], data: bytes, address: tuple) -> None:
        why = self.drop_reason(ice, protocol.transactions, data, (address[0], address[1]))
        if why is None and data[0] >= 4:
            self._hand_on(original, data, address)  # This only queues it for ``pace_datagrams``.
        elif why is None and not self._queue_check(partial(self._hand_on, original, data, address)):
            why = "rate"
        if why is not None:
            self.dropped[why] += 1

    def _queue_check(self, check: Callable[[], None]) -> bool:
        """Queue a STUN check, to be answered in its turn; return False if too many wait."""
        if len(self._waiting_checks) >= MAX_WAITING:
            return False
        queue = FairQueue.of_running_loop()
        if self._check_flow is None:
            # All checks share one flow, because the source address of a first check may be forged.
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
        except Exception:  # aioice parses STUN with struct and dicts, which raise many exceptions.
            self.dropped["malformed"] += 1

    def _guard_handler(
        self, original: Callable[..., Awaitable[None]], source_at: int
    ) -> Callable[..., Awaitable[None]]:
        async def handle(data: bytes, *arguments: Any, **more: Any) -> None:
            # These data are authenticated, so only sources of the peer itself are counted.
            source = data[source_at : source_at + 4]
            if len(self._sources) >= MAX_SOURCES and source not in self._sources:
                self.dropped["sources"] += 1  # It was queued before the limit was reached.
                return
            self._sources.add(source)
            try:
                await original(data, *arguments, **more)
            except ConnectionError:
                raise
            except Exception:  # aiortc would end the connection and log a traceback.
                self.dropped["malformed"] += 1

        return handle


def pace_datagrams(original: Callable[[], Awaitable[bytes]], ice: Any) -> Callable[[], Awaitable[bytes]]:
    """Wrap the receive call of aiortc's task, so that each datagram waits for this peer's turn.

    A turn is charged with the processing time of the previous datagram.
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
            pair = ice._nominated.get(1)  # None while the connection closes.
            flow = queue.create_flow(source_key(pair.remote_addr[0] if pair else ""), budget=MEDIA_BUDGET)
            flow.unread = unread
        await queue.wait_turn(flow, took, is_idle)
        began = time.thread_time()
        return data

    return receive


def transports_of(connection: RTCPeerConnection) -> set[Any]:
    """Return the DTLS transports of a connection, including the data channel's."""
    transports: set[Any] = {each.receiver.transport for each in connection.getTransceivers()}
    if connection.sctp is not None:
        transports.add(connection.sctp.transport)
    return transports
