"""A Ray cluster of several nodes on this machine, each started by ``ray start`` and killed as a machine fails."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

PATIENCE = 60.0


class Nodes:
    """The first node is the cluster's head; each has one processor for one engine.

    Attributes:
        folder: gone with them.
        environment: for whoever joins the cluster: its address, and the token without which nobody may.
    """

    def __init__(self, count: int):
        self._folder = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # its sockets' paths have to be short
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
    """Of a process, youngest last; none of one that is gone."""
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
