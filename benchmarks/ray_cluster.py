"""What do robots see of a Ray cluster when it grows, and when a machine or a server of it dies?

    python -m benchmarks.ray_cluster

Three nodes of Ray run on this machine, each with one engine. First, simulated robots send requests to one, two and
three engines, at 20 Hz and as fast as the engines answer. Then two servers have eight robots each; a node is
killed, then a server, whose sessions the other server adopts. Last, a server with four robots loses
all nodes, including the head, and gets new nodes. Nodes on one machine share its cores: the scaling shows what a
cluster costs here, not what more machines give.
"""

import argparse
import asyncio
import io
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
from PIL import Image

from benchmarks.measured import RESULTS, SHIPPED, quietness, result, write
from benchmarks.postgres import postgres
from benchmarks.processes import Child, call
from robojax.client import AsyncClient
from robojax.client.errors import RobojaxError
from robojax.client.stream import Command, StatusMessage

ROBOTS = 16
PATIENCE = 60.0
FPS = 20.0
# Seconds without any cluster; less than robots wait for an engine before their sessions are in error (60).
DOWN = 30.0


# The nodes.


class Nodes:
    """Nodes of a Ray cluster, each with one processor for one engine; the first node is the head.

    Attributes:
        folder: their temporary folder.
        environment: environment of processes that join the cluster: its address and token.
    """

    def __init__(self, count: int):
        # A short path, because the length of a socket's path is limited.
        self._folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")
        token = Path(self._folder.name) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self._port = _free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.folder = self._folder.name
        self._count = count
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._clusters = 0

    def __enter__(self) -> "Nodes":
        self.begin()
        return self

    def begin(self) -> None:
        """Start the nodes of a cluster that knows nothing of the one before, at the same address."""
        self._clusters += 1
        temporary = f"--temp-dir={self._folder.name}/{self._clusters}"
        try:
            head = ("--head", f"--port={self._port}", "--include-dashboard=false", temporary)
            for number in range(self._count):
                self._start(*(head if number == 0 else (f"--address={self.address}",)))
        except BaseException:
            self._end()
            raise

    def kill_all(self) -> None:
        """Kill everything of all nodes, the head first."""
        for number in range(len(self._nodes)):
            self.kill(number)
        self._nodes.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _start(self, *arguments: str) -> None:
        before = len(raylets())
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(Path(__file__).parent.parent)}
        del environment["RAY_ADDRESS"]  # `ray start` refuses to start a node where there is one
        command = (str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1", *arguments)
        self._nodes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        until = time.monotonic() + PATIENCE
        while len(raylets()) <= before:
            if self._nodes[-1].poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"`{' '.join(command)}` did not start a node")
            time.sleep(0.1)
        time.sleep(2.0)  # a raylet that is there has yet to register

    def kill(self, number: int) -> None:
        """Kill everything of a node at once."""
        for pid in [*descendants(self._nodes[number].pid), self._nodes[number].pid]:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self._nodes[number].wait()

    def node_of(self, pid: int) -> int | None:
        """The node that a process belongs to."""
        return next((n for n, node in enumerate(self._nodes) if pid in descendants(node.pid)), None)

    def _end(self) -> None:
        self.kill_all()
        self._folder.cleanup()


def raylets() -> list[int]:
    """Processes of Ray's that look after a node each."""
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if (one.info["cmdline"] or [""])[0].endswith("raylet/raylet")]


def descendants(pid: int) -> list[int]:
    """Descendants of a process, youngest last; empty if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    return []


def _free_port() -> int:
    # Below the ports that Ray gives to workers (10002 to 19999) and those of outgoing connections.
    for port in range(6400, 6500):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 6400 and 6500")


# The robots.


def _pictures() -> list[bytes]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(8):
        held = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8)).resize((96, 96)).save(held, "JPEG")
        found.append(held.getvalue())
    return found


PICTURES = _pictures()


@dataclass
class Heard:
    """What one robot heard.

    Attributes:
        commands: monotonic times.
        holds: times and codes; None when a hold ended.
    """

    commands: list[float] = field(default_factory=list)
    holds: list[tuple[float, str | None]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Commands, the longest pause between two, and the holds of a time."""
        came = [begin, *(at for at in self.commands if begin <= at <= end), end]
        codes = [code for at, code in self.holds if begin <= at <= end and code]
        return {
            "commands": len(came) - 2,
            "longest_pause_s": round(float(np.diff(came).max()), 3),
            "holds": {code: codes.count(code) for code in dict.fromkeys(codes)},
        }


