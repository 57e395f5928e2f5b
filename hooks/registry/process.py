"""Runs one job to its end: a process group of its own, a clean environment, bounded time and output.

A program that leaves its group (``setsid``) leaves these bounds as well.
"""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# How often a running job is looked at.
STEP = 0.05
# From the polite signal to the other one: after its time is over, and when the server stops.
GRACE = 2.0
GRACE_AT_STOP = 0.5


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        status: exit status, negative for a signal; None when it did not start.
        error: why it was ended by us or did not start.
        output: the last bytes of what it said, on both of its outputs.
    """

    status: int | None
    error: str | None
    output: bytes


def run_process(
    argv: tuple[str, ...],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    timeout: float,
    max_output: int,
    stop: threading.Event,
    note: Path | None = None,
) -> Ended:
    """Run it, in the calling thread; nothing of its process group is left when this returns.

    Args:
        timeout: seconds.
        max_output: bytes to keep, the last ones.
        stop: set it to end the job.
        note: file to write the process into, for ``end_left_behind``.
    """
    try:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return Ended(None, f"the job does not start: {reason or type(error).__name__}", b"")
    if note is not None:
        note.write_text(f"{process.pid} {_born(process.pid)}")
    assert process.stdout is not None
    with process.stdout:
        output = _Tail(process.stdout.fileno(), max_output)
        try:
            error = _wait(process, output, timeout, stop)
        finally:
            _signal(process.pid, signal.SIGKILL)
            process.wait()
            _part_from(process.pid)
        output.read_rest()
    return Ended(process.returncode, error, bytes(output.kept))


def _wait(process: "subprocess.Popen[bytes]", output: "_Tail", timeout: float, stop: threading.Event) -> str | None:
    """Wait for its end, or bring it about; then the reason."""
    until = time.monotonic() + timeout
    error, kill_at = None, None
    while process.poll() is None:
        output.read(STEP)
        now = time.monotonic()
        if kill_at is None and (stop.is_set() or now >= until):
            error = "the server stopped" if stop.is_set() else f"ended after its {timeout:g} s"
            kill_at = now + (GRACE_AT_STOP if stop.is_set() else GRACE)
            _signal(process.pid, signal.SIGTERM)
        elif kill_at is not None and stop.is_set():
            kill_at = min(kill_at, now + GRACE_AT_STOP)
        if kill_at is not None and now >= kill_at:
            _signal(process.pid, signal.SIGKILL)
    return error


class _Tail:
    """The last bytes of a pipe."""

    def __init__(self, file: int, most: int):
        self.kept = bytearray()
        self._file = file
        self._most = most
        self._is_open = True
        os.set_blocking(file, False)

    def read(self, wait: float) -> bool:
        """Take what is there, or comes within so many seconds; whether there was something."""
        if not self._is_open:
            time.sleep(wait)
            return False
        if not select.select([self._file], [], [], wait)[0]:
            return False
        try:
            data = os.read(self._file, 1 << 16)
        except BlockingIOError:
            return False
        self._is_open = bool(data)
        self.kept += data
        del self.kept[: -self._most]
        return self._is_open

    def read_rest(self) -> None:
        """Take what was written before the end; one that left the group may hold the pipe open, and is not read."""
        until = time.monotonic() + GRACE_AT_STOP
        while self.read(0) and time.monotonic() < until:
            pass


def _part_from(group: int) -> None:
    """Wait until what was killed is gone, which takes the kernel a moment."""
    until = time.monotonic() + GRACE_AT_STOP / 2
    while _signal(group, 0) and time.monotonic() < until:
        time.sleep(STEP / 10)


def _signal(group: int, number: int) -> bool:
    """Whether there is such a group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _born(process: int) -> str:
    """When a process began, in the kernel's ticks: a number and this together are never given twice.

    What psutil tells follows the system's clock, and is another number for the same process once that was set.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def end_left_behind(note: Path) -> bool:
    """End the job that a killed server has left running; whether it still ran."""
    number, _, born = note.read_text().partition(" ")
    if not number.isdigit() or not born or _born(int(number)) != born:
        return False
    _signal(int(number), signal.SIGKILL)
    return True
