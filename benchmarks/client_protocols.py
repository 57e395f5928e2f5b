"""What does each client protocol cost, and how does LeRobot's own server compare with ours?

    make lerobot
    python -m benchmarks.client_protocols --lerobot-python .venv/lerobot/bin/python

- overhead: milliseconds from an observation to its chunk with a policy that computes nothing, for one client and for
  eight at once, each a process of its own. An observation has one picture of 480x640, as an array or as a JPEG file,
  and 14 joints; a chunk has 100 actions. HTTP and the stream are measured with ``robojax.client``, openpi's protocol
  with an independent WebSocket library, LeRobot's gRPC with LeRobot's own messages. Also the processor time of the
  server for a request. The protocols take turns.
- ACT: LeRobot's ACT of its default size with random weights, written by LeRobot and read by both servers. LeRobot's
  client asks LeRobot's server and ours in turns; the ratio is ours over theirs, the median of the rounds' ratios
  (target 0.6). Then eight robots share one policy of our server, which LeRobot's server cannot do.

There are two cores for up to nine processes on a small machine; then requests also wait for clients.
"""

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.cold_start import JOINTS, LEROBOT, free_port, wait_for
from benchmarks.measured import RESULTS, percentiles, quietness, result, write
from benchmarks.processes import Child, call, child, peer_versions, say, settle

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
CAMERA, SIZE, CHUNK, ROBOTS = "camera0", (480, 640), 100, 8
PICTURES = {"cameras": 1, "height": SIZE[0], "width": SIZE[1]}
TARGET = 0.6
# Protocol and form of the pictures.
CASES = (
    ("http", "raw"),
    ("http", "jpeg"),
    ("stream", "raw"),
    ("stream", "jpeg"),
    ("openpi", "raw"),
    ("lerobot-grpc", "raw"),
)


def serve(folder: str) -> None:
    """Serve a policy that computes nothing, in this folder, with a port for LeRobot's clients."""
    from jaxmodels import Requirements
    from service.app import create_app
    from service.http.server import listen, run
    from service.lerobot.grpc_server import LerobotServer
    from service.settings import Settings
    from tests.testing.doubles import ScriptedPolicy

    needs = Requirements(
        policy_type="act",
        cameras={CAMERA: SIZE},
        state=len(JOINTS),
        action=len(JOINTS),
        chunk=CHUNK,
        action_steps=CHUNK,
    )

    class Nothing(ScriptedPolicy):
        def act(self, observation: Any) -> np.ndarray:
            return np.zeros((len(observation["observation.state"]), CHUNK, len(JOINTS)), np.float32)

    settings = Settings.from_values(state="off", policy_roots=(str(Path(folder).parent),), lerobot_port=free_port())
    app = create_app(settings, load=lambda *_, **more: Nothing(needs), read_requirements=lambda path, revision: needs)
    robots = LerobotServer(app, "127.0.0.1")
    run(app, listen("127.0.0.1", 0), lambda url: say(event="ready", url=url, port=robots.port), [robots])


