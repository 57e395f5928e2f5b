"""Jobs: programs that webhooks may start, and their runs.

A webhook names a job by its id only. What runs, where, and with which variables is in the file::

    [jobs.retrain]
    argv = ["/srv/retrain/.venv/bin/python", "retrain.py"]
    cwd = "/srv/retrain"             # default: the folder of this file
    env = { WANDB_MODE = "offline" } # beside PATH, HOME, LANG and the WEBHOOK_ variables
    secrets = ["HF_TOKEN"]           # variables that a webhook may set
    timeout = 600                    # seconds
    max_output = 16384               # bytes of its output that are kept, the last ones

A job runs in a process group of its own; a program that leaves it (``setsid``) leaves these bounds, too.
"""

import asyncio
import logging
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hooks.errors import InvalidSettings
from hooks.registry.delivery import MAX_JOB_SECRET, DeliveryRequest, Destination, Outcome, make_excerpt

MAX_OUTPUT = 1 << 20
_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_KEYS = {"argv", "cwd", "env", "secrets", "timeout", "max_output"}


@dataclass(frozen=True)
class Job:
    """A program with its arguments and limits, from the operator's file."""

    id: str
    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = ()
    timeout: float = 600.0
    max_output: int = 16 << 10


def load_jobs(path: Path | None) -> dict[str, Job]:
    """Load the jobs of a file by id; none without a file.

    Raises:
        InvalidSettings: with all that is wrong in it.
    """
    if path is None:
        return {}
    try:
        mode = path.stat().st_mode
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidSettings(f"jobs file {str(path)!r}: {error.strerror or type(error).__name__}") from error
    except ValueError as error:  # of the TOML, or of its encoding
        raise InvalidSettings(f"jobs file {str(path)!r}: {error}") from error
    wrong: list[str] = []
    if mode & stat.S_IWOTH:
        wrong.append("everybody on this machine can write it, and so start anything as this server; chmod o-w")
    table = content.get("jobs", {})
    if not isinstance(table, dict) or set(content) - {"jobs"}:
        wrong.append(f"wanted only tables [jobs.ID], found {', '.join(sorted(content))}")
        table = {}
    jobs = {name: _read_job(name, jobs_by_id, path.resolve().parent, wrong) for name, jobs_by_id in table.items()}
    if wrong:
        raise InvalidSettings(f"jobs file {str(path)!r}: " + "; ".join(wrong))
    return {name: job for name, job in jobs.items() if job is not None}


def _read_job(name: str, fields: object, folder: Path, wrong: list[str]) -> Job | None:
    if not isinstance(fields, dict):
        wrong.append(f"{name}: wanted a table")
        return None
    before = len(wrong)

    def check(is_right: bool, text: str) -> None:
        if not is_right:
            wrong.append(f"{name}: {text}")

    argv, cwd, env = fields.get("argv", []), fields.get("cwd", "."), fields.get("env", {})
    secrets, timeout, max_output = (
        fields.get("secrets", []),
        fields.get("timeout", 600),
        fields.get("max_output", 16 << 10),
    )
    check(bool(_ID.fullmatch(name)), "an id is of letters, digits, dots, dashes and underscores")
    check(
        not set(fields) - _KEYS, f"unknown {', '.join(sorted(set(fields) - _KEYS))}; known: {', '.join(sorted(_KEYS))}"
    )
    check(_is_texts(argv) and bool(argv), "argv: wanted a list of the program and its arguments (no shell reads it)")
    check(isinstance(cwd, str), "cwd: wanted a folder")
    is_env = isinstance(env, dict) and _is_texts(list(env.values())) and all(map(_VARIABLE.fullmatch, env))
    check(is_env, "env: wanted a table of texts")
    is_secrets = _is_texts(secrets) and all(map(_VARIABLE.fullmatch, secrets))
    check(
        is_secrets and not any(_is_ours(one) for one in secrets), "secrets: wanted names of variables, not WEBHOOK_.."
    )
    check(_is_number(timeout) and timeout > 0, "timeout: wanted seconds above 0")
    check(
        _is_number(max_output) and isinstance(max_output, int) and 0 < max_output <= MAX_OUTPUT,
        f"max_output: wanted 1 to {MAX_OUTPUT} bytes",
    )
    if len(wrong) > before:
        return None
    return Job(name, tuple(argv), folder / cwd, env, tuple(secrets), float(timeout), max_output)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) and "\0" not in part for part in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_ours(variable: str) -> bool:
    return variable.startswith("WEBHOOK_")


