"""Worker host: a Ray actor that runs what its coordinator sends.

It runs in a worker of the node that ``robojax follow`` began, and tells that process through a named pipe what people
may want to know, and why it is over.
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
from service.distributed.artifacts import Listing, PolicyArtifact, find_kept, is_like
from service.distributed.host_group import BEAT, SILENCE
from service.distributed.ray_node import ADDRESS, PIPE
from service.processes import exit_with_parent

logger = logging.getLogger(__name__)

# Methods that run beside each other, each of a group in one thread: programs over the devices of all hosts; loading and
# compiling, which asks nothing of the devices of others; signs of life; the call that lasts as long as this process.
GROUPS = {"run": 1, "build": 1, "beat": 1, "stay": 1}
# Bytes that a pipe takes at once without those of another thread between them.
_LINE = 4096
# What a host answers that does not have the files of a policy.
MISSING = "missing"

Words = dict[str, Any]
Arrays = Mapping[str, np.ndarray]


def versions() -> dict[str, str]:
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
            self.write({"log": line[: _LINE // 8]})

    def write(self, what: Words) -> None:
        """Send one message as a line of JSON; raises where nobody reads any more, as this process ends then."""
        os.write(self._pipe, json.dumps(what).encode()[: _LINE - 1] + b"\n")


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
        self._place, self._cache = "", jaxmodels.user_cache() / "robojax" / "hosts"
        self._policies: dict[int, jaxmodels.Policy] = {}
        self._early: dict[int, tuple[Words, Arrays]] = {}
        self._next = 1
        self._heard_at = time.monotonic()
        self._is_over = threading.Event()
        self._reporter.write({"say": f"Host {number} of {count}."})
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    @ray.method(concurrency_group="beat")
    def introduce(self) -> tuple[str, dict[str, str]]:
        """Return the address of its machine, and its versions."""
        return os.environ[ADDRESS], versions()

    @ray.method(concurrency_group="beat")
    def beat(self) -> None:
        """Exchange a sign of life with the coordinator."""
        self._heard_at = time.monotonic()

    @ray.method(concurrency_group="stay")
    def stay(self) -> None:
        """Return when the actor ends; the coordinator hears of its death by this call."""
        self._is_over.wait()

    @ray.method(concurrency_group="beat")
    def end(self, why: str | None) -> None:
        """End, for this reason; None where the server ended in order."""
        self._reporter.write({"end": why})
        self._is_over.set()

    @ray.method(concurrency_group="run")
    def run(self, number: int, words: Words, arrays: Arrays) -> list[tuple[int, str]]:
        """Run a command when its number is next; returns the commands that were refused, and why."""
        self._early[number] = words, arrays
        refused = []
        while (run := self._early.pop(self._next, None)) is not None:
            try:
                self._do(*run)
            except JaxModelsError as error:
                refused.append((self._next, str(error)))
            except Exception:
                logger.exception("%s failed", run[0]["do"])
                raise
            self._next += 1
            del run  # with it a policy, and its weights, would wait here for the next one
        return refused

    @ray.method(concurrency_group="build")
    def build(self, words: Words, parcel: PolicyArtifact | None = None) -> str | None:
        """Load or compile; returns None when that is done, `MISSING`, or why it cannot be done.

        Args:
            parcel: the policy's files, where this host was found not to have them.
        """
        try:
            if words["do"] == "load":
                return self._load(words, parcel)
            self._policies[words["policy"]].build(words["batch"], _sizes(words))
        except JaxModelsError as error:
            return str(error)
        except Exception as error:
            logger.exception("%s failed", words["do"])
            return f"it failed ({type(error).__name__}); its log says more"
        return None

    def _do(self, words: Words, arrays: Arrays) -> None:
        policy = self._policies.get(words.get("policy", 0))
        match words["do"]:
            case "join":
                self._join(words)
            case "drop":
                self._policies.pop(words["policy"], None)
            case _ if policy is None:
                raise KeyError("the policy was not loaded")
            case "act":
                policy.act({**arrays, **words["texts"]})
            case "prepare":
                policy.prepare_task(words["text"])
            case "compile":
                policy.compile(words["batch"], _sizes(words))
            case "rehearse":
                policy.rehearse(words["batch"], _sizes(words))

    def _join(self, words: Words) -> None:
        coordinator = words["coordinator"]
        number = None if coordinator is None else self._number
        self._place, devices = jaxmodels.join_hosts(self._count, number, coordinator, patience=words["patience"])
        joined = f"Joined: {devices} devices on {self._count} hosts. Ctrl-C ends it, and the front's policies."
        self._reporter.write({"say": joined})

    def _load(self, words: Words, parcel: PolicyArtifact | None) -> str | None:
        began = time.monotonic()
        listing = Listing(words["sha"], tuple((name, size) for name, size in words["files"]))
        listing.check()
        folder = Path(words["folder"])
        if not is_like(folder, listing):
            try:
                folder = find_kept(self._cache, listing, lambda name: _pieces(parcel, name))
            except _Missing:
                return MISSING
        policy = jaxmodels.load_policy(
            folder, None, words["dtype"], self._place, like=self._policies.get(words["like"])
        )
        self._policies[words["policy"]] = policy
        logger.info("policy %s from %s in %.1f s", listing.sha[:8], folder, time.monotonic() - began)
        return None

    def _listen(self) -> None:
        while not self._is_over.wait(BEAT):
            if time.monotonic() - self._heard_at > SILENCE:
                self._reporter.write({"end": f"nothing was heard of the server for {SILENCE:g} s"})
                return


def _pieces(parcel: PolicyArtifact | None, name: str) -> Iterator[bytes]:
    if parcel is None:
        raise _Missing
    return map(ray.get, parcel.pieces[name])


class _Missing(Exception):
    """A file is neither on this host nor sent along."""


def _sizes(words: Words) -> Mapping[str, tuple[int, int]] | None:
    cameras = words["cameras"]
    return None if cameras is None else {name: (height, width) for name, (height, width) in cameras.items()}
