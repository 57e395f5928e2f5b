"""Camera rooms: the consumer receives video, the producer sends it."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from service.errors import TransportError
from service.http.limits import Bucket
from service.transport.client.connection import RoomConnection, RoomListener
from service.transport.client.joint_rooms import SessionRoomListener
from service.transport.client.rest import Presence, RoomsApi
from service.transport.link import Inbox
from service.transport.protocol import EmergencyStopMessage as StopMessage
from service.transport.protocol import (
    Message,
    ParticipantJoined,
    ParticipantLeft,
    ParticipantRole,
    StreamStarted,
    WebrtcAnswer,
    WebrtcIce,
    WebrtcOffer,
)
from service.transport.webrtc.decoding import FrameDecoder
from service.transport.webrtc.encoding import CameraTrack, VideoCamera
from service.transport.webrtc.ice import EarlyCandidates, trim_candidate
from service.transport.webrtc.peer import MAX_SDP, BadSignal, PeerConnection

# Answered offers per second and at once. An answer takes 10 ms; a robot offers once in OFFER_INTERVAL seconds.
ANSWER_RATE = (1.0, 5)
PEER_CHECK_INTERVAL = 0.5  # Seconds between checks of the peer connection.
MAX_SIGNALS = 256  # Signals that wait for their task.

ConsumerSignal = WebrtcOffer | WebrtcIce | ParticipantLeft


class CameraReceiver(SessionRoomListener):
    """Receives one camera. Pictures continue while the room is lost, until the producer's new offer."""

    def __init__(
        self,
        camera: str,
        room: str,
        api: RoomsApi,
        inbox: Inbox,
        ice_servers: Sequence[str],
    ):
        super().__init__(room, inbox)
        self.camera = camera
        self._api = api
        self._timeouts = api.timeouts
        self._ice_servers = ice_servers
        self._signals: asyncio.Queue[ConsumerSignal] = asyncio.Queue(MAX_SIGNALS)
        self._candidates = EarlyCandidates()
        self._answer_rate = Bucket(*ANSWER_RATE)
        self._pending_offer: WebrtcOffer | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer: PeerConnection | None = None
        self._producer: str | None = None
        self._decoder = FrameDecoder(self._deliver_frame, self._set_failure)
        self._counts: dict[str, int] = {"offers": 0, "refused_offers": 0, "asked_again": 0, "signals_dropped": 0}
        self._counts |= dict.fromkeys(self._decoder.get_counts(), 0)
        self._fault: str | None = None
        self._rejoin_wait = api.timeouts.ask_first
        self._rejoin_at = 0.0
        self._last_error: str | None = None

    def on_message(self, message: Message, received_at: float) -> None:
        """Queue a signal for ``run``; report an emergency stop at once."""
        super().on_message(message, received_at)
        if isinstance(message, WebrtcOffer) and len(message.offer["sdp"]) > MAX_SDP:
            self._counts["offers"] += 1
            self._refuse_offer(message, f"it has {len(message.offer['sdp'])} characters; at most {MAX_SDP} are read")
        elif isinstance(message, ConsumerSignal):
            self._counts["signals_dropped"] += not _queue_signal(self._signals, message)

    async def run(self, connection: RoomConnection) -> None:
        """Answer offers until cancelled."""
        loop = asyncio.get_running_loop()
        check_at = loop.time() + PEER_CHECK_INTERVAL
        try:
            while True:
                if self._failure.done():
                    self._failure.result()  # Raises the exception of the session's inbox.
                signal = None
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with a signal.
                    async with asyncio.timeout_at(check_at):
                        signal = await self._signals.get()
                await self._handle_signal(signal, connection)
                # Checked at fixed times, because signals may arrive all the time.
                if loop.time() >= check_at:
                    check_at = loop.time() + PEER_CHECK_INTERVAL
                    await self._rejoin_when_needed(connection)
        finally:
            self._decoder.is_muted = True
            if self._peer is not None:
                await self._peer.close()

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready figures."""
        decoder = self._decoder
        return {
            "state": "waiting" if self._peer is None else self._peer.state,
            "size": None if decoder.size is None else list(decoder.size),
            "age_ms": None if decoder.decoded_at is None else round((time.monotonic() - decoder.decoded_at) * 1e3, 1),
            "last_error": self._fault or self._last_error,
            "datagrams_dropped": {} if self._peer is None else dict(self._peer.datagram_filter.dropped),
            **{name: count + decoder.get_counts().get(name, 0) for name, count in self._counts.items()},
        }

    def _refuse_offer(self, message: WebrtcOffer, why: str) -> None:
        self._counts["refused_offers"] += 1
        self._fault = f"offer of {message.from_producer}: {why}"

    async def _handle_signal(self, signal: ConsumerSignal | None, connection: RoomConnection) -> None:
        if isinstance(signal, WebrtcOffer):
            if self._pending_offer is not None:
                # This is not a fault, because the newer offer is answered and a working connection continues.
                self._counts["offers"] += 1
                self._counts["refused_offers"] += 1
                self._last_error = f"offers of {signal.from_producer} come faster than {ANSWER_RATE[0]:g} a second"
            self._pending_offer = signal
        elif isinstance(signal, ParticipantLeft):
            self._candidates.forget(signal.participant_id)
        elif signal is not None and signal.from_producer is not None:
            self._candidates.keep(signal.from_producer, signal.candidate)
            if self._peer is not None and signal.from_producer == self._producer:
                self._peer.add_candidates([signal.candidate])
        if self._pending_offer is not None and self._answer_rate.take():
            offer, self._pending_offer = self._pending_offer, None
            await self._answer_offer(offer, connection)

    async def _answer_offer(self, message: WebrtcOffer, connection: RoomConnection) -> None:
        """Answer an offer with a new peer connection, because producers offer once for each stream."""
        self._counts["offers"] += 1
        participant_id = connection.participant_id
        if participant_id is None:
            return  # The offer was sent to an old participant id.
        sdp = message.offer["sdp"]
        peer, decoder = PeerConnection(self._ice_servers), FrameDecoder(self._deliver_frame, self._set_failure)
        try:
            async with asyncio.timeout(self._timeouts.answer):
                answer = await peer.answer_offer(sdp, decoder)
            peer.add_candidates(self._candidates.for_description(message.from_producer, sdp))
            signal = {"type": "answer", "sdp": answer, "target_producer": message.from_producer}
            await self._api.post_signal(connection.workspace, self.room, participant_id, signal)
        except (BadSignal, TransportError, TimeoutError) as error:
            self._refuse_offer(message, str(error) or type(error).__name__)
            await peer.close()
            return
        except BaseException:
            await peer.close()
            raise
        await self._replace_peer(peer, decoder)
        self._producer = message.from_producer
        self._fault = None

    async def _replace_peer(self, peer: PeerConnection | None, decoder: FrameDecoder) -> None:
        old_peer, self._peer = self._peer, peer
        old_decoder, self._decoder = self._decoder, decoder
        old_decoder.is_muted = True
        if old_peer is not None:
            await old_peer.close()
        for name, count in old_decoder.get_counts().items():
            self._counts[name] += count

    async def _rejoin_when_needed(self, connection: RoomConnection) -> None:
        """Join the room again for a new offer if the peer is useless while its producer is present."""
        is_useless = self._peer is not None and self._peer.is_useless(self._timeouts.connect)
        now = time.monotonic()
        self._fault = self._fault or self._find_fault(now)
        if is_useless:
            await self._replace_peer(None, FrameDecoder(self._deliver_frame, self._set_failure))
        if self._fault is None:
            if self._decoder.frames:
                self._rejoin_wait = self._timeouts.ask_first
            return
        if now >= self._rejoin_at and connection.presence is not None and connection.presence.producer is not None:
            self._counts["asked_again"] += 1
            self._rejoin_at = now + self._rejoin_wait
            self._rejoin_wait = min(2 * self._rejoin_wait, self._timeouts.ask_longest)
            self._last_error, self._fault = self._fault, None
            connection.rejoin(f"camera {self.camera}: {self._last_error}; asking for a new offer")

    def _find_fault(self, now: float) -> str | None:
        peer = self._peer
        if peer is None or (peer.state not in ("failed", "closed") and not peer.has_video):
            return None  # The producer offers when it has a camera.
        if peer.state in ("failed", "closed"):
            return f"the peer connection is {peer.state}"
        if peer.connected_at is None:
            is_late = now > peer.created_at + self._timeouts.connect
            return f"not connected within {self._timeouts.connect} s" if is_late else None
        newest_at = max(peer.connected_at, self._decoder.decoded_at or 0.0)
        return f"no picture for {self._timeouts.silence} s" if now > newest_at + self._timeouts.silence else None

    def _deliver_frame(self, image: np.ndarray, observed_at: float) -> None:
        self.inbox.on_frame(self.camera, image, observed_at)

    def _set_failure(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)


OFFER_INTERVAL = 2.0  # Seconds between two offers to one consumer without a connection.
MAX_PEERS = 8  # Consumers of one camera; each has an encoder, which takes 5 ms per picture of 640x480.
OFFER_RATE = (2.0, 16)  # Offers to all consumers, per second and at once.

ProducerSignal = ParticipantJoined | ParticipantLeft | WebrtcAnswer | WebrtcIce


class CameraSender(RoomListener):
    """Sends one camera: the listener of its room, and the task ``run``."""

    def __init__(
        self,
        camera: VideoCamera,
        room: str,
        api: RoomsApi,
        ice_servers: Sequence[str],
        on_stop: Callable[[StopMessage], None],
    ):
        self.camera = camera
        self.room = room
        self._api = api
        self._timeouts = api.timeouts
        self._ice_servers = ice_servers
        self._on_stop = on_stop
        self._signals: asyncio.Queue[ProducerSignal] = asyncio.Queue(MAX_SIGNALS)
        self._candidates = EarlyCandidates()
        self._peers: dict[str, tuple[PeerConnection, CameraTrack]] = {}
        self._consumers: set[str] = set()
        self._offered_at: dict[str, float] = {}
        self._offer_rate = Bucket(*OFFER_RATE)
        self._restarted_at = self._offer_at = 0.0
        self._is_restarted = True
        self._offers = self._dropped = 0
        self._last_error: str | None = None

    def on_joined(self, participant_id: str) -> None:
        """Offer again to all consumers, because offers contain the participant id."""
        self._is_restarted = True
        self._restarted_at = time.monotonic()
        self._offer_at = self._restarted_at + self._timeouts.greet

    def on_message(self, message: Message, received_at: float) -> None:
        """Queue a signal for ``run``; report an emergency stop at once."""
        if isinstance(message, StopMessage):
            self._on_stop(message)
        elif isinstance(message, ProducerSignal):
            self._dropped += not _queue_signal(self._signals, message)

    async def on_presence(self, presence: Presence) -> None:
        """Update the consumers, in case an event was missed."""
        self._consumers = set(presence.consumers)

    async def run(self, connection: RoomConnection) -> None:
        """Offer the camera to every consumer, and keep offering, until cancelled."""
        try:
            while True:
                try:
                    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with a signal.
                    async with asyncio.timeout(0.1):
                        signal = await self._signals.get()
                except TimeoutError:
                    signal = None
                try:
                    if signal is not None:
                        await self._handle_signal(signal, connection)
                except (BadSignal, TransportError) as error:
                    self._last_error = str(error)
                await self._maintain_peers(connection)
        finally:
            await self._close_peers(list(self._peers))

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready figures."""
        return {
            "peers": {consumer: peer.state for consumer, (peer, _) in self._peers.items()},
            "sent": {consumer: track.sent for consumer, (_, track) in self._peers.items()},
            "shown": self.camera.show_count,
            "offers": self._offers,
            "signals_dropped": self._dropped,
            "last_error": self._last_error,
        }

    async def _handle_signal(self, signal: ProducerSignal, connection: RoomConnection) -> None:
        if isinstance(signal, ParticipantJoined):
            if signal.role is ParticipantRole.CONSUMER:
                self._consumers.add(signal.participant_id)
                await self._offer_to(signal.participant_id, connection)
        elif isinstance(signal, ParticipantLeft):
            self._consumers.discard(signal.participant_id)
            self._offered_at.pop(signal.participant_id, None)
            self._candidates.forget(signal.participant_id)
            await self._close_peers([signal.participant_id])
        elif isinstance(signal, WebrtcAnswer):
            if signal.from_consumer in self._peers:
                peer, _ = self._peers[signal.from_consumer]
                sdp = signal.answer["sdp"]
                await peer.accept_answer(sdp)
                peer.add_candidates(self._candidates.for_description(signal.from_consumer, sdp))
        elif signal.from_consumer is not None:
            self._candidates.keep(signal.from_consumer, signal.candidate)
            if signal.from_consumer in self._peers and self._peers[signal.from_consumer][0].is_answered:
                self._peers[signal.from_consumer][0].add_candidates([signal.candidate])

    async def _maintain_peers(self, connection: RoomConnection) -> None:
        """Offer after a join, drop peers that did not connect, and offer to every consumer without a peer."""
        now = time.monotonic()
        if connection.participant_id is None:
            return
        if self._is_restarted:
            if now < self._offer_at:
                return
            try:
                presence = await self._api.get_presence(connection.kind, connection.workspace, self.room)
            except TransportError as error:
                self._last_error = str(error)
                self._offer_at = now + self._timeouts.greet
                return
            self._is_restarted = False
            connection.send(StreamStarted({"framerate": self.camera.rate}, connection.participant_id))
            self._consumers = set() if presence is None else set(presence.consumers)
            old = [consumer for consumer in self._peers if self._offered_at.get(consumer, 0.0) < self._restarted_at]
            await self._close_peers(old)
            self._offered_at.clear()
        useless = [consumer for consumer, (peer, track) in self._peers.items() if self._is_useless(peer, track)]
        await self._close_peers(useless)
        for consumer in self._consumers - self._peers.keys():
            if now >= self._offered_at.get(consumer, float("-inf")) + OFFER_INTERVAL:
                await self._offer_to(consumer, connection)

    def _is_useless(self, peer: PeerConnection, track: CameraTrack) -> bool:
        return peer.is_useless(self._timeouts.connect) or track.readyState != "live"

    async def _offer_to(self, consumer: str, connection: RoomConnection) -> None:
        participant_id = connection.participant_id
        if participant_id is None:
            return
        await self._close_peers([consumer])
        if len(self._peers) >= MAX_PEERS:
            self._last_error = f"offer to {consumer}: this camera has {MAX_PEERS} viewers, the largest number"
            return
        if not self._offer_rate.take():
            self._last_error = f"offer to {consumer} waits: more than {OFFER_RATE[0]:g} viewers join per second"
            return
        self._offers += 1
        self._offered_at[consumer] = time.monotonic()
        peer, track = PeerConnection(self._ice_servers), CameraTrack(self.camera)
        self._peers[consumer] = (peer, track)
        try:
            sdp = await peer.create_offer(track)
            offer = {"type": "offer", "sdp": sdp, "target_consumer": consumer}
            await self._api.post_signal(connection.workspace, self.room, participant_id, offer)
        except (BadSignal, TransportError) as error:
            self._last_error = f"offer to {consumer}: {error}"
            await self._close_peers([consumer])

    async def _close_peers(self, consumers: Sequence[str]) -> None:
        gone = [self._peers.pop(consumer) for consumer in consumers if consumer in self._peers]
        for _, track in gone:
            track.stop()
        # A cancelled gather would not wait for the other tasks.
        async with asyncio.TaskGroup() as group:
            for peer, _ in gone:
                group.create_task(peer.close())


def _queue_signal(queue: asyncio.Queue[Any], signal: ConsumerSignal | ProducerSignal) -> bool:
    """Queue a signal without superfluous fields; False if it is oversized or the queue is full."""
    if isinstance(signal, WebrtcIce):
        candidate = trim_candidate(signal.candidate)
        if candidate is None:
            return False
        signal = dataclasses.replace(signal, candidate=dict(candidate))
    if queue.full() or (isinstance(signal, WebrtcAnswer) and len(signal.answer["sdp"]) > MAX_SDP):
        return False
    queue.put_nowait(signal)
    return True
