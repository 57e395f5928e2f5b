"""The page's socket, used by a client without a browser."""

import asyncio
import json
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from service.dashboard.live import BadMessage, BinaryPart, LiveSettings, StopAll, pack_message, parse_message
from tests.testing.waiting import until

MOVING = {"ticks", "plan", "picture"}


def unpack(raw: bytes) -> dict[str, Any]:
    (length,) = struct.unpack_from("<I", raw)
    head, at = json.loads(raw[4 : 4 + length]), 4 + length
    for part in head["parts"]:
        part["content"] = raw[at : at + part["size"]]
        at += part["size"] + -part["size"] % 4
        if part["kind"] == "detail":
            head["detail"] = json.loads(part["content"])
    assert at == len(raw)
    return head


class Page:
    """Client with the behaviour of the page's script, without drawing."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self.socket = socket

    async def say(self, **word: Any) -> None:
        await self.socket.send_json(word)

    async def next(self, *, is_seen: bool = True) -> dict[str, Any]:
        message = unpack(await self.socket.receive_bytes(timeout=30))
        if is_seen and "number" in message:
            await self.say(type="seen", number=message["number"])
        return message

    async def until(self, claim) -> dict[str, Any]:
        """Return the first of the next hundred messages for which the claim is true."""
        for _ in range(100):
            message = await self.next()
            if claim(message):
                return message
        raise AssertionError("no message matched")


@asynccontextmanager
async def opened(server, path: str = "/ui/live", **more: Any) -> AsyncIterator[Page]:
    async with server.http.ws_connect(path, max_msg_size=1 << 22, **more) as socket:
        yield Page(socket)


def kinds(message: dict[str, Any]) -> set[str]:
    return {part["kind"] for part in message["parts"]}


async def test_page_shows_the_motion_of_a_robot(server):
    await server.create()
    async with opened(server) as page:
        first = await page.next()
        assert first["caller"] == {"name": "anybody", "role": "admin"}
        assert [(line["id"], line["stage"]) for line in first["sessions"]] == [("arm", "ready")]
        assert "session" not in first
        await page.say(type="look", session="arm", pictures=True)
        await server.call("POST", "/sessions/arm/start")
        detail = (await page.until(lambda message: "detail" in message))["detail"]
        assert detail["status"]["session_id"] == "arm"
        assert detail["joints"][5] == {"name": "Jaw", "low": 0, "high": 100}
        await page.until(lambda message: kinds(message) >= MOVING)
        message = await page.until(lambda message: "ticks" in kinds(message))
        [ticks] = [part for part in message["parts"] if part["kind"] == "ticks"]
        rows = np.frombuffer(ticks["content"], np.float32).reshape(ticks["shape"])
        assert rows.shape[1] == 3 + 2 * 6
        assert (rows[:, 0] <= 0).all()
        assert (rows[:, 0] > -1).all()
        assert rows[:, 1].all(), "all commands must be marked as sent"
        np.testing.assert_allclose(rows[-1, 9:] - rows[-1, 9], np.arange(6) * 10, atol=1e-3)
        spread = (await page.until(lambda message: message.get("detail", {}).get("spread")))["detail"]["spread"]
        assert sum(spread["lateness"]) > 0


async def test_pictures_are_jpegs_and_encoded_only_for_open_pages(server):
    arm = await server.create()
    live = server.app.ctx.live
    async with opened(server) as page:
        await page.say(type="look", session="arm", pictures=False)
        for _ in range(5):
            assert "picture" not in kinds(await page.next())
        assert live.pictures.encoded == 0
        await page.say(type="look", session="arm", pictures=True)
        message = await page.until(lambda message: "picture" in kinds(message))
        [picture] = [part for part in message["parts"] if part["kind"] == "picture"]
        assert (picture["camera"], picture["content"][:3]) == ("front", b"\xff\xd8\xff")
        assert picture["age"] < 1
        arm.is_seeing = False
        await page.until(lambda message: message["frame_ages"]["front"] > 0.3)
        while live.pictures._encoding is not None:
            await page.next()
        await page.next()  # After a pause of the machine, the last picture may arrive late.
        assert "picture" not in kinds(await page.next()), "a shown picture is not sent again"
    await until(lambda: not live.viewers and live.pictures._encoding is None)
    arm.is_seeing, made = True, live.pictures.encoded
    await asyncio.sleep(0.3)
    assert live.pictures.encoded == made
    assert not server.app.ctx.sessions.get("arm")._observers.attached, "a closed page leaves an observer"


async def test_encoding_all_pictures_takes_a_small_part_of_a_core(server, monkeypatch):
    await server.create()
    pictures = server.app.ctx.live.pictures
    encode = pictures._encode
    monkeypatch.setattr(pictures, "_encode", lambda frames: (encode(frames)[0], 0.02))  # Seconds per frame.
    async with opened(server) as page:
        await page.say(type="look", session="arm", pictures=True)
        began = asyncio.get_running_loop().time()
        for _ in range(3):
            await page.until(lambda message: "picture" in kinds(message))
        took = asyncio.get_running_loop().time() - began
    assert took >= 2 * 0.02 / 0.05, "at most 5 % of a core"


async def test_slow_page_gets_no_messages_and_is_disconnected(server):
    live = server.app.ctx.live
    live.settings = LiveSettings(view_timeout=2.0)
    async with opened(server) as slow, opened(server) as quick:
        keeping_up = asyncio.create_task(quick.until(lambda message: message["number"] == 12))
        assert [(await slow.next(is_seen=False))["number"] for _ in range(2)] == [1, 2]
        end = await slow.socket.receive(timeout=30)
        assert end.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.ERROR)
        assert live.cut == 1
        await keeping_up
        assert live.cut == 1, "the other page is not delayed"


async def test_stop_of_a_slow_page_is_acknowledged(server):
    await server.create("a")
    await server.create("b")
    async with opened(server) as page:
        for _ in range(2):
            await page.next(is_seen=False)
        await page.say(type="stop", number=7, reason="a person\npressed it")
        stop = (await page.next())["stop"]
        assert (stop["number"], stop["count"], stop["stopped"]) == (7, 2, ["a", "b"])
    _, sessions = await server.call("GET", "/sessions")
    assert [session["stats"]["emergency_stop"] for session in sessions] == ["a person pressed it"] * 2


async def test_page_that_sends_too_much_is_disconnected(server):
    async with opened(server) as page:
        for _ in range(200):
            await page.say(type="look", session=None)
        await until(lambda: server.app.ctx.live.cut == 1)


@pytest.mark.parametrize(
    "text", ["[", "[]", '{"type":"fly"}', '{"type":"seen","number":"1"}', '{"type":"look"}', "x" * 5000]
)
async def test_page_with_invalid_messages_is_disconnected(server, text):
    async with opened(server) as page:
        await page.socket.send_str(text)
        await until(lambda: server.app.ctx.live.cut == 1)
        await until(lambda: not server.app.ctx.live.viewers)


async def test_text_that_is_not_utf_8_closes_the_socket(server, caplog):
    async with opened(server) as page:
        await page.next()
        await page.socket._writer.send_frame(b'{"type":"stop","reason":"\xff"}', aiohttp.WSMsgType.TEXT)
        while (end := await page.socket.receive(timeout=30)).type is not aiohttp.WSMsgType.CLOSE:
            pass
        assert (end.data, end.extra) == (1007, "text is not UTF-8")
    await until(lambda: not server.app.ctx.live.viewers)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_pages_of_other_origins_are_refused_before_the_upgrade(server):
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await server.http.ws_connect("/ui/live", headers={"origin": "http://evil.example"})
    assert refused.value.status == 403
    async with opened(server, headers={"origin": server.url}) as page:
        assert (await page.next())["number"] == 1


async def test_recreated_session_is_shown_again(server):
    async with opened(server) as page:
        await page.say(type="look", session="arm", pictures=False)
        for _ in range(2):
            await server.create()
            await page.until(lambda message: message.get("session") == "arm")
            await server.call("DELETE", "/sessions/arm")
            gone = await page.until(lambda message: message.get("sessions") == [])
            assert "session" not in gone
    await until(lambda: not server.app.ctx.live._views)


def test_message_is_aligned_and_has_only_json_numbers():
    parts = [BinaryPart({"kind": "picture"}, b"12345"), BinaryPart({"kind": "plan"}, bytes(8))]
    raw = pack_message({"number": 1, "text": "é"}, parts)
    assert len(raw) % 4 == 0
    assert [part["content"] for part in unpack(raw)["parts"]] == [b"12345", bytes(8)]
    with pytest.raises(ValueError, match="JSON"):
        pack_message({"number": float("nan")})


def test_stop_is_read_even_with_invalid_fields():
    assert parse_message('{"type":"stop","number":true,"reason":["x"]}') == StopAll(0, "asked for on the page")
    with pytest.raises(BadMessage):
        parse_message(b"{}")
