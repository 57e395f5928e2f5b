"""What does each client protocol cost, and how does LeRobot's own server compare with ours?

    make lerobot
    python -m benchmarks.client_protocols --lerobot-python .venv/lerobot/bin/python

- overhead: milliseconds from an observation to its chunk with a policy that computes nothing, without the time of
  the engine, for one client and for eight at once, each a process of its own. An observation has one picture of
  480x640, as an array or as a JPEG file, and 14 joints; a chunk has 100 actions. HTTP and the stream are measured with
  ``robojax.client``, openpi's protocol with an independent WebSocket library, LeRobot's gRPC with LeRobot's own
  messages, Zenoh with the client of our tests. Also the processor time of the server for a request. The protocols take
  turns.
- ACT: LeRobot's ACT of its default size with random weights, written by LeRobot and read by both servers. LeRobot's
  client asks LeRobot's server and ours in turns; the ratio is ours over theirs, the median of the rounds' ratios
  (target 0.6). Then eight robots share one policy of our server, which LeRobot's server cannot do.

There are two cores for up to nine processes on a small machine; then requests also wait for clients.
Last figure, AMD EPYC, 2 cores shared with other work: the ratio of ACT is 0.62.
"""

import argparse
import asyncio
import importlib.util
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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
LEROBOT_GRPC, ZENOH = "lerobot-grpc", "lerobot-zenoh"
# Protocol to the forms of the pictures.
CASES = {"http": ("raw", "jpeg"), "stream": ("raw", "jpeg"), "openpi": ("raw",), LEROBOT_GRPC: ("raw",)}
if importlib.util.find_spec("zenoh"):
    CASES[ZENOH] = ("raw", "jpeg")


def serve(folder: str) -> None:
    """Serve a policy that computes nothing, in this folder, with a port and an endpoint for LeRobot's clients."""
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

    values: dict[str, Any] = {"state": "off", "policy_roots": (str(Path(folder).parent),), "lerobot_port": free_port()}
    if ZENOH in CASES:
        values["lerobot_zenoh"] = f"tcp/127.0.0.1:{free_port()}"
        values |= {"lerobot_deployments": {"act": folder}, "lerobot_joints": {"act": JOINTS}}
    settings = Settings.from_values(**values)
    app = create_app(settings, load=lambda *_, **more: Nothing(needs), read_requirements=lambda path, revision: needs)
    servers: list[Any] = [LerobotServer(app, "127.0.0.1")]
    if ZENOH in CASES:
        from service.lerobot.zenoh_server import LerobotZenohServer

        servers.append(LerobotZenohServer(app))
    where = {LEROBOT_GRPC: values["lerobot_port"], ZENOH: values.get("lerobot_zenoh")}
    run(app, listen("127.0.0.1", 0), lambda url: say(event="ready", http=url, stream=url, openpi=url, **where), servers)


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


def ask(protocol: str, form: str, address: str, session: str) -> None:
    """Send the number of requests that each line of standard input orders."""
    picture, file = make_picture()
    image: Any = picture if form == "raw" else file
    connect = {"openpi": connect_openpi, ZENOH: connect_zenoh}.get(protocol, connect_robojax)
    with ExitStack() as stack:
        act = connect(stack, protocol, address, session, image, np.zeros(len(JOINTS), np.float32))
        act()
        say(event="ready")
        for line in sys.stdin:
            seconds, engine = [], []
            for _ in range(json.loads(line)["count"]):
                began = time.perf_counter()
                timings = act()
                seconds.append(time.perf_counter() - began)
                engine += [timings["total"] / 1e3] if timings else []
            say(seconds=seconds, engine=engine)


_Act = Callable[[], Mapping[str, float] | None]  # Returns the server's times, if the protocol has them.


def connect_robojax(stack: ExitStack, protocol: str, url: str, session: str, image: Any, state: np.ndarray) -> _Act:
    from robojax.client import Client

    asked: Any = stack.enter_context(Client(url)).session(session)
    if protocol == "stream":
        asked = stack.enter_context(asked.stream())
    return lambda: asked.act({CAMERA: image}, state).timings_ms


