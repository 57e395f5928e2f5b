"""The producer's side of one camera room: a peer connection for each consumer, offered and offered again."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from service.edge.limits import Bucket
from service.errors import TransportError
from service.transport.camera import Camera, CameraTrack
from service.transport.candidates import EarlyCandidates, trimmed
from service.transport.connection import RoomConnection
from service.transport.messages import (
    EmergencyStop,
    Message,
    ParticipantJoined,
    ParticipantLeft,
    Role,
    StreamStarted,
    WebrtcAnswer,
    WebrtcIce,
)
from service.transport.pace import Pace
from service.transport.peer import MAX_SDP, BadSignal, Peer
from service.transport.rest import Presence, RoomsApi

OFFER_AGAIN = 2.0  # the least seconds between two offers to one consumer that did not lead to a connection
MAX_PEERS = 8  # that one camera is sent to; each has an encoder of its own, 5 ms a picture of 640x480
OFFERS = (2.0, 16)  # to all consumers together, a second and at once; those that wait are offered to later

Signal = ParticipantJoined | ParticipantLeft | WebrtcAnswer | WebrtcIce


class CameraSender:
    """Sends one camera: a ``Listener`` of its room, and the task ``run``."""

    def __init__(
        self,
        camera: Camera,
        room: str,
        api: RoomsApi,
        pace: Pace,
        ice_servers: Sequence[str],
        stopped: Callable[[EmergencyStop], None],
    ):
        self.camera = camera
        self.room = room
        self._api = api
        self._pace = pace
        self._ice_servers = ice_servers
        self._stopped = stopped
        self._signals: asyncio.Queue[Signal] = asyncio.Queue(maxsize=256)
        self._candidates = EarlyCandidates()
        self._peers: dict[str, tuple[Peer, CameraTrack]] = {}
        self._consumers: set[str] = set()
        self._offered_at: dict[str, float] = {}
        self._rate = Bucket(*OFFERS)
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
        if isinstance(message, EmergencyStop):
            self._stopped(message)
        elif isinstance(message, Signal):
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

    async def _handle(self, signal: Signal, connection: RoomConnection) -> None:
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
            self._last_error = f"offer to {consumer}: it waits, as viewers come faster than {OFFERS[0]:g} a second"
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


def _of_a_size(signal: Signal) -> Signal | None:
    """A signal without what it need not have; None for one that is larger than any peer's."""
    if isinstance(signal, WebrtcIce):
        candidate = trimmed(signal.candidate)
        return None if candidate is None else dataclasses.replace(signal, candidate=dict(candidate))
    return None if isinstance(signal, WebrtcAnswer) and len(signal.answer["sdp"]) > MAX_SDP else signal
