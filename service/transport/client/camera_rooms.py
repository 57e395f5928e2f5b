"""Camera rooms: consumer receives video, producer sends it."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from service.errors import TransportError
from service.http.limits import Bucket
from service.transport.client.connection import RoomConnection, TransportTimeouts
from service.transport.client.joint_rooms import SessionRoom
from service.transport.client.rest import Presence, RoomsApi
from service.transport.link import Inbox
from service.transport.protocol import EmergencyStop as StopMessage
from service.transport.protocol import (
    Message,
    ParticipantJoined,
    ParticipantLeft,
    Role,
    StreamStarted,
    WebrtcAnswer,
    WebrtcIce,
    WebrtcOffer,
)
from service.transport.webrtc.candidates import EarlyCandidates, trim_candidate
from service.transport.webrtc.decoding import FrameDecoder
from service.transport.webrtc.encoding import Camera, CameraTrack
from service.transport.webrtc.peer import MAX_SDP, BadSignal, Peer

# Offers answered, a second and at once. A robot offers once in OFFER_AGAIN seconds; each costs 10 ms of the event loop
# and a few sockets.
CONSUMER_OFFERS = (1.0, 5)
LOOK_EVERY = 0.5  # seconds between looks at whether the peer is of use

ConsumerSignal = WebrtcOffer | WebrtcIce | ParticipantLeft


class CameraReceiver(SessionRoom):
    """Receives one camera: a ``Listener`` of its room, and the task ``run``.

    Pictures of a peer go on while the room is lost, until the producer's new offer replaces it.
    """

    def __init__(
        self, camera: str, room: str, api: RoomsApi, inbox: Inbox, pace: TransportTimeouts, ice_servers: Sequence[str]
    ):
        super().__init__(room, inbox)
        self.camera = camera
        self._api = api
        self._pace = pace
        self._ice_servers = ice_servers
        self._signals: asyncio.Queue[ConsumerSignal] = asyncio.Queue(maxsize=256)
        self._candidates = EarlyCandidates()
        self._offers = Bucket(*CONSUMER_OFFERS)
        self._waiting: WebrtcOffer | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer: Peer | None = None
        self._producer: str | None = None
        self._screen = FrameDecoder(self._show, self._fail)
        self._counts: dict[str, int] = {"offers": 0, "refused_offers": 0, "asked_again": 0, "signals_dropped": 0}
        self._counts |= dict.fromkeys(self._screen.counts(), 0)
        self._complaint: str | None = None
        self._ask_wait = pace.ask_first
        self._ask_at = 0.0
        self._last_error: str | None = None

    def received(self, message: Message, seen_at: float) -> None:
        """Queue a signal for ``run``; an emergency stop goes on at once."""
        super().received(message, seen_at)
        if isinstance(message, WebrtcOffer) and len(message.offer["sdp"]) > MAX_SDP:
            self._counts["offers"] += 1
            self._refuse(message, f"it has {len(message.offer['sdp'])} characters; at most {MAX_SDP} are read")
        elif isinstance(message, WebrtcIce):
            candidate = trim_candidate(message.candidate)
            self._queue(None if candidate is None else dataclasses.replace(message, candidate=dict(candidate)))
        elif isinstance(message, WebrtcOffer | ParticipantLeft):
            self._queue(message)

    async def run(self, connection: RoomConnection) -> None:
        """Answer offers until cancelled."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + LOOK_EVERY
        try:
            while True:
                if self._failure.done():
                    self._failure.result()  # raises what the session's inbox raised
                signal = None
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with a signal.
                    async with asyncio.timeout_at(look_at):
                        signal = await self._signals.get()
                await self._handle(signal, connection)
                # By the clock and not when nothing comes: somebody may signal all the time.
                if loop.time() >= look_at:
                    look_at = loop.time() + LOOK_EVERY
                    await self._ask_when_needed(connection)
        finally:
            self._screen.is_muted = True
            if self._peer is not None:
                await self._peer.close()

    def health(self) -> Mapping[str, object]:
        """Plain figures for a status page."""
        screen = self._screen
        return {
            "state": "waiting" if self._peer is None else self._peer.state,
            "size": None if screen.size is None else list(screen.size),
            "age_ms": None if screen.shown_at is None else round((time.monotonic() - screen.shown_at) * 1e3, 1),
            "last_error": self._complaint or self._last_error,
            "datagrams_dropped": {} if self._peer is None else dict(self._peer.intake.dropped),
            **{name: count + screen.counts().get(name, 0) for name, count in self._counts.items()},
        }

    def _queue(self, signal: ConsumerSignal | None) -> None:
        if signal is None or self._signals.full():
            self._counts["signals_dropped"] += 1
        else:
            self._signals.put_nowait(signal)

    def _refuse(self, message: WebrtcOffer, why: str) -> None:
        self._counts["refused_offers"] += 1
        self._complaint = f"offer of {message.from_producer}: {why}"

    async def _handle(self, signal: ConsumerSignal | None, connection: RoomConnection) -> None:
        if isinstance(signal, WebrtcOffer):
            if self._waiting is not None:
                # No complaint: the newer one is answered, and a connection that works goes on.
                self._counts["offers"] += 1
                self._counts["refused_offers"] += 1
                self._last_error = f"offers of {signal.from_producer} come faster than {CONSUMER_OFFERS[0]:g} a second"
            self._waiting = signal
        elif isinstance(signal, ParticipantLeft):
            self._candidates.forget(signal.participant_id)
        elif signal is not None and signal.from_producer is not None:
            self._candidates.keep(signal.from_producer, signal.candidate)
            if self._peer is not None and signal.from_producer == self._producer:
                self._peer.add_all([signal.candidate])
        if self._waiting is not None and self._offers.take():
            offer, self._waiting = self._waiting, None
            await self._answer(offer, connection)

    async def _answer(self, message: WebrtcOffer, connection: RoomConnection) -> None:
        """A second offer replaces the peer connection: producers make a new one for each stream they start."""
        self._counts["offers"] += 1
        participant_id = connection.participant_id
        if participant_id is None:
            return  # the offer was for an id we no longer have
        sdp = message.offer["sdp"]
        peer, screen = Peer(self._ice_servers), FrameDecoder(self._show, self._fail)
        try:
            async with asyncio.timeout(self._pace.answer):
                answer = await peer.answer(sdp, screen)
            peer.add_all(self._candidates.fitting(message.from_producer, sdp))
            signal = {"type": "answer", "sdp": answer, "target_producer": message.from_producer}
            await self._api.signal(connection.workspace, self.room, participant_id, signal)
        except (BadSignal, TransportError, TimeoutError) as error:
            self._refuse(message, str(error) or type(error).__name__)
            await peer.close()
            return
        except BaseException:
            await peer.close()
            raise
        await self._replace(peer, screen)
        self._producer = message.from_producer
        self._complaint = None

    async def _replace(self, peer: Peer | None, screen: FrameDecoder) -> None:
        old_peer, self._peer = self._peer, peer
        old_screen, self._screen = self._screen, screen
        old_screen.is_muted = True
        if old_peer is not None:
            await old_peer.close()
        for name, count in old_screen.counts().items():
            self._counts[name] += count

    async def _ask_when_needed(self, connection: RoomConnection) -> None:
        """Join again when the peer is of no use while its producer is there: this makes the producer offer anew."""
        is_useless = self._peer is not None and self._peer.is_useless(self._pace.connect)
        now = time.monotonic()
        self._complaint = self._complaint or self._find_fault(now)
        if is_useless:
            await self._replace(None, FrameDecoder(self._show, self._fail))
        if self._complaint is None:
            if self._screen.frames:
                self._ask_wait = self._pace.ask_first
            return
        if now >= self._ask_at and connection.presence is not None and connection.presence.producer is not None:
            self._counts["asked_again"] += 1
            self._ask_at = now + self._ask_wait
            self._ask_wait = min(2 * self._ask_wait, self._pace.ask_longest)
            self._last_error, self._complaint = self._complaint, None
            connection.rejoin(f"camera {self.camera}: {self._last_error}; asking for a new offer")

    def _find_fault(self, now: float) -> str | None:
        peer = self._peer
        if peer is None or (peer.state not in ("failed", "closed") and not peer.has_video):
            return None  # no camera yet; the producer offers when it has one
        if peer.state in ("failed", "closed"):
            return f"the peer connection is {peer.state}"
        if peer.connected_at is None:
            return f"not connected within {self._pace.connect} s" if now > peer.made_at + self._pace.connect else None
        seen_at = max(peer.connected_at, self._screen.shown_at or 0.0)
        return f"no picture for {self._pace.silence} s" if now > seen_at + self._pace.silence else None

    def _show(self, image: np.ndarray, seen_at: float) -> None:
        self.inbox.frame(self.camera, image, seen_at)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)