def connect_openpi(stack: ExitStack, protocol: str, url: str, session: str, image: Any, state: np.ndarray) -> _Act:
    from websockets.sync.client import connect

    from service.streaming import codec

    address = f"{url.replace('http', 'ws')}/sessions/{session}/openpi"
    socket = stack.enter_context(connect(address, max_size=None, compression=None))
    socket.recv()  # The metadata.

    def act() -> None:
        socket.send(codec.pack_openpi({f"observation.images.{CAMERA}": image, "observation.state": state}))
        assert len(codec.unpack(bytes(socket.recv(decode=False)))["actions"]) == CHUNK

    return act


def connect_zenoh(stack: ExitStack, protocol: str, address: str, session: str, image: Any, state: np.ndarray) -> _Act:
    import zenoh

    from tests.testing.zenoh_robot import ZenohRobot, read_array, rgb, tensor

    runner = stack.enter_context(asyncio.Runner())

    async def start() -> ZenohRobot:
        robot = ZenohRobot(address, asyncio.get_running_loop())
        await robot.start()
        # Unlike a robot's, the observations wait for the network, because a dropped one has no answer to measure.
        robot.observations = robot.zenoh.declare_publisher(
            f"{robot.key}/obs", congestion_control=zenoh.CongestionControl.BLOCK
        )
        return robot

    robot = runner.run(start())
    stack.callback(lambda: runner.run(robot.close()))
    is_file = isinstance(image, bytes)
    sent = rgb(np.empty((*SIZE, 3), np.uint8), "jpeg", image) if is_file else rgb(image)
    features = {f"observation.images.{CAMERA}": sent, "observation.state": tensor(state)}

    def act() -> None:
        answer = runner.run(robot.observe(features=features))
        assert answer["message_type"] == "action", answer
        assert len(read_array(answer["body"]["canonical_actions"])) == CHUNK

    return act


def create_session(url: str, name: str, folder: Path) -> None:
    body = {"session_id": name, "policy_path": str(folder), "transport_server_url": "direct", "camera_names": [CAMERA]}
    call(f"{url}/sessions", "POST", body | {"joint_names": JOINTS})


def start_lerobot(stack: ExitStack, python: str, number: int) -> list[Child]:
    """Start this number of LeRobot's clients, together, because their imports take long."""
    command = (str(LEROBOT), "ask", "--port", "0")
    clients = [stack.enter_context(child(*command, python=python, env=PASSIVE)) for _ in range(number)]
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(lambda client: client.order(do="prepare"), clients))
    return clients


def measure_together(
    clients: list[Child], count: int, folder: Path, port: int | None, read_cpu: Callable[[], float] = time.monotonic
) -> tuple[list[Any], float]:
    """Return the answers of all clients, and the server's processor seconds while they all asked.

    Args:
        clients: processes that ask ``count`` times, all at once.
        folder: policy that LeRobot's clients load before.
        port: of the server that LeRobot's clients connect to before. Each then asks without a pause until all are
            ready, because our server ends connections that are silent for two seconds. None: they are connected.
        read_cpu: returns the server's processor seconds.
    """
    ready: list[Child] = []
    failed: list[Child] = []
    began: list[float] = []

    def measure(client: Child) -> Any:
        try:
            if port is not None:
                client.order(do="ready", port=port, within=60)
                client.order(do="load", folder=str(folder), actions=CHUNK, **PICTURES)
                client.order(do="measure", count=1)
            ready.append(client)
            while port is not None and len(ready) < len(clients) and not failed:
                client.order(do="measure", count=1)
            began.append(read_cpu())
            return client.order(do="measure", count=count)
        except RuntimeError:
            failed.append(client)
            raise

    with ThreadPoolExecutor(len(clients)) as pool:
        answers = list(pool.map(measure, clients))
    return answers, read_cpu() - min(began)


