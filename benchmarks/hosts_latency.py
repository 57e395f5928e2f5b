"""What does a second host cost, per chunk, and beside another version of robojax?

    python benchmarks/hosts_latency.py [--beside CHECKOUT]

One question after the other: the shipped policy in one process, and over two processes of this machine with gloo
between them (``robojax follow``), by turns in one run; with ``--beside``, also as the robojax of that folder does
it. What is added is the way of the observation to the other host, and what the programs exchange.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import jaxmodels
from benchmarks.measured import RESULTS, ROOT, SHIPPED, percentiles, quietness, result, write

SIZES = {"96x96": (96, 96), "480x640": (480, 640)}
ONE, TWO, BESIDE = "one process", "two hosts", "two hosts, beside"
SECRET = "of two hosts of one machine"


class Side:
    """A process that asks a policy when it is told to."""

    def __init__(self, stack: ExitStack, folder: Path, hosts: bool):
        self._stack = stack
        self._environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder)}
        address, coordinator = _free_ports()
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        if hosts:
            self._start("-m", "robojax.cli", "follow", f"127.0.0.1:{address}", "--secret-file", str(secret))
        mode = [str(address), str(coordinator)] if hosts else []
        self._process = self._start(str(Path(__file__).resolve()), "--ask", *mode)
        self.read()

    def ask(self, size: str, count: int) -> list[float]:
        """Seconds of each of so many questions."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{size} {count}\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        """What it says next; libraries print other lines."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("#"):
                return json.loads(line[1:])
        raise SystemExit("a side of the benchmark ended; see above")

    def _start(self, *command: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, *command], env=self._environment, text=True, stdin=-1, stdout=-1, cwd="/"
        )
        self._stack.callback(_kill, process)
        return process


def _kill(process: "subprocess.Popen[str]") -> None:
    with suppress(psutil.NoSuchProcess):
        one = psutil.Process(process.pid)
        for other in (*one.children(recursive=True), one):
            with suppress(psutil.NoSuchProcess):
                other.kill()
    process.wait()


def _free_ports() -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return [listener.getsockname()[1] for listener in listeners]


def answer(ports: list[str]) -> None:
    """The process of a side: of several hosts where there are ports."""
    if ports:
        from service.distributed import host_coordinator

        # Another version has them elsewhere.
        kind = getattr(host_coordinator, "HostOptions", None) or host_coordinator.HostOptions  # pyright: ignore[reportPrivateImportUsage]
        addresses = ("127.0.0.1", int(ports[0]), f"127.0.0.1:{ports[1]}")
        hosts = host_coordinator.HostCoordinator(kind(2, *addresses, SECRET.encode()), lambda folder: None)
        hosts.begin()
        policy: Any = hosts.load(str(SHIPPED))
    else:
        policy = jaxmodels.load_policy(SHIPPED)
    random, needs, seen = np.random.default_rng(0), policy.requirements, {}
    for name, size in SIZES.items():
        picture = random.integers(0, 255, (1, *size, 3), np.uint8)
        seen[name] = {f"observation.images.{camera}": picture for camera in needs.cameras}
        seen[name] |= {"observation.state": np.zeros((1, needs.state or 0), np.float32)}
        policy.compile(1, dict.fromkeys(needs.cameras, size))
        policy.act(seen[name])
    print("#0", flush=True)
    for line in sys.stdin:
        name, count = line.split()
        times = []
        for _ in range(int(count)):
            began = time.perf_counter()
            policy.act(seen[name])
            times.append(time.perf_counter() - began)
            time.sleep(0.02)  # a robot's next question comes a little later, to cores that went to sleep
        print(f"#{json.dumps(times)}", flush=True)
    os._exit(0)  # a thread may wait for hosts that are gone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--beside", type=Path, help="folder of another version, with service/ in it")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=50, help="questions of each side, size and round")
    parser.add_argument("--output", type=Path, default=RESULTS / "hosts_latency.json")
    parser.add_argument("--ask", nargs="*", help=argparse.SUPPRESS)
    host_coordinator = parser.parse_args()
    if host_coordinator.ask is not None:
        answer(host_coordinator.ask)
    quiet = quietness()
    with ExitStack() as stack:
        sides = {ONE: Side(stack, ROOT, False), TWO: Side(stack, ROOT, True)}
        if host_coordinator.beside is not None:
            sides[BESIDE] = Side(stack, host_coordinator.beside.resolve(), True)
        times: dict[str, dict[str, list[float]]] = {size: {side: [] for side in sides} for size in SIZES}
        for number in range(host_coordinator.rounds):
            for size in SIZES:
                for name, side in sides.items():
                    times[size][name] += side.ask(size, host_coordinator.count)[5:]
            print(f"round {number + 1} of {host_coordinator.rounds}", flush=True)
    found: dict[str, Any] = {}
    for size, of in times.items():
        found[size] = {name: percentiles(np.asarray(seconds)) for name, seconds in of.items()}
        added = {name: found[size][name]["p50"] - found[size][ONE]["p50"] for name in sides if name != ONE}
        found[size]["added_ms_p50"] = {name: round(value, 3) for name, value in added.items()}
        if BESIDE in added:
            found[size]["added_ratio"] = round(added[TWO] / added[BESIDE], 3)
        print(size, found[size], flush=True)
    command = "python benchmarks/hosts_latency.py --beside CHECKOUT"
    write(host_coordinator.output, result((__doc__ or "").splitlines()[0], command, quiet, "ray", **{"sizes": found}))


if __name__ == "__main__":
    main()
