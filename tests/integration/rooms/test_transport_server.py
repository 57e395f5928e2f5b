"""Effects of a hostile, slow or vanished peer on the server and on other participants."""

import asyncio
import json
import logging
import os
import socket
import struct
import time

import aiohttp
import pytest
import typer
import websockets
from sanic import Sanic
from typer.testing import CliRunner

from robojax.cli.serve import transport
from service.transport.address import Kind
from service.transport.server.app import RoomsSettings, add_transport
from service.transport.server.rooms import RoomLimits
from service.transport.server.websocket import OutboxLimits
from tests.testing.rooms_server import serve_transport

TEXT, CONTINUED, BINARY, CLOSE, PING = 1, 0, 2, 8, 9


class RawSocket:
    """WebSocket client that can violate the protocol."""

    @classmethod
    async def open(cls, caller, path: str, **headers: str) -> "RawSocket":
        host, port = caller.base.removeprefix("http://").split(":")
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(host, int(port))
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(
            f"GET {path}/ws HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{more}"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        self.head = await self.reader.readuntil(b"\r\n\r\n")
        return self

    @classmethod
    async def join(cls, caller, path: str, participant_id: str, role: str) -> "RawSocket":
        self = await cls.open(caller, path)
        self.send(json.dumps({"participant_id": participant_id, "role": role}).encode())
        await self.until(b'"joined"')
        return self

    def send(self, payload: bytes, opcode: int = TEXT, is_last: bool = True) -> None:
        mask, size = os.urandom(4), len(payload)
        length = bytes([0x80 | size]) if size < 126 else bytes([0x80 | 127]) + struct.pack(">Q", size)
        keys = (mask * (size // 4 + 1))[:size]
        body = (int.from_bytes(payload, "big") ^ int.from_bytes(keys, "big")).to_bytes(size, "big")
        self.writer.write(bytes([(0x80 if is_last else 0) | opcode]) + length + mask + body)

    async def until(self, expected: bytes) -> bytes:
        found = b""
        async with asyncio.timeout(30):
            while expected not in found:
                part = await self.reader.read(1 << 16)
                assert part, f"closed after {found!r}"
                found += part
        return found

    async def close_code(self) -> int:
        async with asyncio.timeout(30):
            found = await self.reader.read()
        at = found.rindex(b"\x88")
        return struct.unpack(">H", found[at + 2 : at + 4])[0]

    def reset(self) -> None:
        """Break the TCP connection without a close frame."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@pytest.fixture
async def path(caller) -> str:
    return await caller.room("robotics", "r")


@pytest.fixture
async def raw(caller, path):
    raw = await RawSocket.join(caller, path, "p", "producer")
    yield raw
    raw.writer.close()
    await asyncio.sleep(0)


BROKEN_FRAMES = {
    "bad UTF-8": (lambda raw: raw.send(b'{"type":"heartbeat\xff"}'), 1007),
    "bad UTF-8 in a fragment": (
        lambda raw: (raw.send(b'{"type":', is_last=False), raw.send(b'"\xfe"}', CONTINUED)),
        1007,
    ),
    "2 MiB": (lambda raw: raw.send(b" " * (2 << 20)), 1009),
    "fragments of 1.5 MiB": (
        lambda raw: [raw.send(b" " * (1 << 19), CONTINUED if i else TEXT, is_last=False) for i in range(3)],
        1009,
    ),
    "reserved opcode": (lambda raw: raw.send(b"", opcode=3), 1002),
    "no mask": (lambda raw: raw.writer.write(b"\x81\x02{}"), 1002),
}


async def test_invalid_frame_frees_the_participant(caller, caplog):
    """All cases run at once, because the server waits a second for each client to read the reason."""

    async def check(number: int, name: str) -> None:
        break_it, code = BROKEN_FRAMES[name]
        path = await caller.room("robotics", f"r{number}")
        raw = await RawSocket.join(caller, path, f"p{number}", "producer")
        break_it(raw)
        assert await raw.close_code() == code, name
        await caller.settled(path, producer=None)
        raw.writer.close()

    await asyncio.gather(*(check(number, name) for number, name in enumerate(BROKEN_FRAMES)))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_refused_client_can_read_the_reason_while_sending(raw):
    raw.writer.write(struct.pack("!BBQ4x", 0x81, 0x80 | 127, 2 << 20))  # Too large and mostly unsent.
    for _ in range(20):  # Closing a connection with unread data would reset it, and the reason would be lost.
        raw.writer.write(b" " * 65536)
        await raw.writer.drain()
        await asyncio.sleep(0.01)
    assert not raw.writer.transport.is_closing()
    assert await raw.close_code() == 1009


async def test_client_refused_by_a_busy_server_can_read_the_reason(raw):
    async def busy() -> None:
        while True:
            time.sleep(0.002)  # noqa: ASYNC251 - other work of the loop
            await asyncio.sleep(0)

    other = asyncio.create_task(busy())
    # More than the kernel's buffer: a blocked writer does not notice that data can be read.
    raw.writer.write(struct.pack("!BBQ4x", 0x81, 0x80 | 127, 16 << 20) + b" " * (16 << 20))
    await raw.writer.drain()
    assert await raw.close_code() == 1009
    other.cancel()


HEARTBEAT = b'{"type":"heartbeat"}'


@pytest.mark.parametrize(
    "frames",
    [
        [(b'{"type":', TEXT, False), *[(b" ", CONTINUED, False)] * 1000, (b'"heartbeat"}', CONTINUED, True)],
        [*[(b"x", PING, True)] * 2000, (HEARTBEAT, TEXT, True)],
        [(b"\xff\x00", BINARY, True), (HEARTBEAT, BINARY, True)],
    ],
    ids=["a thousand fragments", "a ping flood", "binary frames"],
)
async def test_valid_frames_are_accepted(raw, frames):
    for frame in frames:
        raw.send(*frame)
    await raw.until(b"heartbeat_ack")


@pytest.mark.parametrize("before", [0, 5])
async def test_message_directly_before_a_close_is_processed(raw, caller, path, before):
    listening = await caller.join(path, "c", "consumer")
    written, writer = bytearray(), raw.writer
    raw.writer = type("Together", (), {"write": lambda self, data: written.extend(data)})()
    for _ in range(before):
        raw.send(HEARTBEAT)
    raw.send(b'{"type":"emergency_stop","reason":"now"}')
    raw.send(struct.pack(">H", 1000), CLOSE)
    writer.write(bytes(written))
    assert (await listening.until("emergency_stop"))["reason"] == "now"
    raw.writer = writer


async def test_pings_and_messages_of_one_socket_create_no_tasks(raw, monkeypatch):
    made, loop = [], asyncio.get_running_loop()
    create = loop.create_task
    monkeypatch.setattr(loop, "create_task", lambda task, **more: made.append(task) or create(task, **more))
    for _ in range(200):
        raw.send(b"x", PING)
        raw.send(HEARTBEAT)
    raw.send(b"", PING)
    await raw.until(b"\x8a\x00")
    assert len(made) < 20
    monkeypatch.undo()


async def test_broken_connection_frees_its_participant(raw, caller, path):
    raw.reset()
    await caller.settled(path, producer=None)
    await caller.join(path, "p", "producer")


async def test_peer_without_pong_is_disconnected(serve):
    async with serve(ping_interval=0.1, ping_timeout=0.2) as caller:
        path = await caller.room("robotics", "r")
        raw = await RawSocket.join(caller, path, "p", "producer")
        assert not (await caller.settled(path, producer=None))["has_producer"]
        raw.writer.close()


async def test_socket_that_never_joins_is_closed(serve):
    async with serve(join_timeout=0.05) as caller:
        path = await caller.room("robotics", "r")
        assert await (await caller.open(path)).next() is None


async def slow_consumer(caller, path: str) -> RawSocket:
    """Open a consumer that reads no data after its join."""
    slow = await RawSocket.open(caller, path)
    slow.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.writer.transport.pause_reading()
    slow.send(b'{"participant_id":"slow","role":"consumer"}')
    await caller.settled(path, consumers=["slow"])
    return slow


def large_update(number: int) -> dict:
    return {"type": "joint_update", "data": [{"name": "Jaw", "value": number, "padding": "x" * 250_000}]}


async def test_consumer_that_does_not_read_is_dropped_without_delay(serve, pauses):
    async with serve(outbox=OutboxLimits(messages=20, size=8 << 20, seconds=2.0)) as caller:
        path = await caller.room("robotics", "r")
        slow = await slow_consumer(caller, path)
        quick = await caller.join(path, "quick", "consumer")
        producer = await caller.join(path, "p", "producer")
        worst = 0.0
        for number in range(120):
            sent = time.monotonic()
            await producer.send(large_update(number))
            assert (await quick.next())["data"][0]["value"] == number
            worst = max(worst, pauses.running(sent))
        await caller.settled(path, consumers=["quick"], producer="p")
        assert worst < 1.0
        slow.reset()


async def test_frame_that_cannot_be_written_in_time_drops_its_reader(serve):
    async with serve(outbox=OutboxLimits(messages=1000, size=1 << 30, seconds=0.2)) as caller:
        path = await caller.room("robotics", "r")
        slow = await slow_consumer(caller, path)
        producer = await caller.join(path, "p", "producer")
        for number in range(80):
            await producer.send(large_update(number))
        await caller.settled(path, consumers=[], producer="p")
        slow.reset()


async def test_client_may_rejoin_at_once_after_a_close(caller, path):
    url = f"{caller.base}{path}/ws".replace("http", "ws", 1)
    for _ in range(20):
        async with websockets.connect(url) as client:
            await client.send('{"participant_id":"p","role":"producer"}')
            assert json.loads(await client.recv())["type"] == "joined"


async def test_slow_request_is_cut_off(serve, monkeypatch, pauses):
    monkeypatch.setattr("service.transport.server.app.REQUEST_DEADLINE", 0.2)
    async with serve() as caller:
        reader, writer = await asyncio.open_connection(*caller.base.removeprefix("http://").split(":"))
        started = time.monotonic()
        for part in (b"GET /health HTTP/1.1\r\nHo", b"s", b"t"):
            writer.write(part)
            await asyncio.sleep(0.06)
        async with asyncio.timeout(30):
            assert b" 408 " in await reader.read()
        assert pauses.running(started) < 2.0
        writer.close()


async def test_ids_may_be_percent_encoded(caller):
    path = await caller.room("robotics", "session-1_a.front")
    encoded = path.replace("session-1_a.front", "%73ession%2D1_a%2Efront")
    assert (await caller.call("GET", encoded))[0] == 200
    socket = await caller.join(path, "c", "consumer")
    assert await socket.is_silent()
    joined = await (await caller.open_socket(encoded, "d", "producer")).next()
    assert joined["room_id"] == "session-1_a.front"


BAD_IDS = ["a b", "a/b", "..", ".", "é", "x" * 161, "a\n", "a%20b", "<script>"]
BAD_CONFIGS = [
    {"encoding": "avi"}, {"framerate": 0}, {"framerate": 121}, {"bitrate": 99_999}, {"quality": 101},
    {"resolution": {"width": "wide"}},
]  # fmt: skip
BAD_BODIES = [b"{", b"[" * 200_000, b"\xff\xfe", b"[]", b'"room"', b'{"room_id": 7}', b'{"max_consumers": 0}']


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        *[({"room_id": name}, ["body", "room_id"]) for name in BAD_IDS],
        *[({"config": config}, ["body", "config"]) for config in BAD_CONFIGS],
        *[(body, ["body"]) for body in (*BAD_BODIES, b'{"max_consumers": 1e999}')],
    ],
)
async def test_invalid_room_is_422_without_echo(caller, body, loc):
    for kind in [Kind.VIDEO] if loc[1:] == ["config"] else Kind:
        status, answer = await caller.call("POST", f"/{kind}/workspaces/w/rooms", body)
        assert status == 422
        assert answer["detail"][0]["loc"][: len(loc)] == loc
        assert all(entry.keys() == {"type", "loc", "msg"} for entry in answer["detail"])
        assert "<script>" not in json.dumps(answer)


@pytest.mark.parametrize("workspace", ["a%20b", "a%2Fb", "%2E%2E%20", "%C3%A9", "x" * 161])
async def test_workspace_id_that_is_invalid_in_a_url_is_422(caller, workspace):
    status, answer = await caller.call("POST", f"/robotics/workspaces/{workspace}/rooms")
    assert (status, answer["detail"][0]["loc"]) == (422, ["path", "workspace_id"])


async def test_number_of_rooms_is_limited(serve):
    async with serve(limits=RoomLimits(rooms=1)) as caller:
        await caller.room("robotics", "r")
        status, answer = await caller.call("POST", "/video/workspaces/w/rooms")
        assert status == 429
        assert "1 rooms exist" in answer["detail"]


@pytest.mark.parametrize(
    ("method", "where", "body", "status", "detail"),
    [
        ("POST", "/robotics/workspaces/w/rooms", b" " * (2 << 20), 413, "Request Entity Too Large"),
        ("GET", "/nope", None, 404, "Not Found"),
        ("PUT", "/robotics/status", None, 405, "Method Not Allowed"),
        ("GET", "/robotics/workspaces/w/rooms/r/ws", None, 426, "Upgrade Required"),
    ],
)
async def test_request_refused_before_routing_gets_json(caller, path, method, where, body, status, detail):
    assert await caller.call(method, where, body) == (status, {"detail": detail})
    assert (await caller.call("GET", "/health"))[0] == 200


async def test_page_of_this_machine_may_call_and_its_preflight_passes(caller):
    page = "http://localhost:5173"
    headers = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    async with caller.session.options(f"{caller.base}/video/workspaces/w/rooms", headers=headers) as response:
        assert response.status == 204
        assert response.headers["access-control-allow-origin"] == page
        assert response.headers["access-control-allow-methods"] == "GET, POST"
        assert "content-type" in response.headers["access-control-allow-headers"]
    for path in ("/video/workspaces/w/rooms/none", "/video/status"):
        async with caller.session.get(caller.base + path, headers=headers) as response:
            assert response.headers["access-control-allow-origin"] == page


async def test_foreign_page_may_call_only_if_all_pages_may(caller, serve):
    elsewhere = {"Origin": "http://page"}
    async with caller.session.get(f"{caller.base}/video/status", headers=elsewhere) as response:
        assert response.status == 403
    async with (
        serve(origins=("*",)) as open_caller,
        open_caller.session.get(f"{open_caller.base}/video/status", headers=elsewhere) as response,
    ):
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == "http://page"


async def test_only_listed_pages_may_call_when_pages_are_listed(serve):
    async with serve(origins=("http://good",)) as caller:
        path = await caller.room("robotics", "r")
        async with caller.session.get(caller.base + path, headers={"Origin": "http://good"}) as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == "http://good"
            assert response.headers["vary"] == "origin"
        async with caller.session.delete(caller.base + path, headers={"Origin": "http://evil"}) as response:
            assert response.status == 403
            assert "access-control-allow-origin" not in response.headers
        assert (await caller.call("GET", path))[0] == 200
        await caller.join(path, "a", "consumer", headers={"Origin": "http://good"})
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await caller.open(path, headers={"Origin": "http://evil"})
        assert refused.value.status == 403


async def test_idle_rooms_are_removed(serve, until):
    async with serve(idle=0.0, cleanup_interval=0.02) as caller:
        path = await caller.room("robotics", "r")

        async def is_gone() -> bool:
            return (await caller.call("GET", path))[0] == 404

        await until(is_gone)


async def test_server_shutdown_closes_sockets_and_leaves_no_task(until):
    before = asyncio.all_tasks()
    async with aiohttp.ClientSession() as session:
        async with serve_transport() as base:
            await session.post(f"{base}/video/workspaces/w/rooms", json={"room_id": "v"})
            sockets = [await session.ws_connect(f"{base}/video/workspaces/w/rooms/v/ws") for _ in range(3)]
            for number, one in enumerate(sockets[1:]):
                await one.send_json({"participant_id": f"c{number}", "role": "consumer"})
                await one.receive(30)
        for one in sockets:
            while (frame := await one.receive(30)).type is aiohttp.WSMsgType.TEXT:
                pass
            assert frame.type is aiohttp.WSMsgType.CLOSE
    await until(lambda: not asyncio.all_tasks() - before)


def test_occupied_port_is_explained_by_the_command():
    app = typer.Typer()
    app.command()(transport)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = CliRunner().invoke(app, ["--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "Address already in use" in result.output
    assert "--port 0" in result.output


async def test_both_prefixes_have_the_same_routes():
    app = Sanic("somebody-elses-app", configure_logging=False)
    try:
        settings = RoomsSettings()
        table = settings.table()
        add_transport(app, table, settings)
        paths = {route.path for route in app.router.routes}
        assert "api/robotics/workspaces/<workspace:str>/rooms/<room:str>/ws" in paths
        assert "video/workspaces/<workspace:str>/rooms/<room:str>/webrtc/signal" in paths
        assert not {"health", "api/health", ""} & paths
        at_root = {path for path in paths if not path.startswith("api/")}
        assert paths - at_root == {f"api/{path}" for path in at_root}
    finally:
        Sanic.unregister_app(app)
