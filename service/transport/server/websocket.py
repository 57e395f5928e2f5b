"""WebSocket of one participant: room rules, signalling, bounded outbox."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from socket import IPPROTO_TCP, TCP_NODELAY

from pydantic import ValidationError
from sanic import Request
from sanic.exceptions import WebsocketClosed
from sanic.server.websockets.impl import WebsocketImplProtocol
from websockets.protocol import State

from service.auth.caller import ANYBODY, Caller, Role, caller_of
from service.http.fair_queue import FairQueue
from service.http.protocol import DeadlineProtocol
from service.transport import protocol
from service.transport.address import Kind
from service.transport.client.room_keys import CLAIM_HEADER
from service.transport.protocol import Json, Message, ParticipantRole, WireError
from service.transport.server.bodies import VideoConfig
from service.transport.server.rooms import (
    CommandRefused,
    Connection,
    Effects,
    Participant,
    Room,
    RoomPath,
    RoomTable,
    Send,
    send,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutboxLimits:
    """Limits on the frames and characters (``size``) that wait for a peer, and on seconds to write a frame or close."""

    messages: int = 256
    size: int = 4 << 20
    seconds: float = 10.0


class WriteQueue:
    """Queue of sockets with data to write, in slices of ``SLICE`` seconds, for at most half of the event loop's time.

    Sockets take turns, so that a message to a thousand participants does not delay robots.
    """

    SLICE = 0.001

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._ready: deque[Outbox | asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def add(self, outbox: "Outbox") -> None:
        """Write the frames of this outbox in its turn."""
        self._ready.append(outbox)
        self._schedule()

    async def wait_written(self) -> None:
        """Wait until all earlier frames are written, so that a broadcast delays only its sender."""
        if self._ready:
            written = asyncio.get_running_loop().create_future()
            self._ready.append(written)
            await written

    def _schedule(self, pause: float = 0.0) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(pause, self._write)

    def _write(self) -> None:
        self._is_scheduled = False
        began = now = self._clock()
        while self._ready and now - began < self.SLICE:
            first = self._ready.popleft()
            if isinstance(first, Outbox):
                first.write_waiting()
            elif not first.done():
                first.set_result(None)
            now = self._clock()
        FairQueue.of_running_loop().charge_turn(now - began)
        if self._ready:
            self._schedule(now - began)


class Outbox:
    """Writing half of one socket. ``put`` and ``close`` never wait; ``run`` is the task that writes to a slow peer."""

    def __init__(self, socket: WebsocketImplProtocol, limits: OutboxLimits, queue: WriteQueue):
        self._socket = socket
        self._limits = limits
        self._queue = queue
        self._is_queued = False
        self._waiting: deque[str] = deque()
        self._size = 0
        self._wake = asyncio.Event()
        self._close_reason: str | None = None
        self._is_writing = False
        self.is_aborted = False

    def put(self, text: str, is_urgent: bool = True) -> None:
        """Write a frame now if it is urgent and first, else queue it; cut a socket that exceeds its limits."""
        if self.is_aborted or self._close_reason is not None:
            return
        if is_urgent and not self._waiting and self._write_now(text):
            return
        if len(self._waiting) >= self._limits.messages or self._size + len(text) > self._limits.size:
            self.abort(f"{len(self._waiting)} frames, {self._size} characters unread")
            return
        self._waiting.append(text)
        self._size += len(text)
        if not self._is_queued and not self._is_writing:
            self._is_queued = True
            self._queue.add(self)

    def write_waiting(self) -> None:
        """Write the waiting frames; ``run`` writes the rest if the peer reads slowly."""
        self._is_queued = False
        while self._waiting and self._write_now(self._waiting[0]):
            self._size -= len(self._waiting.popleft())
        if self._waiting or self._close_reason is not None:
            self._wake.set()

    def _write_now(self, text: str) -> bool:
        """Write a frame now if no other frame is queued, which is ten times as fast as through ``run``."""
        connection = None if self._socket.io_proto is None else self._socket.io_proto.transport
        if (
            self._is_writing
            or connection is None
            or connection.is_closing()
            or connection.get_write_buffer_size()
            or self._socket.ws_proto.state is not State.OPEN
        ):
            return False
        self._socket.ws_proto.send_text(text.encode())
        for data in self._socket.ws_proto.data_to_send():
            connection.write(data)
        return True

    def close(self, reason: str) -> None:
        """Close the socket after the queued frames."""
        if self._close_reason is None:
            self._close_reason = reason
            if not self._is_queued:
                self._wake.set()

    def abort(self, reason: str) -> None:
        """Drop the connection and the waiting frames."""
        if self.is_aborted:
            return
        self.is_aborted = True
        self._waiting.clear()
        self._wake.set()
        log.warning("a participant's socket is cut: %s", reason)
        if self._socket.io_proto is not None and self._socket.io_proto.transport is not None:
            self._socket.io_proto.transport.abort()

    async def run(self) -> None:
        """Write queued frames until the socket is closed or cut."""
        while not self.is_aborted:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._drain()
            except (TimeoutError, WebsocketClosed, ConnectionError) as error:
                self.abort(f"a frame could not be written: {type(error).__name__}")
                return
            if self._close_reason is not None:
                await self._finish(self._close_reason)
                return

    async def _drain(self) -> None:
        while self._waiting:
            text = self._waiting.popleft()
            self._size -= len(text)
            self._is_writing = True
            try:
                async with asyncio.timeout(self._limits.seconds):
                    await self._socket.send(text)
            finally:
                self._is_writing = False

    async def _finish(self, reason: str) -> None:
        try:
            async with asyncio.timeout(self._limits.seconds):
                await self._socket.close(1000, reason)
                # The reader ends when the peer has closed, and cancels this task.
                await self._socket.wait_for_connection_lost()
        except (TimeoutError, WebsocketClosed, ConnectionError):
            self.abort(f"{reason}, and the peer did not close")


# Types that a robotics room ignores; other types that it does not handle are answered with an error.
_IGNORED_TYPES = frozenset({"joined", "error", "heartbeat_ack", "state_sync", "status_update", "consumer_status"})
_HANDLED_TYPES = frozenset({"joint_update", "heartbeat", "emergency_stop"})
MAX_REASON = 500


def receive_message(table: RoomTable, connection: Connection, message: Message, now: float) -> Effects:
    """Handle one message of a connection; no effects without a room."""
    participant = table.get_participant(connection)
    if participant is None:
        return []
    room = table.rooms.get(participant.path)
    if room is not None:
        room.touched_at = now
    match message:
        case protocol.Heartbeat():
            return _reply(participant, protocol.HeartbeatAck())
        case protocol.EmergencyStopMessage():
            is_robotics = participant.path.kind is Kind.ROBOTICS
            default = f"Emergency stop from {participant.id}" if is_robotics else "Emergency stop triggered"
            stop = protocol.EmergencyStopMessage((message.reason or default)[:MAX_REASON], participant.id)
            return send(table.participants(room), stop)
    if participant.path.kind is Kind.VIDEO:
        return _relay_to_others(table, participant, room, message)
    if isinstance(message, protocol.JointUpdate):
        return _update_joints(table, participant, room, message)
    return [] if message.type in _IGNORED_TYPES else _reply(participant, _unknown_type(message.type))


def refuse_message(table: RoomTable, connection: Connection, error: WireError) -> Effects:
    """Handle an invalid frame; the robotics service answers some invalid frames with an error."""
    participant = table.get_participant(connection)
    if participant is None or participant.path.kind is Kind.VIDEO or error.type is None:
        return []
    if error.type == "joint_update":
        return _reply(participant, _UPDATE_FAILED) if participant.role is ParticipantRole.PRODUCER else []
    return [] if error.type in _IGNORED_TYPES | _HANDLED_TYPES else _reply(participant, _unknown_type(error.type))


def publish_joints(
    table: RoomTable, room: Room, joints: tuple[Json, ...], source: str, claim: str | None
) -> tuple[int, Effects]:
    """Set the joints of a room and return the number of changed joints and the effects. All commands pass here.

    Only the room's session may set joints, within its latch and limits.

    Raises:
        WireError: the room would hold too many joint names.
        CommandRefused: another session owns the room, or the room's session refuses the command.
    """
    commander = table.commander(room)
    if commander is not None:
        if not commander.is_own(claim):
            raise commander.refuse_stranger()
        refusal = commander.check_command(joints, room.joints)
        if refusal is not None:
            raise refusal
    changed = _store_joints(room, joints, table.limits.joints)
    if not changed:
        return 0, []
    return len(changed), send(table.consumers(room), protocol.JointUpdate(changed, source=source))


def _update_joints(
    table: RoomTable, participant: Participant, room: Room | None, message: protocol.JointUpdate
) -> Effects:
    if participant.role is not ParticipantRole.PRODUCER or not message.data:
        return []
    if room is None:
        return _reply(participant, _UPDATE_FAILED)
    try:
        return publish_joints(table, room, message.data, participant.id, participant.claim)[1]
    except WireError:
        return _reply(participant, _UPDATE_FAILED)
    except CommandRefused as error:
        return _reply(participant, protocol.VideoError(str(error), error.code))


def _store_joints(room: Room, joints: tuple[Json, ...], limit: int) -> tuple[Json, ...]:
    """Store the new values; returns the changed joints as received."""
    names = {joint["name"] for joint in joints} | room.joints.keys()
    if len(names) > limit:
        raise WireError(f"{len(names)} joint names in one room; the limit is {limit}", "joint_update")
    changed = []
    for joint in joints:
        if room.joints.get(joint["name"]) != joint["value"]:
            room.joints[joint["name"]] = joint["value"]
            changed.append(joint)
    return tuple(changed)


def _relay_to_others(table: RoomTable, participant: Participant, room: Room | None, message: Message) -> Effects:
    match message:
        case protocol.StreamStarted() | protocol.StreamStopped():
            relayed = replace(message, participant_id=participant.id, timestamp=None)
        case protocol.VideoConfigUpdate():
            if room is not None and participant.role is ParticipantRole.PRODUCER:
                room.config = _apply_update(room.config, message.config)
            relayed = replace(message, source=participant.id, timestamp=None)
        case protocol.StatusUpdate():
            relayed = replace(message, status=message.status or "unknown", timestamp=None)
        case protocol.StreamStats():
            relayed = replace(message, stats={} if message.stats is None else message.stats, timestamp=None)
        case protocol.RecoveryTriggered():
            relayed = replace(message, reason=message.reason or "Recovery triggered", timestamp=None)
        case _:
            return []
    return send(table.others(room, participant), relayed)


def _apply_update(config: VideoConfig, update: Json) -> VideoConfig:
    """Return the settings after a producer's update; an invalid update is relayed but not kept."""
    known = {key: value for key, value in update.items() if key in VideoConfig.model_fields}
    try:
        return VideoConfig.model_validate({**config.model_dump(), **known})
    except ValidationError:
        return config


