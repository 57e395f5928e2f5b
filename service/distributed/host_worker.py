"""Worker host: a Ray actor that runs what its coordinator sends.

It runs in a worker of the node that ``robojax follow`` began, and sends that process, through a named pipe, lines for
people, log lines, and why it ended.
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray  # pyright: ignore[reportMissingImports] - an extra

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.distributed.artifacts import Listing, PolicyArtifact, fetch_to_cache, matches_listing
from service.distributed.host_group import BEAT_PERIOD, SILENCE_TIMEOUT
from service.distributed.ray_node import ADDRESS, PIPE
from service.processes import exit_with_parent

logger = logging.getLogger(__name__)

# Methods that run beside each other, each of a group in one thread: programs over the devices of all hosts; loading and
# compiling, which need no devices of others; signs of life; the call that lasts as long as this process.
CONCURRENCY_GROUPS = {"run": 1, "build": 1, "beat": 1, "stay": 1}
# Bytes that a pipe takes at once without those of another thread between them.
MAX_LINE_BYTES = 4096
# What a host answers that does not have the files of a policy.
MISSING = "missing"

Command = dict[str, Any]
Arrays = Mapping[str, np.ndarray]


def package_versions() -> dict[str, str]:
    """Return the versions of packages that must be the same on all hosts, or their programs may differ."""
    return {name: version(name) for name in ("robojax", "jax", "jaxlib", "flax")}


class Reporter(logging.Handler):
    """Log handler that sends log lines, messages and the end to ``robojax follow`` through a named pipe."""

    def __init__(self, path: str):
        super().__init__(logging.INFO)
        self._pipe = os.open(path, os.O_WRONLY)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Send the lines of a log record."""
        for line in self.format(record).splitlines():
            self.write({"log": line[: MAX_LINE_BYTES // 8]})

    def write(self, what: Command) -> None:
        """Send one message as a line of JSON; raises where nobody reads any more, as this process ends then."""
        os.write(self._pipe, json.dumps(what).encode()[: MAX_LINE_BYTES - 1] + b"\n")


class HostActor:
    """Ray actor on a worker host, created by the coordinator; `number` is from 1.

    Runs are numbered, and done in the order of their numbers, whatever the order in which Ray delivers them: one whose
    arrays travel by the object store may be overtaken.
    """

    def __init__(self, number: int, count: int):
        exit_with_parent(os.getppid(), signal.SIGKILL)
        self._reporter = Reporter(os.environ[PIPE])
        logging.getLogger().addHandler(self._reporter)
        logging.getLogger().setLevel(logging.INFO)
        self._number, self._count = number, count
        self._device, self._cache = "", jaxmodels.user_cache() / "robojax" / "hosts"
        self._policies: dict[int, jaxmodels.Policy] = {}
        self._early_runs: dict[int, tuple[Command, Arrays]] = {}
        self._next_run = 1
        self._last_beat_at = time.monotonic()
        self._has_ended = threading.Event()
        self._reporter.write({"say": f"Host {number} of {count}."})
        threading.Thread(target=self._watch_server, name="listen", daemon=True).start()

    @ray.method(concurrency_group="beat")
    def introduce(self) -> tuple[str, dict[str, str]]:
        """Return the address of its machine, and its versions."""
        return os.environ[ADDRESS], package_versions()

    @ray.method(concurrency_group="beat")
    def beat(self) -> None:
        """Exchange a sign of life with the coordinator."""
        self._last_beat_at = time.monotonic()

    @ray.method(concurrency_group="stay")
    def stay(self) -> None:
        """Return when the actor ends; its death ends this call with an error, at the coordinator."""
        self._has_ended.wait()

    @ray.method(concurrency_group="beat")
    def end(self, why: str | None) -> None:
        """End, for this reason; None where the server ended in order."""
        self._reporter.write({"end": why})
        self._has_ended.set()

    @ray.method(concurrency_group="run")
    def run(self, number: int, command: Command, arrays: Arrays) -> list[tuple[int, str]]:
        """Run a command when its number is next; returns the commands that were refused, and why."""
        self._early_runs[number] = command, arrays
        refused = []
        while (run := self._early_runs.pop(self._next_run, None)) is not None:
            try:
                self._run_command(*run)
            except JaxModelsError as error:
                refused.append((self._next_run, str(error)))
            except Exception:
                logger.exception("%s failed", run[0]["do"])
                raise
            self._next_run += 1
            del run  # with it a policy, and its weights, would wait here for the next one
        return refused

    @ray.method(concurrency_group="build")
    def build(self, command: Command, artifact: PolicyArtifact | None = None) -> str | None:
        """Load or compile; returns None when that is done, `MISSING`, or why it cannot be done.

        Args:
            artifact: the policy's files, where this host does not have them.
        """
        try:
            if command["do"] == "load":
                return self._load(command, artifact)
            self._policies[command["policy"]].build(command["batch"], _frame_sizes(command))
        except JaxModelsError as error:
            return str(error)
        except Exception as error:
            logger.exception("%s failed", command["do"])
            return f"it failed ({type(error).__name__}); its log says more"
        return None

    def _run_command(self, command: Command, arrays: Arrays) -> None:
        policy = self._policies.get(command.get("policy", 0))
        match command["do"]:
            case "join":
                self._join(command)
            case "drop":
                self._policies.pop(command["policy"], None)
            case _ if policy is None:
                raise KeyError("the policy was not loaded")
            case "act":
                policy.act({**arrays, **command["texts"]})
            case "prepare":
                policy.prepare_task(command["text"], command["prompt_cut"])
            case "compile":
                policy.compile(command["batch"], _frame_sizes(command))
            case "profile":
                policy.profile(command["batch"], _frame_sizes(command))

    def _join(self, command: Command) -> None:
        coordinator = command["coordinator"]
        number = None if coordinator is None else self._number
        self._device, devices = jaxmodels.join_hosts(self._count, number, coordinator, patience=command["patience"])
        joined = f"Joined: {devices} devices on {self._count} hosts. Ctrl-C ends it, and the front's policies."
        self._reporter.write({"say": joined})

    def _load(self, command: Command, artifact: PolicyArtifact | None) -> str | None:
        began = time.monotonic()
        listing = Listing(command["sha"], tuple((name, size) for name, size in command["files"]))
        listing.check()
        folder = Path(command["folder"])
        if not matches_listing(folder, listing):
            try:
                folder = fetch_to_cache(self._cache, listing, lambda name: _get_pieces(artifact, name))
            except _Missing:
                return MISSING
        policy = jaxmodels.load_policy(
            folder, None, command["dtype"], self._device, like=self._policies.get(command["like"])
        )
        self._policies[command["policy"]] = policy
        logger.info("policy %s from %s in %.1f s", listing.sha[:8], folder, time.monotonic() - began)
        return None

    def _watch_server(self) -> None:
        while not self._has_ended.wait(BEAT_PERIOD):
            if time.monotonic() - self._last_beat_at > SILENCE_TIMEOUT:
                self._reporter.write({"end": f"the server sent nothing for {SILENCE_TIMEOUT:g} s"})
                return


def _get_pieces(artifact: PolicyArtifact | None, name: str) -> Iterator[bytes]:
    if artifact is None:
        raise _Missing
    return map(ray.get, artifact.pieces[name])


class _Missing(Exception):
    """A file is neither on this host nor sent along."""


def _frame_sizes(command: Command) -> Mapping[str, tuple[int, int]] | None:
    cameras = command["cameras"]
    return None if cameras is None else {name: (height, width) for name, (height, width) in cameras.items()}
