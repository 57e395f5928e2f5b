"""What do robots see when the database that their servers share is away for a minute, and is anything lost?

    python benchmarks/database_away.py                       # 60 s killed, then 60 s standing still
    python benchmarks/database_away.py --seconds 5

Two real server processes share one PostgreSQL. A robot at each is driven over a stream at 20 Hz all the time. The
database is killed (and later stopped with SIGSTOP: it takes connections and answers nothing), and meanwhile one session
is stopped in an emergency, one is reset, one is deleted. In the second round their server is killed with SIGKILL before
the database is back, and started again. Afterwards both servers and the database have to say what was acknowledged.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.database_kills import AGREED, Kills, Server
from benchmarks.measured import RESULTS, machine, write
from benchmarks.postgres import PostgresServer, postgres
from robojax.client import AsyncClient, Command, StreamClosed

POSE = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
TICK = 0.05


class Robot:
    """One that says where it is, and hears commands.

    Attributes:
        heard: when, on the monotonic clock.
    """

    def __init__(self, url: str, session_id: str):
        self._url, self.session_id = url, session_id
        self.heard: list[float] = []

    async def run(self) -> None:
        """Until it is cancelled or its server ends."""
        async with AsyncClient(self._url) as client:
            session = await client.create(self.session_id, "p", camera_names=("front",), rate=1 / TICK)
            async with session.stream() as stream:
                hearing = asyncio.create_task(self._hear(stream))
                try:
                    await stream.observe({"front": _picture(0)}, POSE)
                    await session.start()
                    for number in itertools.count():
                        if hearing.done():
                            break
                        await stream.observe({"front": _picture(number)}, POSE)
                        await asyncio.sleep(TICK)
                except StreamClosed:
                    pass
                finally:
                    hearing.cancel()

    async def _hear(self, stream: Any) -> None:
        async for message in stream:
            if isinstance(message, Command):
                self.heard.append(time.monotonic())

    def longest_pause(self, since: float, until: float) -> float:
        """Seconds between two commands, at most."""
        times = [since, *(at for at in self.heard if since < at < until), until]
        return max(after - before for before, after in pairwise(times))


async def campaign(folder: Path, seconds: float, database: PostgresServer) -> dict[str, Any]:
    """What robots saw, and what is not as it was acknowledged."""
    fleet = Kills(folder, 1, "direct", None, database)
    a, b, _ = fleet.servers
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for one in (a, b):
        await one.begin()
    robots = [Robot(str(one.http._base_url), f"robot-{one.name}") for one in (a, b)]
    running = [asyncio.create_task(robot.run()) for robot in robots]
    try:
        while any(len(robot.heard) < 20 for robot in robots):
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)
        for how, begin, end in (
            ("killed", database.stop, database.start),
            ("standing_still", database.pause, database.go_on),
        ):
            for name in ("stopped", "reset", "gone"):
                await _call(a, "POST", "/sessions", {"session_id": f"{how}-{name}", **_DIRECT})
            await _call(a, "POST", f"/sessions/{how}-reset/emergency_stop")
            before = time.monotonic()
            await asyncio.sleep(seconds / 4)
            began = time.monotonic()
            await asyncio.to_thread(begin)
            answers = [
                await _call(a, "POST", f"/sessions/{how}-stopped/emergency_stop"),
                await _call(a, "POST", f"/debug/sessions/{how}-reset/reset"),
                await _call(a, "DELETE", f"/sessions/{how}-gone"),
            ]
            slowest = max(took for _, _, took in answers)
            refused, told, _ = await _call(
                a, "POST", "/sessions", {"session_id": f"{how}-new", **_DIRECT}, is_fine=False
            )
            if (refused, told.get("code")) != (503, "not_kept"):
                wrong.append(f"{how}: a new session is {refused} {told}")
            await asyncio.sleep(max(began + seconds - time.monotonic(), 0))
            now = time.monotonic()
            found[how] = {
                "away_s": round(now - began, 1),
                "longest_pause_before_ms": [round(one.longest_pause(before, began) * 1e3) for one in robots],
                "longest_pause_ms": [round(one.longest_pause(began, now) * 1e3) for one in robots],
                "commands": [sum(began < at < now for at in one.heard) for one in robots],
                "slowest_answer_s": round(slowest, 2),
                "warned": all("warning" in told for _, told, _ in answers),
            }
            for robot in robots:
                if (await _status(b if robot is robots[1] else a, robot.session_id))["status"] != "running":
                    wrong.append(f"{how}: {robot.session_id} does not run")
            if how == "standing_still":
                await a.kill()
                starting = asyncio.create_task(_again(a))
                await asyncio.sleep(0.5)
                await asyncio.to_thread(end)
                await starting
            else:
                await asyncio.to_thread(end)
            wrong += await _compare(how, a, b, database)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for one in (a, b):
            await one.end()
    return {**found, "wrong": wrong}


def _picture(number: int) -> np.ndarray:
    """Return one of pictures that differ, as those of a camera do."""
    return np.full((48, 64, 3), number % 2, np.uint8)


_DIRECT = {"policy_path": "p", "transport_server_url": "direct"}


async def _again(server: Server) -> None:
    await server.end()
    await server.begin()


async def _call(
    server: Server, method: str, path: str, body: Any = None, *, is_fine: bool = True
) -> tuple[int, dict[str, Any], float]:
    began = time.monotonic()
    async with server.http.request(method, path, json=body) as answer:
        told = await answer.json()
    if is_fine and answer.status != 200:
        raise RuntimeError(f"{method} {path}: {answer.status} {told}")
    return answer.status, told, time.monotonic() - began


async def _status(server: Server, session_id: str) -> dict[str, Any]:
    return (await _call(server, "GET", f"/sessions/{session_id}"))[1]


async def _compare(how: str, a: Server, b: Server, database: PostgresServer) -> list[str]:
    """What of this round is not as it was acknowledged, once both know."""
    until = time.monotonic() + AGREED
    while True:
        wrong = []
        for one in (a, b):
            try:
                listed = {id: found["stats"]["emergency_stop"] for id, found in (await one.listed()).items()}
            except (RuntimeError, aiohttp.ClientError) as error:
                wrong.append(str(error))
                continue
            if listed.get(f"{how}-stopped") is None:
                wrong.append(f"{how}, {one.name}: the emergency stop is lost")
            if listed.get(f"{how}-reset", "there is none") is not None:
                wrong.append(f"{how}, {one.name}: the reset is lost")
            if f"{how}-gone" in listed:
                wrong.append(f"{how}, {one.name}: the deletion is lost")
        latched = {row[0] for row in await asyncio.to_thread(database.sql, "SELECT id FROM robojax_latches")}
        if {id for id in latched if id.startswith(how)} != {f"{how}-stopped"}:
            wrong.append(f"{how}: the database has latches of {sorted(latched)}")
        if not wrong or time.monotonic() > until:
            return wrong
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", "--results", type=Path, default=RESULTS / "database_away.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, postgres() as database:
        found = asyncio.run(campaign(Path(folder), options.seconds, database))
    result = {
        "question": "what robots see, and what is lost, when the database that servers share is away",
        "command": f"python benchmarks/database_away.py --seconds {options.seconds:g}",
        "machine": machine("asyncpg"),
        **found,
        "is_met": not found["wrong"],
    }
    write(options.output, result)
    print(json.dumps(result, indent=2))
    raise SystemExit(0 if result["is_met"] else 1)


if __name__ == "__main__":
    main()
