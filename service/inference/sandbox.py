"""Checkpoint sandbox: reads a policy's files in a memory-limited child process before they are loaded.

First a child process, which can be killed, reads every byte; such loads run in parallel. Then this process builds and
compiles. A thread cannot be killed, so a cancelled or slow one is abandoned: it ends at its next step and its result is
dropped.
"""

import asyncio
import concurrent.futures
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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
# Seconds that a load may build and compile alone. Then others begin beside it, at most so many at a time.
BUILD_ALONE_SECONDS = 10.0
MAX_PARALLEL_BUILDS = 4
# What a child may write; of what a policy needs, a few thousand bytes.
_MAX_OUTPUT = 1 << 18
# Limits are set before other imports. The child ends with its parent's thread, or where that signal does not exist,
# when its input is closed.
_PRELUDE = f"""
import ctypes, os, resource, signal, sys, threading
{inspect.getsource(exit_with_parent)}
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
    """A load was cancelled before it was done; the text says why, and clients may read it."""


class LoadJob:
    """One load: its thread checks at each step whether the event loop cancelled it.

    Args:
        build_slot: slot for building and compiling; None for a job that only reads.
        timeout: seconds for building and compiling.

    Attributes:
        cancelled: future of the reason, on the event loop.
        is_building: whether the second stage began.
    """

    def __init__(self, build_slot: "BuildSlot | None" = None, timeout: float = float("inf")):
        self._loop = asyncio.get_running_loop()
        self.cancelled: asyncio.Future[str] = self._loop.create_future()
        self.is_building = False
        self._reason: str | None = None
        self._build_slot = build_slot
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: concurrent.futures.Future[None] | None = None
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        """Whether the job was cancelled."""
        return self._reason is not None

    # On the event loop.

    def cancel(self, reason: str) -> None:
        """Cancel the job, whose result is not needed."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            for child in self._children:
                child.kill()
            if self._waiting is not None:
                self._waiting.cancel()
        if not self.cancelled.done():
            self.cancelled.set_result(reason)

    def finish(self) -> None:
        """Release what the job holds; its thread has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._build_slot is not None:
            self._build_slot.release(self)

    async def _enter(self) -> None:
        assert self._build_slot is not None
        await self._build_slot.acquire(self)
        self.is_building = True
        if self._timeout < float("inf"):
            why = f"building and compiling it took over {self._timeout:g} s (load_timeout)"
            self._timer = self._loop.call_later(self._timeout, self.cancel, why)

    # In its thread.

    def run(self, call: Callable[[], Result]) -> Result:
        """Call a function as this job."""
        token = _load.set(self)
        try:
            self.raise_if_cancelled()
            return call()
        finally:
            _load.reset(token)

    def raise_if_cancelled(self) -> None:
        """Raise LoadCancelled if the job was cancelled; called between two steps."""
        if self._reason is not None:
            raise LoadCancelled(self._reason)

    def begin_building(self) -> None:
        """Wait for the build slot unless the job has it; raises LoadCancelled."""
        if self._build_slot is None or self.is_building:
            self.raise_if_cancelled()
            return
        entering = self._enter()
        try:
            with self._lock:
                self.raise_if_cancelled()
                self._waiting = asyncio.run_coroutine_threadsafe(entering, self._loop)
            self._waiting.result()
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            raise LoadCancelled(self._reason or "the server ends") from error
        finally:
            if self._waiting is None:
                entering.close()
        self.raise_if_cancelled()

    @contextmanager
    def kill_at_end(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Kill the child when the job is cancelled, at the latest at the end of the context."""
        with self._lock:
            self._children.add(child)
            if self._reason is not None:
                child.kill()
        try:
            yield
        finally:
            with self._lock:
                self._children.discard(child)
                child.kill()


_load: ContextVar[LoadJob | None] = ContextVar("load", default=None)


def begin_building() -> None:
    """Wait for the build slot of this thread's job after its files are checked; raises LoadCancelled."""
    if (load := _load.get()) is not None:
        load.begin_building()


class BuildSlot:
    """The slot for building and compiling: one job at a time, and more next to slow jobs."""

    def __init__(self) -> None:
        # Two loads at once would take both cores of a small machine away from the control loops.
        self.semaphore = asyncio.Semaphore(1)
        self._alone, self._most = BUILD_ALONE_SECONDS, MAX_PARALLEL_BUILDS
        self._holder: LoadJob | None = None
        self._beside: set[LoadJob] = set()

    async def acquire(self, load: LoadJob) -> None:
        """Wait for the slot; ``release`` gives it back."""
        await self.semaphore.acquire()
        self._holder = load
        asyncio.get_running_loop().call_later(self._alone, self._let_others_build, load)

    def release(self, load: LoadJob) -> None:
        """Release the slot; nothing happens when the job does not have it."""
        self._beside.discard(load)
        if self._holder is load:
            self._holder = None
            self.semaphore.release()

    def _let_others_build(self, load: LoadJob) -> None:
        if self._holder is not load:
            return
        if len(self._beside) >= self._most:
            asyncio.get_running_loop().call_later(self._alone, self._let_others_build, load)
            return
        self._holder = None
        self._beside.add(load)
        self.semaphore.release()


