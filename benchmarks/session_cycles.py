"""Does a server that makes and deletes sessions all day grow?

    python benchmarks/session_cycles.py                      # 1,000 cycles

One server process with its state folder and its embedded rooms; over HTTP a session with a camera is created, started,
stopped and deleted, again and again, its rooms made, joined, left and removed each time. Every hundred cycles the
server is left alone for a moment and counted: memory, file descriptors, threads, asyncio tasks and rooms. Targets: no
error, memory at most 5 % above what it was after the 100th, and everything else as it was after it.

The policy is scripted: what JAX keeps for a policy that is loaded anew is another question.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from sanic import HTTPResponse, Request

from benchmarks.measured import RESULTS, machine, write
from service.app import create_app
from service.http.bodies import json_response
from service.http.server import listen, run
from service.settings import Settings
from tests.testing.doubles import ScriptedLoader

LOOK_EVERY = 100
GROWTH = 0.05
COUNTED = ("descriptors", "threads", "tasks", "rooms", "sessions")


def serve(state: str, log: str, told: Connection) -> None:
    """The server, in a process of its own, with one route more that counts what it holds."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    app = create_app(Settings.from_values(state=state, port=0), load=ScriptedLoader())

    async def count(request: Request[Any, Any]) -> HTTPResponse:
        gc.collect()
        process = psutil.Process()
        assert app.ctx.room_table is not None
        return json_response(
            {
                "memory_mb": round(process.memory_info().rss / 1e6, 2),
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
                "tasks": len(asyncio.all_tasks()),
                "rooms": len(app.ctx.room_table.rooms),
                "sessions": len(app.ctx.sessions.list()),
            }
        )

    app.add_route(count, "/count", ctx_role=None)
    run(app, listen("127.0.0.1", 0), told.send)


async def cycle(http: aiohttp.ClientSession, url: str, errors: Counter[str]) -> None:
    """One session's life."""
    body = {"session_id": "arm", "policy_path": "p", "transport_server_url": url}
    for method, path in (
        ("POST", "/sessions"),
        ("POST", "/sessions/arm/start"),
        ("POST", "/sessions/arm/stop"),
        ("DELETE", "/sessions/arm"),
    ):
        async with http.request(method, path, json=body if path == "/sessions" else None) as answered:
            text = await answered.text()
        if answered.status != 200:
            errors[f"{method} {path}: {answered.status} {text[:100]}"] += 1


async def settled(http: aiohttp.ClientSession) -> dict[str, float]:
    """What the server holds, when nothing of the last cycle is under way any more."""
    before: dict[str, float] = {}
    for _ in range(20):
        await asyncio.sleep(0.25)
        async with http.get("/count") as answered:
            now = await answered.json()
        if before and all(now[name] == before[name] for name in COUNTED):
            return now
        before = now
    return before


async def measure(folder: Path, cycles: int, look_every: int = LOOK_EVERY) -> dict[str, Any]:
    """So many cycles; the first look is the one that the others are held against."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["service.app", "tests.testing.doubles", __name__])
    hears, tells = processes.Pipe(duplex=False)
    process = processes.Process(target=serve, args=(str(folder / "state"), str(folder / "log"), tells), daemon=True)
    process.start()
    tells.close()
    errors: Counter[str] = Counter()
    looks: list[dict[str, float]] = []
    try:
        url = await asyncio.to_thread(hears.recv)
        # One connection: those of the client would be counted, too.
        connector = aiohttp.TCPConnector(limit=1)
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
            began = time.monotonic()
            for number in range(1, cycles + 1):
                await cycle(http, url, errors)
                if number % look_every == 0:
                    looks.append({"cycle": number, **await settled(http)})
            seconds = time.monotonic() - began
    finally:
        process.terminate()
        await asyncio.to_thread(process.join, 10)
        code = process.exitcode
        process.kill()
        hears.close()
    first, last = looks[0], looks[-1]
    return {
        "errors": dict(errors),
        "cycle_ms": round(seconds / cycles * 1e3, 1),
        "memory_growth": round(last["memory_mb"] / first["memory_mb"] - 1, 4),
        **{f"{name}_growth": last[name] - first[name] for name in COUNTED},
        "exit_code": code,
        "looks": looks,
    }


def is_met(found: dict[str, Any]) -> bool:
    """Whether nothing grew."""
    return (
        not found["errors"]
        and found["memory_growth"] <= GROWTH
        and all(found[f"{name}_growth"] <= 0 for name in COUNTED)
        and found["exit_code"] == 0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--output", "--results", type=Path, default=RESULTS / "session_cycles.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), options.cycles))
    result = {
        "question": "what a server keeps of sessions that are gone",
        "command": f"python benchmarks/session_cycles.py --cycles {options.cycles}",
        "machine": machine(),
        "cycles": options.cycles,
        **found,
        "is_met": is_met(found),
    }
    write(options.output, result)
    print(json.dumps(result, indent=2))
    raise SystemExit(0 if result["is_met"] else 1)


if __name__ == "__main__":
    main()
