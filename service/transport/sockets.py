"""One participant's WebSocket: frames in, through the room table, and what follows out to everybody's outboxes."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from socket import IPPROTO_TCP, TCP_NODELAY

from sanic import Request
from sanic.exceptions import WebsocketClosed
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.auth.caller import ANYBODY, Caller, caller_of
from service.auth.roles import Role as KeyRole
from service.edge.punctual import PunctualProtocol
from service.transport import conversation, wire
from service.transport.credentials import CLAIM
from service.transport.messages import Role
from service.transport.outbox import Outbox, OutboxLimits, WriteQueue
from service.transport.rooms import Effects, Place, Room, RoomTable, Send

log = logging.getLogger(__name__)

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
            text = wire.build(effect.message, timestamp())
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
    watching = asyncio.create_task(_watch(socket, request.ctx.is_still_in))
    try:
        first = await socket.recv(timeout=join_timeout)
        if first is None:
            return
        try:
            join = wire.parse_join(first)
        except wire.WireError as error:
            log.info("a socket of %s is closed: %s", place, error)
            return
        by = None if caller.name == ANYBODY.name else caller.name
        perform(table.join(outbox, place, join, time.monotonic(), by, partial(_may, caller), claim))
        if table.seat(outbox) is None:
            await writer
            return
        if table.is_commanded_by(outbox) and isinstance(socket.io_proto, PunctualProtocol):
            socket.io_proto.be_own()
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


async def _watch(socket: WebsocketImplProtocol, is_still_in: Callable[[], bool]) -> None:
    while is_still_in():  # noqa: ASYNC110, files do not say when they change
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
        message = wire.parse(raw)
    except wire.WireError as error:
        log.info("a frame is not relayed: %s", error)
        return conversation.refuse(table, outbox, error)
    return conversation.receive(table, outbox, message, now)
