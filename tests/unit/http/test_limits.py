import asyncio
import contextlib
import time

import pytest
from sanic.response import text

from service.errors import TooManyRequests
from service.http.limits import Connections, CreateLimiter, Rates, is_local, source_key
from tests.testing.rig import body, started
from tests.testing.waiting import until

pytestmark = pytest.mark.timed


@contextlib.asynccontextmanager
async def server(big=0, **settings):
    async def send_large(request):
        return text("x" * big)

    async with started(prepare=lambda app: app.add_route(send_large, "/big"), **settings) as server:
        yield server.app, server.http, server.address


async def ask(address, request):
    """Return the status of a request over a new connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"{request} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n".encode())
    status = int((await asyncio.wait_for(reader.readline(), 30)).split()[1])
    writer.close()
    return status


def test_connections_are_limited_per_address_except_local_ones():
    connections = Connections(per_address=2)
    assert [connections.enter("10.0.0.1") for _ in range(3)] == [True, True, False]
    assert connections.enter("10.0.0.2")
    connections.leave("10.0.0.1")
    assert connections.enter("10.0.0.1")
    assert len(connections) == 3
    connections = Connections(per_address=1, total=3)
    assert [connections.enter("127.0.0.1") for _ in range(4)] == [True, True, True, False]
    assert not Connections(per_address=0, is_local_limited=True).enter("::1")


@pytest.mark.parametrize(
    ("address", "source", "local"),
    [
        ("10.0.0.1", "10.0.0.1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", False),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64", False),
        ("fe80::1%eth0", "fe80::/64", False),
        ("::1", "::/64", True),
        ("", "here", True),
    ],
)
def test_spellings_of_an_address_and_its_network_are_one_source(address, source, local):
    assert (source_key(address), is_local(address)) == (source, local)


def test_each_source_has_its_own_rate_until_it_is_silent():
    now = [10.0]
    rates = Rates(2.0, 3, lambda: now[0], max_sources=2)
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert rates.take("b") == 0.0
    now[0] = 10.4
    assert rates.take("a") > 0
    now[0] = 10.5
    assert rates.take("a") == 0.0
    now[0] = 1000.0
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    for source in ("b", "c"):
        rates.take(source)
    assert rates.take("a") == 0.0


def test_creates_are_limited_per_minute_with_a_retry_time():
    now = [0.0]
    creates = CreateLimiter(Rates(2 / 60, 2, lambda: now[0]))
    for key, address in ((None, "10.0.0.1"), ("anna", "127.0.0.1")):
        creates.take(key, address)
        creates.take(key, address)
        with pytest.raises(TooManyRequests) as caught:
            creates.take(key, address)
        assert caught.value.headers == {"retry-after": "30"}
    now[0] += 30
    creates.take("anna", "10.0.0.7")
    for _ in range(10):
        creates.take(None, "127.0.0.1")


async def test_too_many_creates_are_429_with_retry_after():
    async with server(creates_per_minute=2, limit_local=True) as (app, http, _):
        app.ctx.create_limiter._rates._clock = lambda: 0.0
        statuses, error = [], {}
        for number in range(3):
            async with http.post("/sessions", json=body(f"arm{number}")) as answer:
                statuses.append((answer.status, answer.headers.get("retry-after")))
                error = await answer.json()
        assert statuses == [(200, None), (200, None), (429, "30")]
        assert error["code"] == "too_many_requests"
        assert "creates_per_minute" in error["detail"]


async def test_a_surplus_connection_is_429_until_another_one_closes():
    async with server(max_connections=2, limit_local=True) as (app, _, address):
        pairs = [await asyncio.open_connection(*address) for _ in range(3)]
        pairs[2][1].write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        response = await asyncio.wait_for(pairs[2][0].read(), 30)
        assert response.startswith(b"HTTP/1.1 429 ")
        assert {b"connection: close", b"retry-after: 5"} <= set(response.split(b"\r\n"))
        assert response.endswith(b'"code":"too_many_requests"}')
        for _, writer in pairs:
            writer.close()
        await until(lambda: not len(app.config.CONNECTIONS), within=30)
        assert await ask(address, "GET /health") == 200


async def test_a_stop_is_accepted_with_any_number_of_idle_connections():
    async with server(max_connections=1, limit_local=True) as (app, _, address):
        idle = [await asyncio.open_connection(*address) for _ in range(40)]
        paths = ("/debug/emergency_stop", "/api/debug/emergency_stop", "/tickets", "/nothing")
        assert [await ask(address, f"POST {path}") for path in paths] == [200, 200, 429, 404]
        assert len(app.config.CONNECTIONS) <= 1 + 16
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize("requests", [1, 3], ids=["one answer", "pipelined"])
async def test_a_client_that_does_not_read_its_answer_is_disconnected(requests, pauses):
    async with server(big=8 << 20, request_deadline=0.3) as (app, _, address):
        _reader, writer = await asyncio.open_connection(*address, limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * requests)
        await until(lambda: len(app.config.CONNECTIONS) == 1)
        began = time.monotonic()
        while len(app.config.CONNECTIONS):
            assert pauses.running(began) < 5
            await asyncio.sleep(0.01)
        writer.close()


async def test_a_slow_reader_gets_the_whole_answer():
    async with server(big=12 << 20, request_deadline=0.5) as (_, _, address):
        reader, writer = await asyncio.open_connection(*address, limit=1024)
        writer.write(b"GET /big HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        count = 0
        while piece := await reader.read(1 << 16):
            count += len(piece)
            await asyncio.sleep(0.01)  # At 6 MB per second, the answer takes four deadlines.
        assert count > 12 << 20
        writer.close()
