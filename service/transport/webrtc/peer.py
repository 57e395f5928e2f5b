"""One WebRTC peer connection: offers, answers and candidates."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiortc import MediaStreamTrack, RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.sdp import candidate_from_sdp
from OpenSSL import SSL

from service.errors import TransportError
from service.transport.webrtc.decoding import FrameDecoder
from service.transport.webrtc.encoding import CameraTrack, install_encoder, limit_retransmissions, vp8_codecs
from service.transport.webrtc.ice import (
    MAX_CANDIDATES,
    DatagramFilter,
    explain_refused_address,
    split_candidates,
    transports_of,
)

log = logging.getLogger(__name__)

_CERTIFICATES = "_RTCPeerConnection__certificates"  # Private attribute of aiortc 1.16.
_CODEC = re.compile(r"a=rtpmap:(\d{1,3}) (?:VP8|H264|rtx)/90000$", re.IGNORECASE)
CLOSE_TIMEOUT = 2.0
OPEN_TIMEOUT = 0.5  # Seconds in which all local sockets are open; STUN servers may take 5 s longer.

# Limits of a description: Chrome offers 500 lines in 20 kB, while 60 kB with 2,000 codecs block aiortc for 24 s.
MAX_SDP = 65_536
MAX_LINE = 2048
MAX_LINES = 1000
MAX_SECTIONS = 4
MAX_LINES_OF_KIND = {
    "a=rtpmap": 64, "a=fmtp": 64, "a=rtcp-fb": 256, "a=ssrc": 64, "a=ssrc-group": 16, "a=extmap": 64,
    "a=candidate": 128, "a=fingerprint": 8,
}  # fmt: skip
MAX_CODECS = 16  # Decodable codecs per video section; Chrome has VP8 and seven kinds of H.264, each twice.
MAX_FEEDBACK = 8  # Kinds of RTCP feedback of one codec; Chrome has six.
MAX_CREDENTIAL = 256  # Characters of a=ice-ufrag and a=ice-pwd (RFC 8839, 5.4), which each check contains.


class BadSignal(Exception):
    """An offer, an answer or a candidate is invalid."""


class PeerConnection:
    """Peer connection with its candidates; ``answer_offer`` and ``create_offer`` start it.

    Attributes:
        connected_at: monotonic time of the connection, or None.
        has_video: whether a video stream was agreed.
        datagram_filter: filter of received datagrams.
    """

    def __init__(self, ice_servers: Sequence[str]):
        servers = [RTCIceServer(urls=url) for url in ice_servers]
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=servers))
        forbid_renegotiation(self._pc)
        self.datagram_filter = DatagramFilter()
        self._candidate_count = 0
        self._decoder: FrameDecoder | None = None
        self._adding: set[asyncio.Task[None]] = set()
        self._gathering: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.created_at = time.monotonic()
        self.connected_at: float | None = None
        self.has_video = False
        self.changed = asyncio.Event()
        self._pc.on("connectionstatechange", self._on_state_change)

    @property
    def state(self) -> str:
        """State of the connection: new, connecting, connected, failed or closed."""
        return self._pc.connectionState

    @property
    def is_answered(self) -> bool:
        """Whether both descriptions are set, so that candidates can be added."""
        return self._pc.signalingState == "stable" and self._pc.remoteDescription is not None

    def is_useless(self, connect_timeout: float) -> bool:
        """Whether the connection ended, or did not connect in ``connect_timeout`` seconds."""
        return self.state in ("failed", "closed") or (
            self.connected_at is None and time.monotonic() > self.created_at + connect_timeout
        )

    async def answer_offer(self, offer: str, decoder: FrameDecoder) -> str:
        """Take an offer, decode its first video stream with ``decoder``, and return the answer's SDP with candidates.

        Raises:
            BadSignal: the offer is invalid.
        """

        def receive(track: MediaStreamTrack) -> None:
            for transceiver in self._pc.getTransceivers():
                if transceiver.receiver.track is track and track.kind == "video" and not self.has_video:
                    decoder.install(transceiver.receiver)
                    self.has_video = True
                elif transceiver.receiver.track is track:
                    transceiver.direction = "inactive"

        check_description(offer)
        self._decoder = decoder
        self._pc.on("track", receive)
        plain, named = split_candidates(keep_known_codecs(offer))
        await self._set_remote_description(RTCSessionDescription(plain, "offer"))
        if self._pc.sctp is not None:
            self._pc.sctp.start = _ignore_start  # type: ignore[method-assign] # data channels never open
        _limit_gathering(self._pc, self.datagram_filter)
        await self._gather()
        self.add_candidates(named)
        return self._get_description()

    async def create_offer(self, track: CameraTrack) -> str:
        """Send ``track``, and return the offer's SDP with candidates; raises BadSignal without a local address."""
        transceiver = self._pc.addTransceiver(track, direction="sendonly")
        transceiver.setCodecPreferences(vp8_codecs())
        install_encoder(transceiver.sender, track)
        limit_retransmissions(transceiver.sender)
        self.has_video = True
        _limit_gathering(self._pc, self.datagram_filter)
        await self._gather()
        return self._get_description()

    async def accept_answer(self, answer: str) -> None:
        """Take the answer to this peer's offer; raises BadSignal if it is invalid."""
        if self._pc.signalingState != "have-local-offer":
            raise BadSignal(f"an answer came while the connection was {self._pc.signalingState}")
        check_description(answer)
        plain, named = split_candidates(keep_known_codecs(answer))
        await self._set_remote_description(RTCSessionDescription(plain, "answer"))
        self.add_candidates(named)

    def add_candidates(self, candidates: Iterable[Mapping[str, Any]]) -> None:
        """Add trickled candidates in parallel, at most twice ``MAX_CANDIDATES``."""
        for candidate in candidates:
            if self._candidate_count >= 2 * MAX_CANDIDATES:
                return
            self._candidate_count += 1
            task = asyncio.ensure_future(self._add_candidate(candidate))
            self._adding.add(task)
            task.add_done_callback(self._adding.discard)

    async def close(self) -> None:
        """Close the connection and its tasks; a cancelled caller still waits, so that no socket leaks."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            await self._closing
            raise

    async def _close(self) -> None:
        for task in self._adding:
            task.cancel()
        await asyncio.gather(*self._adding, return_exceptions=True)
        if self._gathering is not None:
            await asyncio.wait([self._gathering], timeout=OPEN_TIMEOUT)
            self._gathering.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._pc.close()
        except TimeoutError:
            log.warning("a peer connection did not close within %s s", CLOSE_TIMEOUT)
        if self._decoder is not None:
            await self._decoder.wait_ended()

    async def _gather(self) -> None:
        # `close` waits for this task, because aioice leaks its sockets if it is cancelled while opening them.
        self._gathering = asyncio.ensure_future(self._pc.setLocalDescription())
        try:
            await asyncio.shield(self._gathering)
        except Exception as error:  # aiortc finds some errors of an offer only here.
            raise BadSignal(f"no description can be created ({type(error).__name__}: {error})") from error

    def _get_description(self) -> str:
        sdp = self._pc.localDescription.sdp
        if self.has_video and "a=candidate:" not in sdp:
            raise BadSignal("no UDP port could be opened on any address of this machine; check its network")
        return sdp

    async def _set_remote_description(self, description: RTCSessionDescription) -> None:
        try:
            await self._pc.setRemoteDescription(description)
        except Exception as error:
            # aiortc's parser raises many kinds of exceptions for invalid SDP.
            raise BadSignal(f"unusable {description.type} ({type(error).__name__}: {error})") from error

    async def _add_candidate(self, candidate: Mapping[str, Any]) -> None:
        text = candidate.get("candidate")
        if not isinstance(text, str) or not text.strip():
            return  # A browser marks the end of its candidates.
        try:
            parsed = candidate_from_sdp(text.removeprefix("a=").removeprefix("candidate:"))
            if (why := explain_refused_address(parsed.ip, parsed.port)) is not None:
                log.info("candidate %r not used: %s", text, why)
                return
            mid, index = candidate.get("sdpMid"), candidate.get("sdpMLineIndex")
            parsed.sdpMid = mid if isinstance(mid, str) else None
            parsed.sdpMLineIndex = index if isinstance(index, int) else 0 if parsed.sdpMid is None else None
            await self._pc.addIceCandidate(parsed)
        except Exception as error:
            # One invalid candidate, or a host without multicast for mDNS, must not affect other candidates.
            log.info("candidate %r not used: %s: %s", text, type(error).__name__, error)

    def _on_state_change(self) -> None:
        if self.state == "connected" and self.connected_at is None:
            self.connected_at = time.monotonic()
        self.changed.set()


async def _ignore_start(*arguments: object) -> None:
    """Do nothing in place of RTCSctpTransport.start."""


def check_description(sdp: str) -> None:
    """Raise BadSignal for a description that is larger than a camera's, before it is parsed."""
    if len(sdp) > MAX_SDP:
        raise BadSignal(f"a description of {len(sdp)} characters; at most {MAX_SDP} are read")
    lines = sdp.splitlines()
    if len(lines) > MAX_LINES:
        raise BadSignal(f"a description of {len(lines)} lines; at most {MAX_LINES} are read")
    counts: dict[str, int] = {}
    sections = 0
    for line in lines:
        if len(line) > MAX_LINE:
            raise BadSignal(f"a line of {len(line)} characters in a description; at most {MAX_LINE} are read")
        kind, _, value = line.partition(":")
        if line.startswith("m="):
            sections += 1
            counts = {}
            if sections > MAX_SECTIONS:
                raise BadSignal(f"more than {MAX_SECTIONS} media sections in a description; a camera has one")
        elif kind in MAX_LINES_OF_KIND:
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] > MAX_LINES_OF_KIND[kind]:
                raise BadSignal(f"more than {MAX_LINES_OF_KIND[kind]} lines of {kind} in a section of a description")
        elif kind in ("a=ice-ufrag", "a=ice-pwd") and len(value) > MAX_CREDENTIAL:
            raise BadSignal(f"{kind[2:]} of {len(value)} characters; at most {MAX_CREDENTIAL} are allowed")