def _reply(participant: Participant, message: Message) -> Effects:
    return [Send((participant.connection,), message)]


_UPDATE_FAILED = protocol.Error("Failed to process joint update")


def _unknown_type(kind: str | None) -> protocol.Error:
    return protocol.Error(f"Unknown message type: {kind}")


# Participants to whom a message is written in one turn of the loop, 8 us each.
MAX_IMMEDIATE_WRITES = 32
KEY_CHECK_INTERVAL = 2.0  # Seconds between checks of a socket's key.


def timestamp() -> str:
    """Return the present time in the wire's format: ISO-8601 with +00:00."""
    return datetime.now(tz=UTC).isoformat()


def perform_effects(effects: Effects, max_immediate: int = MAX_IMMEDIATE_WRITES) -> bool:
    """Put each message into its outboxes without waiting, the first ``max_immediate`` in this turn of the loop.

    Returns:
        Whether an effect has too many recipients to write all of them now.
    """
    for effect in effects:
        if isinstance(effect, Send):
            text = protocol.build_message(effect.message, timestamp())
            for number, outbox in enumerate(effect.to):
                assert isinstance(outbox, Outbox)
                outbox.put(text, is_urgent=number < max_immediate)
        else:
            for outbox in effect.to:
                assert isinstance(outbox, Outbox)
                outbox.close(effect.reason)
    return any(len(effect.to) > MAX_IMMEDIATE_WRITES for effect in effects)


