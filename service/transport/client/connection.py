"""One joined WebSocket of a room, reconnected with backoff."""

import asyncio
import contextlib
import logging
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from service.errors import TransportError
from service.transport.address import Kind
from service.transport.client.rest import Presence, RoomsApi, explain
from service.transport.protocol import (
    MAX_FRAME_BYTES,
    Error,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    Message,
    Role,
    VideoError,
    WireError,
    build,
    parse,
    participant,
)


@dataclass(frozen=True)
class TransportTimeouts:
    """Times in seconds, and what follows when they are over.

    Attributes:
        join: from opening a socket to ``joined``; then the attempt has failed.
        request: one REST call, likewise.
        heartbeat: between heartbeats, and between looks at who is in the room.
        missed: heartbeats in a row without an answer that mean the link is lost.
        retry_first, retry_longest: the first and the longest wait before joining again, doubled, with full jitter.
        leave: for the closing handshake, and again for removing the rooms.
        greet: from a producer's join to its offers to consumers that were there before. The reference waits a second;
            whoever is listed has joined, and an offer that comes to nothing is made again.
        answer: for answering one offer.
        connect: from an offer or an answer to a connected peer; then a new offer is wanted.
        silence: a connected peer that sends no picture for so long is asked for a new offer.
        ask_first, ask_longest: between such requests, doubled each time until a picture comes.
    """

    join: float = 5.0
    request: float = 5.0
    heartbeat: float = 5.0
    missed: int = 2
    retry_first: float = 0.25
    retry_longest: float = 10.0
    leave: float = 1.0
    greet: float = 0.1
    answer: float = 10.0
    connect: float = 15.0
    silence: float = 10.0
    ask_first: float = 5.0
    ask_longest: float = 60.0


# Bytes that may wait in this process, and in the kernel, before a command is refused: what waits would
# reach the robot late and in a burst. A command of six joints is about 350 bytes.
SEND_LIMIT = 4096
KERNEL_LIMIT = 16384
# Seconds after a message in which leaving waits until it was heard.
RECENTLY = 1.0


class JoinRefused(TransportError):
    """The room is unknown, has another producer, or has this participant already; the wire does not say which."""


