"""Checkpoint sandbox: reads a policy's files in a memory-limited child process before an engine loads them.

A cancelled load ends its child at once.
"""

import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import jaxmodels
from jaxmodels import PolicyFolder, hub_cache
from jaxmodels.errors import CheckpointError
from service.processes import exit_with_parent

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds, and what a disk gives at least: a file that takes longer is a device or a fault.
READ_TIMEOUT = 30.0
BYTES_PER_SECOND = 20e6
# Bytes of memory per byte of an Orbax tree's largest file: it may hold one chunk, which is decoded whole to twice as
# many bytes, and is in memory in four forms.
CHUNK_MEMORY = 8
# Child processes at a time.
MAX_CHILDREN = 8
# Seconds between two checks whether a load that waits for a child process was cancelled.
POLL_INTERVAL = 0.05
# What a child may write; of what a policy needs, a few thousand bytes.
_MAX_OUTPUT = 1 << 18
# Begins the program of a child: the source of `exit_with_parent` goes between these two parts. Limits are set before
# other imports. The child ends with its parent's thread; where that signal does not exist, when its input is closed.
_IMPORTS = "import ctypes, os, resource, signal, sys, threading\n"
_PRELUDE = """
parent, memory, most, seconds, file_size = map(int, sys.argv[1:6])
exit_with_parent(parent, signal.SIGKILL)
def end_when_alone():
    while os.read(0, 1):
        pass
    os._exit(1)
resource.setrlimit(resource.RLIMIT_DATA, (memory, most))
resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(5)
threading.stack_size(1 << 18)
threading.Thread(target=end_when_alone, daemon=True).start()
sys.path[:] = sys.argv[6].split(chr(0x1f))
"""
_READER_PROGRAM = """
from jaxmodels.policies.integrity import main
main(sys.argv[7])
"""
# How libraries say it before they end the process.
_NO_MEMORY = ("memory allocation of", "bad_alloc", "MemoryError", "Cannot allocate memory", "Unable to allocate")


class LoadCancelled(Exception):
    """The session that needed the policy is gone."""


