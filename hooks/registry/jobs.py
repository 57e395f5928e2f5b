"""Jobs: programs that webhooks may start by their ids, described in the operator's TOML file, and their runs.

Each job runs in its own process group; a program that leaves the group (``setsid``) escapes the limits.
"""

import asyncio
import logging
import os
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
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hooks.errors import InvalidSettings
from hooks.registry.delivery import MAX_JOB_SECRET, DeliveryOutcome, DeliveryRequest, Destination, make_excerpt

logger = logging.getLogger(__name__)

MAX_OUTPUT = 1 << 20
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Secret = Annotated[str, Field(pattern=r"^(?!WEBHOOK_)[A-Za-z_][A-Za-z0-9_]*$")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", regex_engine="python-re"))
class Job:
    """A program with its arguments and limits, from the operator's file; no shell reads ``argv``."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$")]
    argv: Annotated[tuple[str, ...], Field(min_length=1)]
    cwd: Path = Path()
    env: dict[Variable, str] = field(default_factory=dict, repr=False)
    secrets: tuple[Secret, ...] = ()
    timeout: Annotated[float, Field(strict=True, gt=0)] = 600.0
    max_output: Annotated[int, Field(strict=True, gt=0, le=MAX_OUTPUT)] = 16 << 10


def load_jobs(path: Path | None) -> dict[str, Job]:
    """Load the jobs of a file by id; raise ``InvalidSettings`` if the file is invalid or all users may write it."""
    if path is None:
        return {}
    name = f"jobs file {str(path)!r}"
    try:
        mode = path.stat().st_mode
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidSettings(f"{name}: {error.strerror or type(error).__name__}") from error
    except ValueError as error:  # The file is not TOML, or not UTF-8.
        raise InvalidSettings(f"{name}: {error}") from error
    wrong = []
    if mode & stat.S_IWOTH:
        wrong.append("all users of this machine can write it, and so start any program as this server; chmod o-w")
    tables = content.get("jobs", {})
    if not isinstance(tables, dict) or set(content) - {"jobs"}:
        wrong.append(f"wanted only tables [jobs.ID], found {', '.join(sorted(content))}")
        tables = {}
    jobs, folder = {}, path.resolve().parent
    for job_id, table in tables.items():
        try:
            job = TypeAdapter(Job).validate_python({**table, "id": job_id} if isinstance(table, dict) else table)
        except ValidationError as error:
            for one in error.errors():
                place = ".".join(map(str, (job_id, *one["loc"])))
                wrong.append(f"{place}: {one['msg']}, found {one['input']!r}")
        else:
            jobs[job_id] = replace(job, cwd=folder / job.cwd)
    if wrong:
        raise InvalidSettings(f"{name}: " + "; ".join(wrong))
    return jobs


POLL_INTERVAL = 0.05  # seconds between checks of a running job
# Seconds from SIGTERM to SIGKILL after the job's timeout, and when the server stops.
GRACE, GRACE_AT_STOP = 2.0, 0.5


class JobResult(NamedTuple):
    """Exit status (None without a start), why the server ended or did not start the job, and its last output."""

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
    """Run a process in the calling thread until it ends or times out; on return its process group has ended."""
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
    output = bytearray()
    with process.stdout:
        try:
            error = _wait_for_exit(process, output, max_output, timeout, stop)
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            _wait_for_group(process.pid)
        # Read the rest with a time limit, because a process that left the group may keep the pipe open.
        until = time.monotonic() + GRACE_AT_STOP
        while _read_output(process, output, max_output, wait=0) and time.monotonic() < until:
            pass
    return JobResult(process.returncode, error, bytes(output))


def _wait_for_exit(
    process: "subprocess.Popen[bytes]", output: bytearray, max_output: int, timeout: float, stop: threading.Event
) -> str | None:
    """Wait until the process exits; if the server ends the process, return the reason."""
    until = time.monotonic() + timeout
    error, kill_at = None, None
    while process.poll() is None:
        if not _read_output(process, output, max_output, wait=POLL_INTERVAL):
            time.sleep(POLL_INTERVAL / 10)  # The call above does not wait if the job has closed its output.
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


def _read_output(process: "subprocess.Popen[bytes]", output: bytearray, max_output: int, wait: float) -> bool:
    """Append output that arrives within ``wait`` seconds, keep the last bytes, and return whether any arrived."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], wait)[0]:
        return False
    data = os.read(process.stdout.fileno(), 1 << 16)
    output += data
    del output[:-max_output]
    return bool(data)


def _wait_for_group(group: int) -> None:
    """Wait until the kernel has removed the killed process group."""
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
    """Return the start of a process in kernel ticks, which identify it together with its process id."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def end_orphaned_job(pid_file: Path) -> bool:
    """Kill the job of a killed server; return whether the job was still running."""
    number, _, started_at = pid_file.read_text().partition(" ")
    if not number.isdigit() or not started_at or _get_start_time(int(number)) != started_at:
        return False
    _signal_group(int(number), signal.SIGKILL)
    return True


MAX_VARIABLE = 128 << 10  # Linux's limit for ``NAME=value`` with its final NUL: 32 pages (MAX_ARG_STRLEN)
INHERITED = ("PATH", "HOME", "LANG")


class JobDeliverer:
    """Delivers events by running jobs in threads, a limited number at once."""

    def __init__(self, jobs: Mapping[str, Job], folder: Path | None, max_jobs: int):
        """Create a deliverer, and kill jobs that a killed server left running; ``folder`` is for payloads."""
        self._jobs = jobs
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(max_jobs, "webhook-job")
        self._running: set[Future[DeliveryOutcome]] = set()
        if folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="robojax-jobs-"))
            return
        self._folder = folder
        for pid_file in folder.glob("*/process"):
            if end_orphaned_job(pid_file):
                logger.warning("ended a job that an earlier server left running")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)

    async def deliver(self, destination: Destination, request: DeliveryRequest, now: float) -> DeliveryOutcome:
        """Run the job to its end."""
        job = self._jobs.get(destination.job or "")
        if job is None:
            return DeliveryOutcome(error=f"job {destination.job!r} is no longer in the operator's file")
        if self._stop.is_set():
            return DeliveryOutcome(is_interrupted=True)
        started_at = time.monotonic()
        running = self._threads.submit(self._run_job, job, destination, request)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        outcome = await asyncio.wrap_future(running)
        return replace(outcome, seconds=time.monotonic() - started_at)

    def _run_job(self, job: Job, destination: Destination, request: DeliveryRequest) -> DeliveryOutcome:
        if self._stop.is_set():
            return DeliveryOutcome(is_interrupted=True)
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
            return DeliveryOutcome(error=f"the payload cannot be written: {error.strerror}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self._stop.is_set() and result.error is not None:
            return DeliveryOutcome(is_interrupted=True)
        secrets = (destination.secret, *destination.secrets.values())
        output = make_excerpt(
            result.output, secrets, is_end=True, max_bytes=job.max_output, longest_secret=MAX_JOB_SECRET
        )
        return DeliveryOutcome(exit_status=result.status, error=result.error, excerpt=output)

    async def close(self) -> None:
        """End the running jobs and accept no more."""
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            await asyncio.wait(running, timeout=2 * GRACE_AT_STOP + 4 * POLL_INTERVAL)
        shutil.rmtree(self._folder, ignore_errors=True)


def build_environment(job: Job, destination: Destination, request: DeliveryRequest, payload: Path) -> dict[str, str]:
    """Build a job's environment, which inherits only the variables in ``INHERITED`` from the server."""
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
