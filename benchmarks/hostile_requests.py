"""What do ten thousand malformed requests do to a server, and to the robot that runs on it meanwhile?

    python benchmarks/hostile_requests.py --requests 10000

Half of the requests are made by schemathesis from the server's two OpenAPI documents (values that fit and values that
do not), half are bytes: valid requests that were cut, repeated, spliced and flipped, and heads and bodies that are
known to confuse servers. The server is a process of its own with scripted policies; beside the requests one session
runs at 50 ticks a second with joints and frames that come in. Nothing but answers below 500 is right.

Last result, AMD EPYC (Zen 4), 2 cores shared with other work: benchmarks/results/hostile_requests.json
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from benchmarks.malformed_requests import bytes_of, from_documents
from benchmarks.measured import RESULTS, machine, write

BESIDE = "beside"  # the session that must not notice
RATE = 50.0
QUIET = 0.3  # seconds after which a request that is not answered is taken for one that still waits for bytes
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
        # The answer to a valid create takes as long as it takes; what waits for bytes never comes.
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
    """The session that runs beside the requests."""
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
    """A Hub that can be reached and has nothing: what is asked of it is no fault of the server's."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")  # by which its clients know
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing to say."""


@contextlib.contextmanager
def empty_hub() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _EmptyHub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{hub.server_port}"
        hub.shutdown()


def measure(count: int, seed: int) -> dict[str, Any]:
    """All of it."""
    with empty_hub() as hub:
        return _measure(count, seed, hub)


def _measure(count: int, seed: int, hub: str) -> dict[str, Any]:
    from service.api.blueprint import ROUTES
    from service.api.openapi import full_document, specified_document

    documents = [specified_document(ROUTES), full_document(ROUTES)]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"HF_ENDPOINT": hub},
        )
        question, told = child.stdin, child.stdout
        assert question is not None
        assert told is not None

        def ask() -> dict[str, Any]:
            question.write("\n")
            question.flush()
            return json.loads(told.readline())

        try:
            host, _, port = told.readline().strip().removeprefix("http://").partition(":")
            # Code paths and caches that the first of each kind fills are no growth.
            began = time.monotonic()
            made = list(from_documents(documents, count - count // 2, seed))
            making = time.monotonic() - began
            asyncio.run(assail(host, int(port), made[: count // 10]))
            asyncio.run(assail(host, int(port), bytes_of(count // 10, seed + 1)))
            quiet = ask()
            time.sleep(10)
            before = ask()
            began = time.monotonic()
            first = asyncio.run(assail(host, int(port), made))
            second = asyncio.run(assail(host, int(port), bytes_of(count - len(made), seed)))
            seconds = time.monotonic() - began
            after = ask()
            failed = asyncio.run(server_errors(host, int(port)))
        finally:
            question.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()
        log.seek(0)
        text = log.read()
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
