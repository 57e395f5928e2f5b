"""What does a request over a socket cost, without inference? Our endpoint for openpi's clients against openpi's server.

    python -m venv VENV && VENV/bin/pip install openpi-client==0.1.2 typing_extensions
    python -m benchmarks.transport_overhead --openpi-python VENV/bin/python

A policy that computes nothing, two uint8 images of 224x224 and 7 joints up, a chunk of 50 actions down. The clients are
openpi's own, unmodified, in processes of their own; sides take turns, and a ratio is ours over theirs, the median of
the rounds' ratios. Ours does what theirs does not: keys, limits on everything that comes, an engine that batches and
survives stuck policies, and a guard over every chunk. ``benchmarks/openpi_peer.py`` says what replaces their server.

Each client needs a core: where there are fewer, requests wait for clients and not for servers. So the processor time
that each server needs for a request is measured, too.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.measured import RESULTS, percentiles, quietness, result, write
from benchmarks.processes import Child, call, child, say

PEER = str(Path(__file__).parent / "openpi_peer.py")
CAMERAS, CHUNK, WIDTH, SIZE = ("image", "wrist_image"), 50, 7, 224
OURS, THEIRS = "robojax", "openpi's server"
TARGETS = {1: 1.0, 8: 0.5}


def serve() -> None:
    """Our server with a policy that computes nothing."""
    from jaxmodels import Requirements
    from service.api.websockets import create_openpi_app
    from service.app import create_app
    from service.http.server import listen, run, serve_app
    from service.settings import Settings
    from tests.testing.doubles import ScriptedPolicy

    needs = Requirements(
        policy_type="act",
        cameras=dict.fromkeys(CAMERAS, (SIZE, SIZE)),
        state=WIDTH,
        action=WIDTH,
        chunk=CHUNK,
        action_steps=CHUNK,
        joint_names=tuple(f"joint_{number}" for number in range(WIDTH)),
    )

    class Nothing(ScriptedPolicy):
        def act(self, observation: Any) -> np.ndarray:
            return np.zeros((len(observation["observation.state"]), CHUNK, WIDTH), np.float32)

    app = create_app(Settings(), load=lambda path, revision=None, /, **more: Nothing(needs))
    beside = listen("127.0.0.1", 0)
    port = beside.getsockname()[1]
    run(
        app,
        listen("127.0.0.1", 0),
        lambda url: say(event="serves", url=url, port=port),
        [serve_app(create_openpi_app(app), beside)],
    )


def cpu(process: Child) -> float:
    """Seconds of processor time that a process has used."""
    return sum(psutil.Process(process.process.pid).cpu_times()[:2])


def turn(server: Child, clients: list[Child], count: int) -> tuple[list[float], float, float]:
    """Seconds of each request of all clients at once; processor milliseconds of the server and of a client for one."""
    before = cpu(server)
    for client in clients:
        assert client.process.stdin is not None
        client.process.stdin.write(f'{{"count": {count}}}\n')
        client.process.stdin.flush()
    told = [client.told("asked") for client in clients]
    requests = count * len(clients)
    spent = sum(one["cpu"] for one in told) / requests * 1e3
    return [seconds for one in told for seconds in one["seconds"]], (cpu(server) - before) / requests * 1e3, spent


def measure(python: str, many: int, rounds: int, count: int) -> dict[str, Any]:
    """Return the figures for a number of clients."""
    found: dict[str, dict[str, list[Any]]] = {side: {"seconds": [], "cpu": []} for side in (OURS, THEIRS)}
    ratios, clients_cpu = [], []
    with ExitStack() as stack:
        servers = {
            OURS: stack.enter_context(child("-m", "benchmarks.transport_overhead", "--serve")),
            THEIRS: stack.enter_context(child(PEER, "serve", python=python)),
        }
        told = {side: server.told("serves") for side, server in servers.items()}
        new = {"session_id": "arm", "policy_path": "none", "transport_server_url": "direct", "camera_names": CAMERAS}
        call(f"{told[OURS]['url']}/sessions", "POST", new)
        clients = {
            side: [
                stack.enter_context(child(PEER, "ask", "127.0.0.1", str(told[side]["port"]), python=python))
                for _ in range(many)
            ]
            for side in servers
        }
        for client in (client for side in clients.values() for client in side):
            client.told("ready")
        for number in range(rounds):
            medians = {}
            # The server that is first in a round is second in the next.
            for side in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                seconds, spent, by_client = turn(servers[side], clients[side], count)
                found[side]["seconds"] += seconds
                found[side]["cpu"].append(spent)
                medians[side] = statistics.median(seconds)
                clients_cpu.append(by_client)
            ratios.append(medians[OURS] / medians[THEIRS])
    sides = {
        side: {
            "round_trip_ms": percentiles(one["seconds"], (50, 99)),
            "server_cpu_ms_per_request": round(statistics.median(one["cpu"]), 3),
        }
        for side, one in found.items()
    }
    ratio, target = statistics.median(ratios), TARGETS.get(many)
    return {
        **sides,
        "client_cpu_ms_per_request": round(statistics.median(clients_cpu), 3),
        "ratio": round(ratio, 3),
        "target": target,
        "is_met": None if target is None else ratio <= target,
        "ratio_of_server_cpu": round(
            sides[OURS]["server_cpu_ms_per_request"] / max(sides[THEIRS]["server_cpu_ms_per_request"], 1e-9), 3
        ),
        "rounds_ratios": [round(one, 3) for one in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openpi-python", help="a Python with openpi-client 0.1.2")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--count", type=int, default=200, help="requests of each client and round")
    parser.add_argument("--output", type=Path, default=RESULTS / "transport_overhead.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.openpi_python is None:
        parser.error("--openpi-python is required: a Python with openpi-client 0.1.2")
    quiet = quietness()
    sides = {
        f"clients_{many}": measure(options.openpi_python, many, options.rounds, options.count)
        for many in options.clients
    }
    found = result(
        "What does one request cost without inference, compared with openpi's own server?",
        "python " + " ".join(["-m", "benchmarks.transport_overhead", *sys.argv[1:]]),
        quiet,
        "msgpack",
        "uvloop",
        rounds=options.rounds,
        requests_per_round=options.count,
        peer="a stand-in for openpi's websocket_policy_server.py: the same calls to the same libraries",
        **sides,
    )
    write(options.output, found)
    for name, one in sides.items():
        ours, theirs = (one[side]["round_trip_ms"]["p50"] for side in (OURS, THEIRS))
        print(f"{name}: ours {ours} ms, theirs {theirs} ms, ratio {one['ratio']} (target {one['target']})")
        print(f"  processor time of the servers: ratio {one['ratio_of_server_cpu']}")


if __name__ == "__main__":
    main()