async def serve_participant(
    request: Request,
    socket: WebsocketImplProtocol,
    path: RoomPath,
    table: RoomTable,
    limits: OutboxLimits,
    queue: WriteQueue,
    join_timeout: float,
) -> None:
    """Serve one upgraded socket: the join, then each frame.

    A connection that does not join in ``join_timeout`` seconds is closed silently. If the key is no longer accepted,
    the socket is closed within ``KEY_CHECK_INTERVAL`` seconds. All sockets of the server share ``queue``.
    """
    caller, claim = caller_of(request), request.headers.get(CLAIM_HEADER)
    _disable_nagle(socket)
    outbox = Outbox(socket, limits, queue)
    writer = asyncio.create_task(outbox.run())
    key_watch = asyncio.create_task(_close_when_unauthorized(request.ctx.is_still_authorized, socket, outbox, table))
    try:
        first = await socket.recv(timeout=join_timeout)
        if first is None:
            return
        try:
            join = protocol.parse_join(first)
        except protocol.WireError as error:
            log.info("a socket of %s is closed: %s", path, error)
            return
        key_name = None if caller.name == ANYBODY.name else caller.name
        perform_effects(table.join(outbox, path, join, time.monotonic(), key_name, partial(_may_join, caller), claim))
        if table.get_participant(outbox) is None:
            await writer
            return
        if table.is_commanded_by(outbox) and isinstance(socket.io_proto, DeadlineProtocol):
            socket.io_proto.mark_own()
        while True:
            raw = await socket.recv()
            if raw is not None and perform_effects(_handle_frame(table, outbox, raw, time.monotonic())):
                await queue.wait_written()
    except WebsocketClosed:
        return
    finally:
        # Synchronous, because this runs inside a cancellation if the connection is lost.
        is_orderly = socket.ws_proto is not None and socket.ws_proto.close_rcvd is not None
        # Sent in the next turn, so that video continues if the whole server shuts down.
        perform_effects(table.leave(outbox, is_orderly), max_immediate=0)
        writer.cancel()
        key_watch.cancel()


