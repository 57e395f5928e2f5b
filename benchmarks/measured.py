"""What every benchmark writes down: the machine, the spread of its samples, how late bare loops were during the run."""

import asyncio
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHIPPED = ROOT / "robojax" / "sim" / "policy"
PERCENTS = (50.0, 99.0, 99.9)
# Above this, in milliseconds, bare loops say that the machine does something else.
QUIET_P99 = 5.0
PACKAGES = ("robojax", "jax", "flax", "numpy", "sanic", "aiortc")


def percentiles(seconds: Sequence[float] | np.ndarray, percents: Sequence[float] = PERCENTS) -> dict[str, float]:
    """Of seconds, in milliseconds: ``{"p50": 1.25, ..., "max": 9.5}``; empty without samples."""
    samples = np.asarray(seconds, np.float64)
    if not samples.size:
        return {}
    found = dict(zip((f"p{percent:g}" for percent in percents), np.percentile(samples, percents), strict=True))
    return {name: round(float(value) * 1e3, 3) for name, value in (found | {"max": samples.max()}).items()}


def machine(*packages: str) -> dict[str, Any]:
    """Where this runs, how busy it is, and the versions of what runs; ``packages`` are added to the usual packages."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "accelerator": accelerator(),
        "system": platform.system(),
        "python": platform.python_version(),
        "process_niceness": os.nice(0),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "versions": {name: found for name in (*PACKAGES, *packages) if (found := _version(name))},
    }


@cache
def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@cache
def accelerator() -> str | None:
    """The GPU's name, as its driver says; None without one."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip().splitlines()[0] if told.returncode == 0 and told.stdout.strip() else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# Bare loops: what an asyncio program on this machine can do at best.


async def sleep_until(deadline: float) -> None:
    """Sleep until a time of the monotonic clock; never wakes early."""
    # A loop because timers are coarse: uvloop's count in whole milliseconds of a cached clock and may be early.
    while (left := deadline - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(left)


async def beat(
    rate: float,
    act: Callable[[], object],
    note: Callable[[float], object],
    *,
    phase: float = 0.0,
    seconds: float | None = None,
) -> None:
    """Call ``note`` with the lateness in seconds at each deadline, ``rate`` times per second.

    With an end, no deadline is skipped. Without one, missed deadlines are skipped, as in a robot's control.
    """
    start = time.monotonic() + phase
    number = 0
    while seconds is None or number < int(seconds * rate):
        deadline = start + number / rate
        await sleep_until(deadline)
        now = time.monotonic()
        note(now - deadline)
        act()
        number = number + 1 if seconds is not None else max(number + 1, int((now - start) * rate))


def quietness(seconds: float = 2.0, rate: float = 50.0) -> dict[str, Any]:
    """How late a bare loop is here and now, and whether that is what a machine without other work does."""
    late: list[float] = []
    asyncio.run(beat(rate, lambda: None, late.append, seconds=seconds))
    found = percentiles(late)
    return {"bare_loop_lateness_ms": found, "is_quiet": found["p99"] < QUIET_P99}


# Results.


def result(question: str, command: str, quiet: Mapping[str, Any], *packages: str, **figures: Any) -> dict[str, Any]:
    """What is written of one run; ``figures`` are its own."""
    return {
        "question": question,
        "command": command,
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(*packages),
        **quiet,
        **figures,
    }


def write(path: Path, found: Mapping[str, Any]) -> None:
    """As JSON, for people too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {path}", flush=True)
