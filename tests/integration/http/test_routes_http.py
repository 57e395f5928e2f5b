import asyncio
import logging
import re
import time

import pytest
from sanic.response import text

from service.app import API_ROUTES, ROUTES
from service.http.origins import Origins
from tests.testing.rig import expect_refusal


class Wire:
    """Connection for requests with arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def send(self, text: str) -> None:
        self.writer.write(text.encode())
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, body

    async def is_closed(self, within: float = 30.0) -> bool:
        return await asyncio.wait_for(self.reader.read(), within) == b""


@pytest.fixture
async def dial():
    wires = []

    async def open_wire(server) -> Wire:
        wires.append(Wire(*await asyncio.open_connection(*server.address)))
        return wires[-1]

    yield open_wire
    for wire in wires:
        wire.writer.close()


async def test_routes_of_robothub_and_stops_answer_under_api(server):
    for route in ROUTES:
        path = route.path.replace("{session_id}", "nobody")
        statuses = []
        for prefix in ("", "/api"):
            async with server.http.request(route.method, prefix + path) as answer:
                statuses.append((answer.status, answer.content_type))
        assert statuses[0][0] in (200, 404, 422) or (path.endswith("/adopt") and statuses[0][0] == 409)
        if route in API_ROUTES:
            assert statuses[0] == statuses[1], path
        else:
            assert statuses[1][0] in (404, 405), path


async def test_unknown_path_is_404_in_json(server):
    for path in ("/nope", "/api/nope", "/sessions/a/b/c", "/ui/nope"):
        status, reply = await server.call("GET", path)
        assert (status, reply) == (404, {"detail": "Not Found", "code": "not_found"})


async def test_wrong_method_is_405_with_the_allowed_methods(server):
    for method in ("PUT", "PATCH", "TRACE", "DELETE", "INVENTED"):
        async with server.http.request(method, "/sessions") as answer:
            assert (answer.status, (await answer.json())["code"]) == (405, "method_not_allowed")
            assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "POST", "OPTIONS"}
    async with server.http.request("TRACE", "/sessions/arm") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD, OPTIONS, PATCH, DELETE")
    async with server.http.put("/api/sessions/arm/stop") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST, OPTIONS")


async def test_head_is_get_without_its_body(server):
    for path in ("/", "/health", "/sessions", "/openapi.json", "/docs", "/metrics"):
        async with server.http.head(path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_options_lists_the_allowed_methods(server):
    async with server.http.options("/sessions/arm/start") as answer:
        assert (answer.status, answer.headers["allow"]) == (204, "POST, OPTIONS")


async def test_connection_is_kept_for_the_next_request(server, dial):
    wire = await dial(server)
    for _ in range(3):
        await wire.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (200, "keep-alive")
    await wire.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /sessions HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert [(await wire.answer())[0] for _ in range(2)] == [200, 200]


async def test_each_response_has_its_own_request_id(server):
    found = set()
    for path in ("/", "/nope", "/sessions/nobody"):
        async with server.http.get(path) as answer:
            found.add(answer.headers["x-request-id"])
    assert len(found) == 3


async def test_internal_error_shows_only_its_request_id(server, caplog):
    async def broken(request):
        raise RuntimeError("the secret is hunter2 in /root/models")

    server.app.ctx.sessions.list = broken  # The route fails with this error.
    with caplog.at_level(logging.ERROR):
        async with server.http.get("/sessions") as answer:
            reply = await answer.json()
            request_id = answer.headers["x-request-id"]
    del server.app.ctx.sessions.list
    assert (answer.status, reply["code"]) == (500, "internal")
    assert request_id in reply["detail"]
    assert "hunter2" not in str(reply)
    assert "Traceback" not in str(reply)
    assert any(request_id in record.getMessage() and record.exc_info for record in caplog.records)


async def test_oversized_body_is_413(serve):
    async with serve(max_body=2048) as server:
        expect_refusal(await server.call("POST", "/sessions", data=b"x" * 4096), 413, "request_entity_too_large")


async def test_invalid_http_is_400_in_json(server, dial):
    wire = await dial(server)
    await wire.send("nonsense\r\n\r\n")
    status, headers, body = await wire.answer()
    assert (status, headers["content-type"]) == (400, "application/json")
    assert b'"code":"bad_request"' in body


DRIPPING = (
    "",
    "GET /health HTTP/1.1\r\nHost: localhost\r\n",
    "POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
)


async def test_slow_request_is_cut_at_its_deadline(serve, dial, pauses):
    async with serve(request_deadline=1.0) as server:

        async def drip(start: str) -> None:
            wire = await dial(server)
            began = time.monotonic()
            await wire.send(start)
            while time.monotonic() < began + 0.8:
                await wire.send("x")
                await asyncio.sleep(0.05)
            status, _, body = await wire.answer()
            # A timeout that restarts with each byte would end 1 s after the last byte.
            assert time.monotonic() - began > 0.9
            assert pauses.running(began) < 1.6
            assert (status, b'"code":"request_timeout"' in body) == (408, True)
            assert await wire.is_closed()

        await asyncio.gather(*map(drip, DRIPPING))
        assert (await server.call("GET", "/health"))[0] == 200


async def test_refused_slow_request_is_cut_at_its_deadline(serve, dial):
    async with serve(request_deadline=0.5) as server:
        wire = await dial(server)
        await wire.send("POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert (await wire.answer())[0] == 404
        assert await wire.is_closed(within=3)


@pytest.mark.parametrize(
    ("deadline", "first", "rest"), [(0.3, "Host: localhost\r\n\r\n", ""), (2.0, "", "Host: localhost\r\n\r\n")]
)
async def test_deadline_excludes_idle_time_and_earlier_requests(serve, dial, deadline, first, rest):
    async with serve(request_deadline=deadline) as server:
        wire = await dial(server)
        for _ in range(3):
            await wire.send(f"GET /health HTTP/1.1\r\n{first}")
            await asyncio.sleep(0.8)
            await wire.send(rest)
            assert (await wire.answer())[0] == 200


async def test_slow_response_is_503(serve):
    async with serve(answer_deadline=0.2) as server:
        await server.create()

        async def slow(request, session_id):
            await asyncio.sleep(30)
            return text("")

        server.app.ctx.sessions.stop = lambda session_id: slow(None, session_id)
        expect_refusal(await server.call("POST", "/sessions/arm/stop"), 503, "service_unavailable", "GET /sessions")


async def test_foreign_page_may_not_move_a_robot(server):
    await server.create()
    page = {"origin": "https://evil.example"}
    expect_refusal(await server.call("POST", "/sessions/arm/start", headers=page), 403, "origin_refused")
    assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "ready"
    async with server.http.get("/sessions", headers=page) as answer:
        assert "access-control-allow-origin" not in answer.headers


async def test_page_of_this_machine_may_call_and_read(server):
    page = {"origin": "http://localhost:5173", "access-control-request-method": "POST"}
    async with server.http.options("/sessions", headers=page) as answer:
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == page["origin"]
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "content-type" in answer.headers["access-control-allow-headers"]
    status, _ = await server.call("GET", "/sessions", headers={"origin": page["origin"]})
    assert status == 200


@pytest.mark.parametrize(
    ("origin", "host", "expected"),
    [
        (None, "x", True),
        ("http://127.0.0.1:3000", "127.0.0.1:8001", True),
        ("http://[::1]:3000", "127.0.0.1:8001", True),
        ("http://192.168.1.5:8001", "192.168.1.5:8001", True),
        ("http://192.168.1.5:9000", "192.168.1.5:8001", False),
        ("https://good.example", "x", True),
        ("https://good.example:444", "x", False),
        ("http://localhost.evil.example", "x", False),
        ("http://evil.example:8001", "evil.example:8001", False),  # A foreign name that resolves to this server.
        ("null", "x", False),
        ("http://[", "x", False),
        ("http://LOCALHOST:3000", "x", True),
        *(
            (text, "localhost:8001", False)
            for text in (
                *("", "localhost", "//localhost", "http:localhost", "http:/localhost", "http://", "http://localhost/"),
                *("http://localhost\\", "http://localhost\\.evil.example", "http://evil.example\\@localhost"),
                *(
                    "http://evil.example@localhost",
                    "http://localhost:",
                    "http://localhost:x",
                    "http://localhost:800100",
                ),
                *(
                    "http://localhost#",
                    "http://localhost?",
                    " http://localhost",
                    "http://localhost\t",
                    "http://l\u00f6",
                ),
                *("http://[::1", "http://[::1]x", "http://localhost http://evil.example", "http://localhost,http://a"),
            )
        ),
    ],
)
def test_which_pages_may_call(origin, host, expected):
    assert Origins(["https://good.example"]).allows(origin, host) is expected


def test_star_admits_all_pages_and_no_malformed_origin():
    origins = Origins(["*"])
    assert origins.allows("https://evil.example", "x")
    assert origins.allows("null", "x")
    assert not origins.allows("https://evil.example\\@good.example", "x")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (None, True),
        ("localhost:8001", True),
        ("[::1]:8001", True),
        ("good.example", True),
        ("evil.example", False),
        ("evil.example@localhost", False),
        ("evil.example\\@localhost", False),
        ("localhost/", False),
        ("", False),
    ],
)
def test_host_names_of_this_server(host, expected):
    assert Origins(["https://good.example"]).allows_host(host) is expected


async def test_rooms_are_served_with_sessions_unless_switched_off(serve):
    async with serve() as server:
        for prefix in ("", "/api"):
            status, reply = await server.call("POST", f"{prefix}/robotics/workspaces/w/rooms", json={"room_id": "r"})
            assert (status, reply["room_id"]) == (200, "r")
    async with serve(embedded_transport=False) as server:
        assert (await server.call("GET", "/robotics/workspaces/w/rooms"))[0] == 404


async def test_two_servers_in_one_process_share_no_state(serve):
    async with serve() as first, serve() as second:
        await first.create("arm")
        assert (await second.call("GET", "/sessions"))[1] == []
        assert re.search(r'robojax_sessions{stage="ready"} 1', await (await first.http.get("/metrics")).text())
        assert re.search(r'robojax_sessions{stage="ready"} 0', await (await second.http.get("/metrics")).text())