def _may_join(caller: Caller, room: Room, role: ParticipantRole) -> bool:
    """Whether a caller may have this role; producers need an operator's key, because they control a robot."""
    return caller.sees(room.owner) and (role is not ParticipantRole.PRODUCER or caller.role >= Role.OPERATOR)


async def _close_when_unauthorized(
    is_still_authorized: Callable[[], bool], socket: WebsocketImplProtocol, outbox: Outbox, table: RoomTable
) -> None:
    """Close a socket when its key is no longer accepted, after an emergency stop in its room if it is the producer."""
    while is_still_authorized():  # noqa: ASYNC110, a file sends no event when it changes
        await asyncio.sleep(KEY_CHECK_INTERVAL)
    participant = table.get_participant(outbox)
    if participant is not None and participant.role is ParticipantRole.PRODUCER:
        # The stop is latched, because the robot must not move by itself if the file of keys is restored.
        stop = protocol.EmergencyStopMessage("its key is no longer accepted")
        perform_effects(receive_message(table, outbox, stop, time.monotonic()))
    socket.fail_connection(1008, "the key is no longer accepted")


def _disable_nagle(socket: WebsocketImplProtocol) -> None:
    """Turn off Nagle's algorithm, which would delay small frames by 40 ms."""
    connection = None if socket.io_proto is None else socket.io_proto.transport
    raw = None if connection is None else connection.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)


def _handle_frame(table: RoomTable, outbox: Outbox, raw: str | bytes, now: float) -> Effects:
    try:
        message = protocol.parse_message(raw)
    except protocol.WireError as error:
        log.info("a frame is not relayed: %s", error)
        return refuse_message(table, outbox, error)
    return receive_message(table, outbox, message, now)


class InvalidSignal(ValueError):
    """A signal that lacks what its type needs."""


def relay_signal(table: RoomTable, path: RoomPath, client_id: str, signal: Json) -> tuple[str | None, Effects]:
    """Relay a WebRTC signal; returns the answer's text (None for the default text) and the effects.

    Signals without a target are dropped. A missing recipient is not an error, because the producer offers again.

    Raises:
        UnknownRoom: the room does not exist.
        InvalidSignal: ``type``, ``sdp`` or ``candidate`` is missing.
    """
    table.get(path)
    if "type" not in signal:
        raise InvalidSignal("signal without type")
    sender = table.find_sender(path, client_id)
    role = None if sender is None else sender.role
    to = ParticipantRole.PRODUCER if role is ParticipantRole.CONSUMER else ParticipantRole.CONSUMER
    target = None if role is None else signal.get(f"target_{to}")
    has_target = isinstance(target, str) and target != ""
    match signal["type"], to:
        case "offer", ParticipantRole.CONSUMER if has_target:
            what, message = "Offer", protocol.WebrtcOffer(_read_description(signal), client_id)
        case "offer", _:
            return "Peer-to-peer mode - no server WebRTC processing", []
        case "answer", ParticipantRole.PRODUCER if has_target:
            what, message = "Answer", protocol.WebrtcAnswer(_read_description(signal), client_id)
        case "ice", _ if has_target:
            if not isinstance(candidate := signal.get("candidate"), dict):
                raise InvalidSignal("ice without candidate")
            what, message = "ICE candidate", protocol.WebrtcIce(candidate, **{f"from_{role}": client_id})
        case _:
            return None, []
    recipient = table.find(path, to, str(target))
    return f"{what} forwarded to {to}", [] if recipient is None else _reply(recipient, message)


def _read_description(signal: Json) -> Json:
    if not isinstance(signal.get("sdp"), str):
        raise InvalidSignal(f"{signal['type']} without sdp")
    return {"type": signal["type"], "sdp": signal["sdp"]}