def make_picture() -> tuple[np.ndarray, bytes]:
    """Return a picture with soft shapes and noise, and its JPEG file."""
    from PIL import Image

    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (SIZE[0] // 16, SIZE[1] // 16, 3), np.uint8))
    soft = np.asarray(coarse.resize((SIZE[1], SIZE[0]), Image.Resampling.BICUBIC))
    picture = np.clip(soft + random.normal(0, 4, soft.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return picture, file.getvalue()


def ask(protocol: str, form: str, url: str, session: str) -> None:
    """Send the number of requests that each line of standard input orders."""
    from websockets.sync.client import connect

    from robojax.client import Client
    from service.streaming import codec

    picture, file = make_picture()
    state = np.zeros(len(JOINTS), np.float32)
    images: Any = {CAMERA: picture if form == "raw" else file}
    with ExitStack() as stack:
        act: Callable[[], object]
        if protocol == "openpi":
            address = f"{url.replace('http', 'ws')}/sessions/{session}/openpi"
            socket = stack.enter_context(connect(address, max_size=None, compression=None))
            socket.recv()  # The metadata.

            def act() -> object:
                socket.send(codec.pack_openpi({f"observation.images.{CAMERA}": picture, "observation.state": state}))
                return codec.unpack(bytes(socket.recv(decode=False)))["actions"]

        else:
            client = stack.enter_context(Client(url))
            asked = client.session(session)
            if protocol == "stream":
                stream = stack.enter_context(asked.stream())
                act = lambda: stream.act(images, state)  # noqa: E731
            else:
                act = lambda: asked.act(images, state)  # noqa: E731
        act()
        say(event="ready")
        for line in sys.stdin:
            seconds = []
            for _ in range(json.loads(line)["count"]):
                began = time.perf_counter()
                act()
                seconds.append(time.perf_counter() - began)
            say(seconds=seconds)


def create_session(url: str, name: str, folder: Path) -> None:
    body = {"session_id": name, "policy_path": str(folder), "transport_server_url": "direct", "camera_names": [CAMERA]}
    call(f"{url}/sessions", "POST", body | {"joint_names": JOINTS})


def start_lerobot(stack: ExitStack, python: str, port: int) -> Child:
    """Start LeRobot's client."""
    client = stack.enter_context(child(str(LEROBOT), "ask", "--port", str(port), python=python, env=PASSIVE))
    client.order(do="prepare")
    return client


def connect_lerobot(clients: list[Child], folder: Path) -> None:
    """Let clients connect and request the policy, again after each pause, because our server ends silent sessions."""

    def connect(client: Child) -> None:
        client.order(do="ready", within=60)
        client.order(do="load", folder=str(folder), actions=CHUNK, **PICTURES)
        client.order(do="measure", count=1)

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(connect, clients))


def measure_together(clients: list[Child], count: int) -> tuple[list[float], float]:
    """Return the seconds of each request of all clients at once, and the seconds that they all took."""
    began = time.monotonic()
    with ThreadPoolExecutor(len(clients)) as pool:
        orders = [pool.submit(client.order, do="measure", count=count) for client in clients]
        return [seconds for order in orders for seconds in order.result()["seconds"]], time.monotonic() - began


def measure_overhead(python: str | None, folder: Path, robots: int, rounds: int, count: int) -> dict[str, Any]:
    """Return the figures of each protocol for this number of clients."""
    seconds: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(child("-m", "benchmarks.client_protocols", "--serve", str(folder)))
        told = server.told("ready")
        clients: dict[str, list[Child]] = {}
        for protocol, form in CASES:
            name = f"{protocol}, {form}"
            if protocol == "lerobot-grpc":
                if python is not None:
                    clients[name] = [start_lerobot(stack, python, told["port"]) for _ in range(robots)]
                continue
            clients[name] = []
            for number in range(robots):
                session = f"{protocol}-{form}-{number}"
                create_session(told["url"], session, folder)
                command = ("-m", "benchmarks.client_protocols", "--ask", protocol, form, told["url"], session)
                clients[name].append(stack.enter_context(child(*command)))
            for client in clients[name]:
                client.told("ready")
        process = psutil.Process(server.process.pid)
        for _ in range(rounds):
            for name, asking in clients.items():
                if name.startswith("lerobot"):
                    connect_lerobot(asking, folder)
                before = sum(process.cpu_times()[:2])
                taken, _ = measure_together(asking, count)
                seconds.setdefault(name, []).extend(taken)
                used.setdefault(name, []).append((sum(process.cpu_times()[:2]) - before) / len(taken) * 1e3)
    return {
        name: percentiles(taken, (50.0, 99.0)) | {"server_cpu_ms": round(statistics.median(used[name]), 3)}
        for name, taken in seconds.items()
    }


def measure_act(python: str, folder: Path, rounds: int, count: int) -> dict[str, Any]:
    """Return the figures of ACT behind both servers with LeRobot's client, and of eight robots on ours."""
    with ExitStack() as stack:
        port = free_port()
        command = (str(LEROBOT), "serve", "--port", str(port))
        stack.enter_context(child(*command, python=python, env=PASSIVE))
        serving = ("-m", "robojax.cli", "serve", "--port", "0", "--state", "off", "--policy-roots", str(folder.parent))
        own_port = free_port()
        url = stack.enter_context(child(*serving, "--lerobot-port", str(own_port), env=PASSIVE)).url()
        for each in (port, own_port):
            wait_for(each)
        robots = [start_lerobot(stack, python, own_port) for _ in range(ROBOTS)]
        connect_lerobot(robots, folder)
        settle(url)
        connect_lerobot(robots, folder)
        together, passed = measure_together(robots, count)
        sides = {"robojax": robots[0], "LeRobot's server": start_lerobot(stack, python, port)}
        connect_lerobot([sides["LeRobot's server"]], folder)
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, client in sides.items():
                connect_lerobot([client], folder)
                taken[side] += client.order(do="measure", count=count)["seconds"]
        figures: dict[str, Any] = {side: percentiles(seconds, (50.0, 99.0)) for side, seconds in taken.items()}
        medians = [[np.median(part) for part in np.split(np.array(seconds), rounds)] for seconds in taken.values()]
        ratio = round(statistics.median(float(ours / theirs) for ours, theirs in zip(*medians, strict=True)), 3)
    shared = percentiles(together, (50.0, 99.0)) | {"chunks_per_s": round(len(together) / passed, 2)}
    return figures | {"ratio": ratio, "target": TARGET, "is_met": ratio <= TARGET, f"{ROBOTS} robots": shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot-python", help="a Python with lerobot[async] 0.6.1; without it, LeRobot is left out")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, ROBOTS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=40, help="requests of each client and round; a tenth with ACT")
    parser.add_argument("--output", type=Path, default=RESULTS / "client_protocols.json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve or options.ask:
        serve(options.serve) if options.serve else ask(*options.ask)
        return
    python, rounds, count = options.lerobot_python, options.rounds, options.count
    quiet, figures = quietness(), {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "policies" / "act"
        folder.mkdir(parents=True)
        if python is not None:
            with child(str(LEROBOT), "ask", "--port", "0", python=python, env=PASSIVE) as writer:
                writer.order(do="write", folder=str(folder), **PICTURES)
            figures["act_ms"] = measure_act(python, folder, rounds, max(count // 10, 1))
            print("ACT:", json.dumps(figures["act_ms"]), flush=True)
        for robots in options.clients:
            figures[f"clients_{robots}"] = found = measure_overhead(python, folder, robots, rounds, count)
            for name, one in found.items():
                print(f"{robots} clients, {name}: p50 {one['p50']} ms, server {one['server_cpu_ms']} ms", flush=True)
    found = result(
        "milliseconds from an observation to its chunk, by client protocol",
        "python " + " ".join(["-m", "benchmarks.client_protocols", *sys.argv[1:]]),
        quiet,
        "grpcio",
        "msgpack",
        rounds=rounds,
        requests_per_round=count,
        payload=f"one picture of {SIZE[0]}x{SIZE[1]}, {len(JOINTS)} joints; a chunk of {CHUNK} actions",
        peer=peer_versions(python, "lerobot", "torch", "grpcio", "numpy"),
        **figures,
    )
    write(options.output, found)


if __name__ == "__main__":
    main()
