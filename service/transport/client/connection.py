"""One joined WebSocket of a room, reconnected with backoff."""

import asyncio
import contextlib
import logging
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping

import aiohttp

from service.errors import TransportError
from service.transport.address import Kind
from service.transport.client.rest import Presence, RoomsApi, TransportTimeouts, to_transport_error
from service.transport.protocol import (
    MAX_FRAME_BYTES,
    Error,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    Message,
    ParticipantRole,
    VideoError,
    WireError,
    build_message,
    create_participant_id,
    parse_message,
)

# Bytes that may wait in this process and in the kernel. Further commands (350 bytes for six joints) are refused.
MAX_SEND_BUFFER = 4096
KERNEL_SEND_BUFFER = 16384
# Seconds after a message in which leaving waits for its confirmation.
CONFIRM_WINDOW = 1.0


class JoinRefused(TransportError):
    """The room is unknown, or it already has a producer or this participant."""


class Membership:
    """A participant in a room: a joined WebSocket with its heartbeat.

    Attributes:
        participant_id: unique for this socket.
        rtt: seconds from the last heartbeat to its answer, None before the first.
        sent, refused, received, malformed, expired: counts of messages; expired messages were not written in time.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, participant_id: str, timeouts: TransportTimeouts):
        self.participant_id = participant_id
        self.rtt: float | None = None
        self.sent = self.refused = self.received = self.malformed = self.expired = 0
        self._socket = socket
        self._timeouts = timeouts
        self._transport = _write_transport(socket)
        self._outbox: asyncio.Queue[tuple[str, float]] = asyncio.Queue(maxsize=16)
        self._received_early: list[tuple[Message, float]] = []
        self._got_error = asyncio.Event()
        self._drop_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._heartbeat_at = self._acked_at = time.monotonic()
        self._sent_at = -math.inf

    @classmethod
    async def join(
        cls,
        api: RoomsApi,
        kind: Kind,
        workspace: str,
        room: str,
        participant_id: str,
        role: ParticipantRole,
    ) -> "Membership":
        """Open a room's WebSocket and join.

        Raises:
            JoinRefused: the server answered with an error.
            TransportError: the server cannot be reached, does not answer in time, or closed the socket.
        """
        url, timeouts = api.address.socket_url(kind, workspace, room), api.timeouts
        what = f"joining {url} as {role}"
        opened: aiohttp.ClientWebSocketResponse | None = None
        try:
            async with asyncio.timeout(timeouts.join):
                closing = aiohttp.ClientWSTimeout(ws_close=timeouts.leave)  # pyright: ignore[reportCallIssue]
                opened = await api.session.ws_connect(url, max_msg_size=MAX_FRAME_BYTES, timeout=closing)
                membership = cls(opened, participant_id, timeouts)
                await opened.send_str(build_message(Join(participant_id, role)))
                await membership._wait_joined(what)
                return membership
        except BaseException as error:
            if opened is not None:
                _abort(opened)
                await opened.close()
            if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                raise to_transport_error(error, what, api.address.base) from error
            raise

    async def _wait_joined(self, what: str) -> None:
        while True:
            frame = await self._socket.receive()
            if frame.type is not aiohttp.WSMsgType.TEXT:
                raise TransportError(
                    f"{what}: the socket was closed before 'joined' ({_describe_close(frame, self._socket)})"
                )
            message = self._parse(frame.data)
            if isinstance(message, Joined):
                return
            if isinstance(message, Error | VideoError):
                raise JoinRefused(
                    f"{what}: refused with {message.message!r}; the room is unknown there, "
                    "or it has another producer already"
                )
            if message is not None:
                self._received_early.append((message, time.monotonic()))

    def send(self, message: Message, lifetime: float = math.inf) -> bool:
        """Queue one message, to be written within ``lifetime`` seconds or discarded; False if it was refused."""
        if (
            self._drop_reason.done()
            or self._outbox.full()
            or self._transport.is_closing()
            or self._transport.get_write_buffer_size() > MAX_SEND_BUFFER
        ):
            self.refused += 1
            return False
        now = time.monotonic()
        if not isinstance(message, Heartbeat):
            self._sent_at = now
        self._outbox.put_nowait((build_message(message), now + lifetime))
        self.sent += 1
        return True

    def drop(self, reason: str) -> None:
        """Make ``serve`` return with this reason."""
        if not self._drop_reason.done():
            self._drop_reason.set_result(reason)

    async def serve(
        self,
        on_message: Callable[[Message, float], None],
        check: Callable[[], Awaitable[str | None]],
        on_malformed: Callable[[], None] = lambda: None,
    ) -> str:
        """Deliver messages until the socket is lost, and return the reason.

        Args:
            on_message: receives each message and the monotonic time at which it was read.
            on_malformed: called for each invalid frame.
            check: called at first, with each heartbeat and after each server error; a reason ends the membership.
        """
        for message, received_at in self._received_early:
            on_message(message, received_at)
        self._received_early.clear()
        return await _wait_first(
            self._read(on_message, on_malformed),
            self._write(),
            self._send_heartbeats(),
            self._check_repeatedly(check),
            self._wait_dropped(),
        )

    async def leave(self, at_once: bool = False) -> None:
        """Close the socket after the peer received everything, or discard unsent messages with ``at_once``."""
        self.drop("left")
        if at_once:
            _abort(self._socket)
        elif time.monotonic() < self._sent_at + CONFIRM_WINDOW:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with asyncio.timeout(self._timeouts.leave):
                    await self._flush_and_confirm()
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.close()

    async def _flush_and_confirm(self) -> None:
        """Write the rest and wait for a heartbeat's answer, because Sanic drops messages before a close frame."""
        while not self._outbox.empty():
            await self._send_text(*self._outbox.get_nowait())
        await self._send_text(build_message(Heartbeat()), math.inf)
        while (frame := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
            if isinstance(self._parse(frame.data), HeartbeatAck):
                return

    async def _read(self, on_message: Callable[[Message, float], None], on_malformed: Callable[[], None]) -> str:
        while True:
            frame = await self._socket.receive()
            now = time.monotonic()
            if frame.type is aiohttp.WSMsgType.BINARY:
                self.malformed += 1
                on_malformed()
                continue
            if frame.type is not aiohttp.WSMsgType.TEXT:
                return f"the socket was closed ({_describe_close(frame, self._socket)})"
            message = self._parse(frame.data)
            if message is None:
                on_malformed()
            elif isinstance(message, HeartbeatAck):
                self._acked_at = now
                self.rtt = now - self._heartbeat_at
            else:
                if isinstance(message, Error | VideoError):
                    self._got_error.set()
                on_message(message, now)

    async def _write(self) -> str:
        try:
            while True:
                await self._send_text(*await self._outbox.get())
        except (aiohttp.ClientError, OSError) as error:
            return f"sending failed ({error})"

    async def _send_text(self, text: str, expires_at: float) -> None:
        if time.monotonic() > expires_at:
            self.expired += 1
        else:
            await self._socket.send_str(text)

    async def _send_heartbeats(self) -> str:
        ack_timeout = (self._timeouts.missed + 0.1) * self._timeouts.heartbeat
        while True:
            self._heartbeat_at = time.monotonic()
            self.send(Heartbeat())
            next_beat = self._heartbeat_at + self._timeouts.heartbeat
            while (now := time.monotonic()) < next_beat:
                if now >= self._acked_at + ack_timeout:
                    return f"no answer to a heartbeat for {now - self._acked_at:.1f} s"
                await asyncio.sleep(min(next_beat, self._acked_at + ack_timeout) - now)

    async def _check_repeatedly(self, check: Callable[[], Awaitable[str | None]]) -> str:
        while True:
            reason = await check()
            if reason is not None:
                return reason
            self._got_error.clear()
            # A pause, because a server may answer every message with an error.
            await asyncio.sleep(self._timeouts.heartbeat / 10)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.heartbeat * 0.9):
                    await self._got_error.wait()

    async def _wait_dropped(self) -> str:
        return await asyncio.shield(self._drop_reason)

    def _parse(self, text: str) -> Message | None:
        try:
            message = parse_message(text)
        except WireError:
            self.malformed += 1
            return None
        self.received += 1
        return message