def keep_known_codecs(sdp: str) -> str:
    """Return a description with supported video codecs only, because aiortc compares all codecs with each other."""
    lines: list[str] = []
    section: list[str] = []
    for line in [*sdp.splitlines(), "m="]:
        if line.startswith("m="):
            lines += _limit_codecs(section) if section and section[0].startswith("m=video") else section
            section = []
        section.append(line)
    return "\r\n".join(lines) + "\r\n"


def _limit_codecs(section: list[str]) -> list[str]:
    matches = (_CODEC.match(line) for line in section)
    ours = list(dict.fromkeys(match[1] for match in matches if match))[:MAX_CODECS]
    left = {("a=rtcp-fb", codec): MAX_FEEDBACK for codec in (*ours, "*")}
    left |= {(kind, codec): 1 for codec in ours for kind in ("a=rtpmap", "a=fmtp")}
    lines = []
    for line in section:
        kind, _, value = line.partition(":")
        if kind in ("a=rtpmap", "a=fmtp", "a=rtcp-fb"):
            of = kind, value.partition(" ")[0]
            if left.get(of, 0) == 0 or (kind == "a=rtpmap" and not _CODEC.match(line)):
                continue
            left[of] -= 1
        lines.append(line)
    return lines


def forbid_renegotiation(connection: RTCPeerConnection) -> None:
    """Forbid repeated DTLS handshakes, which take 1 ms each; raises TransportError for another aiortc."""
    certificates = getattr(connection, _CERTIFICATES, None)
    if not certificates:
        raise TransportError("this aiortc has another attribute of certificates; install aiortc 1.16")
    for certificate in certificates:

        def create(plain: Callable[..., SSL.Context] = certificate._create_ssl_context, **more: Any) -> SSL.Context:
            context = plain(**more)
            context.set_options(SSL.OP_NO_RENEGOTIATION)
            return context

        certificate._create_ssl_context = create


def _limit_gathering(connection: RTCPeerConnection, datagram_filter: DatagramFilter) -> None:
    """Filter the datagrams of each transport, offer 127.0.0.1 without another address, and limit mDNS addresses."""
    datagram_filter.guard_connection(connection)
    for transport in transports_of(connection):
        ice = transport.transport.iceGatherer._connection

        async def gather(
            component: int, addresses: list[str], timeout: int = 5, ice: Any = ice, plain=ice.get_component_candidates
        ) -> list[Any]:
            candidates = await plain(component, addresses or ["127.0.0.1"], timeout)
            datagram_filter.guard_sockets(ice)
            return candidates

        def add(remote_candidate: Any, network_host: str, ice: Any = ice, plain=ice._add_remote_candidate) -> None:
            why = explain_refused_address(network_host, remote_candidate.port)
            if why is None and len(ice._remote_candidates) >= MAX_CANDIDATES:
                why = f"{MAX_CANDIDATES} others came before it"
            if why is not None:
                log.info("candidate %r at %s not used: %s", remote_candidate.host, network_host, why)
            else:
                plain(remote_candidate, network_host)

        ice.get_component_candidates = gather
        ice._add_remote_candidate = add
