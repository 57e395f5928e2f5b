"""Is anything lost, owned twice, or moved by itself, when servers that share a database are killed?

    python -m benchmarks.database_kills                      # 20 kills
    python -m benchmarks.database_kills --kills 4 --seed 7

Three server processes share one PostgreSQL. Twelve clients create, start, stop, restart, delete, stop in an emergency
and reset sessions at random servers. At a random moment one server gets SIGKILL. Then it is started again, or another
server adopts its sessions before that. The lists of all three are compared with what was acknowledged without a
warning, which says that other servers do not know of a change yet:

- ``lost``, ``owned_twice``, ``ghosts``: a session is on no server, on two, or listed after its deletion;
- ``lists_differ``: the servers do not list the same sessions;
- ``moved_by_themselves``: a session of the killed server is not ``interrupted``, or a client is in its rooms;
- ``latches_wrong``: an acknowledged emergency stop is not latched, or an acknowledged reset is not in effect.

Last figure, AMD EPYC, 2 cores: 20 kills, no fault.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.crash_recovery import ASKED, STAGES, Campaign, Known, NotKeptYet, report, rooms_server, serve
from benchmarks.measured import RESULTS
from benchmarks.postgres import PostgresServer, postgres

NAMES = ("a", "b", "c")
CLIENTS = 12
LIFE = (0.3, 1.5)
# Seconds in which clients go on at the other servers, and in which all must know of all again.
AFTER = 0.2
AGREED = 20.0
FAULTS = (
    "lost",
    "ghosts",
    "owned_twice",
    "lists_differ",
    "moved_by_themselves",
    "latches_wrong",
    "not_adopted",
    "server_errors",
)


class Server:
    """A server that is killed and started again."""

    def __init__(self, name: str, campaign: "Kills"):
        self.name, self._campaign = name, campaign
        self.http: aiohttp.ClientSession
        self.process: Any

    async def begin(self) -> None:
        """Return when it serves."""
        hears, tells = self._campaign.processes.Pipe(duplex=False)
        folder, settings = self._campaign.folder, {"database": self._campaign.database.url, "front_name": self.name}
        arguments = (str(folder / self.name), str(folder / f"{self.name}.log"), tells)
        self.process = self._campaign.processes.Process(target=serve, args=arguments, kwargs=settings, daemon=True)
        self.process.start()
        tells.close()
        try:
            url = await asyncio.to_thread(hears.recv)
        except EOFError:
            log = (folder / f"{self.name}.log").read_text()
            raise RuntimeError(f"{self.name} does not start: {log[-3000:]}") from None
        hears.close()
        self.http = aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=30))

    async def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        await asyncio.to_thread(self.process.join)

    async def end(self) -> None:
        """Let go of it."""
        await self.kill()
        self.process.close()
        await self.http.close()

    async def listed(self) -> dict[str, Any]:
        """All sessions, as it says."""
        async with self.http.get("/sessions") as answer:
            if "x-robojax-incomplete" in answer.headers:
                raise RuntimeError(f"{self.name} does not reach the database")
            return {one["session_id"]: one for one in await answer.json()}


class Kills(Campaign):
    """Servers ``a``, ``b`` and ``c``, and what was found wrong after each kill."""

    def __init__(self, folder: Path, seed: int, rooms: str, table: Any, database: PostgresServer):
        super().__init__(folder, seed, rooms, table)
        self.folder, self.database, self.processes = folder, database, self._processes
        self.processes.set_forkserver_preload(["service.app", "service.distributed.peers", __name__])
        self.known = {f"robot-{number}": Known() for number in range(CLIENTS)}
        self.servers = [Server(name, self) for name in NAMES]
        self.seen: Counter[str] = Counter()
        self.back_s: dict[str, list[float]] = {"restarted": [], "adopted": []}

    async def run(self, kills: int) -> None:
        """Kill one after the other."""
        async with AsyncExitStack() as stack:
            for one in self.servers:
                await one.begin()
                stack.push_async_callback(one.end)
            for number in range(kills):
                ended = asyncio.Event()
                clients = [asyncio.create_task(self.ask_on(name, ended)) for name in self.known]
                await asyncio.sleep(self.random.uniform(*LIFE))
                victim = self.random.choice(self.servers)
                await victim.kill()
                await asyncio.sleep(AFTER)
                ended.set()
                await asyncio.gather(*clients)
                began = time.monotonic()
                is_adopted = number % 2 == 0
                of_victim = await self.of(victim)
                if is_adopted:
                    await self.adopt(victim, of_victim, number)
                    self.back_s["adopted"].append(time.monotonic() - began)
                await victim.end()
                await victim.begin()
                if not is_adopted:
                    self.back_s["restarted"].append(time.monotonic() - began)
                await self.compare_all(of_victim, f"kill {number} of {victim.name}, {'adopted' if is_adopted else ''}")

    async def ask_on(self, name: str, ended: asyncio.Event) -> None:
        """Send one request after the other, to any of the servers."""
        known = self.known[name]
        while not ended.is_set():
            move = self.random.choice(ASKED.get(known.stage, ("delete", "emergency_stop")))
            known.asked = move
            server = self.random.choice(self.servers)
            try:
                status, stage = await self.ask(server.http, name, move)
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                return  # The change may have been applied: no more requests follow.
            except NotKeptYet:
                self.acknowledged["with_a_warning"] += 1
                return  # The other servers may not know of the change: no more requests follow.
            if status == 200:
                self.acknowledged[move] += 1
                known.acknowledge(move, stage or known.stage)
            elif status == 502:
                return  # an emergency stop that was passed on to the killed one
            else:
                known.asked = None
                if status >= 500:
                    self.fault("server_errors", f"{move} of {name}: {status}")

    async def of(self, victim: Server) -> set[str]:
        """What the others say that it has."""
        listed = await next(one for one in self.servers if one is not victim).listed()
        return {name for name, one in listed.items() if one["stats"].get("front") == victim.name}

    async def adopt(self, victim: Server, names: set[str], number: int) -> None:
        """Let both other servers adopt the sessions at once: exactly one server gets each session."""
        others = [one for one in self.servers if one is not victim]
        for name in sorted(names):
            until = time.monotonic() + AGREED
            while True:
                answers = await asyncio.gather(*(self._adopt(one, name) for one in others))
                if 200 in answers or "unready" in answers:
                    break
                if time.monotonic() > until:
                    self.fault("not_adopted", f"kill {number}, {name}: {answers}")
                    break
                await asyncio.sleep(0.2)
            if answers.count(200) > 1:
                self.fault("owned_twice", f"kill {number}, {name}: adopted by two")

    async def _adopt(self, server: Server, name: str) -> int | str:
        async with server.http.post(f"/sessions/{name}/adopt") as answer:
            told = await answer.json()
        return "unready" if "never ready" in str(told.get("detail")) else answer.status

    async def compare_all(self, of_victim: set[str], where: str) -> None:
        """Compare the lists of all servers with the acknowledged sessions, which are replaced by the listed ones."""
        until = time.monotonic() + AGREED
        while True:
            lists = [await one.listed() for one in self.servers]
            shown = [{name: found["status"] for name, found in one.items()} for one in lists]
            if shown[0] == shown[1] == shown[2]:
                break
            if time.monotonic() > until:
                self.fault("lists_differ", f"{where}: {shown}")
                break
            await asyncio.sleep(0.1)
        owners = Counter(name for one in lists for name, found in one.items() if "front" not in found["stats"])
        listed = {name: found for one in lists for name, found in one.items() if "front" not in found["stats"]}
        for name, count in owners.items():
            if count > 1:
                self.fault("owned_twice", f"{where}, {name}")
        for name, known in self.known.items():
            found, here = listed.get(name), f"{where}, {name}, {known}"
            if found is None:
                if known.stage != "absent" and known.asked != "delete":
                    self.fault("lost", here)
                self.known[name] = Known(is_latched=known.is_latched)
                continue
            if known.stage == "absent" and known.asked != "create":
                self.fault("ghosts", here)
            if name in of_victim and found["status"] != "interrupted":
                self.fault("moved_by_themselves", f"{here}: {found['status']}")
            allowed = {known.stage} | STAGES.get(known.asked or "", set())
            if found["status"] in ("running", "degraded", "reconnecting") and "running" not in allowed:
                self.fault("moved_by_themselves", f"{here}: {found['status']}")
            latch = found["stats"]["emergency_stop"] is not None
            if latch != known.is_latched and known.asked not in ("emergency_stop", "reset"):
                self.fault("latches_wrong", here)
            self.seen[found["status"]] += 1
            self.known[name] = Known(found["status"], latch, {found["status"]})
        self._look_at_rooms(listed, where)

    def _look_at_rooms(self, listed: dict[str, Any], where: str) -> None:
        for name, one in listed.items():
            if one["status"] != "interrupted":
                continue
            rooms = one["rooms"]
            ids = {*rooms["camera_room_ids"].values(), rooms["joint_input_room_id"], rooms["joint_output_room_id"]}
            mine = [place for place in self._table.rooms if (place.workspace, place.room) in {
                (rooms["workspace_id"], id) for id in ids}]  # fmt: skip
            if any(self._table.is_occupied(place) for place in mine):
                self.fault("moved_by_themselves", f"{where}, {name}: its rooms are occupied")

    def result(self) -> dict[str, Any]:
        """All figures, JSON-ready."""
        return {
            **{fault: self.found[fault] for fault in FAULTS},
            "acknowledged": dict(sorted(self.acknowledged.items())),
            "sessions_looked_at": dict(sorted(self.seen.items())),
            "back_s": {how: [round(one, 2) for one in sorted(took)] for how, took in self.back_s.items()},
            "notes": self.notes,
        }


async def campaign(folder: Path, kills: int, seed: int, database: PostgresServer) -> dict[str, Any]:
    """Kill servers so often; what was found, with 0 for every fault when all is well."""
    async with rooms_server() as (url, table):
        found = Kills(folder, seed, url, table, database)
        await found.run(kills)
        return found.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "database_kills.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, postgres() as database:
        began = time.monotonic()
        found = asyncio.run(campaign(Path(folder), options.kills, options.seed, database))
    question = "what is lost, owned twice or moves by itself when servers that share a database are killed"
    report(options, "database_kills", question, FAULTS, began, found)


if __name__ == "__main__":
    main()
