"""Measures a server with robots and bare loops on the same machine, and makes rows of ``benchmarks/load.py`` of it."""

import argparse
import json
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measured import ROOT, SHIPPED
from benchmarks.processes import Child, call, child

SERVER, ROBOTS = (ROOT / "benchmarks" / f"load_{role}.py" for role in ("server", "robots"))
LIMIT = 1.5  # times what bare loops do, when the machine is not quiet
Row = dict[str, Any]


class Scene:
    """A rooms server, a server under measurement, and the requested number of robots."""

    def __init__(self, stack: ExitStack, policy: str = "scripted", cameras: Sequence[str] = (), **flags: Any):
        self.stack = stack
        rooms = stack.enter_context(child("-m", "robojax.cli", "transport", "--port", "0"))
        self.rooms = next(word for word in rooms.line().split() if word.startswith("http")).removesuffix(".")
        self.server = stack.enter_context(child(str(SERVER), "--policy", policy, *_flags(flags), *_cameras(cameras)))
        self.url = self.server.told("ready")["url"]
        self.sessions: list[str] = []

    def create(self, prefix: str, number: int, cameras: Sequence[str], policy: Path = SHIPPED, **more: Any) -> None:
        name = f"{prefix}{number}"
        body = {
            "session_id": name,
            "policy_path": str(policy),
            "transport_server_url": self.rooms,
            "camera_names": list(cameras),
            "workspace_id": "load",
            **more,
        }
        call(f"{self.url}/sessions", "POST", body)
        self.sessions.append(name)

    def robots(self, prefix: str, count: int, cameras: Sequence[str], **flags: Any) -> Child:
        made = child(
            str(ROBOTS),
            "robots",
            *_flags({"url": self.rooms, "prefix": prefix, "count": count, **flags}),
            *_cameras(cameras),
        )
        robots = self.stack.enter_context(made)
        robots.told("ready")
        return robots

    def start_all(self) -> None:
        for name in self.sessions:
            call(f"{self.url}/sessions/{name}/start", "POST")

    def stop_all(self) -> None:
        for name in self.sessions:
            call(f"{self.url}/sessions/{name}/stop", "POST")

    def measure(self, seconds: float, meanwhile: Callable[[], Any] = lambda: None) -> Any:
        """Measure the server for this number of seconds."""
        return _measure(self.server, seconds, meanwhile)

    def bare(self, count: int, rate: float, seconds: float, cameras: Sequence[str] = (), **flags: Any) -> Any:
        """The figures of bare loops with robots of the same kind."""
        with ExitStack() as stack:
            shared = {"url": self.rooms, "prefix": "b", "count": count}
            loops = child(str(ROBOTS), "bare", *_flags({**shared, "rate": rate}), *_cameras(cameras))
            bare = stack.enter_context(loops)
            bare.told("ready")
            robots = stack.enter_context(child(str(ROBOTS), "robots", *_flags({**shared, **flags}), *_cameras(cameras)))
            robots.told("ready")
            time.sleep(2)
            return _measure(bare, seconds)


def _measure(measured: Child, seconds: float, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    measured.ask(signal.SIGUSR1, "measuring")
    until = time.monotonic() + seconds
    meanwhile()
    time.sleep(max(until - time.monotonic(), 0))
    return measured.ask(signal.SIGUSR2, "measured")


def _flags(flags: Mapping[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def _cameras(cameras: Sequence[str]) -> list[str]:
    return ["--cameras", *cameras] if cameras else []


def lateness(figures: Sequence[Any]) -> dict[str, float]:
    """Return the medians of the rounds."""
    names = ("p50", "p99", "p99.9", "max")
    return {name: round(statistics.median(one["lateness_ms"][name] for one in figures), 3) for name in names}


def row(name: str, target: str, figure: Any, passes: bool, bare: Any = None, **more: Any) -> Row:
    """One row; ``bare`` are the figures of lateness of the bare loops."""
    found: Row = {"row": name, "target": target, "figure": figure, **more}
    if bare is not None:
        ratio = round(figure["lateness_ms"]["p99"] / bare["p99"], 2)
        found |= {"bare": bare, "p99_over_bare": ratio}
    found["passes"] = passes
    print(f"{name}: {'pass' if passes else 'MISS'}  target {target}\n    {json.dumps(figure)}", flush=True)
    if bare is not None:
        print(f"    bare {json.dumps(bare)}  ratio {found['p99_over_bare']}", flush=True)
    return found


def is_wanted(options: argparse.Namespace, name: str) -> bool:
    return name in options.only
