"""A room's connection that is made again whenever it is lost."""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from service.errors import TransportError
from service.transport.address import Kind
from service.transport.membership import JoinRefused, Membership
from service.transport.messages import Error, Message, Role, VideoError
from service.transport.names import participant
from service.transport.pace import Pace
from service.transport.rest import Presence, RoomsApi

log = logging.getLogger(__name__)

Present = Callable[[Presence], Awaitable[None]]


class Listener(Protocol):
    """Who is told what happens in one room; synchronous, quick, on the event loop."""

    def joined(self, participant_id: str) -> None:
        """We are in the room, under this fresh id."""
        ...

    def received(self, message: Message, seen_at: float) -> None:
        """A message came; ``seen_at`` is monotonic."""
        ...

    def lost(self, reason: str) -> None:
        """We are out of the room; it is being joined again."""
        ...


def retry_delay(attempt: int, pace: Pace) -> float:
    """Seconds before attempt 0, 1, 2...: doubling, with full jitter so that many clients do not come at once."""
    return random.uniform(0, min(pace.retry_longest, pace.retry_first * 2 ** min(attempt, 32)))


class RoomConnection:
    """Joins one room, and joins it again, with a fresh participant id, each time the membership is lost.

    ``open`` joins the first time and raises; ``run`` keeps the connection until cancelled; then comes ``close``.

    Args:
        who: what our participant ids begin with.
        make: makes the room when the server does not know it (any more); None for a room of somebody else.
        present: told who is in the room, right after each join and with each heartbeat.
        refused: told of each frame that is no message of this wire.
    """

    def __init__(
        self,
        api: RoomsApi,
        kind: Kind,
        workspace: str,
        room: str,
        *,
        who: str,
        role: Role,
        listener: Listener,
        pace: Pace,
        make: Callable[[], Awaitable[None]] | None = None,
        present: Present | None = None,
        refused: Callable[[], None] = lambda: None,
    ):
        self.kind = kind
        self.workspace = workspace
        self.room = room
        self.presence: Presence | None = None
        self._api = api
        self._who = who
        self._role = role
        self._listener = listener
        self._pace = pace
        self._make = make
        self._present = present
        self._refused = refused
        self._membership: Membership | None = None
        self._totals: dict[str, int] = dict.fromkeys(("sent", "refused", "expired", "received", "malformed"), 0)
        self._reconnects = 0
        self._last_error: str | None = None

    @property
    def participant_id(self) -> str | None:
        """Our id in the room now; None while we are out of it."""
        return None if self._membership is None else self._membership.participant_id

    def send(self, message: Message, within: float = math.inf) -> bool:
        """Hand one message to the socket without waiting; False when it was not taken. See `Membership.send`."""
        if self._membership is None:
            self._totals["refused"] += 1
            return False
        return self._membership.send(message, within)

    def rejoin(self, reason: str) -> None:
        """Leave and join again under a new id; in a video room this makes the producer offer again."""
        if self._membership is not None:
            self._membership.drop(reason)

    async def open(self) -> None:
        """Join.

        Raises:
            TransportError: it did not work.
        """
        self._membership = await self._join()
        self._listener.joined(self._membership.participant_id)

    async def run(self) -> None:
        """Deliver what comes, and join again when the room is lost, until cancelled."""
        attempt = 0
        while True:
            if self._membership is not None:
                reason = await self._membership.serve(self._received, self._check, self._refused)
                attempt = 0 if self._membership.rtt is not None else attempt
                await self._forget(reason)
            await asyncio.sleep(retry_delay(attempt, self._pace))
            attempt += 1
            try:
                await self.open()
                self._reconnects += 1
            except TransportError as error:
                self._last_error = str(error)

    async def close(self) -> None:
        """Leave the room, when we are in it."""
        membership, self._membership = self._membership, None
        if membership is not None:
            await membership.leave()

    def health(self) -> Mapping[str, object]:
        """Plain figures for a status page."""
        now = self._membership
        counts = {name: total + (getattr(now, name) if now else 0) for name, total in self._totals.items()}
        return {
            "connected": now is not None,
            "participant_id": self.participant_id,
            "producer": None if self.presence is None else self.presence.producer,
            "reconnects": self._reconnects,
            "heartbeat_ms": None if now is None or now.rtt is None else round(now.rtt * 1e3, 2),
            "last_error": self._last_error,
            **counts,
        }

    async def _join(self) -> Membership:
        try:
            return await self._join_once()
        except JoinRefused:
            if self._make is None:
                raise
            await self._make()
            return await self._join_once()

    async def _join_once(self) -> Membership:
        return await Membership.join(
            self._api,
            self.kind,
            self.workspace,
            self.room,
            participant(self._who, self._role),
            self._role,
            self._pace,
        )

    async def _forget(self, reason: str) -> None:
        lost = self._membership
        assert lost is not None
        self._membership = None
        self._last_error = reason
        for name in self._totals:
            self._totals[name] += getattr(lost, name)
        log.warning("room %s lost: %s", self.room, reason)
        self._listener.lost(reason)
        await lost.leave(at_once=True)

    def _received(self, message: Message, seen_at: float) -> None:
        if isinstance(message, Error | VideoError):
            self._last_error = f"the server says {message.message!r}"
        self._listener.received(message, seen_at)

    async def _check(self) -> str | None:
        """Look at who is in the room: a server that lost or replaced it leaves our socket open and says nothing."""
        assert self._membership is not None
        try:
            presence = await self._api.look(self.kind, self.workspace, self.room)
            if presence is not None and self._membership.participant_id in presence:
                self.presence = presence
                if self._present is not None:
                    await self._present(presence)
                return None
        except TransportError as error:
            # The socket and its heartbeat decide whether the link lives; looking is only a second opinion.
            self._last_error = str(error)
            return None
        if presence is None:
            return "the server no longer knows the room"
        return "the server no longer lists us in the room"