OFFER_AGAIN = 2.0  # the least seconds between two offers to one consumer that did not lead to a connection
MAX_PEERS = 8  # that one camera is sent to; each has an encoder of its own, 5 ms a picture of 640x480
PRODUCER_OFFERS = (2.0, 16)  # to all consumers together, a second and at once; those that wait are offered to later

ProducerSignal = ParticipantJoined | ParticipantLeft | WebrtcAnswer | WebrtcIce


class CameraSender:
    """Sends one camera: a ``Listener`` of its room, and the task ``run``."""

    def __init__(
        self,
        camera: Camera,
        room: str,
        api: RoomsApi,
        pace: TransportTimeouts,
        ice_servers: Sequence[str],
        stopped: Callable[[StopMessage], None],
    ):
        self.camera = camera
        self.room = room
        self._api = api
        self._pace = pace
        self._ice_servers = ice_servers
        self._stopped = stopped
        self._signals: asyncio.Queue[ProducerSignal] = asyncio.Queue(maxsize=256)
        self._candidates = EarlyCandidates()
        self._peers: dict[str, tuple[Peer, CameraTrack]] = {}
        self._consumers: set[str] = set()
        self._offered_at: dict[str, float] = {}
        self._rate = Bucket(*PRODUCER_OFFERS)
        self._new_since = self._greet_at = 0.0
        self._is_new = True
        self._offers = self._dropped = 0
        self._last_error: str | None = None

    def joined(self, participant_id: str) -> None:
        """Everybody in the room gets a new offer: it must name our new id."""
        self._is_new = True
        self._new_since = time.monotonic()
        self._greet_at = self._new_since + self._pace.greet

    def lost(self, reason: str) -> None:
        """Peers go on without the room."""

    def received(self, message: Message, seen_at: float) -> None:
        """Queue a signal for ``run``; an emergency stop goes on at once."""
        if isinstance(message, StopMessage):
            self._stopped(message)
        elif isinstance(message, ProducerSignal):
            signal = _of_a_size(message)
            if signal is None or self._signals.full():
                self._dropped += 1
            else:
                self._signals.put_nowait(signal)

    async def present(self, presence: Presence) -> None:
        """Who is in the room, in case an event was missed."""
        self._consumers = set(presence.consumers)

    def restart(self) -> None:
        """The stream starts anew: everybody gets a new offer, which replaces the old connection."""
        self._is_new = True
        self._new_since = self._greet_at = time.monotonic()

    async def run(self, connection: RoomConnection) -> None:
        """Offer, and keep offering, until cancelled."""
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
                        await self._handle(signal, connection)
                except (BadSignal, TransportError) as error:
                    self._last_error = str(error)
                await self._tend(connection)
        finally:
            await self._close(list(self._peers))

    def health(self) -> Mapping[str, object]:
        """Plain figures."""
        return {
            "peers": {consumer: peer.state for consumer, (peer, _) in self._peers.items()},
            "sent": {consumer: track.sent for consumer, (_, track) in self._peers.items()},
            "shown": self.camera.shown,
            "offers": self._offers,
            "signals_dropped": self._dropped,
            "last_error": self._last_error,
        }

    async def _handle(self, signal: ProducerSignal, connection: RoomConnection) -> None:
        if isinstance(signal, ParticipantJoined):
            if signal.role is Role.CONSUMER:
                self._consumers.add(signal.participant_id)
                await self._offer(signal.participant_id, connection)
        elif isinstance(signal, ParticipantLeft):
            self._consumers.discard(signal.participant_id)
            self._offered_at.pop(signal.participant_id, None)
            self._candidates.forget(signal.participant_id)
            await self._close([signal.participant_id])
        elif isinstance(signal, WebrtcAnswer):
            if signal.from_consumer in self._peers:
                peer, _ = self._peers[signal.from_consumer]
                sdp = signal.answer["sdp"]
                await peer.accept(sdp)
                peer.add_all(self._candidates.fitting(signal.from_consumer, sdp))
        elif signal.from_consumer is not None:
            self._candidates.keep(signal.from_consumer, signal.candidate)
            if signal.from_consumer in self._peers and self._peers[signal.from_consumer][0].is_answered:
                self._peers[signal.from_consumer][0].add_all([signal.candidate])

    async def _tend(self, connection: RoomConnection) -> None:
        """Greet after a join, drop peers that came to nothing, and offer to every consumer that has none."""
        now = time.monotonic()
        if connection.participant_id is None:
            return
        if self._is_new:
            if now < self._greet_at:
                return
            try:
                presence = await self._api.look(connection.kind, connection.workspace, self.room)
            except TransportError as error:
                self._last_error = str(error)
                self._greet_at = now + self._pace.greet
                return
            self._is_new = False
            connection.send(StreamStarted({"framerate": self.camera.rate}, connection.participant_id))
            self._consumers = set() if presence is None else set(presence.consumers)
            old = [consumer for consumer in self._peers if self._offered_at.get(consumer, 0.0) < self._new_since]
            await self._close(old)
            self._offered_at.clear()
        useless = [consumer for consumer, (peer, track) in self._peers.items() if self._is_useless(peer, track)]
        await self._close(useless)
        for consumer in self._consumers - self._peers.keys():
            if now >= self._offered_at.get(consumer, float("-inf")) + OFFER_AGAIN:
                await self._offer(consumer, connection)

    def _is_useless(self, peer: Peer, track: CameraTrack) -> bool:
        return peer.is_useless(self._pace.connect) or track.readyState != "live"

    async def _offer(self, consumer: str, connection: RoomConnection) -> None:
        participant_id = connection.participant_id
        if participant_id is None:
            return
        await self._close([consumer])
        if len(self._peers) >= MAX_PEERS:
            self._last_error = f"offer to {consumer}: this camera has {MAX_PEERS} viewers, the most that it is sent to"
            return
        if not self._rate.take():
            self._last_error = (
                f"offer to {consumer}: it waits, as viewers come faster than {PRODUCER_OFFERS[0]:g} a second"
            )
            return
        self._offers += 1
        self._offered_at[consumer] = time.monotonic()
        peer, track = Peer(self._ice_servers), CameraTrack(self.camera)
        self._peers[consumer] = (peer, track)
        try:
            sdp = await peer.offer(track)
            offer = {"type": "offer", "sdp": sdp, "target_consumer": consumer}
            await self._api.signal(connection.workspace, self.room, participant_id, offer)
        except (BadSignal, TransportError) as error:
            self._last_error = f"offer to {consumer}: {error}"
            await self._close([consumer])

    async def _close(self, consumers: Sequence[str]) -> None:
        gone = [self._peers.pop(consumer) for consumer in consumers if consumer in self._peers]
        for _, track in gone:
            track.stop()
        # A group, as gather would return at the first one when cancelled, and leave the others to nobody.
        async with asyncio.TaskGroup() as group:
            for peer, _ in gone:
                group.create_task(peer.close())


def _of_a_size(signal: ProducerSignal) -> ProducerSignal | None:
    """A signal without what it need not have; None for one that is larger than any peer's."""
    if isinstance(signal, WebrtcIce):
        candidate = trim_candidate(signal.candidate)
        return None if candidate is None else dataclasses.replace(signal, candidate=dict(candidate))
    return None if isinstance(signal, WebrtcAnswer) and len(signal.answer["sdp"]) > MAX_SDP else signal