class Membership:
    """A participant in a room: a joined WebSocket with its heartbeat.

    Attributes:
        participant_id: ours, fresh for this socket.
        rtt: seconds from the last heartbeat to its answer, None before the first.
        sent, refused, received, malformed: counts of messages.
        expired: of those sent, how many were thrown away because they were not written in time.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, participant_id: str, pace: TransportTimeouts):
        self.participant_id = participant_id
        self.rtt: float | None = None
        self.sent = self.refused = self.received = self.malformed = self.expired = 0
        self._socket = socket
        self._pace = pace
        self._transport = _write_transport(socket)
        self._outbox: asyncio.Queue[tuple[str, float]] = asyncio.Queue(maxsize=16)
        self._early: list[tuple[Message, float]] = []
        self._doubt = asyncio.Event()
        self._dropped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._beat_at = self._acked_at = time.monotonic()
        self._spoke_at = -math.inf

    @classmethod
    async def join(
        cls,
        api: RoomsApi,
        kind: Kind,
        workspace: str,
        room: str,
        participant_id: str,
        role: Role,
        pace: TransportTimeouts,
    ) -> "Membership":
        """Open the socket and join.

        Raises:
            JoinRefused: the server answered with an error.
            TransportError: it could not be reached, said nothing in time, or closed the socket.
        """
        url = api.address.socket(kind, workspace, room)
        what = f"joining {url} as {role}"
        opened: aiohttp.ClientWebSocketResponse | None = None
        try:
            async with asyncio.timeout(pace.join):
                closing = aiohttp.ClientWSTimeout(ws_close=pace.leave)  # pyright: ignore[reportCallIssue]
                opened = await api.session.ws_connect(url, max_msg_size=MAX_FRAME_BYTES, timeout=closing)
                membership = cls(opened, participant_id, pace)
                await opened.send_str(build(Join(participant_id, role)))
                await membership._wait_joined(what)
                return membership
        except BaseException as error:
            if opened is not None:
                _abort(opened)
                await opened.close()
            if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
                raise explain(error, what, api.address.base) from error
            raise

    async def _wait_joined(self, what: str) -> None:
        while True:
            frame = await self._socket.receive()
            if frame.type is not aiohttp.WSMsgType.TEXT:
                raise TransportError(f"{what}: the socket was closed before 'joined' ({_ending(frame, self._socket)})")
            message = self._parse(frame.data)
            if isinstance(message, Joined):
                return
            if isinstance(message, Error | VideoError):
                raise JoinRefused(
                    f"{what}: refused with {message.message!r}; the room is unknown there, "
                    "or it has another producer already"
                )
            if message is not None:
                self._early.append((message, time.monotonic()))

    def send(self, message: Message, within: float = math.inf) -> bool:
        """Hand one message to the socket without waiting; False when it was not taken.

        Args:
            within: seconds after which it is worth nothing any more: when this process stood still until then, it is
                thrown away.
        """
        if (
            self._dropped.done()
            or self._outbox.full()
            or self._transport.is_closing()
            or self._transport.get_write_buffer_size() > SEND_LIMIT
        ):
            self.refused += 1
            return False
        now = time.monotonic()
        if not isinstance(message, Heartbeat):
            self._spoke_at = now
        self._outbox.put_nowait((build(message), now + within))
        self.sent += 1
        return True

    def drop(self, reason: str) -> None:
        """End ``serve`` from outside."""
        if not self._dropped.done():
            self._dropped.set_result(reason)

    async def serve(
        self,
        received: Callable[[Message, float], None],
        check: Callable[[], Awaitable[str | None]],
        refused: Callable[[], None] = lambda: None,
    ) -> str:
        """Deliver messages until the socket is lost, and return why.

        Args:
            received: takes each message and the monotonic time it was read.
            refused: told of each frame that is no message of this wire.
            check: asked at once, then with every heartbeat and after every error from the server; returns why the
                membership is worthless, or None.
        """
        for message, seen_at in self._early:
            received(message, seen_at)
        self._early.clear()
        return await _first(
            self._read(received, refused), self._write(), self._beat(), self._watch(check), self._until_dropped()
        )

    async def leave(self, at_once: bool = False) -> None:
        """Close the socket when what was handed over, a last hold above all, has been heard at the other end.

        Args:
            at_once: throw away what waits to be sent, as it would come late.
        """
        self.drop("left")
        if at_once:
            _abort(self._socket)
        elif time.monotonic() < self._spoke_at + RECENTLY:
            with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
                async with asyncio.timeout(self._pace.leave):
                    await self._be_heard()
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.close()

    async def _be_heard(self) -> None:
        """Write the rest and wait for the answer to a heartbeat: a socket that is closed right after a message may take
        it along, as Sanic hands on no more messages once it has read the close frame."""
        while not self._outbox.empty():
            await self._put_on_wire(*self._outbox.get_nowait())
        await self._put_on_wire(build(Heartbeat()), math.inf)
        while (frame := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
            if isinstance(self._parse(frame.data), HeartbeatAck):
                return

    async def _read(self, received: Callable[[Message, float], None], refused: Callable[[], None]) -> str:
        while True:
            frame = await self._socket.receive()
            now = time.monotonic()
            if frame.type is aiohttp.WSMsgType.BINARY:
                self.malformed += 1
                refused()
                continue
            if frame.type is not aiohttp.WSMsgType.TEXT:
                return f"the socket was closed ({_ending(frame, self._socket)})"
            message = self._parse(frame.data)
            if message is None:
                refused()
            elif isinstance(message, HeartbeatAck):
                self._acked_at = now
                self.rtt = now - self._beat_at
            else:
                if isinstance(message, Error | VideoError):
                    self._doubt.set()
                received(message, now)

    async def _write(self) -> str:
        try:
            while True:
                await self._put_on_wire(*await self._outbox.get())
        except (aiohttp.ClientError, OSError) as error:
            return f"sending failed ({error})"

    async def _put_on_wire(self, text: str, worthless_at: float) -> None:
        if time.monotonic() > worthless_at:
            self.expired += 1
        else:
            await self._socket.send_str(text)

    async def _beat(self) -> str:
        patience = (self._pace.missed + 0.1) * self._pace.heartbeat
        while True:
            self._beat_at = time.monotonic()
            self.send(Heartbeat())
            next_beat = self._beat_at + self._pace.heartbeat
            while (now := time.monotonic()) < next_beat:
                if now >= self._acked_at + patience:
                    return f"no answer to a heartbeat for {now - self._acked_at:.1f} s"
                await asyncio.sleep(min(next_beat, self._acked_at + patience) - now)

    async def _watch(self, check: Callable[[], Awaitable[str | None]]) -> str:
        while True:
            reason = await check()
            if reason is not None:
                return reason
            self._doubt.clear()
            await asyncio.sleep(
                self._pace.heartbeat / 10
            )  # a server that answers everything with errors is not flooded
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.heartbeat * 0.9):
                    await self._doubt.wait()

    async def _until_dropped(self) -> str:
        return await asyncio.shield(self._dropped)

    def _parse(self, text: str) -> Message | None:
        try:
            message = parse(text)
        except WireError:
            self.malformed += 1
            return None
        self.received += 1
        return message


async def _first(*waiting: Coroutine[None, None, str]) -> str:
    """The result of whichever ends first; the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(each) for each in waiting]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _write_transport(opened: aiohttp.ClientWebSocketResponse) -> asyncio.WriteTransport:
    """The transport under an open WebSocket, with a small kernel buffer.

    aiohttp offers no public way to see how much waits to be sent; its ``get_extra_info`` reads this same attribute.
    """
    connection = opened._response.connection
    if connection is None or connection.transport is None:
        raise TransportError("the socket was closed while it was being opened")
    raw = connection.transport.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_LIMIT)
    return connection.transport


def _abort(opened: aiohttp.ClientWebSocketResponse) -> None:
    connection = opened._response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _ending(frame: aiohttp.WSMessage, opened: aiohttp.ClientWebSocketResponse) -> str:
    return str(frame.data) if frame.type is aiohttp.WSMsgType.ERROR else f"code {opened.close_code}"


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


def retry_delay(attempt: int, pace: TransportTimeouts) -> float:
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
        pace: TransportTimeouts,
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
