"""A participant's WebSocket: room rules, signalling, bounded outbox.

nobody, and for all of them together, so that a message to a thousand participants keeps no robot waiting.
"""

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

from service.auth.caller import ANYBODY, Caller, caller_of
from service.auth.caller import Role as KeyRole
from service.http.fair_queue import FairQueue
from service.http.protocol import DeadlineProtocol
from service.transport import protocol
from service.transport.address import Kind
from service.transport.client.rest import CLAIM
from service.transport.protocol import Json, Message, Role, WireError
from service.transport.server.bodies import VideoConfig
from service.transport.server.rooms import CommandRefused, Connection, Effects, Place, Room, RoomTable, Seat, Send, send

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutboxLimits:
    """How far a peer may fall behind.

    Attributes:
        messages: frames that may wait. At 50 joint updates a second 256 are five seconds.
        size: characters that may wait.
        seconds: how long one frame, or the closing handshake, may take.
    """

    messages: int = 256
    size: int = 4 << 20
    seconds: float = 10.0


class WriteQueue:
    """The sockets that have something to write, in turn: at most ``SLICE`` seconds of writing at a time, and as long a
    pause after it, so that writing takes half of the event loop at most."""

    SLICE = 0.001

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._ready: deque[Outbox | asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def add(self, outbox: "Outbox") -> None:
        """Write what waits in this outbox when its turn comes."""
        self._ready.append(outbox)
        self._schedule()

    async def turn(self) -> None:
        """Return when all that stood in the queue before has been written: whoever sends to many waits for it, so that
        the next message is not read before."""
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
                first.take_turn()
            elif not first.done():
                first.set_result(None)
            now = self._clock()
        FairQueue.of_running_loop().charge_turn(now - began)
        if self._ready:
            self._schedule(now - began)


class Outbox:
    """The writing half of one socket. ``put`` and ``close`` never wait; ``run`` is the task that writes to a peer which
    reads slowly.

    Args:
        queue: shared by all sockets of a server.
    """

    def __init__(self, socket: WebsocketImplProtocol, limits: OutboxLimits, queue: WriteQueue):
        self._socket = socket
        self._limits = limits
        self._queue = queue
        self._is_queued = False
        self._waiting: deque[str] = deque()
        self._size = 0
        self._wake = asyncio.Event()
        self._reason: str | None = None
        self._is_writing = False
        self.is_cut = False

    def put(self, text: str, is_urgent: bool = True) -> None:
        """Write one frame, or queue it behind others; a socket that is over its limits is cut instead.

        Args:
            is_urgent: whether it is written in this turn of the loop, when nothing is ahead of it.
        """
        if self.is_cut or self._reason is not None:
            return
        if is_urgent and not self._waiting and self._write_now(text):
            return
        if len(self._waiting) >= self._limits.messages or self._size + len(text) > self._limits.size:
            self.cut(f"{len(self._waiting)} frames, {self._size} characters unread")
            return
        self._waiting.append(text)
        self._size += len(text)
        if not self._is_queued and not self._is_writing:
            self._is_queued = True
            self._queue.add(self)

    def take_turn(self) -> None:
        """Write what waits; the task goes on with it when the peer does not read as fast."""
        self._is_queued = False
        while self._waiting and self._write_now(self._waiting[0]):
            self._size -= len(self._waiting.popleft())
        if self._waiting or self._reason is not None:
            self._wake.set()

    def _write_now(self, text: str) -> bool:
        """Write a frame in this turn of the loop when nothing is ahead of it.

        Waking the task for each frame of each participant took ten times as long.
        """
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
        """Close the socket after what is queued."""
        if self._reason is None:
            self._reason = reason
            if not self._is_queued:
                self._wake.set()

    def cut(self, why: str) -> None:
        """Drop the connection now; what waits is lost."""
        if self.is_cut:
            return
        self.is_cut = True
        self._waiting.clear()
        self._wake.set()
        log.warning("a participant's socket is cut: %s", why)
        if self._socket.io_proto is not None and self._socket.io_proto.transport is not None:
            self._socket.io_proto.transport.abort()

    async def run(self) -> None:
        """Write what is queued until the socket is closed or cut."""
        while not self.is_cut:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._drain()
            except (TimeoutError, WebsocketClosed, ConnectionError) as error:
                self.cut(f"a frame could not be written: {type(error).__name__}")
                return
            if self._reason is not None:
                await self._finish(self._reason)
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
                # The reader's end is what says that the peer has closed too; it cancels this task.
                await self._socket.wait_for_connection_lost()
        except (TimeoutError, WebsocketClosed, ConnectionError):
            self.cut(f"{reason}, and the peer did not close")


# Types a robotics room knows and does not act on; any other type that it does not handle gets an error back.
_HEARD = frozenset({"joined", "error", "heartbeat_ack", "state_sync", "status_update", "consumer_status"})
_ACTED = frozenset({"joint_update", "heartbeat", "emergency_stop"})
MAX_REASON = 500


def receive_message(table: RoomTable, connection: Connection, message: Message, now: float) -> Effects:
    """What follows from one message of a connection; nothing when it is in no room."""
    seat = table.seat(connection)
    if seat is None:
        return []
    room = table.rooms.get(seat.place)
    if room is not None:
        room.touched_at = now
    match message:
        case protocol.Heartbeat():
            return table.reply(seat, protocol.HeartbeatAck())
        case protocol.EmergencyStop():
            is_robotics = seat.place.kind is Kind.ROBOTICS
            default = f"Emergency stop from {seat.id}" if is_robotics else "Emergency stop triggered"
            stop = protocol.EmergencyStop((message.reason or default)[:MAX_REASON], seat.id)
            return send(table.everybody(room), stop)
    if seat.place.kind is Kind.VIDEO:
        return _tell_others(table, seat, room, message)
    if isinstance(message, protocol.JointUpdate):
        return _update_joints(table, seat, room, message)
    return [] if message.type in _HEARD else table.reply(seat, _unknown(message.type))


def refuse_message(table: RoomTable, connection: Connection, error: WireError) -> Effects:
    """What follows from a frame that is no message: an error where the robotics service answers with one."""
    seat = table.seat(connection)
    if seat is None or seat.place.kind is Kind.VIDEO or error.type is None:
        return []
    if error.type == "joint_update":
        return table.reply(seat, _FAILED) if seat.role is Role.PRODUCER else []
    return [] if error.type in _HEARD | _ACTED else table.reply(seat, _unknown(error.type))


def publish_command(
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
    return len(changed), send(table.consumers(room), protocol.JointUpdate(changed, source=source))


def _update_joints(table: RoomTable, seat: Seat, room: Room | None, message: protocol.JointUpdate) -> Effects:
    if seat.role is not Role.PRODUCER or not message.data:
        return []
    if room is None:
        return table.reply(seat, _FAILED)
    try:
        return _let_out(table, room, message.data, seat.id, seat.claim)[1]
    except WireError:
        return table.reply(seat, _FAILED)
    except CommandRefused as error:
        return table.reply(seat, protocol.VideoError(str(error), error.code))


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
        case protocol.StreamStarted() | protocol.StreamStopped():
            told = replace(message, participant_id=seat.id, timestamp=None)
        case protocol.VideoConfigUpdate():
            if room is not None and seat.role is Role.PRODUCER:
                room.config = _updated(room.config, message.config)
            told = replace(message, source=seat.id, timestamp=None)
        case protocol.StatusUpdate():
            told = replace(message, status=message.status or "unknown", timestamp=None)
        case protocol.StreamStats():
            told = replace(message, stats={} if message.stats is None else message.stats, timestamp=None)
        case protocol.RecoveryTriggered():
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


_FAILED = protocol.Error("Failed to process joint update")


def _unknown(kind: str | None) -> protocol.Error:
    return protocol.Error(f"Unknown message type: {kind}")


AT_ONCE = 32  # participants to whom a message is written in one turn of the loop, 8 us each; the others follow
LOOK = 2.0  # seconds between looks at whether a socket's key still counts


def timestamp() -> str:
    """The wall clock as the wire writes it: ISO-8601 with +00:00."""
    return datetime.now(tz=UTC).isoformat()


def perform(effects: Effects, at_once: int = AT_ONCE) -> bool:
    """Hand every message to the outboxes it is for; nothing here waits for anybody.

    Args:
        at_once: participants to whom a message is written in this turn of the loop.

    Returns:
        Whether some of them get it later, as there are many.
    """
    for effect in effects:
        if isinstance(effect, Send):
            text = protocol.build(effect.message, timestamp())
            for number, outbox in enumerate(effect.to):
                assert isinstance(outbox, Outbox)
                outbox.put(text, is_urgent=number < at_once)
        else:
            for outbox in effect.to:
                assert isinstance(outbox, Outbox)
                outbox.close(effect.reason)
    return any(len(effect.to) > AT_ONCE for effect in effects)


async def attend(
    request: Request,
    socket: WebsocketImplProtocol,
    place: Place,
    table: RoomTable,
    limits: OutboxLimits,
    queue: WriteQueue,
    join_timeout: float,
) -> None:
    """Serve one upgraded socket until it ends: the join, then every frame.

    A first frame that is no join, or none within ``join_timeout`` seconds, ends the connection without a word. So
    does a key that is revoked, within ``LOOK`` seconds.

    Args:
        queue: of all sockets of this server.
    """
    caller, claim = caller_of(request), request.headers.get(CLAIM)
    _send_at_once(socket)
    outbox = Outbox(socket, limits, queue)
    writer = asyncio.create_task(outbox.run())
    watching = asyncio.create_task(_watch(socket, request.ctx.is_still_authorized))
    try:
        first = await socket.recv(timeout=join_timeout)
        if first is None:
            return
        try:
            join = protocol.parse_join(first)
        except protocol.WireError as error:
            log.info("a socket of %s is closed: %s", place, error)
            return
        by = None if caller.name == ANYBODY.name else caller.name
        perform(table.join(outbox, place, join, time.monotonic(), by, partial(_may, caller), claim))
        if table.seat(outbox) is None:
            await writer
            return
        if table.is_commanded_by(outbox) and isinstance(socket.io_proto, DeadlineProtocol):
            socket.io_proto.mark_own()
        while True:
            raw = await socket.recv()
            if raw is not None and perform(_answer(table, outbox, raw, time.monotonic())):
                await queue.turn()
    except WebsocketClosed:
        return
    finally:
        # Synchronous on purpose: when the peer is gone this runs inside a cancellation.
        is_orderly = socket.ws_proto is not None and socket.ws_proto.close_rcvd is not None
        # In the next turn: where the server ends, nobody is told that the others are gone. Pictures go on between them.
        perform(table.leave(outbox, is_orderly), at_once=0)
        writer.cancel()
        watching.cancel()


def _may(caller: Caller, room: Room, role: Role) -> bool:
    """Whoever produces in a room moves a robot, or shows it what it sees."""
    return caller.sees(room.owner) and (role is not Role.PRODUCER or caller.role >= KeyRole.OPERATOR)


async def _watch(socket: WebsocketImplProtocol, is_still_authorized: Callable[[], bool]) -> None:
    while is_still_authorized():  # noqa: ASYNC110, files do not say when they change
        await asyncio.sleep(LOOK)
    socket.fail_connection(1008, "the key does not count any more")


def _send_at_once(socket: WebsocketImplProtocol) -> None:
    """Turn Nagle's algorithm off, which holds a small frame back for up to 40 ms while another is unacknowledged.

    asyncio does so by itself only for sockets made with an explicit TCP protocol number, and Sanic's are not.
    """
    connection = None if socket.io_proto is None else socket.io_proto.transport
    raw = None if connection is None else connection.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)


def _answer(table: RoomTable, outbox: Outbox, raw: str | bytes, now: float) -> Effects:
    try:
        message = protocol.parse(raw)
    except protocol.WireError as error:
        log.info("a frame is not relayed: %s", error)
        return refuse_message(table, outbox, error)
    return receive_message(table, outbox, message, now)


class BrokenSignal(ValueError):
    """A signal that lacks what its type needs."""


def relay_signal(table: RoomTable, place: Place, client_id: str, signal: Json) -> tuple[str | None, Effects]:
    """What to answer (None: only that it was processed) and whom to tell.

    A producer offers and sends candidates to ``target_consumer``, a consumer answers and sends candidates to
    ``target_producer``; a signal without its target or from another role is taken and dropped. The answer says
    "forwarded" even when nobody is there: peers come and go, and the producer offers again.

    Raises:
        UnknownRoom: there is no such room.
        BrokenSignal: no ``type``, or no ``sdp`` or ``candidate`` where one has to be passed on.
    """
    table.get(place)
    if "type" not in signal:
        raise BrokenSignal("signal without type")
    sender = table.claimed(place, client_id)
    role = None if sender is None else sender.role
    if table.is_odd and signal["type"] == "answer":  # the reference passes on anybody's, from other workspaces too
        role = Role.CONSUMER
    to = Role.PRODUCER if role is Role.CONSUMER else Role.CONSUMER
    target = None if role is None else signal.get(f"target_{to}")
    is_aimed = isinstance(target, str) and target != ""
    match signal["type"], to:
        case "offer", Role.CONSUMER if is_aimed:
            what, message = "Offer", protocol.WebrtcOffer({"type": "offer", "sdp": _text(signal, "sdp")}, client_id)
        case "offer", _:
            return "Peer-to-peer mode - no server WebRTC processing", []
        case "answer", Role.PRODUCER if is_aimed:
            what, message = "Answer", protocol.WebrtcAnswer({"type": "answer", "sdp": _text(signal, "sdp")}, client_id)
        case "ice", _ if is_aimed:
            what, message = "ICE candidate", protocol.WebrtcIce(_candidate(signal), **{f"from_{role}": client_id})
        case _:
            return None, []
    seat = table.find(place, to, str(target))
    return f"{what} forwarded to {to}", [] if seat is None else [Send((seat.connection,), message)]


def _text(signal: Json, key: str) -> str:
    value = signal.get(key)
    if not isinstance(value, str):
        raise BrokenSignal(f"{signal['type']} without {key}")
    return value


def _candidate(signal: Json) -> Json:
    value = signal.get("candidate")
    if not isinstance(value, dict):
        raise BrokenSignal("ice without candidate")
    return value