async def _wait_first(*coroutines: Coroutine[None, None, str]) -> str:
    """Return the result of the coroutine that ends first, after cancelling the others."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write_transport(opened: aiohttp.ClientWebSocketResponse) -> asyncio.WriteTransport:
    """Return the transport of a WebSocket, with a small kernel buffer; aiohttp has no public access to it."""
    connection = opened._response.connection
    if connection is None or connection.transport is None:
        raise TransportError("the socket was closed while it was being opened")
    raw = connection.transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_SEND_BUFFER)
    return connection.transport


def _abort(opened: aiohttp.ClientWebSocketResponse) -> None:
    connection = opened._response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _describe_close(frame: aiohttp.WSMessage, opened: aiohttp.ClientWebSocketResponse) -> str:
    return str(frame.data) if frame.type is aiohttp.WSMsgType.ERROR else f"code {opened.close_code}"


log = logging.getLogger(__name__)


class RoomListener:
    """Receives the events of one room on the event loop, and ignores them by default."""

    def on_joined(self, participant_id: str) -> None:
        """Called when the room is joined with this new participant id."""

    def on_message(self, message: Message, received_at: float) -> None:
        """Called for each message; ``received_at`` is monotonic."""

    def on_malformed(self) -> None:
        """Called for each invalid frame."""

    async def on_presence(self, presence: Presence) -> None:
        """Called after each join and with each heartbeat, with the participants of the room."""

    def on_lost(self, reason: str) -> None:
        """Called when the connection to the room is lost, before the room is joined again."""


def retry_delay(attempt: int, timeouts: TransportTimeouts) -> float:
    """Return seconds to wait before attempt 0, 1, 2...: doubled each time, with full jitter."""
    return random.uniform(0, min(timeouts.retry_longest, timeouts.retry_first * 2 ** min(attempt, 32)))


class RoomConnection:
    """Joins one room, and again with a new participant id after each loss.

    Args:
        id_prefix: prefix of the participant ids.
        create_room: creates an unknown room; None for a room of another owner.
    """

    def __init__(
        self,
        api: RoomsApi,
        kind: Kind,
        workspace: str,
        room: str,
        *,
        id_prefix: str,
        role: ParticipantRole,
        listener: RoomListener,
        create_room: Callable[[], Awaitable[None]] | None = None,
    ):
        self.kind = kind
        self.workspace = workspace
        self.room = room
        self.presence: Presence | None = None
        self._api = api
        self._id_prefix = id_prefix
        self._role = role
        self._listener = listener
        self._create_room = create_room
        self._membership: Membership | None = None
        self._totals: dict[str, int] = dict.fromkeys(("sent", "refused", "expired", "received", "malformed"), 0)
        self._reconnects = 0
        self._last_error: str | None = None

    @property
    def participant_id(self) -> str | None:
        """Present participant id; None while the room is not joined."""
        return None if self._membership is None else self._membership.participant_id

    def send(self, message: Message, lifetime: float = math.inf) -> bool:
        """Send as `Membership.send`; False while the room is not joined."""
        if self._membership is None:
            self._totals["refused"] += 1
            return False
        return self._membership.send(message, lifetime)

    def rejoin(self, reason: str) -> None:
        """Leave and join again with a new id; in a video room the producer then offers again."""
        if self._membership is not None:
            self._membership.drop(reason)

    async def open(self) -> None:
        """Join the room for the first time; raises TransportError."""
        self._membership = await self._join()
        self._listener.on_joined(self._membership.participant_id)

    async def run(self) -> None:
        """Deliver messages, and join again when the room is lost, until cancelled."""
        attempt = 0
        while True:
            if self._membership is not None:
                reason = await self._membership.serve(
                    self._on_message, self._check_presence, self._listener.on_malformed
                )
                attempt = 0 if self._membership.rtt is not None else attempt
                await self._drop_membership(reason)
            await asyncio.sleep(retry_delay(attempt, self._api.timeouts))
            attempt += 1
            try:
                await self.open()
                self._reconnects += 1
            except TransportError as error:
                self._last_error = str(error)

    async def close(self) -> None:
        """Leave the room, if it is joined."""
        membership, self._membership = self._membership, None
        if membership is not None:
            await membership.leave()

    def health(self) -> Mapping[str, object]:
        """Return JSON-ready figures."""
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
            if self._create_room is None:
                raise
            await self._create_room()
            return await self._join_once()

    async def _join_once(self) -> Membership:
        room = self._api, self.kind, self.workspace, self.room
        participant_id = create_participant_id(self._id_prefix, self._role)
        return await Membership.join(*room, participant_id, self._role)

    async def _drop_membership(self, reason: str) -> None:
        lost = self._membership
        assert lost is not None
        self._membership = None
        self._last_error = reason
        for name in self._totals:
            self._totals[name] += getattr(lost, name)
        log.warning("room %s lost: %s", self.room, reason)
        self._listener.on_lost(reason)
        await lost.leave(at_once=True)

    def _on_message(self, message: Message, received_at: float) -> None:
        if isinstance(message, Error | VideoError):
            self._last_error = f"the server says {message.message!r}"
        self._listener.on_message(message, received_at)

    async def _check_presence(self) -> str | None:
        """Return why the server no longer lists this participant: a server may replace the room without closing."""
        assert self._membership is not None
        try:
            presence = await self._api.get_presence(self.kind, self.workspace, self.room)
            if presence is not None and self._membership.participant_id in presence:
                self.presence = presence
                await self._listener.on_presence(presence)
                return None
        except TransportError as error:
            # Only the socket and its heartbeat decide whether the link is lost.
            self._last_error = str(error)
            return None
        if presence is None:
            return "the server no longer knows the room"
        return "the server no longer lists us in the room"
