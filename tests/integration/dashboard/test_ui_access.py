"""Access to the page and its socket when keys are required, and the content of the page."""

import asyncio
import time
from dataclasses import replace

import aiohttp
import pytest

from service.auth.caller import Role
from service.dashboard.live import read_static_files


async def ticket(server, key: str) -> str:
    status, reply = await server.call("POST", "/tickets", headers={"x-api-key": key})
    assert status == 200
    return reply["ticket"]


async def sessions_seen(server, key: str) -> list[str]:
    async with server.http.ws_connect(f"/ui/live?ticket={await ticket(server, key)}") as socket:
        raw = await socket.receive_bytes(timeout=30)
    return [part.split(b'"')[0].decode() for part in raw.split(b'{"id":"')[1:]]


async def test_socket_accepts_a_ticket_once_and_shows_own_sessions(serve, keys):
    async with serve(keys_file=str(keys.path), policy_owners=("policies",)) as server:
        now = time.time()
        mine, theirs = (keys.create(f"{name}-key", Role.OPERATOR, name, now) for name in ("me", "them"))
        viewer, admin = keys.create("viewer", Role.VIEWER, "me", now), keys.create("admin", Role.ADMIN, None, now)
        for name, key in (("a", mine), ("b", theirs)):
            server.http.headers["x-api-key"] = key
            await server.create(name)
        del server.http.headers["x-api-key"]

        for query in ("", "?ticket=guessed"):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await server.http.ws_connect(f"/ui/live{query}")
            assert refused.value.status == 401
        used = await ticket(server, mine)
        async with server.http.ws_connect(f"/ui/live?ticket={used}"):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await server.http.ws_connect(f"/ui/live?ticket={used}")

        seen = [await sessions_seen(server, key) for key in (mine, theirs, viewer, admin)]
        assert seen == [["a"], ["b"], ["a"], ["a", "b"]]


async def test_page_sees_only_own_sessions_until_its_key_is_revoked(serve, keys):
    async with serve(keys_file=str(keys.path), policy_owners=("policies",)) as server:
        mine, theirs = (keys.create(name, Role.OPERATOR, name, time.time()) for name in ("me", "them"))
        server.http.headers["x-api-key"] = theirs
        await server.create("theirs")
        del server.http.headers["x-api-key"]
        async with server.http.ws_connect(f"/ui/live?ticket={await ticket(server, mine)}") as socket:
            await socket.send_json({"type": "look", "session": "theirs", "pictures": True})
            for number in range(1, 5):
                raw = await socket.receive_bytes(timeout=30)
                assert b'"session"' not in raw
                await socket.send_json({"type": "seen", "number": number})
            keys.revoke("me")
            async with asyncio.timeout(30):
                while (message := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                    await socket.send_json({"type": "seen", "number": (number := number + 1)})
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1008)


async def test_page_needs_no_key_and_loads_no_foreign_content(serve, keys):
    async with serve(keys_file=str(keys.path)) as server:
        async with server.http.get("/ui/", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (302, "../ui")
        for name in ("", *(f"/{name}" for name in read_static_files() if name != "page.html")):
            async with server.http.get(f"/ui{name}") as answer:
                text, policy = await answer.text(), answer.headers["content-security-policy"]
            assert answer.status == 200
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "https://" not in text
            assert "http://" not in text or name.endswith(".svg"), "an XML namespace is not an address"
        for name in ("page.html", "nothing.js", "..%2flive.py", "%2e%2e%2f__init__.py"):
            assert (await server.call("GET", f"/ui/{name}"))[0] == 404


def test_page_never_inserts_text_as_html():
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", " style=")
    for name, file in read_static_files().items():
        assert not [word for word in words if word in file.content.decode()], name


async def test_one_key_cannot_block_the_pages_of_other_keys(serve, keys):
    async with serve(keys_file=str(keys.path)) as server:
        greedy, other = (keys.create(name, Role.VIEWER, name, time.time()) for name in ("greedy", "other"))
        live = server.app.ctx.live
        live.settings = replace(live.settings, viewers=3)
        opened = [
            await server.http.ws_connect("/ui/live", headers={"x-api-key": key})
            for key in (greedy, greedy, greedy, other, other)
        ]
        assert sorted(viewer.caller.name for viewer in live.viewers) == ["greedy", "greedy", "other"]
        for socket, why in ((opened[0], "others want to look on, too"), (opened[4], "3 pages look on already")):
            while (end := await socket.receive(timeout=30)).type is not aiohttp.WSMsgType.CLOSE:
                pass
            assert (end.data, end.extra) == (1013, why)
        for socket in opened:
            await socket.close()
