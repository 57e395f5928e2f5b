"""A few hundred of the requests of ``benchmarks/hostile_requests.py``, and requests that confuse servers."""

import asyncio
import importlib.util
import logging
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from service.api.blueprint import ROUTES
from service.api.pages import specified_document
from tests.testing.doubles import SO100_REQUIREMENTS
from tests.testing.rig import started
from tests.testing.waiting import until

_FILE = Path(__file__).parents[3] / "benchmarks" / "hostile_requests.py"
_spec = importlib.util.spec_from_file_location("hostile_requests", _FILE)
assert _spec is not None
assert _spec.loader is not None
hostile = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = hostile
_spec.loader.exec_module(hostile)


@asynccontextmanager
async def server(**settings):
    parts = {"read_requirements": lambda path, revision: SO100_REQUIREMENTS}
    async with started(parts=parts, **settings) as server:
        yield server.app, server.transport, server.address


async def test_malformed_requests_do_not_disturb_a_running_robot(caplog):
    requests = [*hostile.from_documents([specified_document(ROUTES)], 120, 1), *hostile.bytes_of(480, 1)]
    assert len(requests) > 550
    async with (
        server(max_sessions=16) as (app, transport, address),
        hostile.running_session(app, transport, hostile.make_beside) as session,
    ):
        with caplog.at_level(logging.WARNING):
            result = await hostile.assail(*address, requests, at_once=48)
        assert result.wrong == []
        assert sum(result.statuses.values()) == len(requests)
        assert sum(count for status, count in result.statuses.items() if status.startswith("4")) > len(requests) / 3
        assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
        assert await hostile.server_errors(*address) == {}
        assert str(session.stage) == "running"
        sent = session.status().stats["commands_sent"]
        await until(lambda: session.status().stats["commands_sent"] > sent)


