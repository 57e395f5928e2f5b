"""Delivers an event by starting a job with it."""

import asyncio
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hooks.registry.jobs import Job
from hooks.registry.process import GRACE_AT_STOP, STEP, end_left_behind, run_process
from hooks.sending.outcome import MAX_JOB_SECRET, Destination, Outcome, Parcel, excerpt

logger = logging.getLogger(__name__)

# Linux takes no single variable, with its name and an end, above 32 pages (MAX_ARG_STRLEN).
MAX_VARIABLE = 128 << 10
INHERITED = ("PATH", "HOME", "LANG")


class JobCourier:
    """Runs jobs in threads, so many at once; ``close`` ends them."""

    def __init__(self, jobs: Mapping[str, Job], folder: Path | None, at_once: int):
        """Make one; jobs that a killed server left behind are ended.

        Args:
            folder: for payloads while their jobs run; of this registry alone. None: a temporary one.
        """
        self._jobs = jobs
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(at_once, "webhook-job")
        self._running: set[Future[Outcome]] = set()
        if folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="robojax-jobs-"))
            return
        self._folder = folder
        for note in folder.glob("*/process"):
            if end_left_behind(note):
                logger.warning("a job that an earlier server left running was ended")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)

    async def deliver(self, destination: Destination, parcel: Parcel, now: float) -> Outcome:
        """Run the job to its end."""
        job = self._jobs.get(destination.job or "")
        if job is None:
            return Outcome(error=f"job {destination.job!r} is not in the operator's file any more")
        if self._stop.is_set():
            return Outcome(is_interrupted=True)
        began = time.monotonic()
        running = self._threads.submit(self._run, job, destination, parcel)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        outcome = await asyncio.wrap_future(running)
        return replace(outcome, seconds=time.monotonic() - began)

    def _run(self, job: Job, destination: Destination, parcel: Parcel) -> Outcome:
        if self._stop.is_set():
            return Outcome(is_interrupted=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{parcel.id}-", dir=self._folder))
        try:
            payload = folder / "payload.json"
            payload.touch(mode=0o600)
            payload.write_bytes(parcel.body)
            ended = run_process(
                job.argv,
                job.cwd,
                environment(job, destination, parcel, payload),
                timeout=job.timeout,
                max_output=job.max_output + MAX_JOB_SECRET,
                stop=self._stop,
                note=folder / "process",
            )
        except OSError as error:
            return Outcome(error=f"the payload cannot be written: {error.strerror}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if self._stop.is_set() and ended.error is not None:
            return Outcome(is_interrupted=True)
        secrets = (destination.secret, *destination.secrets.values())
        said = excerpt(ended.output, secrets, of_end=True, most=job.max_output, longest=MAX_JOB_SECRET)
        return Outcome(exit_status=ended.status, error=ended.error, excerpt=said)

    async def close(self) -> None:
        """End what runs, and take no more."""
        self._stop.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            await asyncio.wait(running, timeout=2 * GRACE_AT_STOP + 4 * STEP)
        shutil.rmtree(self._folder, ignore_errors=True)


def environment(job: Job, destination: Destination, parcel: Parcel, payload: Path) -> dict[str, str]:
    """All that a job gets to know; nothing of the server's own environment but ``INHERITED``."""
    given = {name: os.environ[name] for name in INHERITED if name in os.environ}
    given |= job.env
    given |= {name: value for name, value in destination.secrets.items() if name in job.secrets}
    given |= {"WEBHOOK_ID": parcel.id, "WEBHOOK_PAYLOAD_FILE": str(payload)}
    if len("WEBHOOK_PAYLOAD=") + len(parcel.body) + 1 <= MAX_VARIABLE:
        given["WEBHOOK_PAYLOAD"] = parcel.body.decode()
    if (repo := parcel.repo) is not None:
        given["WEBHOOK_REPO_ID"], given["WEBHOOK_REPO_TYPE"] = repo
    if destination.secret:
        given["WEBHOOK_SECRET"] = destination.secret
    return given
