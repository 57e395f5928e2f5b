"""One WebRTC peer connection and the signals that make it, for the side that answers and the side that offers."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.sdp import candidate_from_sdp

from service.transport.camera import CameraTrack, fit_encoder, vp8
from service.transport.candidates import CANDIDATES, LONGEST, refusal, sorted_out
from service.transport.video import Screen

log = logging.getLogger(__name__)

CLOSE_TIMEOUT = 2.0
OPEN_TIMEOUT = 0.5  # the sockets of this machine are open by then; what STUN servers answer may take 5 s


class BadSignal(Exception):
    """An offer, an answer or a candidate that cannot be used."""


class Peer:
    """A peer connection with its late candidates; ``answering`` and ``offering`` make one.

    Attributes:
        connected_at: when it connected (monotonic), None before.
        has_video: whether the other side offered, or took, a video stream.
    """

    def __init__(self, ice_servers: Sequence[str]):
        servers = [RTCIceServer(urls=url) for url in ice_servers]
        self._pc = RTCPeerConnection(RTCConfiguration(iceServers=servers))
        self._adding: set[asyncio.Task[None]] = set()
        self._candidates = 0
        self._gathering: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self.made_at = time.monotonic()
        self.connected_at: float | None = None
        self.has_video = False
        self.changed = asyncio.Event()
        self._pc.on("connectionstatechange", self._state_changed)

    @property
    def state(self) -> str:
        """new, connecting, connected, failed or closed."""
        return self._pc.connectionState

    @property
    def is_answered(self) -> bool:
        """Whether both descriptions are known, so that candidates can be added."""
        return self._pc.signalingState == "stable" and self._pc.remoteDescription is not None

    async def answer(self, offer: str, screen: Screen) -> str:
        """Take an offer, show its first video stream on ``screen``, and return the answer's SDP with all candidates.

        Raises:
            BadSignal: the offer cannot be used.
        """

        def receive(track: MediaStreamTrack) -> None:
            for transceiver in self._pc.getTransceivers():
                if transceiver.receiver.track is track and track.kind == "video" and not self.has_video:
                    screen.fit(transceiver.receiver)
                    self.has_video = True
                elif transceiver.receiver.track is track:
                    transceiver.direction = "inactive"

        self._pc.on("track", receive)
        named = await self._take("offer", offer)
        _fit_gathering(self._pc)
        await self._gather()
        self.add_all(named)
        return self._description()

    async def offer(self, track: CameraTrack) -> str:
        """Send ``track``, and return the offer's SDP with all candidates.

        Raises:
            BadSignal: there is no address to offer.
        """
        transceiver = self._pc.addTransceiver(track, direction="sendonly")
        transceiver.setCodecPreferences(vp8())
        fit_encoder(transceiver.sender, track)
        self.has_video = True
        _fit_gathering(self._pc)
        await self._gather()
        return self._description()

    async def accept(self, answer: str) -> None:
        """Take the answer to our offer.

        Raises:
            BadSignal: it cannot be used.
        """
        if self._pc.signalingState != "have-local-offer":
            raise BadSignal(f"an answer came while the connection was {self._pc.signalingState}")
        named = await self._take("answer", answer)
        self.add_all(named)

    def add_all(self, candidates: Iterable[Mapping[str, Any]]) -> None:
        """Add trickled candidates, each in its own time: an mDNS name takes up to a second to resolve."""
        for candidate in candidates:
            if self._candidates >= CANDIDATES:
                return  # each is checked against each address of ours, many times
            self._candidates += 1
            task = asyncio.ensure_future(self._add(candidate))
            self._adding.add(task)
            task.add_done_callback(self._adding.discard)

    async def close(self) -> None:
        """Close the connection and everything that still waits for it.

        Whoever is cancelled meanwhile waits all the same: half a close would leave its sockets open for good.
        """
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

    async def _gather(self) -> None:
        # aioice forgets the sockets that it has opened when it is cancelled between two; `close` lets it finish.
        self._gathering = asyncio.ensure_future(self._pc.setLocalDescription())
        await asyncio.shield(self._gathering)

    def _description(self) -> str:
        # Only after setLocalDescription does it hold our candidates; what createOffer and createAnswer return has none.
        sdp = self._pc.localDescription.sdp
        if self.has_video and "a=candidate:" not in sdp:
            raise BadSignal("no UDP port could be opened on any address of this machine; check its network")
        return sdp

    async def _take(self, kind: str, sdp: str) -> Iterable[Mapping[str, Any]]:
        """Use a description; the candidates of it that are still to be added."""
        try:
            plain, named = sorted_out(sdp)
            await self._pc.setRemoteDescription(RTCSessionDescription(plain, kind))
        except Exception as error:
            # aiortc parses SDP with asserts, indexing and int(): a stranger's text can raise nearly anything.
            raise BadSignal(f"unusable {kind} ({type(error).__name__}: {str(error)[:LONGEST]})") from error
        return named

    async def _add(self, candidate: Mapping[str, Any]) -> None:
        text = candidate.get("candidate")
        if not isinstance(text, str) or not text.strip():
            return  # the browser's end of candidates
        if len(text) > LONGEST:
            log.info("a candidate of %d characters is not used", len(text))
            return
        try:
            parsed = candidate_from_sdp(text.removeprefix("a=").removeprefix("candidate:"))
            if (why := refusal(parsed.ip, parsed.port)) is not None:
                log.info("candidate %r not used: %s", text, why)
                return
            mid, index = candidate.get("sdpMid"), candidate.get("sdpMLineIndex")
            parsed.sdpMid = mid if isinstance(mid, str) else None
            parsed.sdpMLineIndex = index if isinstance(index, int) else 0 if parsed.sdpMid is None else None
            await self._pc.addIceCandidate(parsed)
        except Exception as error:
            # As above; and one bad candidate, or a host without multicast for mDNS, leaves the other candidates.
            log.info("candidate %r not used: %s: %s", text, type(error).__name__, error)

    def _state_changed(self) -> None:
        if self.state == "connected" and self.connected_at is None:
            self.connected_at = time.monotonic()
        self.changed.set()


def _fit_gathering(connection: RTCPeerConnection) -> None:
    """Two things that aioice does otherwise, for each of the connection's transports.

    It never offers 127.0.0.1; a machine that has no other address, as a laptop on a train or a container without
    network, does here, for otherwise two processes on it could not see each other. And it takes whatever address an
    mDNS name is resolved to; here that is held to the rule for addresses that are given as such.
    """
    for transceiver in connection.getTransceivers():
        ice = transceiver.receiver.transport.transport.iceGatherer._connection

        def gather(component: int, addresses: list[str], timeout: int = 5, plain=ice.get_component_candidates):
            return plain(component, addresses or ["127.0.0.1"], timeout)

        def add(remote_candidate: Any, network_host: str, plain=ice._add_remote_candidate) -> None:
            if (why := refusal(network_host, remote_candidate.port)) is not None:
                log.info("candidate %r at %s not used: %s", remote_candidate.host, network_host, why)
            else:
                plain(remote_candidate, network_host)

        ice.get_component_candidates = gather
        ice._add_remote_candidate = add
