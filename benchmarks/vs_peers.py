"""How much faster than the peers? Same policies, same payloads, same run; the servers take turns.

    python -m benchmarks.vs_peers --lerobot-python VENV/bin/python         # one with lerobot 0.4.4 and grpcio

- served: an observation (two uint8 images of 224x224, 14 joints) to a server on this machine and its chunk of 100
  actions back, by each project's own client in a process of its own: ``robojax.client`` over a stream, LeRobot's gRPC
  service. Once with LeRobot's ACT of its default size (52 M parameters, random weights, written by LeRobot and read by
  both from the same files), once with a policy that computes nothing.

A ratio is theirs over ours, the median of the rounds' ratios: 2 means that ours takes half as long. Behind servers,
OpenMP's threads wait passively; otherwise the threads of the previous server would take the cores. What cannot run is
left out, with why. Measuring begins when all sizes of batches are compiled.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cold_start import CAMERAS, JOINTS, LEROBOT, PEER_SIZE, free_port, wait_for, write_act
from benchmarks.measured import RESULTS, percentiles, quietness, result, write
from benchmarks.processes import child, peer_versions, say, settle

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
CHUNK = 100
OURS, LEROBOTS = "robojax", "LeRobot's gRPC server"
Ask = Callable[[int], list[float]]


def serve() -> None:
    """A server whose policy computes nothing."""
    from jaxmodels import Requirements
    from service.app import create_app
    from service.http.server import listen, run
    from service.settings import Settings
    from tests.testing.doubles import ScriptedPolicy

    size = (PEER_SIZE["height"], PEER_SIZE["width"])
    needs = Requirements(
        policy_type="act",
        cameras=dict.fromkeys(CAMERAS, size),
        state=len(JOINTS),
        action=len(JOINTS),
        chunk=CHUNK,
        action_steps=CHUNK,
    )

    def load(path: str, revision: str | None = None, /, **more: Any) -> ScriptedPolicy:
        return ScriptedPolicy(needs)

    app = create_app(Settings.from_values(state="off"), load=load, read_requirements=lambda path, revision: needs)
    run(app, listen("127.0.0.1", 0), lambda url: say(event="ready", url=url))


def ask(url: str, policy: str) -> None:
    """Our client: a session of its own, then the number of acts that each line of standard input requests."""
    from robojax.client import Client

    random = np.random.default_rng(0)
    size = (PEER_SIZE["height"], PEER_SIZE["width"], 3)
    images = {camera: random.integers(0, 256, size, np.uint8) for camera in CAMERAS}
    state = random.standard_normal(len(JOINTS)).astype(np.float32)
    with Client(url) as client:
        session = client.create("arm", policy, camera_names=CAMERAS, joint_names=JOINTS)
        with session.stream() as stream:
            stream.act(images, state)
            say(event="ready")
            for line in sys.stdin:
                seconds = []
                for _ in range(json.loads(line)["count"]):
                    began = time.perf_counter()
                    stream.act(images, state)
                    seconds.append(time.perf_counter() - began)
                say(seconds=seconds)


def ours(stack: ExitStack, folder: Path, policy: str) -> Ask:
    """Our server and our client."""
    if policy == "none":
        url = stack.enter_context(child("-m", "benchmarks.vs_peers", "--serve")).told("ready")["url"]
    else:
        url = stack.enter_context(
            child("-m", "robojax.cli", "serve", "--port", "0", "--state", "off", env=PASSIVE)
        ).url()
    asking = stack.enter_context(child("-m", "benchmarks.vs_peers", "--ask", url, str(folder)))
    asking.told("ready")
    settle(url)
    return lambda count: asking.order(count=count)["seconds"]


def theirs(stack: ExitStack, python: str, folder: Path, policy: str) -> Ask:
    """LeRobot's server and LeRobot's client."""
    port = free_port()
    command = (str(LEROBOT), "serve", "--port", str(port), "--policy", policy)
    stack.enter_context(child(*command, python=python, env=PASSIVE))
    asking = stack.enter_context(child(str(LEROBOT), "ask", "--port", str(port), python=python, env=PASSIVE))
    wait_for(port)
    asking.order(do="ready", within=60)
    asking.order(do="load", folder=str(folder), actions=CHUNK, **PEER_SIZE)
    asking.order(do="measure", count=1)
    return lambda count: asking.order(do="measure", count=count)["seconds"]


def served(python: str | None, folder: Path, policy: str, rounds: int, count: int) -> dict[str, Any]:
    """The figures of all servers with one policy, in turns."""
    with ExitStack() as stack:
        sides = {OURS: ours(stack, folder, policy)}
        if python is not None:
            sides[LEROBOTS] = theirs(stack, python, folder, policy)
        taken: dict[str, list[list[float]]] = {side: [] for side in sides}
        for act in sides.values():
            act(2)
        for _ in range(rounds):
            for side, act in sides.items():
                taken[side].append(act(count))
    found: dict[str, Any] = {}
    for side, turns in taken.items():
        ratios = [np.median(one) / np.median(own) for one, own in zip(turns, taken[OURS], strict=True)]
        found[side] = percentiles(np.concatenate(turns), (50.0, 99.0)) | {"ratio": round(float(np.median(ratios)), 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot-python", help="a Python with lerobot 0.4.4 and grpcio")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--count", type=int, default=5, help="inferences of each side and round; ten times more without a policy"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "vs_peers.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve or options.ask:
        serve() if options.serve else ask(*options.ask)
        return
    python, rounds, count = options.lerobot_python, options.rounds, options.count
    quiet = quietness()
    left_out = {"RobotHub's inference server": "no package of it is on PyPI; only its wire is public"}
    if python is None:
        left_out["LeRobot"] = "no --lerobot-python"
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "act"
        write_act(folder, python)
        for name, run in {
            "served, ACT of 52 M": lambda: served(python, folder, "real", rounds, count),
            "served, a policy that computes nothing": lambda: served(python, folder, "none", rounds, 10 * count),
        }.items():
            cases[name] = run()
            for side, one in cases[name].items():
                print(f"{name}: {side}: p50 {one['p50']:.1f} ms, {one['ratio']:.2f} times ours", flush=True)
    found = result(
        "milliseconds of one observation to its chunk, ours and the peers', and how many times ours theirs is",
        "python -m benchmarks.vs_peers --lerobot-python VENV/bin/python",
        quiet,
        "torch",
        rounds=rounds,
        payload="2 images of 224x224 as uint8, 14 joints; a chunk of 100 actions",
        cases_ms=cases,
        left_out=left_out,
        peer=peer_versions(python, "lerobot", "torch", "grpcio", "numpy"),
    )
    write(options.output, found)


if __name__ == "__main__":
    main()
