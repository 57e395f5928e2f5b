"""Table of rooms and participants, without I/O: it returns messages to send as effects."""

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from service.errors import ServiceError
from service.transport import protocol
from service.transport.address import Kind
from service.transport.protocol import Join, Json, Message, ParticipantRole, session_of
from service.transport.server.bodies import VideoConfig

Connection = Hashable  # The table only stores connections, and returns them in effects.
# Seconds for which a room keeps its session of another server after the session's producer left.
CLAIM_GRACE = 60.0


class UnknownRoom(LookupError):
    """There is no such room."""


class RoomTaken(ServiceError, status=409):
    """A room of another owner has this id."""


class TooManyRooms(ServiceError, status=429):
    """The table, or the share of one owner, is full."""


class CommandRefused(Exception):
    """A command or a producer is refused for a room of a session; ``docs/robots/safety.md`` lists the codes."""

    def __init__(self, code: str, text: str):
        super().__init__(text)
        self.code = code


class Commander(Protocol):
    """The one session that may command the robot of a room."""

    @property
    def latch(self) -> str | None:
        """Reason of a latched emergency stop, or None."""
        ...

    @property
    def is_moving(self) -> bool:
        """Whether commands other than holds are allowed now."""
        ...

    def is_own(self, claim: str | None) -> bool:
        """Whether the claim is the session's secret."""
        ...

    def refuse_stranger(self) -> CommandRefused:
        """Count a command of another sender, and return its error."""
        ...

    def check_command(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Return why a command of this session is refused, given the last delivered joints; None allows it."""
        ...


class RoomPath(NamedTuple):
    """Service, workspace and id of a room."""

    kind: Kind
    workspace: str
    room: str


@dataclass(frozen=True)
class RoomLimits:
    """Limits of one table: rooms, participants, joint names of a room, and rooms or participants of one owner."""

    rooms: int = 1024
    participants: int = 1024
    joints: int = 1024
    per_owner: int = 896


@dataclass(frozen=True)
class Participant:
    """One participant: its connection, join fields, key name (None without keys) and session secret."""

    connection: Connection
    path: RoomPath
    id: str
    role: ParticipantRole
    key_name: str | None = None
    claim: str | None = field(default=None, repr=False)


@dataclass
class Room:
    """One room of the table; times are monotonic seconds.

    Attributes:
        joints: last value of every joint name since the room was created.
        owner: owner of the room; None without keys.
        claim: secret of the session of another server that owns the room, or None.
        claimed_until: when the claim ends; infinite while the session's producer is present.
        has_foreign_producer: whether the producer joined before the session that would own the room.
    """

    path: RoomPath
    created_at: float
    touched_at: float
    config: VideoConfig = field(default_factory=VideoConfig)
    consumer_limit: int | None = None
    producer: str | None = None
    consumers: list[str] = field(default_factory=list)
    joints: dict[str, float] = field(default_factory=dict)
    owner: str | None = None
    claim: str | None = field(default=None, repr=False)
    claimed_until: float = math.inf
    has_foreign_producer: bool = False


@dataclass(frozen=True)
class Send:
    """Effect: put one message on these connections."""

    to: tuple[Connection, ...]
    message: Message


@dataclass(frozen=True)
class Close:
    """Effect: close these connections after earlier messages are written."""

    to: tuple[Connection, ...]
    reason: str


Effects = list[Send | Close]
ParticipantKey = tuple[RoomPath, ParticipantRole, str]


Authority = Callable[[RoomPath, str | None], Commander | None]


class RemoteCommander:
    """Commander of a room that a session of another server claimed; only its secret is available here."""

    latch = None
    is_moving = True

    def __init__(self, claim: str):
        self._claim = claim

    def is_own(self, claim: str | None) -> bool:
        """Whether the claim is the session's secret."""
        return matches_secret(claim, self._claim)

    def refuse_stranger(self) -> CommandRefused:
        """Return the error for other senders."""
        return CommandRefused("robot_taken", "only the session that this room belongs to may command its robot")

    def check_command(self, joints: Sequence[Json], delivered: Mapping[str, float]) -> CommandRefused | None:
        """Allow every command, because the session's own server checks them."""
        return None


class RoomTable:
    """All rooms of one transport server, of both services."""

    def __init__(
        self,
        limits: RoomLimits | None = None,
        authority: Authority = lambda path, owner: None,
    ):
        """Create an empty table; ``authority`` returns this server's session of a room, by path and owner."""
        self.limits = limits or RoomLimits()
        self._authority = authority
        self.rooms: dict[RoomPath, Room] = {}
        self._participants: dict[Connection, Participant] = {}
        self._by_id: dict[ParticipantKey, Participant] = {}  # Recipients of messages to a participant id.

    # Rooms.

    def get(self, path: RoomPath) -> Room:
        """Return one room; raises UnknownRoom."""
        if path not in self.rooms:
            raise UnknownRoom(f"no {path.kind} room {path.room!r} in workspace {path.workspace!r}")
        return self.rooms[path]

    def create(
        self,
        path: RoomPath,
        now: float,
        config: VideoConfig | None = None,
        consumer_limit: int | None = None,
        owner: str | None = None,
        claim: str | None = None,
    ) -> Room:
        """Create a room, or replace an empty one; an occupied room stays, so that two clients cannot evict each other.

        Raises:
            TooManyRooms: the limit is reached.
            CommandRefused: the room belongs to another session.
        """
        existing = self.rooms.get(path)
        if existing is not None:
            if self.is_occupied(path):
                existing.touched_at = now
                return existing
            self.check_commander(existing, claim)
        else:
            if len(self.rooms) >= self.limits.rooms:
                raise TooManyRooms(f"{len(self.rooms)} rooms exist, the limit; delete some or wait for idle ones to go")
            own = sum(room.owner == owner for room in self.rooms.values())
            if owner is not None and own >= self.limits.per_owner:
                raise TooManyRooms(f"{own} rooms are of this owner, the limit; delete some or wait for idle ones to go")
        room = Room(path, now, now, config or VideoConfig(), consumer_limit, owner=owner)
        if is_output_room(path) and self._authority(path, owner) is None:
            room.claim = claim
            room.claimed_until = time.monotonic() + CLAIM_GRACE
        self.rooms[path] = room
        return room

    def delete(self, path: RoomPath, claim: str | None = None) -> Effects:
        """Delete a room and disconnect its participants.

        Raises:
            UnknownRoom: the room does not exist.
            CommandRefused: the room belongs to another session.
        """
        self.check_commander(self.get(path), claim)
        del self.rooms[path]
        participants = [participant for participant in self._participants.values() if participant.path == path]
        for participant in participants:
            del self._participants[participant.connection]
            del self._by_id[self._key(participant)]
        return [Close(_connections(participants), "room deleted")] if participants else []

    def remove_idle(self, now: float, idle: float) -> list[RoomPath]:
        """Remove empty rooms that were not used for ``idle`` seconds; returns their paths."""
        occupied = {participant.path for participant in self._by_id.values()}
        gone = [path for path, room in self.rooms.items() if now - room.touched_at > idle and path not in occupied]
        for path in gone:
            del self.rooms[path]
        return gone

    def is_occupied(self, path: RoomPath) -> bool:
        """Whether the room has participants."""
        return any(participant.path == path for participant in self._by_id.values())

    def connections(self, kind: Kind) -> int:
        """Count the participants of one service."""
        return sum(participant.path.kind is kind for participant in self._by_id.values())

    # Commanders.

    def commander(self, room: Room) -> Commander | None:
        """Return the session that commands this room's robot; None if a producer joined before the session."""
        if room.path.kind is not Kind.ROBOTICS:
            return None
        commander = None if room.has_foreign_producer else self._authority(room.path, room.owner)
        if commander is None and room.claim is not None and time.monotonic() < room.claimed_until:
            return RemoteCommander(room.claim)
        return commander

    def check_commander(self, room: Room, claim: str | None) -> None:
        """Raise CommandRefused for callers other than the session of this room."""
        commander = self.commander(room)
        if commander is not None and not commander.is_own(claim):
            raise commander.refuse_stranger()

    def is_commanded_by(self, connection: Connection) -> bool:
        """Whether a connection belongs to this server's session that commands the robot of its room."""
        participant = self._participants.get(connection)
        if (
            participant is None
            or participant.role is not ParticipantRole.PRODUCER
            or not is_output_room(participant.path)
        ):
            return False
        commander = self._authority(participant.path, self.rooms[participant.path].owner)
        return commander is not None and commander.is_own(participant.claim)

    # Participants.

    def join(
        self,
        connection: Connection,
        path: RoomPath,
        join: Join,
        now: float,
        key_name: str | None = None,
        is_allowed: Callable[[Room, ParticipantRole], bool] = lambda room, role: True,
        claim: str | None = None,
    ) -> Effects:
        """Accept or refuse the first frame of a connection.

        Args:
            key_name: name of the caller's key.
            is_allowed: whether the caller may have this role in this room.
            claim: secret of the caller's session.
        """
        participant = Participant(connection, path, join.participant_id, join.role, key_name, claim)
        room = self.rooms.get(path)
        if room is None or not is_allowed(room, join.role):
            return _refuse_join(connection, path.kind)
        if join.role is ParticipantRole.PRODUCER and room.producer is None:
            try:
                self.check_commander(room, claim)
            except CommandRefused as error:
                return _refuse_join(connection, path.kind, error)
        if not self._has_space(room, participant):
            return _refuse_join(connection, path.kind)
        if participant.role is ParticipantRole.PRODUCER:
            room.producer = participant.id
            self._begin_commanding(room, claim)
        else:
            room.consumers.append(participant.id)
        room.touched_at = now
        self._participants[connection] = self._by_id[self._key(participant)] = participant
        if path.kind is Kind.VIDEO:
            announcement = protocol.ParticipantJoined(path.room, participant.id, participant.role)
            return [
                Send((connection,), protocol.Joined(path.room, participant.role)),
                *send(self.others(room, participant), announcement),
            ]
        joined = Send((connection,), protocol.Joined(path.room, participant.role, path.workspace))
        if participant.role is ParticipantRole.PRODUCER:
            return [joined]
        commander = self.commander(room)
        # A client may move its robot to a state_sync, so old commands are omitted while the robot must not move.
        known = dict(room.joints) if commander is None or commander.is_moving else {}
        return [Send((connection,), protocol.StateSync(known)), joined, *_latched_stop(connection, room, commander)]

    def _begin_commanding(self, room: Room, claim: str | None) -> None:
        if not is_output_room(room.path):
            return
        is_session = self._authority(room.path, room.owner) is not None
        if is_session or claim is not None:
            # Commands from before the session must not reach participants that join later.
            room.joints.clear()
        room.claim = None if is_session else claim
        room.has_foreign_producer = not is_session
        room.claimed_until = math.inf

    def leave(self, connection: Connection, is_orderly: bool = False) -> Effects:
        """Remove the participant of a closed connection; an orderly close of a session also releases its room."""
        participant = self._participants.pop(connection, None)
        if participant is None:
            return []
        effects = self._remove_participant(participant)
        room = self.rooms.get(participant.path)
        if is_orderly and room is not None and participant.role is ParticipantRole.PRODUCER and room.producer is None:
            room.claim = None
        return effects

    def get_participant(self, connection: Connection) -> Participant | None:
        """Return the participant of a connection; None before its join and after its removal."""
        return self._participants.get(connection)

    def find_sender(self, path: RoomPath, participant_id: str) -> Participant | None:
        """Return the producer or consumer of a room with the id that a REST caller sent, or None."""
        room = self.rooms.get(path)
        if room is None:
            return None
        if room.producer == participant_id:
            return self.find(path, ParticipantRole.PRODUCER, participant_id)
        return self.find(path, ParticipantRole.CONSUMER, participant_id) if participant_id in room.consumers else None

    def find(self, path: RoomPath, role: ParticipantRole, participant_id: str) -> Participant | None:
        """Return the recipient of messages to this id."""
        return self._by_id.get(self._key(Participant(None, path, participant_id, role)))

    def _key(self, participant: Participant) -> ParticipantKey:
        return participant.path, participant.role, participant.id

    def _has_space(self, room: Room, participant: Participant) -> bool:
        if len(self._participants) >= self.limits.participants:
            return False
        if room.owner is not None:
            rooms = (self.rooms.get(each.path) for each in self._participants.values())
            if sum(one is not None and one.owner == room.owner for one in rooms) >= self.limits.per_owner:
                return False
        if participant.role is ParticipantRole.PRODUCER:
            return room.producer is None
        limit = room.consumer_limit
        return participant.id not in room.consumers and (limit is None or len(room.consumers) < limit)

    def _remove_participant(self, participant: Participant) -> Effects:
        """Remove a participant from its room, and return the notices to the others."""
        if self._by_id.get(self._key(participant)) is not participant:
            return []
        del self._by_id[self._key(participant)]
        room = self.rooms.get(participant.path)
        if room is None:
            return []
        if participant.role is ParticipantRole.PRODUCER and room.producer == participant.id:
            room.producer = None
            room.has_foreign_producer = False
            room.claimed_until = time.monotonic() + CLAIM_GRACE
        elif participant.role is ParticipantRole.CONSUMER and participant.id in room.consumers:
            room.consumers.remove(participant.id)
        else:
            return []
        if room.path.kind is Kind.ROBOTICS:
            return []
        left = protocol.ParticipantLeft(room.path.room, participant.id, participant.role)
        return send(self.others(room, participant), left)

    def consumers(self, room: Room | None) -> list[Participant]:
        """Return the consumers of a room in the order of their joins; none without a room."""
        if room is None:
            return []
        consumers = (self.find(room.path, ParticipantRole.CONSUMER, name) for name in room.consumers)
        return [participant for participant in consumers if participant is not None]

    def participants(self, room: Room | None) -> list[Participant]:
        """Return the producer, then the consumers."""
        producer = (
            self.find(room.path, ParticipantRole.PRODUCER, room.producer)
            if room and room.producer is not None
            else None
        )
        return [*([] if producer is None else [producer]), *self.consumers(room)]

    def others(self, room: Room | None, excluded: Participant) -> list[Participant]:
        """Return the other participants of a room."""
        return [one for one in self.participants(room) if (one.role, one.id) != (excluded.role, excluded.id)]


def send(participants: Iterable[Participant], message: Message) -> Effects:
    """Send one message to these participants; no effect when there are none."""
    to = _connections(participants)
    return [Send(to, message)] if to else []


def matches_secret(given: str | None, secret: str) -> bool:
    """Compare secrets in constant time."""
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def is_output_room(path: RoomPath) -> bool:
    """Whether this is an output room, in which a session commands a robot."""
    return path.kind is Kind.ROBOTICS and session_of(path.room) is not None


def _latched_stop(connection: Connection, room: Room, commander: Commander | None) -> Effects:
    """Return the effects that announce a latched emergency stop to a new connection."""
    if commander is None or commander.latch is None:
        return []
    stop = protocol.EmergencyStopMessage(commander.latch, room.producer or session_of(room.path.room))
    return [Send((connection,), stop)]


def _connections(participants: Iterable[Participant]) -> tuple[Connection, ...]:
    return tuple(participant.connection for participant in participants)


def _refuse_join(connection: Connection, kind: Kind, error: CommandRefused | None = None) -> Effects:
    message: Message = protocol.VideoError("Cannot join room")
    if error is not None:
        message = protocol.VideoError(f"Cannot join room: {error}", error.code)
    elif kind is Kind.ROBOTICS:
        message = protocol.JoinRefusal()
    return [Send((connection,), message), Close((connection,), "join refused")]


class Cleanup:
    """Removes empty rooms that were not used for ``idle`` seconds, every ``interval`` seconds."""

    def __init__(self, table: RoomTable, idle: float, interval: float):
        self.table = table
        self.idle = idle
        self.interval = interval
        self.is_running = False

    async def run(self) -> None:
        """Remove idle rooms at every interval, until cancelled."""
        self.is_running = True
        try:
            while True:
                await asyncio.sleep(self.interval)
                self.table.remove_idle(time.monotonic(), self.idle)
        finally:
            self.is_running = False