def measure_overhead(robots: list[Child], folder: Path, numbers: list[int], rounds: int, count: int) -> dict[str, Any]:
    """Return the figures of each protocol for each number of clients."""
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        server = stack.enter_context(child("-m", "benchmarks.client_protocols", "--serve", str(folder)))
        addresses = server.told("ready")
        clients: dict[str, list[Child]] = {}
        for protocol, form in ((protocol, form) for protocol, forms in CASES.items() for form in forms):
            asking = clients[f"{protocol}, {form}"] = []
            if protocol == LEROBOT_GRPC:
                asking += robots
                continue
            for number in range(max(numbers)):
                session = f"{protocol}-{form}-{number}"
                if protocol != ZENOH:
                    create_session(addresses["http"], session, folder)
                command = ("-m", "benchmarks.client_protocols", "--ask", protocol, form, addresses[protocol], session)
                asking.append(stack.enter_context(child(*command)))
            for client in asking:
                client.told("ready")
        process = psutil.Process(server.process.pid)
        for number in numbers:
            seconds: dict[str, list[float]] = {name: [] for name, asking in clients.items() if asking}
            used, engine = dict.fromkeys(seconds, 0.0), list[float]()
            for _ in range(rounds):
                for name in seconds:
                    port = addresses[LEROBOT_GRPC] if name.startswith(LEROBOT_GRPC) else None
                    asking = clients[name][:number]
                    answers, cpu = measure_together(asking, count, folder, port, lambda: sum(process.cpu_times()[:2]))
                    seconds[name] += [one for answer in answers for one in answer["seconds"]]
                    engine += [one for answer in answers for one in answer.get("engine", ())]
                    used[name] += cpu
            base = percentiles(engine, (50.0, 99.0))
            figures[f"clients_{number}"] = found = {"engine": base}
            for name, taken in seconds.items():
                found[name] = percentiles(taken, (50.0, 99.0)) | {"server_cpu": round(used[name] / len(taken) * 1e3, 3)}
                found[name]["over_engine"] = round(found[name]["p50"] - base["p50"], 3)
                print(f"{number} clients, {name}: {found[name]}", flush=True)
    return figures


def measure_act(python: str, robots: list[Child], folder: Path, rounds: int, count: int) -> dict[str, Any]:
    """Return the figures of ACT behind both servers with LeRobot's client, and of eight robots on ours."""
    with ExitStack() as stack:
        port, own_port = free_port(), free_port()
        command = (str(LEROBOT), "serve", "--port", str(port))
        stack.enter_context(child(*command, python=python, env=PASSIVE))
        serving = ("-m", "robojax.cli", "serve", "--port", "0", "--state", "off", "--policy-roots", str(folder.parent))
        # Batches save nothing on two cores, and compiling them takes minutes. A robot of 1 Hz needs a chunk every
        # 100 s, so that a busy machine admits eight.
        serving += ("--engine-batch-sizes", "1", "--rate", "1", "--stuck-after", "60", "--lerobot-port", str(own_port))
        url = stack.enter_context(child(*serving, env=PASSIVE)).url()
        create_session(url, "first", folder)  # Keeps the policy loaded while the robots connect again.
        settle(url)
        answers, _ = measure_together(robots, count, folder, own_port)
        together = [one for answer in answers for one in answer["seconds"]]
        wait_for(port)
        measure_together(robots[1:2], 1, folder, port)
        taken: dict[str, list[float]] = {"robojax": [], "LeRobot's server": []}
        for _ in range(rounds):
            for side, asking, connects in (("robojax", robots[:1], own_port), ("LeRobot's server", robots[1:2], None)):
                taken[side] += measure_together(asking, count, folder, connects)[0][0]["seconds"]
        figures: dict[str, Any] = {side: percentiles(seconds, (50.0, 99.0)) for side, seconds in taken.items()}
        medians = [[np.median(part) for part in np.split(np.array(seconds), rounds)] for seconds in taken.values()]
        ratio = round(statistics.median(float(ours / theirs) for ours, theirs in zip(*medians, strict=True)), 3)
    shared = percentiles(together, (50.0, 99.0)) | {"chunks_per_s": round(ROBOTS / float(np.mean(together)), 2)}
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
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "policies" / "act"
        folder.mkdir(parents=True)
        robots: list[Child] = []
        if python is not None:
            robots = start_lerobot(stack, python, ROBOTS)
            robots[0].order(do="write", folder=str(folder), **PICTURES)
            figures["act_ms"] = measure_act(python, robots, folder, rounds, max(count // 10, 1))
            print("ACT:", json.dumps(figures["act_ms"]), flush=True)
        figures |= measure_overhead(robots, folder, options.clients, rounds, count)
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
