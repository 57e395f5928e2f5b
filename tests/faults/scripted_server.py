"""``python -m tests.faults.scripted_server serve ...``: ``robojax`` with policies that follow a script.

Environment variables name files:

- ``FAULTS_CLOCK``: the error of this process's wall clock in seconds;
- ``FAULTS_BLOCK``: how SIGUSR1 blocks the event loop, and for how many seconds: ``sleep 2`` (in Python, other
  threads run) or ``held 2`` (in C with the interpreter lock, no thread runs);
- ``HOSTILE_TIMES``: two doubles, the longest turn of the loop in wall-clock time and in processor time. Zeros start
  a new measurement.
"""

import asyncio
import mmap
import os
import signal
import struct
import time
from collections import deque
from functools import partial
from itertools import repeat, starmap, takewhile
from pathlib import Path
from typing import Any

import service.app
from robojax.cli.app import main
from tests.faults.script import load, read

TIMES = struct.Struct("dd")
TURN = 0.001


def set_wrong(file: Path) -> None:
    right, right_ns = time.time, time.time_ns

    def wrong() -> float:
        return float(file.read_text() or 0)

    time.time = lambda: right() + wrong()
    time.time_ns = lambda: right_ns() + int(wrong() * 1e9)


def block(file: Path) -> None:
    how, seconds = file.read_text().split()
    if how == "sleep":
        time.sleep(float(seconds))
        return
    # The loop runs in C and keeps the interpreter lock. It ends by the clock because a fixed count may be too short.
    deque(takewhile((time.monotonic() + float(seconds)).__gt__, starmap(time.monotonic, repeat(()))), maxlen=0)


async def watch(times: mmap.mmap) -> None:
    while True:
        began, worked = time.monotonic(), time.thread_time()
        await asyncio.sleep(TURN)
        found = time.monotonic() - began - TURN, time.thread_time() - worked
        worst = TIMES.unpack_from(times)
        if found[0] > worst[0] or found[1] > worst[1]:
            TIMES.pack_into(times, 0, max(found[0], worst[0]), max(found[1], worst[1]))


def watched(create_app: Any, file: Path) -> Any:
    def create(*arguments: Any, **named: Any) -> Any:
        app = create_app(*arguments, **named)
        with file.open("r+b") as opened:
            times = mmap.mmap(opened.fileno(), TIMES.size)
        app.add_task(watch(times))
        return app

    return create


if __name__ == "__main__":
    if os.environ.get("FAULTS_BLOCK"):
        blocking = Path(os.environ["FAULTS_BLOCK"])
        signal.signal(signal.SIGUSR1, lambda number, frame: block(blocking))
    if os.environ.get("FAULTS_CLOCK"):
        set_wrong(Path(os.environ["FAULTS_CLOCK"]))
    service.app.create_app = partial(service.app.create_app, load=load, read_requirements=read)
    if os.environ.get("HOSTILE_TIMES"):
        service.app.create_app = watched(service.app.create_app, Path(os.environ["HOSTILE_TIMES"]))
    main()
