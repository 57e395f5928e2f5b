"""Processes that a benchmark starts, talks to and ends, and calls to the servers in them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.measured import ROOT


def say(**what: object) -> None:
    """Print a line of figures for the parent process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Child:
    """A process of ours that prints lines, of which those with figures are JSON."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None, python: str = sys.executable):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open until the process ends
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [python, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            # An installed package has compiled files, also where a container does not write any.
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""} | dict(env or {}),
        )

    def line(self) -> str:
        """The next line that it prints.

        Raises:
            RuntimeError: it ended; with the end of what it wrote to standard error.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"a process ended with {self.process.wait()}:\n{self.errors.read()[-3000:]}")
        return line

    def told(self, event: str) -> Any:
        """The next line of figures of this name."""
        while True:
            line = self.line()
            found = json.loads(line) if line.startswith("{") else {}
            if found.get("event") == event:
                return found

    def url(self) -> str:
        """The first address that it prints."""
        while True:
            for word in self.line().split():
                if word.startswith("http://"):
                    return word.rstrip(".")

    def ask(self, number: signal.Signals, event: str) -> Any:
        """Send a signal, wait for what it tells."""
        self.process.send_signal(number)
        return self.told(event)

    def order(self, **order: Any) -> Any:
        """One line of JSON in, one out."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()


@contextmanager
def child(*command: str, env: Mapping[str, str] | None = None, python: str = sys.executable) -> Iterator[Child]:
    """Started now, killed at the end."""
    made = Child(*command, env=env, python=python)
    try:
        yield made
    finally:
        made.end()


class Refused(Exception):
    """A call was answered with an error."""


def call(url: str, method: str = "GET", body: Any = None, patience: float = 300) -> Any:
    """One request with JSON in and out.

    Raises:
        Refused: the answer was an error.
    """
    request = urllib.request.Request(
        url,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=patience) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(f"{method} {url}: {error.code} {error.read().decode()[:2000]}") from error


def settle(url: str, within: float = 300.0) -> None:
    """Until nothing is compiled any more: larger batches are, behind the first one, while no robot runs."""
    until = time.monotonic() + within
    while call(f"{url}/debug/system")["engine"].get("batch_sizes_to_compile", 0):
        if time.monotonic() > until:
            raise RuntimeError(f"after {within:g} s the engine still compiles batch sizes")
        time.sleep(0.5)


def peer_versions(python: str | None, *names: str) -> dict[str, str]:
    """Return the versions of packages in another Python; empty without one."""
    if python is None:
        return {}
    program = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    return json.loads(subprocess.run([python, "-c", program], capture_output=True, check=True, text=True).stdout)