# How often a running job is looked at.
POLL_INTERVAL = 0.05
# From the polite signal to the other one: after its time is over, and when the server stops.
GRACE = 2.0
GRACE_AT_STOP = 0.5


@dataclass(frozen=True)
class JobResult:
    """Result of a job's run.

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
    pid_file: Path | None = None,
) -> JobResult:
    """Run a process in the calling thread; nothing of its process group is left when this returns.

    Args:
        timeout: seconds.
        max_output: bytes to keep, the last ones.
        stop: set it to end the job.
        pid_file: file to write the process into, for ``end_orphaned_job``.
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
        return JobResult(None, f"the job does not start: {reason or type(error).__name__}", b"")
    if pid_file is not None:
        pid_file.write_text(f"{process.pid} {_get_start_time(process.pid)}")
    assert process.stdout is not None
    with process.stdout:
        output = _Tail(process.stdout.fileno(), max_output)
        try:
            error = _wait_for_exit(process, output, timeout, stop)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid)
        output.read_rest()
    return JobResult(process.returncode, error, bytes(output.content))


def _wait_for_exit(
    process: "subprocess.Popen[bytes]", output: "_Tail", timeout: float, stop: threading.Event
) -> str | None:
    """Wait until the process exits, or end it; return the reason in the latter case."""
    until = time.monotonic() + timeout
    error, kill_at = None, None
    while process.poll() is None:
        output.read(POLL_INTERVAL)
        now = time.monotonic()
        if kill_at is None and (stop.is_set() or now >= until):
            error = "the server stopped" if stop.is_set() else f"ended after its {timeout:g} s"
            kill_at = now + (GRACE_AT_STOP if stop.is_set() else GRACE)
            _signal_group(process.pid, signal.SIGTERM)
        elif kill_at is not None and stop.is_set():
            kill_at = min(kill_at, now + GRACE_AT_STOP)
        if kill_at is not None and now >= kill_at:
            _signal_group(process.pid, signal.SIGKILL)
    return error


class _Tail:
    """The last bytes written to a pipe."""

    def __init__(self, file: int, max_bytes: int):
        self.content = bytearray()
        self._file = file
        self._max_bytes = max_bytes
        self._is_open = True
        os.set_blocking(file, False)

    def read(self, wait: float) -> bool:
        """Read what is there, or arrives within so many seconds; return whether there was anything."""
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
        self.content += data
        del self.content[: -self._max_bytes]
        return self._is_open

    def read_rest(self) -> None:
        """Read what was written before the end; a process that left the group may keep the pipe open."""
        until = time.monotonic() + GRACE_AT_STOP
        while self.read(0) and time.monotonic() < until:
            pass