class LoadJob:
    """One load, whose thread checks between two steps whether the event loop cancelled it."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Cancel the job and kill its child process."""
        with self._lock:
            self.is_cancelled = True
            if self._child is not None:
                self._child.kill()

    def run(self, call: Callable[[], Result]) -> Result:
        """Call a function as this job, in this thread."""
        token = _load.set(self)
        try:
            raise_if_cancelled(self)
            return call()
        finally:
            _load.reset(token)

    @contextmanager
    def kill_at_end(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Kill the child when the job is cancelled, at the latest at the end of the context."""
        with self._lock:
            self._child = child
            if self.is_cancelled:
                child.kill()
        try:
            yield
        finally:
            with self._lock:
                self._child = None
                child.kill()


_load: ContextVar[LoadJob | None] = ContextVar("load", default=None)


def raise_if_cancelled(load: LoadJob | None = None) -> None:
    """Raise LoadCancelled if a job, or without one the job of this thread, was cancelled."""
    load = load or _load.get()
    if load is not None and load.is_cancelled:
        raise LoadCancelled("the load was cancelled")


# Children that read whole policies, and children that read small files: neither kind waits for the other.
_LOAD_SLOTS, _DESCRIBE_SLOTS = (threading.BoundedSemaphore(MAX_CHILDREN) for _ in range(2))


class CheckpointSandbox:
    """Reads policy folders in child processes.

    Args:
        memory: limit of a child's data, in bytes.
        timeout: seconds for a child, in addition to the reading time at the slowest rate.
        program: program of the child, for tests.
    """

    def __init__(self, memory: int = 1 << 30, *, timeout: float = READ_TIMEOUT, program: str = _READER_PROGRAM):
        self._memory = memory
        self._timeout = timeout
        self._program = program

    def __call__(self, folder: PolicyFolder | Path) -> None:
        """Check every file in a loader's thread; messages show the folder's name only.

        Raises:
            CheckpointError: the files are invalid, or their reader failed.
            LoadCancelled: the load was cancelled.
        """
        began = time.monotonic()
        result = self._read(folder, "prove", _LOAD_SLOTS)
        log.info(
            "policy folder %s: %s tensors, %s bytes read in %.2f s",
            folder.name,
            result.get("tensors"),
            result.get("bytes"),
            time.monotonic() - began,
        )

    def verify_model(self, folder: Path) -> None:
        """Check every file of a model in diffusers' format, in a loader's thread; raises as a call."""
        request = {"do": "model", "name": str(folder.absolute()), "files": {}, "refused": {}}
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        result = self._run(request, self._timeout + size / BYTES_PER_SECOND, self._memory, folder.name, _LOAD_SLOTS)
        if "error" in result:
            raise CheckpointError(result["error"])

    def describe(self, folder: PolicyFolder | Path) -> dict[str, Any]:
        """Return what the small files say, for `jaxmodels.read_requirements`; raises as a call."""
        return self._read(folder, "describe", _DESCRIBE_SLOTS)

    def _read(self, folder: PolicyFolder | Path, what: str, slots: threading.BoundedSemaphore) -> dict[str, Any]:
        if isinstance(folder, Path):
            with PolicyFolder(folder.absolute()) as opened:
                return self._read(opened, what, slots)
        request = {"do": what, "name": folder.name, "files": folder.descriptors, "refused": folder.refused}
        sizes: dict[str, int] = {}
        if what == "prove":
            sizes = {name: identity[2] for name, identity in folder.identities.items() if len(identity) > 2}
            request["trees"] = {name: str(tree) for name, tree in folder.trees.items()}
        chunk = max((size for name, size in sizes.items() if name not in request["files"]), default=0)
        seconds = self._timeout + sum(sizes.values()) / BYTES_PER_SECOND
        result = self._run(request, seconds, self._memory + CHUNK_MEMORY * chunk, folder.name, slots)
        folder.check_unchanged()
        if "error" in result:
            raise CheckpointError(f"{folder.name}: {result['error']}")
        return result

    def _run(
        self, request: Mapping[str, Any], seconds: float, memory: int, name: str, slots: threading.BoundedSemaphore
    ) -> dict[str, Any]:
        load = _load.get() or LoadJob()
        while not slots.acquire(timeout=POLL_INTERVAL):
            raise_if_cancelled(load)
        with ExitStack() as stack:
            stack.callback(slots.release)
            stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            try:
                with self._start_child(request, seconds, memory, stdout, stderr) as child, load.kill_at_end(child):
                    code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                raise CheckpointError(f"{name}: reading its files took over {seconds:.0f} s") from None
            raise_if_cancelled(load)
            stderr.seek(0)
            error_text = stderr.read(65536).decode(errors="replace")
            stdout.seek(0)
            *steps, answer = [{}, *_parse_lines(stdout.read(_MAX_OUTPUT))]
        if code == 0 and answer and "step" not in answer and not answer.get("out_of_memory"):
            return answer
        step: Any = next((one for one in (answer, *reversed(steps)) if "step" in one), {})
        what = step.get("step", "reading its files")
        log.error("policy folder %s: %s ended its process with %d: %s", name, what, code, error_text[-2000:])
        if answer.get("out_of_memory") or any(words in error_text for words in _NO_MEMORY) or code == -signal.SIGKILL:
            raise CheckpointError(
                f"{name}: out of memory: {what} needs more than {self._memory} bytes (setting load_memory)"
            )
        if code == -signal.SIGPROF:
            raise CheckpointError(f"{name}: {what} took over {step.get('seconds')} s of processor time")
        if code == -signal.SIGXCPU:
            raise CheckpointError(f"{name}: {what} took over {seconds:.0f} s of processor time in all")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise CheckpointError(f"{name}: {what}: the process was ended {how}; the policy is not used")

    def _start_child(
        self, request: Mapping[str, Any], seconds: float, memory: int, stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes]:
        paths = [str(Path(jaxmodels.__file__).parents[1]), *filter(None, sys.path)]
        limits = (os.getpid(), self._memory, memory, int(seconds) + 1, _MAX_OUTPUT)
        program = _IMPORTS + inspect.getsource(exit_with_parent) + _PRELUDE + self._program
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", program),
                *(*map(str, limits), "\x1f".join(paths), json.dumps({**request, "hub_cache": str(hub_cache())})),
            ],
            stdin=subprocess.PIPE,  # nothing is written: it ends when the child is alone
            stdout=stdout,
            stderr=stderr,
            # Nothing of this process' secrets; and no threads, each of which would reserve memory.
            env={
                **{"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                **{"PYTHONDONTWRITEBYTECODE": "1", "PATH": os.defpath},
            },
            cwd="/",
            pass_fds=tuple(request["files"].values()),
            process_group=0,
        )


def _parse_lines(output: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects that a child wrote, one on each line; other lines are left out."""
    found: list[Any] = []
    for line in output.splitlines():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]