class ReadSlots:
    """Slots of child processes, first come, first served: at most ``quick`` younger than ``slow_after`` seconds."""

    def __init__(self, quick: int = 2, total: int = 8, slow_after: float = 1.0):
        self._quick, self._total, self._slow_after = quick, total, slow_after
        self._began: list[float] = []
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, load: LoadJob | None) -> Iterator[None]:
        """Hold a slot for the context; raises LoadCancelled if the load is cancelled while it waits."""
        turn = object()
        with self._changed:
            self._queue.append(turn)
            try:
                while self._queue[0] is not turn or not self._has_free_slot():
                    if load is not None:
                        load.raise_if_cancelled()
                    self._changed.wait(0.05)  # a child becomes slow without a notification
            finally:
                self._queue.remove(turn)
                self._changed.notify_all()
            self._began.append(began := time.monotonic())
        try:
            yield
        finally:
            with self._changed:
                self._began.remove(began)
                self._changed.notify_all()

    def _has_free_slot(self) -> bool:
        slow = time.monotonic() - self._slow_after
        return len(self._began) < self._total and sum(began > slow for began in self._began) < self._quick


# Of all loads of a process, and of all that only want to know what a policy needs: neither waits for the other.
_LOAD_SLOTS, _DESCRIBE_SLOTS = ReadSlots(), ReadSlots()


class CheckpointSandbox:
    """Reads policy folders in child processes.

    Args:
        memory: limit of a child's data, in bytes.
        timeout: seconds for a child, besides the reading time at the slowest rate.
        program: program of the child, for tests.
    """

    def __init__(self, memory: int = 1 << 30, *, timeout: float = READ_TIMEOUT, program: str = _READER_PROGRAM):
        self._memory = memory
        self._timeout = timeout
        self._program = program

    def __call__(self, folder: PolicyFolder | Path) -> None:
        """Check every file in a loader's thread, then wait for the build slot; messages show the folder's name only.

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
        begin_building()

    def verify_model(self, folder: Path) -> None:
        """Check every file of a model in diffusers' format, in a loader's thread; raises as a call."""
        request = {"do": "model", "name": str(folder.absolute()), "files": {}, "refused": {}}
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        with _LOAD_SLOTS.acquire(load := _load.get()):
            seconds = self._timeout + size / BYTES_PER_SECOND
            result = self._run(request, seconds, self._memory, folder.name, load)
        if "error" in result:
            raise CheckpointError(result["error"])

    def describe(self, folder: PolicyFolder | Path) -> dict[str, Any]:
        """Return what the small files say, for `jaxmodels.read_requirements`; raises as a call."""
        return self._read(folder, "describe", _DESCRIBE_SLOTS)

    def _read(self, folder: PolicyFolder | Path, what: str, slots: ReadSlots) -> dict[str, Any]:
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
        with slots.acquire(load := _load.get()):
            result = self._run(request, seconds, self._memory + CHUNK_MEMORY * chunk, folder.name, load)
        folder.check_unchanged()
        if "error" in result:
            raise CheckpointError(f"{folder.name}: {result['error']}")
        return result

    def _run(
        self, request: Mapping[str, Any], seconds: float, memory: int, name: str, load: LoadJob | None
    ) -> dict[str, Any]:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            child = self._start_child(request, seconds, memory, stdout, stderr)
            try:
                with child, load.kill_at_end(child) if load is not None else _kill_at_end(child):
                    code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                raise CheckpointError(f"{name}: reading its files took over {seconds:.0f} s") from None
            if load is not None:
                load.raise_if_cancelled()
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
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _PRELUDE + self._program),
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
            start_new_session=True,
        )


def _parse_lines(output: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects that a child wrote, one on each line; other lines are left out."""
    found: list[Any] = []
    for line in output.splitlines():
        with suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [one for one in found if isinstance(one, dict)]


@contextmanager
def _kill_at_end(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        child.kill()


__all__: Sequence[str] = ("BuildSlot", "CheckpointSandbox", "LoadCancelled", "LoadJob", "ReadSlots", "begin_building")