def _wait_for_group(group: int) -> None:
    """Wait until the killed process group is gone, which takes the kernel a moment."""
    until = time.monotonic() + GRACE_AT_STOP / 2
    while _signal_group(group, 0) and time.monotonic() < until:
        time.sleep(POLL_INTERVAL / 10)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return whether the group exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _get_start_time(process: int) -> str:
    """Return when a process began, in kernel ticks; with its id this is unique.

    What psutil tells follows the system's clock, and is another number for the same process once that was set.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def end_orphaned_job(pid_file: Path) -> bool:
    """Kill the job that a killed server left running; return whether it still ran."""
    number, _, started_at = pid_file.read_text().partition(" ")
    if not number.isdigit() or not started_at or _get_start_time(int(number)) != started_at:
        return False
    _signal_group(int(number), signal.SIGKILL)
    return True


logger = logging.getLogger(__name__)

# Linux takes no single variable, with its name and an end, above 32 pages (MAX_ARG_STRLEN).
MAX_VARIABLE = 128 << 10
INHERITED = ("PATH", "HOME", "LANG")


class JobDeliverer:
    """Delivers events by running jobs in threads, a limited number at once."""

    def __init__(self, jobs: Mapping[str, Job], folder: Path | None, max_jobs: int):
        """Make a deliverer, and kill jobs that a killed server left running.

        Args:
            folder: for payloads while their jobs run; of this registry alone. None: a temporary one.
        """
        self._jobs = jobs
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(max_jobs, "webhook-job")
        self._running: set[Future[Outcome]] = set()
        if folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="robojax-jobs-"))
            return
        self._folder = folder
        for pid_file in folder.glob("*/process"):
            if end_orphaned_job(pid_file):
                logger.warning("a job that an earlier server left running was ended")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)

    async def deliver(self, destination: Destination, request: DeliveryRequest, now: float) -> Outcome:
        """Run the job to its end."""
        job = self._jobs.get(destination.job or "")
        if job is None:
            return Outcome(error=f"job {destination.job!r} is not in the operator's file any more")
        if self._stop.is_set():
            return Outcome(is_interrupted=True)
        started_at = time.monotonic()
        running = self._threads.submit(self._run_job, job, destination, request)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        outcome = await asyncio.wrap_future(running)
        return replace(outcome, seconds=time.monotonic() - started_at)

    def _run_job(self, job: Job, destination: Destination, request: DeliveryRequest) -> Outcome:
        if self._stop.is_set():
            return Outcome(is_interrupted=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{request.id}-", dir=self._folder))
        try:
            payload = folder / "payload.json"
            payload.touch(mode=0o600)
            payload.write_bytes(request.body)
            result = run_process(
                job.argv,
                job.cwd,
                build_environment(job, destination, request, payload),
                timeout=job.timeout,
                max_output=job.max_output + MAX_JOB_SECRET,
                stop=self._stop,
                pid_file=folder / "process",
            )
        except OSError as error:
            return Outcome(error=f"the payload cannot be written: {error.strerror}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self._stop.is_set() and result.error is not None:
            return Outcome(is_interrupted=True)
        secrets = (destination.secret, *destination.secrets.values())
        output = make_excerpt(
            result.output, secrets, is_end=True, max_bytes=job.max_output, longest_secret=MAX_JOB_SECRET
        )
        return Outcome(exit_status=result.status, error=result.error, excerpt=output)

    async def close(self) -> None:
        """End the running jobs and accept no more."""
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            await asyncio.wait(running, timeout=2 * GRACE_AT_STOP + 4 * POLL_INTERVAL)
        shutil.rmtree(self._folder, ignore_errors=True)


def build_environment(job: Job, destination: Destination, request: DeliveryRequest, payload: Path) -> dict[str, str]:
    """Build a job's environment; of the server's own, it gets ``INHERITED`` only."""
    variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
    variables |= job.env
    variables |= {name: value for name, value in destination.secrets.items() if name in job.secrets}
    variables |= {"WEBHOOK_ID": request.id, "WEBHOOK_PAYLOAD_FILE": str(payload)}
    if len("WEBHOOK_PAYLOAD=") + len(request.body) + 1 <= MAX_VARIABLE:
        variables["WEBHOOK_PAYLOAD"] = request.body.decode()
    if (repo := request.repo) is not None:
        variables["WEBHOOK_REPO_ID"], variables["WEBHOOK_REPO_TYPE"] = repo
    if destination.secret:
        variables["WEBHOOK_SECRET"] = destination.secret
    return variables
