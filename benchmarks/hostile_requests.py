"""What do ten thousand malformed requests do to a server, and to a robot that it controls at the same time?

    python -m benchmarks.hostile_requests --requests 10000

Half of the requests are made by schemathesis from the server's two OpenAPI documents (values that fit and values that
do not), half are bytes: valid requests that were cut, repeated, spliced and flipped, and heads and bodies that are
known to confuse servers. The server is a process of its own with scripted policies; during the requests one session
runs at 50 ticks a second and receives joints and frames. Every answer must have a status below 500.

Last result, AMD EPYC (Zen 4), 2 cores shared with other work: benchmarks/results/hostile_requests.json
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measured import RESULTS, machine, write
from benchmarks.processes import child

BESIDE = "beside"  # the session that must not notice
RATE = 50.0
QUIET = 0.3  # seconds after which an unanswered request counts as waiting for more bytes
AT_ONCE = 16


@dataclass
class Result:
    """What was answered.

    Attributes:
        statuses: how often; ``closed`` without an answer, ``waiting`` for more bytes when the client gave up.
        wrong: requests that were answered with 500 or more, or with something that is not HTTP.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def assail(host: str, port: int, requests: Iterable[bytes], at_once: int = AT_ONCE) -> Result:
    """Send each on a connection of its own and note what comes back."""
    result = Result()
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            status = await _ask(host, port, request)
            result.statuses[status] += 1
            if status.startswith("5") or status == "no HTTP":
                result.wrong.append(f"{status}: {request[:300]!r}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    return result


async def server_errors(host: str, port: int) -> dict[str, int]:
    """Answers of 500 and above that the server has counted itself, for clients that did not wait for theirs."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    assert "robojax_requests_total" in text
    found = re.findall(r'robojax_requests_total{(.*status="5\d\d")} (.+)', text)
    return {labels: int(float(count)) for labels, count in found}


async def _ask(host: str, port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        # A valid create may answer late; a request that waits for more bytes gets no answer.
        async with asyncio.timeout(4 * QUIET if request.startswith(b"POST") and b"/sessions " in request else QUIET):
            await writer.drain()
            line = await reader.readline()
    except TimeoutError:
        return "waiting"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    if not line:
        return "closed"
    match = re.match(rb"HTTP/1\.1 (\d{3}) ", line)
    return match[1].decode() if match else "no HTTP"


# The server.


@contextlib.asynccontextmanager
async def running_session(app: Any, transport: Any, create: Any) -> AsyncIterator[Any]:
    """A session that moves its robot in memory: a frame and its joints come at each of its ticks."""
    import numpy as np

    session = await create(app)
    await app.ctx.sessions.start(BESIDE)
    link = transport.links[0]
    joints = ("Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw")
    picture = np.zeros((48, 64, 3), np.uint8)

    async def feed() -> None:
        number = 0
        while True:
            number += 1
            picture[:] = number % 251
            link.deliver_frame("front", picture.copy())
            link.deliver_joints(dict.fromkeys(joints, 5.0))
            await asyncio.sleep(1 / RATE)

    feeding = asyncio.create_task(feed())
    try:
        yield session
    finally:
        feeding.cancel()


async def make_beside(app: Any) -> Any:
    """The session that runs during the requests."""
    from service.sessions.request import NewSession

    return await app.ctx.sessions.create(NewSession(BESIDE, "p", "http://rooms", rate=RATE))


def serve() -> None:
    """The child: prints its address, then one line of figures for each line it reads; ends with its input."""
    import jaxmodels
    from service.app import create_app
    from service.http.server import listen, serve_app
    from service.settings import Settings
    from tests.testing.doubles import MemoryTransport, ScriptedLoader

    # A server does so when it starts; here it would be taken for growth.
    _ = jaxmodels.load_policy

    async def main() -> None:
        transport = MemoryTransport()
        settings = Settings.from_values(creates_per_minute=100_000, limit_local=False, max_sessions=32)
        app = create_app(settings, transport=transport, load=ScriptedLoader())
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with (
            serve_app(app, listen("127.0.0.1", 0)) as url,
            running_session(app, transport, make_beside) as session,
        ):
            print(url, flush=True)
            while await reader.readline():
                stats = session.status().stats
                told = {name: stats[name] for name in ("ticks", "missed_ticks", "commands_sent", "tick_lateness_ms")}
                rss = round(psutil.Process().memory_info().rss / 1e6, 1)
                print(json.dumps(told | {"stage": str(session.stage), "rss": rss}), flush=True)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class _EmptyHub(BaseHTTPRequestHandler):
    """A Hub that can be reached and has no models: a failed download is not a fault of the server."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")  # Its clients read this header.
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


