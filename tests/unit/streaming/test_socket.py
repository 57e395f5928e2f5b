"""What is no WebSocket library's way to speak: bytes over a plain connection."""

import asyncio
import json
import struct
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from service.streaming.websocket import SocketClosed, SocketLimits, StreamSocket

MASK = b"\1\2\3\4"
PING = b'{"kind":"ping","number":1}'
UPGRADE = (
    b"GET /sessions/arm/stream HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def frame(opcode: int, data: bytes = b"", *, is_final: bool = True, length: int | None = None) -> bytes:
    """One of a client's."""
    head = struct.pack(">BBQ", 0x80 * is_final | opcode, 0xFF, len(data) if length is None else length)
    return head + MASK + bytes(byte ^ MASK[place % 4] for place, byte in enumerate(data))


class Paused(asyncio.Transport):
    """A connection on which nothing moves."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def is_closing(self) -> bool:
        return False


@asynccontextmanager
async def connection(server, behind: bytes = b""):
    """A stream, with these bytes sent right behind the upgrade."""
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(UPGRADE + behind)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        yield reader, writer
    finally:
        writer.close()


async def heard(reader, wanted: int) -> bytes:
    """The next frame of this opcode."""
    async with asyncio.timeout(30):
        while True:
            first, length = await reader.readexactly(2)
            if length == 126:
                (length,) = struct.unpack(">H", await reader.readexactly(2))
            data = await reader.readexactly(length)
            if first & 0x0F == wanted:
                return data


async def test_what_comes_right_behind_the_upgrade_is_read_from_its_first_byte(server):
    # More than one read brings, so that it comes in pieces, the first ones before any handler runs.
    large = frame(1, json.dumps({"kind": "ping", "number": 7, "text": "x" * 300_000}).encode())
    async with connection(server, large + frame(1, PING) * 3) as (reader, _):
        numbers = []
        while len(numbers) < 4:
            told = json.loads(await heard(reader, 1))
            numbers += [told["number"]] if told["kind"] == "pong" else []
        assert numbers == [7, 1, 1, 1]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(1, b"\xff" * 5000), 1007),  # longer than what is read at once
        (frame(2, b"a" * 3000, is_final=False) + frame(0, b"a" * 3000, is_final=False) * 70, 1009),
        (frame(2, b"a" * 9000, length=1 << 62), 1009),
        (frame(1, b"a", is_final=False) + frame(0, b"a", length=5 << 20), 1009),
        (b"\x88\x81" + MASK + b"x", 1002),
        (b"\x88\x82" + bytes(4) + struct.pack(">H", 1005), 1002),
        (b"\x88\x83" + bytes(4) + struct.pack(">H", 1000) + b"\xff", 1007),
        (b"\x88\x82" + bytes(4) + struct.pack(">H", 3000), 3000),
    ],
    ids=[
        "long bad text",
        "many long parts",
        "huge",
        "huge text",
        "close of one byte",
        "close 1005",
        "close in bad text",
        "close",
    ],
)
async def test_the_reason_of_a_close_can_be_read(server, caplog, sent, code):
    async with connection(server) as (reader, writer):
        writer.write(sent)
        await writer.drain()
        assert struct.unpack(">H", (await heard(reader, 8))[:2])[0] == code
        writer.write(b"\x88\x80" + MASK)
        with suppress(ConnectionError):
            writer.write(b"x" * 100_000)
    assert "Traceback" not in caplog.text


async def test_a_message_that_takes_long_is_cut_off(server, caplog):
    clients = server.app.ctx.stream_clients
    limits = replace(clients.settings.socket, heartbeat=0.3, message=0.0)
    clients.settings = replace(clients.settings, socket=limits)
    async with connection(server) as (reader, writer):
        writer.write(frame(2, b"a", is_final=False))
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                await reader.read()
    assert "its message takes too long" in caplog.text


async def test_what_is_read_of_a_connection_that_is_lost_ends():
    door = StreamSocket(SocketLimits())
    door._early = memoryview(frame(1, PING) * 400)  # more than is read at once
    door._transport = Paused()
    door._continue_reading()
    assert door._transport.is_paused  # two messages wait to be taken
    door.connection_lost(None)
    assert [await door.receive(), await door.receive()] == [PING.decode()] * 2
    with pytest.raises(SocketClosed):
        await door.receive()
