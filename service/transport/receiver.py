"""The consumer's side of one camera room: answers offers, shows pictures, asks again when they stay away."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from service.edge.limits import Bucket
from service.errors import TransportError
from service.transport.base import Inbox
from service.transport.candidates import EarlyCandidates, trimmed
from service.transport.connection import RoomConnection
from service.transport.joint_rooms import SessionRoom
from service.transport.messages import Message, ParticipantLeft, WebrtcIce, WebrtcOffer
from service.transport.pace import Pace
from service.transport.peer import MAX_SDP, BadSignal, Peer
from service.transport.rest import RoomsApi
from service.transport.video import Screen

# Offers answered, a second and at once. A robot offers once in OFFER_AGAIN seconds; each costs 10 ms of the event loop
# and a few sockets.
OFFERS = (1.0, 5)
LOOK_EVERY = 0.5  # seconds between looks at whether the peer is of use

Signal = WebrtcOffer | WebrtcIce | ParticipantLeft


class CameraReceiver(SessionRoom):
    """Receives one camera: a ``Listener`` of its room, and the task ``run``.

    Pictures of a peer go on while the room is lost, until the producer's new offer replaces it.
    """

    def __init__(self, camera: str, room: str, api: RoomsApi, inbox: Inbox, pace: Pace, ice_servers: Sequence[str]):
        super().__init__(room, inbox)
        self.camera = camera
        self._api = api
        self._pace = pace
        self._ice_servers = ice_servers
        self._signals: asyncio.Queue[Signal] = asyncio.Queue(maxsize=256)
        self._candidates = EarlyCandidates()
        self._offers = Bucket(*OFFERS)
        self._waiting: WebrtcOffer | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peer: Peer | None = None
        self._producer: str | None = None
        self._screen = Screen(self._show, self._fail)
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
            candidate = trimmed(message.candidate)
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

    def _queue(self, signal: Signal | None) -> None:
        if signal is None or self._signals.full():
            self._counts["signals_dropped"] += 1
        else:
            self._signals.put_nowait(signal)

    def _refuse(self, message: WebrtcOffer, why: str) -> None:
        self._counts["refused_offers"] += 1
        self._complaint = f"offer of {message.from_producer}: {why}"

    async def _handle(self, signal: Signal | None, connection: RoomConnection) -> None:
        if isinstance(signal, WebrtcOffer):
            if self._waiting is not None:
                # No complaint: the newer one is answered, and a connection that works goes on.
                self._counts["offers"] += 1
                self._counts["refused_offers"] += 1
                self._last_error = f"offers of {signal.from_producer} come faster than {OFFERS[0]:g} a second"
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
        peer, screen = Peer(self._ice_servers), Screen(self._show, self._fail)
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

    async def _replace(self, peer: Peer | None, screen: Screen) -> None:
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
            await self._replace(None, Screen(self._show, self._fail))
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