class ObedientRobot:
    """Reaches each target at once, and sends a picture that changes a little."""

    def __init__(self, name: str, url: str):
        self.name, self.url = name, url
        self.heard = Heard()
        self.troubles: list[str] = []
        self._state: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def moves(self) -> bool:
        """Whether it receives targets."""
        return bool(self.heard.commands) and time.monotonic() - self.heard.commands[-1] < 0.2

    def begin(self) -> None:
        """Be there until ``end``."""
        self._task = asyncio.create_task(self._live(), name=self.name)

    async def end(self) -> None:
        """Be gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        while True:
            try:
                async with AsyncClient(self.url) as client, client.session(self.name).stream() as stream:
                    joints = stream.welcome.joint_names
                    self._state = self._state or dict.fromkeys(joints, 0.0)
                    seeing = asyncio.create_task(self._show(stream, tuple(stream.welcome.cameras)))
                    try:
                        async for message in stream:
                            self._hear(message)
                    finally:
                        seeing.cancel()
            except (RobojaxError, OSError, TimeoutError) as error:
                self.troubles.append(type(error).__name__)
            await asyncio.sleep(0.2)

    async def _show(self, stream: Any, cameras: tuple[str, ...]) -> None:
        number, start = 0, time.monotonic()
        while True:
            await stream.observe(dict.fromkeys(cameras, PICTURES[number % len(PICTURES)]), self._state)
            number += 1
            await asyncio.sleep(max(start + number / FPS - time.monotonic(), 0))

    def _hear(self, message: object) -> None:
        now = time.monotonic()
        if isinstance(message, Command):
            self.heard.commands.append(now)
            self._state |= message.joints
        elif isinstance(message, StatusMessage):
            self.heard.holds.append((now, message.hold_code))


def summary(robots: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Of all robots' figures of one time."""
    pauses = sorted(one["longest_pause_s"] for one in robots.values())
    held = [name for name, one in robots.items() if one["holds"]]
    return {
        "robots": len(robots),
        "commands": sum(one["commands"] for one in robots.values()),
        "longest_pause_s": pauses[-1],
        "median_of_longest_pauses_s": pauses[len(pauses) // 2],
        "robots_held": len(held),
    }


# What robots see.


def serve(name: str, environment: Mapping[str, str], folder: Path, database: str | None = None) -> Child:
    """A server that joins the cluster, and shares its sessions where there is a database."""
    flags = ("--engine", "ray-auto", "--engines", "3", "--state", str(folder / name))
    if database is not None:
        flags += ("--front-name", name, "--database", database)
    return Child("-m", "robojax.cli", "serve", "--port", "0", *flags, env=environment)


def session(url: str, name: str) -> None:
    """Create a session that starts when its robot is connected."""
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
    """Two servers, a killed node, a killed server."""
    with ExitStack() as stack:
        database = stack.enter_context(postgres()).url
        servers = []
        for name in ("a", "b"):
            servers.append(serve(name, nodes.environment, folder, database))
            stack.callback(servers[-1].end)
        a, b = (one.url() for one in servers)
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

        asyncio.get_running_loop().call_later(1.0, servers[1].process.kill)
        await watch("a server is killed: robots of the other", seconds, robots[::2])
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
        await watch("all on one server", seconds)
        for robot in robots:
            await robot.end()
    return found


async def lost(nodes: Nodes, seconds: float, folder: Path) -> dict[str, Any]:
    """One server whose whole cluster is killed and started again at the same address."""
    with ExitStack() as stack:
        one = serve("c", nodes.environment, folder)
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
    parser.add_argument("--only", choices=["failures", "lost"], help="one part")
    parser.add_argument("--output", type=Path, default=RESULTS / "ray_cluster.json")
    options = parser.parse_args()
    if find_spec("ray") is None:
        parser.error("Ray is not installed: pip install -e '.[ray]'")
    quiet = quietness()
    figures: dict[str, Any] = {}
    if options.only in (None, "failures"):
        with Nodes(3) as nodes:
            figures["failures"] = asyncio.run(broken(nodes, options.seconds, Path(nodes.folder)))
    if options.only in (None, "lost"):
        with Nodes(3) as nodes:
            figures["lost"] = asyncio.run(lost(nodes, options.seconds, Path(nodes.folder)))
    question = (__doc__ or "").splitlines()[0]
    write(options.output, result(question, "python -m benchmarks.ray_cluster", quiet, "ray", **figures))


if __name__ == "__main__":
    main()
