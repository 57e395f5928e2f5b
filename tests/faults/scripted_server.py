"""``python -m tests.faults.scripted_server serve ...``: the command ``robojax``, whose policies follow a script.

``FAULTS_CLOCK`` names a file with the seconds by which its wall clock is wrong. ``FAULTS_BLOCK`` names one with how its
event loop is blocked on SIGUSR1, and for how many seconds: ``sleep 2`` (in Python, other threads run) or ``held 2`` (in
C, which keeps the interpreter's lock: no thread runs).
"""

import os
import signal
import time
from collections import deque
from functools import partial
from itertools import repeat, starmap, takewhile
from pathlib import Path

import service.app
from robojax.cli.app import main
from tests.faults.script import load, read


def set_wrong(file: Path) -> None:
    """From now on the wall clock of this process is as wrong as the file says."""
    right, right_ns = time.time, time.time_ns

    def wrong() -> float:
        return float(file.read_text() or 0)

    time.time = lambda: right() + wrong()
    time.time_ns = lambda: right_ns() + int(wrong() * 1e9)


def block(file: Path) -> None:
    """Let the main thread do nothing else for a while."""
    how, seconds = file.read_text().split()
    if how == "sleep":
        time.sleep(float(seconds))
        return
    # By the clock and all in C, where nobody else gets the interpreter's lock: counted loops, as long as a busy machine
    # had made their first million, once lasted less than a robot's patience.
    deque(takewhile((time.monotonic() + float(seconds)).__gt__, starmap(time.monotonic, repeat(()))), maxlen=0)


if __name__ == "__main__":
    if os.environ.get("FAULTS_BLOCK"):
        blocking = Path(os.environ["FAULTS_BLOCK"])
        signal.signal(signal.SIGUSR1, lambda number, frame: block(blocking))
    if os.environ.get("FAULTS_CLOCK"):
        set_wrong(Path(os.environ["FAULTS_CLOCK"]))
    service.app.create_app = partial(service.app.create_app, load=load, read_requirements=read)
    main()