def post(*headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join(["POST /sessions HTTP/1.1", "Host: 127.0.0.1", *headers]).encode() + b"\r\n\r\n" + body


def get(target: bytes, headers: bytes = b"Host: 127.0.0.1\r\n") -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\n" + headers + b"\r\n"


JSON, CHUNKED = "Content-Type: application/json", "Transfer-Encoding: chunked"
SIZES = ("0x2", "+2", "-2", " 2", "2_0", "", "2 x", "2\t\x0b", "\u0662", "2;" + "a" * 80, "2;\rb", "0" * 17)
# These requests get 400 and end the connection, because their rest could be read as another request.
REFUSED = {
    "no HTTP": b"GARBAGE\r\n\r\n",
    "HTTP/2 in words": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a length without digits": post("Content-Length: 0x10", body=b"{}"),
    "a negative length": post("Content-Length: -1"),
    "two lengths": post("Content-Length: 2", "Content-Length: 5", body=b"{}xyz"),
    "the same length twice": post("Content-Length: 2", "Content-Length: 2", body=b"{}"),
    "a length and chunks": post("Content-Length: 4", CHUNKED, body=b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"),
    "a chunk of a negative size": post(CHUNKED, body=b"-5\r\nhello\r\n0\r\n\r\n"),
    "a chunk of no size": post(CHUNKED, body=b"xyz\r\nhello\r\n0\r\n\r\n"),
    "a space before the colon": post("Content-Length : 2", body=b"{}"),
    "a folded header like another": get(b"/health", b"Host: 127.0.0.1\r\n X-A: b\r\n"),
    "a folded header": get(b"/health", b"Host: 127.0.0.1\r\n folded\r\n"),
    "a bare NUL in the path": get(b"/\0"),
    "a bare carriage return": get(b"/health", b"Host: 127.0.0.1\r\nX-A: b\rX-B: c\r\n"),
    "an upgrade with a key of other letters": get(
        b"/video/workspaces/w/rooms/r/ws",
        b"Host: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \xc3\xbc\r\n",
    ),
    "a URL without a slash": get(b"HTTP/0.9/sessions"),
    "a URL of another host": get(b"http://169.254.169.254/"),
    "a URL with a user": get(b"http://127.0.0.1@evil/health"),
    "a URL of another kind": get(b"file:///etc/passwd"),
    "a fragment": get(b"/health#/sessions"),
    "a tab in the target": get(b"/health\t/x"),
    "two spaces": get(b" /health"),
    "a method with a bracket": b"GE(T /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "no host": get(b"/health", b""),
    "two hosts": get(b"/health", b"Host: 127.0.0.1\r\nHost: evil.example\r\n"),
    "the same host twice": get(b"/health", b"Host: 127.0.0.1\r\nhost: 127.0.0.1\r\n"),
    "two hosts in one": get(b"/health", b"Host: 127.0.0.1, evil.example\r\n"),
    "a host with a path": get(b"/health", b"Host: 127.0.0.1/evil\r\n"),
    "a host with a user": get(b"/health", b"Host: a@127.0.0.1\r\n"),
    **{
        f"a length of {length!r}": post(JSON, f"Content-Length: {length}", body=b"{}   ")
        for length in ("+5", "5_0", "0x5", "5 5", "5,5", "\u0665", "")
    },
    **{
        f"the coding {coding!r}": post(f"Transfer-Encoding: {coding}", body=b"2\r\n{}\r\n0\r\n\r\n")
        for coding in ("chunked, chunked", "xchunked", "identity", "gzip, chunked", "chunked;q=1", "")
    },
    "chunks in HTTP/1.0": post(JSON, CHUNKED, body=b"2\r\n{}\r\n0\r\n\r\n").replace(b"/1.1", b"/1.0", 1),
    **{f"a chunk of {size!r}": post(JSON, CHUNKED, body=size.encode() + b"\r\n{}\r\n0\r\n\r\n") for size in SIZES},
    "a chunk longer than its size": post(JSON, CHUNKED, body=b"2\r\n{}xx0\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
    "a trailer": post(JSON, CHUNKED, body=b"2\r\n{}\r\n0\r\nHost: b\r\n\r\n"),
    "a tunnel": b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
}
# The request, its status, and whether the response ends the connection.
ATTACKS = {name: (request, 400, True) for name, request in REFUSED.items()} | {
    "a head over 8 KiB": (get(b"/health", b"Host: 127.0.0.1\r\nX: " + b"a" * 9000 + b"\r\n"), 413, True),
    "a body that is announced too large": (post("Content-Length: 99999999999"), 413, True),
    "an unknown expectation": (post("Expect: miracles", "Content-Length: 2", body=b"{}"), 417, True),
    "200,000 nested lists": (post(JSON, "Content-Length: 200000", body=b"[" * 200_000), 422, False),
    "200,000 nested objects": (post(JSON, "Content-Length: 1000000", body=b'{"a":' * 200_000), 422, False),
    "a number of a million digits": (post(JSON, "Content-Length: 1000000", body=b"1" * 1_000_000), 422, False),
    "a NUL in the path": (get(b"/%00..%2f..%2fetc/passwd"), 404, False),
    "a way out of the root": (get(b"/../../etc/passwd"), 404, False),
    "a way out of the page's folder": (get(b"/ui/..%2f..%2fapp.py"), 404, False),
    "a URL of the same host": (get(b"http://127.0.0.1/health"), 200, False),
    "an echo": (b"TRACE /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 405, False),
    "no host in HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200, True),
    "an extension of a chunk": (post(JSON, CHUNKED, body=b'2;a="b";c\r\n{}\r\n0;d\r\n\r\n'), 422, False),
}


@pytest.fixture(scope="module")
def attacks():
    """Return the results of all attacks, sent to one server one after the other."""

    async def run():
        found = {}
        async with server() as (_, _, address), aiohttp.ClientSession(f"http://{address[0]}:{address[1]}") as http:
            for name, (request, _, _) in ATTACKS.items():
                reader, writer = await asyncio.open_connection(*address)
                writer.write(request)
                line = await asyncio.wait_for(reader.readline(), 30)
                head = await reader.readuntil(b"\r\n\r\n")
                is_closed = b"connection: close" in head.lower()
                if is_closed:
                    await asyncio.wait_for(reader.read(), 30)
                writer.close()
                found[name] = (int(line.split()[1]), is_closed)
                async with http.get("/health") as answer:
                    assert answer.status == 200
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("name", ATTACKS)
def test_ambiguous_requests_have_one_response(attacks, name):
    assert attacks[name] == ATTACKS[name][1:]


async def test_endless_chunks_are_cut_at_the_body_limit():
    async with server() as (_, _, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(post("Transfer-Encoding: chunked"))
        sent = 0
        with pytest.raises(ConnectionError):  # noqa: PT012 - any of the writes may fail
            while sent < 64 << 20:
                writer.write(b"10000\r\n" + b"a" * 65536 + b"\r\n")
                await writer.drain()
                sent += 65536
                if reader.at_eof():
                    raise ConnectionResetError
        assert sent < 16 << 20  # The server accepts a megabyte; the rest was in transit.
        writer.close()
