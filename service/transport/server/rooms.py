"""Table of rooms and participants; pure, returns effects.

A connection is whatever its owner uses to reach one socket; the table only hands it back inside effects.
``is_odd`` reproduces what the reference server does by accident: participant ids are global keys, a refused
duplicate or a late close evicts whoever holds the id now, making a room again replaces it under its sockets,
deleting it tells nobody, and ``max_consumers`` is never enforced. Without it each of these is safe.
"""

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from service.transport import protocol
from service.transport.address import Kind
from service.transport.protocol import Join, Json, Message, Role, session_of
from service.transport.server.bodies import VideoConfig

Connection = Hashable
# Seconds for which a room stays with the session of another server whose producer left it without deleting it.
CLAIM_KEPT = 60.0


class UnknownRoom(LookupError):
    """There is no such room."""


class RoomTaken(Exception):
    """There is a room of somebody else's there."""


class TooManyRooms(Exception):
    """The table is full; the message says how full."""


class CommandRefused(Exception):
    """A command, or a producer, that a room does not take, because the room is a session's.

    Attributes:
        code: stable, as ``docs/robots/safety.md`` lists.
    """

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


class Commander(Protocol):
    """The one session that may command the robot of a room."""

    @property
    def latch(self) -> str | None:
        """The text of an emergency stop that nobody has reset, or None."""
        ...

    @property
    def is_moving(self) -> bool:
        """Whether commands other than holds may leave now."""
        ...

    def is_own(self, claim: str | None) -> bool:
        """Whether the session itself sent this."""
        ...

    def stranger(self) -> CommandRefused:
        """What everybody else is told; counted."""
        ...

    def refusal(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Why this command of the session itself must not leave, or None; what is refused is counted and logged.

        Args:
            delivered: joint to what left last.
        """
        ...


class Place(NamedTuple):
    """Where a room is; rooms of the two services never meet, even with equal ids."""

    kind: Kind
    workspace: str
    room: str


@dataclass(frozen=True)
class Limits:
    """How much one table holds before it refuses: rooms, participants in all rooms, joint names per room.

    Attributes:
        of_one: rooms of one owner, and participants in them, so that nobody takes the last ones from others.
    """

    rooms: int = 1024
    participants: int = 1024
    joints: int = 1024
    of_one: int = 896


@dataclass(frozen=True)
class Seat:
    """One participant: its connection, and what it said in its join.

    Attributes:
        by: name of the key that it came with; None where there are no keys.
        claim: the secret of the session that it came with, or None.
    """

    connection: Connection
    place: Place
    id: str
    role: Role
    by: str | None = None
    claim: str | None = field(default=None, repr=False)


@dataclass
class Room:
    """One room. Times are monotonic seconds; ``joints`` hold the last value of every name, for ever.

    Attributes:
        owner: whose it is; None where there are no keys.
        claim: secret of the session of another server whose room this is, or None.
        claimed_until: when that ends; never while its producer is there.
        is_foreign: whether its producer was there before the session that would own it.
    """

    place: Place
    made_at: float
    touched_at: float
    config: VideoConfig = field(default_factory=VideoConfig)
    consumer_limit: int | None = None
    producer: str | None = None
    consumers: list[str] = field(default_factory=list)
    joints: dict[str, float] = field(default_factory=dict)
    owner: str | None = None
    claim: str | None = field(default=None, repr=False)
    claimed_until: float = math.inf
    is_foreign: bool = False


@dataclass(frozen=True)
class Send:
    """Put one message on these connections."""

    to: tuple[Connection, ...]
    message: Message


@dataclass(frozen=True)
class Close:
    """Close these connections once what was sent before is written."""

    to: tuple[Connection, ...]
    reason: str


Effects = list[Send | Close]


Authority = Callable[[Place, str | None], Commander | None]


class Claimed:
    """The commander of a room that a session of another server claimed: who it is is known, how it stands is not."""

    latch = None
    is_moving = True

    def __init__(self, claim: str):
        self._claim = claim

    def is_own(self, claim: str | None) -> bool:
        """Whether it is the same secret."""
        return is_same(claim, self._claim)

    def stranger(self) -> CommandRefused:
        """Only the session that has it."""
        return CommandRefused("robot_taken", "only the session that this room belongs to may command its robot")

    def refusal(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Its own server judges what it sends."""
        return None


class RoomTable:
    """All rooms of one transport server, of both services."""

    def __init__(
        self,
        limits: Limits | None = None,
        is_odd: bool = False,
        authority: Authority = lambda place, owner: None,
    ):
        """``authority`` knows which session of this server a room belongs to, by its place and its owner."""
        self.limits = limits or Limits()
        self.is_odd = is_odd
        self._authority = authority
        self.rooms: dict[Place, Room] = {}
        self._seats: dict[Connection, Seat] = {}
        self._book: dict[Hashable, Seat] = {}  # who answers to a participant id

    # Rooms.

    def get(self, place: Place) -> Room:
        """One room.

        Raises:
            UnknownRoom: there is none there.
        """
        if place not in self.rooms:
            raise UnknownRoom(f"no {place.kind} room {place.room!r} in workspace {place.workspace!r}")
        return self.rooms[place]

    def create(
        self,
        place: Place,
        now: float,
        config: VideoConfig | None = None,
        consumer_limit: int | None = None,
        owner: str | None = None,
        claim: str | None = None,
    ) -> Room:
        """Make a room. One that exists is made anew when it is empty and left as it is when somebody is in it,
        so that two clients which both make sure of their room cannot throw each other out.

        Raises:
            TooManyRooms: the limit is reached.
            CommandRefused: it is a session's, and this is not the session.
        """
        known = self.rooms.get(place)
        if known is not None and (self.is_odd or not self.is_occupied(place)):
            self.check_commander(known, claim)
        if known is None and len(self.rooms) >= self.limits.rooms:
            raise TooManyRooms(f"{len(self.rooms)} rooms exist, the limit; delete some or wait for idle ones to go")
        if known is not None and not self.is_odd and self.is_occupied(place):
            known.touched_at = now
            return known
        if known is None and owner is not None:
            own = sum(room.owner == owner for room in self.rooms.values())
            if own >= self.limits.of_one:
                raise TooManyRooms(f"{own} rooms are of this owner, the limit; delete some or wait for idle ones to go")
        room = Room(place, now, now, config or VideoConfig(), consumer_limit, owner=owner)
        if is_claimable(place) and self._authority(place, owner) is None:
            room.claim = claim
            room.claimed_until = time.monotonic() + CLAIM_KEPT
        self.rooms[place] = room
        return room

    def delete(self, place: Place, claim: str | None = None) -> Effects:
        """Remove a room; everybody in it is shown out.

        Raises:
            UnknownRoom: there is none there.
            CommandRefused: it is a session's, and this is not the session.
        """
        self.check_commander(self.get(place), claim)
        del self.rooms[place]
        if self.is_odd:
            return []
        seats = [seat for seat in self._seats.values() if seat.place == place]
        for seat in seats:
            del self._seats[seat.connection]
            del self._book[self._key(seat)]
        return [Close(_connections(seats), "room deleted")] if seats else []

    def clean(self, now: float, idle: float, kind: Kind | None = None) -> list[Place]:
        """Remove the rooms (of one service, or of both) that nobody is in and nothing touched for ``idle`` seconds."""
        occupied = {seat.place for seat in self._book.values()}
        gone = [
            place
            for place, room in self.rooms.items()
            if kind in (None, place.kind) and now - room.touched_at > idle and place not in occupied
        ]
        for place in gone:
            del self.rooms[place]
        return gone

    def is_occupied(self, place: Place) -> bool:
        """Whether anybody is connected to this room."""
        return any(seat.place == place for seat in self._book.values())

    def connections(self, kind: Kind) -> int:
        """How many participants one service has."""
        return sum(seat.place.kind is kind for seat in self._book.values())

    # Who commands.

    def commander(self, room: Room) -> Commander | None:
        """The session that this room's robot takes its commands from; None of a room without one.

        A producer that was there before the session came keeps the room: the session is refused, as the robot is taken.
        """
        if room.place.kind is not Kind.ROBOTICS:
            return None
        found = None if room.is_foreign else self._authority(room.place, room.owner)
        if found is None and room.claim is not None and time.monotonic() < room.claimed_until:
            return Claimed(room.claim)
        return found

    def check_commander(self, room: Room, claim: str | None) -> None:
        """Refuse whoever is not the session of this room.

        Raises:
            CommandRefused: it is another one.
        """
        commander = self.commander(room)
        if commander is not None and not commander.is_own(claim):
            raise commander.stranger()

    def is_commanded_by(self, connection: Connection) -> bool:
        """Whether this is the session of this server that the robot of its room takes its commands from."""
        seat = self._seats.get(connection)
        if seat is None or seat.role is not Role.PRODUCER or not is_claimable(seat.place):
            return False
        found = self._authority(seat.place, self.rooms[seat.place].owner)
        return found is not None and found.is_own(seat.claim)

    # Participants.

    def join(
        self,
        connection: Connection,
        place: Place,
        join: Join,
        now: float,
        by: str | None = None,
        may: Callable[[Room, Role], bool] = lambda room, role: True,
        claim: str | None = None,
    ) -> Effects:
        """Answer the first frame of a connection: in, or refused and closed.

        Args:
            by: name of the key that it came with.
            may: whether it may have this role in this room.
            claim: the secret of the session that it came with.
        """
        seat = Seat(connection, place, join.participant_id, join.role, by, claim)
        room = self.rooms.get(place)
        if room is not None and seat.role is Role.PRODUCER and room.producer is None and may(room, join.role):
            try:
                self.check_commander(room, claim)
            except CommandRefused as error:
                refused = protocol.VideoError(f"Cannot join room: {error}", error.code)
                return [Send((connection,), refused), Close((connection,), "join refused")]
        if room is None or not may(room, join.role) or not self._has_space(room, seat):
            return [
                Send((connection,), _refusal(place.kind)),
                *(self._vacate(seat) if self.is_odd else []),
                Close((connection,), "join refused"),
            ]
        if seat.role is Role.PRODUCER:
            room.producer = seat.id
            self._begin_commanding(room, claim)
        else:
            room.consumers.append(seat.id)
        room.touched_at = now
        self._seats[connection] = self._book[self._key(seat)] = seat
        if place.kind is Kind.VIDEO:
            came = protocol.ParticipantJoined(place.room, seat.id, seat.role)
            return [
                Send((connection,), protocol.Joined(place.room, seat.role)),
                *send(self.others(room, seat), came),
            ]
        joined = Send((connection,), protocol.Joined(place.room, seat.role, place.workspace))
        if seat.role is Role.PRODUCER:
            return [joined]
        commander = self.commander(room)
        # What was commanded before is no command for now: a client may move its robot by a state_sync too.
        known = dict(room.joints) if commander is None or commander.is_moving else {}
        return [Send((connection,), protocol.StateSync(known)), joined, *_latched(connection, room, commander)]

    def _begin_commanding(self, room: Room, claim: str | None) -> None:
        if not is_claimable(room.place):
            return
        is_session = self._authority(room.place, room.owner) is not None
        if is_session or claim is not None:
            # Nothing of whoever commanded before the session is left for whoever joins.
            room.joints.clear()
        room.claim = None if is_session else claim
        room.is_foreign = not is_session
        room.claimed_until = math.inf

    def leave(self, connection: Connection, is_orderly: bool = False) -> Effects:
        """The connection is gone, for whatever reason; of one that never joined nothing follows.

        Args:
            is_orderly: whether it took its leave: a session that did gives its room back.
        """
        seat = self._seats.pop(connection, None)
        if seat is None:
            return []
        effects = self._vacate(seat)
        room = self.rooms.get(seat.place)
        if is_orderly and room is not None and seat.role is Role.PRODUCER and room.producer is None:
            room.claim = None
        return effects

    def seat(self, connection: Connection) -> Seat | None:
        """Where this connection sits; None before its join and after it was shown out."""
        return self._seats.get(connection)

    def claimed(self, place: Place, participant_id: str) -> Seat | None:
        """Who a REST caller claims to be: the producer or a consumer of this room, or nobody."""
        room = self.rooms.get(place)
        if room is None:
            return None
        if room.producer == participant_id:
            return self.find(place, Role.PRODUCER, participant_id)
        return self.find(place, Role.CONSUMER, participant_id) if participant_id in room.consumers else None

    def find(self, place: Place, role: Role, participant_id: str) -> Seat | None:
        """Who a message for this id goes to."""
        return self._book.get(self._key(Seat(None, place, participant_id, role)))

    # Who is who.

    def _key(self, seat: Seat) -> Hashable:
        return (seat.place.kind, seat.id) if self.is_odd else (seat.place, seat.role, seat.id)

    def _has_space(self, room: Room, seat: Seat) -> bool:
        if len(self._seats) >= self.limits.participants:
            return False
        if room.owner is not None:
            taken = (self.rooms.get(there.place) for there in self._seats.values())
            if sum(one is not None and one.owner == room.owner for one in taken) >= self.limits.of_one:
                return False
        if seat.role is Role.PRODUCER:
            return room.producer is None
        limit = None if self.is_odd else room.consumer_limit
        return seat.id not in room.consumers and (limit is None or len(room.consumers) < limit)

    def _vacate(self, seat: Seat) -> Effects:
        """Free the place of whoever answers to this seat's id: the seat itself, or, being odd, whoever does now."""
        holder = self._book.get(self._key(seat))
        if holder is None or not (self.is_odd or holder is seat):
            return []
        del self._book[self._key(seat)]
        room = self.rooms.get(holder.place)
        if room is None:
            return []
        if holder.role is Role.PRODUCER and room.producer == holder.id:
            room.producer = None
            room.is_foreign = False
            room.claimed_until = time.monotonic() + CLAIM_KEPT
        elif holder.role is Role.CONSUMER and holder.id in room.consumers:
            room.consumers.remove(holder.id)
        else:
            return []
        if room.place.kind is Kind.ROBOTICS:
            return []
        left = protocol.ParticipantLeft(room.place.room, holder.id, holder.role)
        return send(self.others(room, holder), left)

    def consumers(self, room: Room | None) -> list[Seat]:
        """The consumers of a room, in the order they came; of no room, nobody."""
        if room is None:
            return []
        found = (self.find(room.place, Role.CONSUMER, name) for name in room.consumers)
        return [seat for seat in found if seat is not None]

    def everybody(self, room: Room | None) -> list[Seat]:
        """The producer, then the consumers."""
        producer = self.find(room.place, Role.PRODUCER, room.producer) if room and room.producer is not None else None
        return [*([] if producer is None else [producer]), *self.consumers(room)]

    def others(self, room: Room | None, but: Seat) -> list[Seat]:
        """Everybody but one."""
        return [seat for seat in self.everybody(room) if (seat.role, seat.id) != (but.role, but.id)]

    def reply(self, seat: Seat, message: Message) -> Effects:
        """A message to the sender; being odd, to whoever answers to the sender's id now."""
        to = self._book.get(self._key(seat)) if self.is_odd else seat
        return [] if to is None else [Send((to.connection,), message)]


def send(seats: Iterable[Seat], message: Message) -> Effects:
    """One message to these participants; nothing when there are none."""
    to = _connections(seats)
    return [Send(to, message)] if to else []


def is_same(given: str | None, secret: str) -> bool:
    """Whether a secret was given, told in the same time however much of it is right."""
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def is_claimable(place: Place) -> bool:
    """Whether sessions command robots in such a room: an output room of some session."""
    return place.kind is Kind.ROBOTICS and session_of(place.room) is not None


def _latched(connection: Connection, room: Room, commander: Commander | None) -> Effects:
    """What whoever joins during an emergency stop is told, as it was not there when that came."""
    if commander is None or commander.latch is None:
        return []
    stop = protocol.EmergencyStop(commander.latch, room.producer or session_of(room.place.room))
    return [Send((connection,), stop)]


def _connections(seats: Iterable[Seat]) -> tuple[Connection, ...]:
    return tuple(seat.connection for seat in seats)


def _refusal(kind: Kind) -> Message:
    return protocol.JoinRefused() if kind is Kind.ROBOTICS else protocol.VideoError("Cannot join room")


class Cleanup:
    """Removes rooms that are empty and were not touched for ``idle`` seconds; ``run`` does so every ``interval``."""

    def __init__(
        self,
        table: RoomTable,
        idle: float = 3600.0,
        interval: float = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.table = table
        self.idle = idle
        self.interval = interval
        self.is_running = False
        self._clock = clock

    def clean(self, kind: Kind | None = None) -> list[Place]:
        """Remove what is idle now, of one service or of both."""
        return self.table.clean(self._clock(), self.idle, kind)

    async def run(self) -> None:
        """Clean for ever; ends by being cancelled."""
        self.is_running = True
        try:
            while True:
                await asyncio.sleep(self.interval)
                self.clean()
        finally:
            self.is_running = False