@contextlib.contextmanager
def empty_hub() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _EmptyHub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hub.server_port}"
        hub.shutdown()


# The requests.

BODY = {"session_id": "arm", "policy_path": "p", "transport_server_url": "http://127.0.0.1:9"}
# A stop is a stop however it is worded; that this one gets through is tested elsewhere.
LEFT_OUT = "/debug/emergency_stop"


def from_documents(documents: Iterable[Mapping[str, Any]], count: int, seed: int) -> Iterator[bytes]:
    """Requests that schemathesis thinks of, as bytes."""
    import requests
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Unsatisfiable
    from schemathesis.generation import GenerationMode

    operations: list[Any] = [
        operation.ok()  # pyright: ignore[reportAttributeAccessIssue] - it is one: the documents are ours
        for document in documents
        for operation in schemathesis.openapi.from_dict(dict(document)).get_all_operations()
    ]
    # Only endpoints with parameters or a body can receive wrong values.
    kinds = [
        (operation, mode)
        for operation in operations
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode is GenerationMode.POSITIVE or operation.body or operation.query
    ]
    kinds = [kind for kind in kinds if not kind[0].path.endswith(LEFT_OUT)]
    weights = [8 if operation.body else 3 if operation.query else 1 for operation, _ in kinds]
    for (operation, mode), weight in zip(kinds, weights, strict=True):
        found: list[Any] = []
        each = max(1, round(count * weight / sum(weights)))

        @settings(
            max_examples=each,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        @seeded(seed)
        @given(case=operation.as_strategy(generation_mode=mode))
        def collect(case: Any) -> None:
            found.append(case.as_transport_kwargs(base_url="http://server"))  # noqa: B023 - it runs in this round only

        with contextlib.suppress(Unsatisfiable):
            collect()
        for arguments in found:
            # Skips requests that a client library refuses to send.
            with contextlib.suppress(requests.RequestException, ValueError):
                yield _written(requests.Request(**arguments).prepare())


def _written(request: Any) -> bytes:
    body = request.body or b""
    body = body.encode("utf-8", "surrogateescape") if isinstance(body, str) else bytes(body)
    head = [f"{request.method} {request.path_url} HTTP/1.1", "Host: 127.0.0.1"]
    head += [f"{_text(name)}: {_text(value)}" for name, value in request.headers.items()]
    return "\r\n".join(head).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def seeds() -> list[bytes]:
    """Valid requests, from which the hostile requests are made."""

    def request(method: str, path: str, body: object = None, *headers: str) -> bytes:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
        if raw:
            lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw

    socket_headers = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    return [
        request("GET", "/health"),
        request("GET", "/sessions"),
        request("POST", "/sessions", BODY | {"camera_names": ["front", "wrist"], "rate": 50}),
        request("POST", "/api/sessions", BODY | {"session_id": "x" * 64, "max_relative_target": {"Jaw": 1.5}}),
        request("DELETE", "/sessions/arm"),
        request("POST", "/sessions/arm/start"),
        request("POST", "/sessions/arm/policy", {"revision": "main", "force": True}),
        request("POST", "/sessions/arm/rollback"),
        request("GET", "/deployments?limit=5&session_id=arm"),
        request("GET", "/debug/logs?limit=10&level=info"),
        request("GET", "/debug/sessions/arm/queue"),
        request("GET", "/metrics", None, "Accept: */*", "Range: bytes=0-1"),
        request("GET", "/openapi-full.json", None, "Accept-Encoding: gzip"),
        request("GET", "/ui"),
        request("POST", "/models/nobody/forward", {"inputs": {"x": [1, 2, 3]}}),
        request("POST", "/robotics/workspaces/w/rooms", {"room_id": "r"}),
        request("POST", "/robotics/workspaces/w/rooms/r/command", {"joints": [{"name": "Jaw", "value": 5}]}),
        request("POST", "/video/workspaces/w/rooms", {"room_id": "r", "config": {"framerate": 30}}),
        request("GET", "/robotics/workspaces/w/rooms/r/ws", None, *socket_headers),
        request("POST", "/sessions", BODY | {"session_id": "direct", "transport_server_url": "direct"}),
        request("PATCH", "/sessions/direct", {"overlap": "ensemble", "ask_ahead": 0.1}),
        request("POST", "/sessions/direct/act", {"images": {"front": "aGVsbG8="}, "state": [0] * 6, "want": "action"}),
        request("GET", "/sessions/direct/stream", None, *socket_headers) + b"\x81\xfe\x00\x80" + b'{"kind":' * 20,
        request("GET", "/sessions/direct/openpi", None, *socket_headers) + b"\x82\xff" + b"\x00" * 40,
        request("OPTIONS", "/sessions", None, "Origin: http://evil.example", "Access-Control-Request-Method: POST"),
        request("POST", "/webhooks/policies", {"event": {"action": "update", "scope": "repo"}}),
        b"POST /sessions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    ]


PIECES = [
    b"\x00", b"\r\n", b"\n", b"\r", b": ", b"%00", b"%2e%2e%2f", b"../", b"//", b"?", b"#", b"%", b"\xff\xfe",
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"99999999999999999999", b"null", b"[]", b"{}", b'"',
    b"\\ud800", b"\xc3\x28",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"Host: b\r\n", b"[" * 2000, b'{"a":' * 500, b"a" * 9000,
    b"HTTP/1.1", b"HTTP/2.0", b"HTTP/0.9", b"${jndi:ldap://a}", b"' OR 1=1--", b"<script>", b"%s%n", "ü∞".encode(),
]  # fmt: skip


def bytes_of(count: int, seed: int) -> Iterator[bytes]:
    """Valid requests, spoiled."""
    chance = random.Random(seed)
    plain = seeds()
    for _ in range(count):
        data = bytearray(chance.choice(plain))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(7):
                case 0:
                    data[at:at] = chance.choice(PIECES)
                case 1:
                    data[at : at + chance.randrange(1, 20)] = chance.choice(PIECES)
                case 2:
                    del data[at : at + chance.randrange(1, 30)]
                case 3:
                    del data[at:]
                case 4 if data:
                    data[at % len(data)] ^= 1 << chance.randrange(8)
                case 5:
                    other = chance.choice(plain)
                    data[at:at] = other[chance.randrange(len(other)) :]
                case _:
                    data[at:at] = bytes(data[at : at + 200])
        # A whole stop that two pieces happen to make would be no surprise, and stop the robot.
        if b"emergency" not in data:
            yield bytes(data)


def measure(count: int, seed: int) -> dict[str, Any]:
    """All of it."""
    with empty_hub() as hub:
        return _measure(count, seed, hub)


def _measure(count: int, seed: int, hub: str) -> dict[str, Any]:
    from service.api.blueprint import ROUTES
    from service.api.pages import full_document, specified_document

    documents = [specified_document(ROUTES), full_document(ROUTES)]
    with child("-m", "benchmarks.hostile_requests", "--serve", env={"HF_ENDPOINT": hub}) as server:
        host, _, port = server.url().removeprefix("http://").partition(":")
        began = time.monotonic()
        made = list(from_documents(documents, count - count // 2, seed))
        making = time.monotonic() - began
        # The first requests of each kind fill caches, which is not growth.
        asyncio.run(assail(host, int(port), made[: count // 10]))
        asyncio.run(assail(host, int(port), bytes_of(count // 10, seed + 1)))
        quiet = server.order()
        time.sleep(10)
        before = server.order()
        began = time.monotonic()
        first = asyncio.run(assail(host, int(port), made))
        second = asyncio.run(assail(host, int(port), bytes_of(count - len(made), seed)))
        seconds = time.monotonic() - began
        after = server.order()
        failed = asyncio.run(server_errors(host, int(port)))
        server.errors.seek(0)
        text = server.errors.read()
    return {
        "requests": sum(first.statuses.values()) + sum(second.statuses.values()),
        "seconds": round(seconds, 1),
        "seconds_of_making_them": round(making, 1),
        "from_documents": dict(sorted(first.statuses.items())),
        "bytes": dict(sorted(second.statuses.items())),
        "server_counts_500_and_above": failed,
        "wrong": (first.wrong + second.wrong)[:20],
        "tracebacks": text.count("Traceback"),
        "memory_mb": {"before": before["rss"], "after": after["rss"], "growth": round(after["rss"] - before["rss"], 1)},
        "session_beside": {
            "stage": after["stage"],
            "in_quiet": _ticks(quiet, before),
            "during_requests": _ticks(before, after),
        },
        "log": text[-2000:] if "Traceback" in text else "",
    }


def _ticks(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    counted = {name: then[name] - first[name] for name in ("ticks", "missed_ticks", "commands_sent")}
    return counted | {"lateness_ms": then["tick_lateness_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "hostile_requests.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    found = measure(arguments.requests, arguments.seed)
    found["machine"] = machine()
    print(json.dumps(found, indent=2))
    write(arguments.output, found)


if __name__ == "__main__":
    main()
