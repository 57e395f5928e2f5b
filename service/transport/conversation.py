"""What follows from a frame in a room: who is told what, by the rules of its service."""

from dataclasses import replace

from pydantic import ValidationError

from service.transport import messages
from service.transport.address import Kind
from service.transport.bodies import VideoConfig
from service.transport.messages import Json, Message, Role
from service.transport.rooms import CommandRefused, Connection, Effects, Place, Room, RoomTable, Seat, send
from service.transport.wire import WireError

# Types a robotics room knows and does not act on; any other type that it does not handle gets an error back.
_HEARD = frozenset({"joined", "error", "heartbeat_ack", "state_sync", "status_update", "consumer_status"})
_ACTED = frozenset({"joint_update", "heartbeat", "emergency_stop"})
MAX_REASON = 500


def receive(table: RoomTable, connection: Connection, message: Message, now: float) -> Effects:
    """What follows from one message of a connection; nothing when it is in no room."""
    seat = table.seat(connection)
    if seat is None:
        return []
    room = table.rooms.get(seat.place)
    if room is not None:
        room.touched_at = now
    match message:
        case messages.Heartbeat():
            return table.reply(seat, messages.HeartbeatAck())
        case messages.EmergencyStop():
            is_robotics = seat.place.kind is Kind.ROBOTICS
            default = f"Emergency stop from {seat.id}" if is_robotics else "Emergency stop triggered"
            stop = messages.EmergencyStop((message.reason or default)[:MAX_REASON], seat.id)
            return send(table.everybody(room), stop)
    if seat.place.kind is Kind.VIDEO:
        return _tell_others(table, seat, room, message)
    if isinstance(message, messages.JointUpdate):
        return _update_joints(table, seat, room, message)
    return [] if message.type in _HEARD else table.reply(seat, _unknown(message.type))


def refuse(table: RoomTable, connection: Connection, error: WireError) -> Effects:
    """What follows from a frame that is no message: an error where the robotics service answers with one."""
    seat = table.seat(connection)
    if seat is None or seat.place.kind is Kind.VIDEO or error.type is None:
        return []
    if error.type == "joint_update":
        return table.reply(seat, _FAILED) if seat.role is Role.PRODUCER else []
    return [] if error.type in _HEARD | _ACTED else table.reply(seat, _unknown(error.type))


def command(
    table: RoomTable, place: Place, joints: tuple[Json, ...], now: float, claim: str | None = None
) -> tuple[int, Effects]:
    """Joints set over REST: how many changed, and what follows.

    Raises:
        UnknownRoom: there is no such room.
        WireError: the room would hold too many joint names.
        CommandRefused: the room is a session's.
    """
    room = table.get(place)
    room.touched_at = now
    return _let_out(table, room, joints, "api", claim)


def _let_out(
    table: RoomTable, room: Room, joints: tuple[Json, ...], source: str, claim: str | None
) -> tuple[int, Effects]:
    """The one way on which joints leave a room while it is open: how many changed, and what follows.

    In a room of a session nothing is kept or sent but what the session itself sends, and of that nothing that its
    latch and its limits forbid, whatever went wrong before.

    Raises:
        WireError: the room would hold too many joint names.
        CommandRefused: the room is a session's, and this must not leave.
    """
    commander = table.commander(room)
    if commander is not None:
        if not commander.is_own(claim):
            raise commander.stranger()
        refusal = commander.refusal(joints, room.joints)
        if refusal is not None:
            raise refusal
    changed = _change(room, joints, table.limits.joints)
    if not changed:
        return 0, []
    return len(changed), send(table.consumers(room), messages.JointUpdate(changed, source=source))


def _update_joints(table: RoomTable, seat: Seat, room: Room | None, message: messages.JointUpdate) -> Effects:
    if seat.role is not Role.PRODUCER or not message.data:
        return []
    if room is None:
        return table.reply(seat, _FAILED)
    try:
        return _let_out(table, room, message.data, seat.id, seat.claim)[1]
    except WireError:
        return table.reply(seat, _FAILED)
    except CommandRefused as error:
        return table.reply(seat, messages.VideoError(str(error), error.code))


def _change(room: Room, joints: tuple[Json, ...], limit: int) -> tuple[Json, ...]:
    """Keep the new values; returns the joints that differ from before, each as the whole object it came as."""
    names = {joint["name"] for joint in joints} | room.joints.keys()
    if len(names) > limit:
        raise WireError(f"{len(names)} joint names in one room; the limit is {limit}", "joint_update")
    changed = []
    for joint in joints:
        if room.joints.get(joint["name"]) != joint["value"]:
            room.joints[joint["name"]] = joint["value"]
            changed.append(joint)
    return tuple(changed)


def _tell_others(table: RoomTable, seat: Seat, room: Room | None, message: Message) -> Effects:
    match message:
        case messages.StreamStarted() | messages.StreamStopped():
            told = replace(message, participant_id=seat.id, timestamp=None)
        case messages.VideoConfigUpdate():
            if room is not None and seat.role is Role.PRODUCER:
                room.config = _updated(room.config, message.config)
            told = replace(message, source=seat.id, timestamp=None)
        case messages.StatusUpdate():
            told = replace(message, status=message.status or "unknown", timestamp=None)
        case messages.StreamStats():
            told = replace(message, stats={} if message.stats is None else message.stats, timestamp=None)
        case messages.RecoveryTriggered():
            told = replace(message, reason=message.reason or "Recovery triggered", timestamp=None)
        case _:
            return []
    return send(table.others(room, seat), told)


def _updated(config: VideoConfig, update: Json) -> VideoConfig:
    """The settings after a producer's update; an update that does not fit is told to the others but not kept."""
    known = {key: value for key, value in update.items() if key in VideoConfig.model_fields}
    try:
        return VideoConfig.model_validate({**config.model_dump(), **known})
    except ValidationError:
        return config


_FAILED = messages.Error("Failed to process joint update")


def _unknown(kind: str | None) -> messages.Error:
    return messages.Error(f"Unknown message type: {kind}")
