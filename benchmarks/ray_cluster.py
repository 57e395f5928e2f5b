"""What do robots see of a Ray cluster when it grows, and when a machine or a front of it dies?

    python benchmarks/ray_cluster.py

Three nodes of Ray on this machine, each with one engine. First one, two and three engines are asked by simulated robots
at 20 Hz and as fast as they answer. Then two front servers with eight robots each; in the middle a node is killed, then
a front, whose sessions the other one adopts. Last a front with four robots that loses all nodes, the head among them,
and gets new ones. Nodes of one machine share its cores: the scaling says what a cluster costs here, not what more
machines give.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.measured import RESULTS, SHIPPED, quietness, result, write
from benchmarks.postgres import postgres
from benchmarks.processes import Child, Refused, call, child
from benchmarks.ray_nodes import Nodes
from benchmarks.ray_robots import ObedientRobot, summary

ROBOTS = 16
# Seconds without any cluster; less than robots wait for an engine before their sessions are in error (60).
DOWN = 30.0


# What robots see.


def front(name: str, environment: Mapping[str, str], folder: Path, database: str | None = None) -> Child:
    """A front server that joins the cluster, and shares its sessions where there is a database."""
    flags = ("--engine", "ray-auto", "--engines", "3", "--state", str(folder / name))
    if database is not None:
        flags += ("--front-name", name, "--database", database)
    return Child("-m", "robojax.cli", "serve", "--port", "0", *flags, env=environment)


def session(url: str, name: str) -> None:
    """Make one that starts when its robot is there."""
    body = {
        "session_id": name,
        "policy_path": str(SHIPPED),
        "transport_server_url": "direct",
        "camera_names": ["front"],
    }
    call(f"{url}/sessions", "POST", body)


async def started(url: str, robots: Sequence[ObedientRobot]) -> None:
    """All of them connected and moving."""
    for robot in robots:
        robot.begin()
    await asyncio.sleep(1.5)
    for robot in robots:
        await asyncio.to_thread(call, f"{url}/sessions/{robot.name}/start", "POST")
    async with asyncio.timeout(60):
        while not all(robot.moves for robot in robots):  # noqa: ASYNC110 - it is another process's doing
            await asyncio.sleep(0.1)


async def broken(nodes: Nodes, seconds: float, folder: Path) -> dict[str, Any]:
    """Two fronts, a killed node, a killed front."""
    with ExitStack() as stack:
        database = stack.enter_context(postgres()).url
        fronts = []
        for name in ("a", "b"):
            fronts.append(front(name, nodes.environment, folder, database))
            stack.callback(fronts[-1].end)
        a, b = (one.url() for one in fronts)
        async with asyncio.timeout(120):
            while min(len(call(f"{url}/cluster")["engines"]["engines"]) for url in (a, b)) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        for number in range(ROBOTS):
            session((a, b)[number % 2], f"robot-{number}")
        robots = [ObedientRobot(f"robot-{number}", (a, b)[number % 2]) for number in range(ROBOTS)]
        found: dict[str, Any] = {}

        async def watch(what: str, seconds: float, whom: Sequence[ObedientRobot] = robots) -> None:
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            figures = {robot.name: robot.heard.between(begin, time.monotonic()) for robot in whom}
            found[what] = {**summary(figures), "each": figures}
            print(what, summary(figures), flush=True)

        await asyncio.gather(started(a, robots[::2]), started(b, robots[1::2]))
        await watch("undisturbed", seconds)

        engines = call(f"{a}/cluster")["engines"]["engines"]
        found["engines_on_nodes"] = {one["engine"]: nodes.node_of(one["process"]) for one in engines}
        asyncio.get_running_loop().call_later(1.0, nodes.kill, 2)
        await watch("a node is killed", seconds)
        found["engines_after"] = [one["engine"] for one in call(f"{a}/cluster")["engines"]["engines"]]

        asyncio.get_running_loop().call_later(1.0, fronts[1].process.kill)
        await watch("a front is killed: robots of the other", seconds, robots[::2])
        found["robots_of_the_killed_front"] = {
            robot.name: {
                "held_by_their_own_watchdog": "no command any more",
                "last_command_before_end_s": round(time.monotonic() - robot.heard.commands[-1], 2),
            }
            for robot in robots[1::2]
        }
        listed = {one["session_id"]: one["status"] for one in call(f"{a}/sessions")}
        found["listed"] = {
            "sessions": len(listed),
            "interrupted": sorted(name for name, status in listed.items() if status == "interrupted"),
            "lost": sorted({robot.name for robot in robots} - set(listed)),
        }
        print(found["listed"], flush=True)

        began = time.monotonic()
        for robot in robots[1::2]:
            await robot.end()
            for move in ("adopt", "restart"):
                await asyncio.to_thread(call, f"{a}/sessions/{robot.name}/{move}", "POST")
            robot.url = a
        found["adopted_in_s"] = round(time.monotonic() - began, 2)
        await started(a, robots[1::2])
        await watch("all on one front", seconds)
        try:
            call(f"{a}/sessions/robot-1/adopt", "POST")
        except Refused as error:
            found["adopting_again"] = str(error).split(": ", 1)[1]
        for robot in robots:
            await robot.end()
    return found


async def lost(nodes: Nodes, seconds: float, folder: Path) -> dict[str, Any]:
    """One front whose whole cluster is killed, and made anew at the same address."""
    with ExitStack() as stack:
        one = front("c", nodes.environment, folder)
        stack.callback(one.end)
        url = one.url()
        robots = [ObedientRobot(f"robot-{number}", url) for number in range(4)]
        for robot in robots:
            session(url, robot.name)
        await started(url, robots)
        found: dict[str, Any] = {}

        def held() -> bool:
            return all(robot.heard.holds and robot.heard.holds[-1][1] for robot in robots)

        async def until(what: str, is_so: Callable[[], bool]) -> None:
            began = time.monotonic()
            async with asyncio.timeout(DOWN + 120):
                while not is_so():  # noqa: ASYNC110 - it is other processes' doing
                    await asyncio.sleep(0.02)
            found[what] = round(time.monotonic() - began, 2)
            print(what, found[what], flush=True)

        await asyncio.sleep(seconds)
        killed_at = time.monotonic()
        await asyncio.to_thread(nodes.kill_all)
        await until("killed_to_all_held_s", held)
        await asyncio.sleep(killed_at + DOWN - time.monotonic())
        found["down_s"], found["told"] = DOWN, call(f"{url}/cluster")["engines"]["trouble"]
        found["commands_while_down"] = sum(
            at > killed_at + found["killed_to_all_held_s"] + 0.1 for robot in robots for at in robot.heard.commands
        )
        await asyncio.to_thread(nodes.begin)
        await until("nodes_up_to_all_move_s", lambda: all(robot.moves for robot in robots))
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        found["afterwards"] = summary({robot.name: robot.heard.between(begin, time.monotonic()) for robot in robots})
        found["listed"] = sorted(one["session_id"] for one in call(f"{url}/sessions"))
        print(found, flush=True)
        for robot in robots:
            await robot.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part")
    parser.add_argument("--only", choices=["scaling", "failures", "lost"], help="one part")
    parser.add_argument("--output", type=Path, default=RESULTS / "ray_cluster.json")
    options = parser.parse_args()
    if find_spec("ray") is None:
        parser.error("Ray is not installed: pip install -e '.[ray]'")
    quiet = quietness()
    figures: dict[str, Any] = {}
    if options.only in (None, "scaling"):
        rows = []
        for engines in (1, 2, 3):
            with Nodes(3) as nodes:
                command = ("-m", "benchmarks.ray_cluster_scaling", str(engines), str(options.seconds))
                with child(*command, env=nodes.environment) as one:
                    rows.append(one.told("scaled")["found"])
                    print(rows[-1], flush=True)
        figures["scaling"] = rows
    if options.only in (None, "failures"):
        with Nodes(3) as nodes:
            figures["failures"] = asyncio.run(broken(nodes, options.seconds, Path(nodes.folder)))
    if options.only in (None, "lost"):
        with Nodes(3) as nodes:
            figures["lost"] = asyncio.run(lost(nodes, options.seconds, Path(nodes.folder)))
    question = (__doc__ or "").splitlines()[0]
    write(options.output, result(question, "python benchmarks/ray_cluster.py", quiet, "ray", **figures))
    if "scaling" in figures:
        shown = {
            f"{row['engines']} engines": row["as_fast_as_possible"]["answers_per_second"] for row in figures["scaling"]
        }
        pictures.bars(options.output.with_suffix(".png"), "Answers per second", shown, "answers", list(shown))


if __name__ == "__main__":
    main()
