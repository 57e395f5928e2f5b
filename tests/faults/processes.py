"""Processes that a test starts, pauses, kills and restarts; each ends with the test in every case."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from service.transport.link import Rooms

ROOT = Path(__file__).parents[2]
STARTING = 60.0
_STARTER = ThreadPoolExecutor(1)


class Process:
    """``python -m module arguments``, with the same log and port after each restart."""

    def __init__(self, log: Path, module: str, *arguments: str, env: dict[str, str] | None = None):
        self.log = log
        self.url = ""
        self._command = [sys.executable, "-m", "service.processes", str(os.getpid()), module, *arguments]
        self._env = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
        self._running: subprocess.Popen[bytes] | None = None
        self.began_at = 0.0

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_alive(self) -> bool:
        return self._running is not None and self._running.poll() is None

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def words(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self) -> "Process":
        """Start the process and block until it prints its address."""
        command = self._command
        if self.url and "--port" in command:
            place = command.index("--port") + 1
            command = [*command[:place], str(self.port), *command[place + 1 :]]
        skipped = len(self.words())
        self.began_at = time.monotonic()
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=ROOT,
                start_new_session=True,
            )
        while (found := re.search(r"at (http://[0-9.]+:\d+)", self.words()[skipped:])) is None:
            if not self.is_alive or time.monotonic() > self.began_at + STARTING:
                self.kill()
                raise AssertionError(f"{command[5:]} did not start:\n{self.words()[-2000:]}")
            time.sleep(0.01)
        self.url = found[1]
        return self

    async def start_again(self) -> None:
        """Restart the process in a thread that stays alive, because the system ends a child with its parent thread."""
        await asyncio.get_running_loop().run_in_executor(_STARTER, self.start)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
        if self._running is not None:
            self._running.wait()

    def ended(self, within: float) -> int:
        return self._running.wait(within)


@contextmanager
def process(log: Path, module: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[Process]:
    made = Process(log, module, *arguments, env=env)
    try:
        yield made.start()
    finally:
        made.kill()


def server(folder: Path, *flags: str, scripted: bool = True, env: dict[str, str] | None = None):
    folder.mkdir(parents=True, exist_ok=True)
    module = "tests.faults.scripted_server" if scripted else "robojax.cli"
    return process(
        folder / "server.log", module, "serve", "--port", "0", "--state", str(folder / "state"), *flags, env=env
    )


def rooms(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    return process(folder / "rooms.log", "robojax.cli", "transport", "--port", "0")


def robot(folder: Path, url: str, rooms: Rooms, began_at: float):
    """Robot in its own process, which a test can kill; ``began_at`` is the start of its clock."""
    places = json.dumps({**asdict(rooms), "cameras": dict(rooms.cameras)})
    return process(folder / "robot.log", "tests.faults.robot", url, places, repr(began_at))
