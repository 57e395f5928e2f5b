"""WebSocket frames that no library sends, written as bytes to a plain connection."""

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
    """Return a frame of a client."""
    head = struct.pack(">BBQ", 0x80 * is_final | opcode, 0xFF, len(data) if length is None else length)
    return head + MASK + bytes(byte ^ MASK[index % 4] for index, byte in enumerate(data))


class Paused(asyncio.Transport):
    """Transport without traffic."""

    is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def is_closing(self) -> bool:
        return False


@asynccontextmanager
async def connection(server, data: bytes = b""):
    """Open a stream and send these bytes directly after the upgrade."""
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(UPGRADE + data)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        yield reader, writer
    finally:
        writer.close()


async def receive(reader, opcode: int) -> bytes:
    """Return the data of the next frame of this opcode."""
    async with asyncio.timeout(30):
        while True:
            first, length = await reader.readexactly(2)
            if length == 126:
                (length,) = struct.unpack(">H", await reader.readexactly(2))
            data = await reader.readexactly(length)
            if first & 0x0F == opcode:
                return data


async def test_data_directly_after_the_upgrade_is_read_completely(server):
    # The data is larger than one read, so that its first pieces arrive before any handler runs.
    large = frame(1, json.dumps({"kind": "ping", "number": 7, "text": "x" * 300_000}).encode())
    async with connection(server, large + frame(1, PING) * 3) as (reader, _):
        numbers = []
        while len(numbers) < 4:
            message = json.loads(await receive(reader, 1))
            numbers += [message["number"]] if message["kind"] == "pong" else []
        assert numbers == [7, 1, 1, 1]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(1, b"\xff" * 5000), 1007),  # The text is longer than one read.
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
async def test_a_close_has_a_code_that_states_the_reason(server, caplog, sent, code):
    async with connection(server) as (reader, writer):
        writer.write(sent)
        await writer.drain()
        assert struct.unpack(">H", (await receive(reader, 8))[:2])[0] == code
        writer.write(b"\x88\x80" + MASK)
        with suppress(ConnectionError):
            writer.write(b"x" * 100_000)
    assert "Traceback" not in caplog.text


async def test_a_message_that_takes_too_long_is_refused(server, caplog):
    clients = server.app.ctx.stream_clients
    limits = replace(clients.settings.socket, heartbeat=0.3, message=0.0)
    clients.settings = replace(clients.settings, socket=limits)
    async with connection(server) as (reader, writer):
        writer.write(frame(2, b"a", is_final=False))
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                await reader.read()
    assert "its message takes too long" in caplog.text


async def test_a_lost_connection_ends_after_its_pending_messages():
    socket = StreamSocket(SocketLimits())
    socket._early = memoryview(frame(1, PING) * 400)  # The data is larger than one read.
    socket._transport = Paused()
    socket._continue_reading()
    assert socket._transport.is_paused, "two messages wait"
    socket.connection_lost(None)
    assert [await socket.receive(), await socket.receive()] == [PING.decode()] * 2
    with pytest.raises(SocketClosed):
        await socket.receive()
