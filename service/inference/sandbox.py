"""Reads checkpoints in a memory-limited process first.

A load has two stages. In the first one a child process reads every byte of the files: it can be killed at any moment,
and loads do not wait for one another. In the second one this process builds and compiles what was proved. A thread
cannot be killed, so that one which takes too long, or which nobody wants any more, is left behind: it ends at its next
step, whatever it gives is dropped, and others go on without it.
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
from jaxmodels import PolicyFolder
from jaxmodels.errors import CheckpointError
from service.processes import exit_with_parent

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds, and what a disk gives at least: a file that takes longer is a device or a fault.
PATIENCE = 30.0
BYTES_PER_SECOND = 20e6
# Seconds that a load may build and compile alone. Then others begin beside it, at most so many at a time.
ALONE = 10.0
BESIDE = 4
# What a child may write; of what a policy needs, a few thousand bytes.
_TOLD = 1 << 18
# The limits stand before anything else is imported. It ends with the thread that waits for it, which its process' death
# is the end of, too; and, where the system has no such signal, when nobody holds the other end of its input any more.
_BEGINNING = f"""
import ctypes, os, resource, signal, sys, threading
{inspect.getsource(exit_with_parent)}
parent, memory, seconds, told = map(int, sys.argv[1:5])
exit_with_parent(parent, signal.SIGKILL)
def end_when_alone():
    while os.read(0, 1):
        pass
    os._exit(1)
resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (told, told))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(5)
threading.stack_size(1 << 18)
threading.Thread(target=end_when_alone, daemon=True).start()
sys.path[:] = sys.argv[5].split(chr(0x1f))
"""
_READING = """
from jaxmodels.policies.integrity import main
main(sys.argv[6])
"""
# How libraries say it before they end the process.
_NO_MEMORY = ("memory allocation of", "bad_alloc", "MemoryError", "Cannot allocate memory", "Unable to allocate")


class LoadEnded(Exception):
    """A load was ended before it was done; the text says why, and may be shown."""


class Load:
    """One load: its thread asks it at each step whether to go on, and the event loop ends it.

    Args:
        building: had by the one load that builds and compiles; None for whoever only reads.
        limit: seconds that building and compiling may take.

    Attributes:
        ended: done as soon as it was ended, with the reason; on the event loop.
        is_building: whether its second stage has begun.
    """

    def __init__(self, building: "Building | None" = None, limit: float = float("inf")):
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.is_building = False
        self._why: str | None = None
        self._building = building
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: concurrent.futures.Future[None] | None = None
        self._children: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    @property
    def is_ended(self) -> bool:
        """Whether it is to do no more."""
        return self._why is not None

    # On the event loop.

    def end(self, why: str) -> None:
        """What it was to give nobody waits for any more."""
        with self._lock:
            if self._why is not None:
                return
            self._why = why
            for child in self._children:
                child.kill()
            if self._waiting is not None:
                self._waiting.cancel()
        if not self.ended.done():
            self.ended.set_result(why)

    def over(self) -> None:
        """Its thread has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._building is not None:
            self._building.leave(self)

    async def _enter(self) -> None:
        assert self._building is not None
        await self._building.enter(self)
        self.is_building = True
        if self._limit < float("inf"):
            why = f"building and compiling it took over {self._limit:g} s (load_timeout)"
            self._timer = self._loop.call_later(self._limit, self.end, why)

    # In its thread.

    def run(self, call: Callable[[], Result]) -> Result:
        """Call, as this load."""
        token = _load.set(self)
        try:
            self.check()
            return call()
        finally:
            _load.reset(token)

    def check(self) -> None:
        """Called between two steps.

        Raises:
            LoadEnded: it is to do no more.
        """
        if self._why is not None:
            raise LoadEnded(self._why)

    def begin_building(self) -> None:
        """Wait for the turn to build and compile; at once where it has it already.

        Raises:
            LoadEnded: it is to do no more.
        """
        if self._building is None or self.is_building:
            self.check()
            return
        entering = self._enter()
        try:
            with self._lock:
                self.check()
                self._waiting = asyncio.run_coroutine_threadsafe(entering, self._loop)
            self._waiting.result()
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            raise LoadEnded(self._why or "the server ends") from error
        finally:
            if self._waiting is None:
                entering.close()
        self.check()

    @contextmanager
    def ending(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """The child ends with the load, at the latest with the block."""
        with self._lock:
            self._children.add(child)
            if self._why is not None:
                child.kill()
        try:
            yield
        finally:
            with self._lock:
                self._children.discard(child)
                child.kill()


_load: ContextVar[Load | None] = ContextVar("load", default=None)


def begin_building() -> None:
    """In a loader's thread: files are proved, now this process reads, builds and compiles. See ``Load``.

    Raises:
        LoadEnded: it is to do no more.
    """
    if (load := _load.get()) is not None:
        load.begin_building()


class Building:
    """Who builds and compiles: one at a time, but for those that take long."""

    def __init__(self) -> None:
        # Two loads at once would take both cores of a small machine away from the control loops.
        self.place = asyncio.Semaphore(1)
        self._alone, self._most = ALONE, BESIDE
        self._holder: Load | None = None
        self._beside: set[Load] = set()

    async def enter(self, load: Load) -> None:
        """Wait for the place; ``leave`` gives it back."""
        await self.place.acquire()
        self._holder = load
        asyncio.get_running_loop().call_later(self._alone, self._step_aside, load)

    def leave(self, load: Load) -> None:
        """Nothing where it has none."""
        self._beside.discard(load)
        if self._holder is load:
            self._holder = None
            self.place.release()

    def _step_aside(self, load: Load) -> None:
        if self._holder is not load:
            return
        if len(self._beside) >= self._most:
            asyncio.get_running_loop().call_later(self._alone, self._step_aside, load)
            return
        self._holder = None
        self._beside.add(load)
        self.place.release()


class Places:
    """Who reads: first come, first served; one that takes long keeps its place, and others have theirs.

    Args:
        quick: children in their first seconds.
        all_of_them: children at a time.
        slow: seconds.
    """

    def __init__(self, quick: int = 2, all_of_them: int = 8, slow: float = 1.0):
        self._quick, self._all, self._slow = quick, all_of_them, slow
        self._began: list[float] = []
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def place(self, load: Load | None) -> Iterator[None]:
        """Wait for one.

        Raises:
            LoadEnded: the load was ended meanwhile.
        """
        turn = object()
        with self._changed:
            self._queue.append(turn)
            try:
                while self._queue[0] is not turn or not self._has_room():
                    if load is not None:
                        load.check()
                    self._changed.wait(0.05)  # a child that became slow tells nobody
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

    def _has_room(self) -> bool:
        slow = time.monotonic() - self._slow
        return len(self._began) < self._all and sum(began > slow for began in self._began) < self._quick


# Of all loads of a process, and of all that only want to know what a policy needs: neither waits for the other.
_LOADS, _LOOKS = Places(), Places()


class CheckpointSandbox:
    """Reads the folders of policies in child processes.

    Args:
        memory: bytes that a child may have for data.
        patience: seconds it may take, besides those for reading at the slowest; then it is killed.
        program: what the child runs, for tests.
    """

    def __init__(self, memory: int = 1 << 30, *, patience: float = PATIENCE, program: str = _READING):
        self._memory = memory
        self._patience = patience
        self._program = program

    def __call__(self, folder: PolicyFolder | Path) -> None:
        """Prove every file, and wait for the turn to load them; called in a loader's thread.

        The folder is named by its last part only.

        Raises:
            CheckpointError: with what is wrong with the files, or what became of the process that read them.
            LoadEnded: nobody wants it any more.
        """
        began = time.monotonic()
        found = self._read(folder, "prove", _LOADS)
        log.info(
            "policy folder %s: %s tensors, %s bytes read in %.2f s",
            folder.name,
            found.get("tensors"),
            found.get("bytes"),
            time.monotonic() - began,
        )
        begin_building()

    def describe(self, folder: PolicyFolder | Path) -> dict[str, Any]:
        """What its small files say, as `jaxmodels.read_requirements` wants it; raises as a call."""
        return self._read(folder, "describe", _LOOKS)

    def _read(self, folder: PolicyFolder | Path, what: str, places: Places) -> dict[str, Any]:
        if isinstance(folder, Path):
            with PolicyFolder(folder.absolute()) as opened:
                return self._read(opened, what, places)
        size = folder.size if what == "prove" else 0
        request = {"do": what, "name": folder.name, "files": folder.descriptors, "refused": folder.refused}
        with places.place(load := _load.get()):
            found = self._run(request, self._patience + size / BYTES_PER_SECOND, folder.name, load)
        if found.get("out_of_memory"):
            raise self._out_of_memory(folder.name)
        if "error" in found:
            raise CheckpointError(f"{folder.name}: {found['error']}")
        return found

    def _run(self, request: Mapping[str, Any], seconds: float, name: str, load: Load | None) -> dict[str, Any]:
        with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as complained:
            child = self._begin(request, seconds, told, complained)
            try:
                with child, load.ending(child) if load is not None else _killing(child):
                    code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                raise CheckpointError(f"{name}: reading its files took over {seconds:.0f} s") from None
            if load is not None:
                load.check()
            complained.seek(0)
            complaint = complained.read(65536).decode(errors="replace")
            if code == 0:
                told.seek(0)
                with suppress(ValueError):
                    return json.loads(told.read(_TOLD))
        log.error("reading policy folder %s ended its process with %d: %s", name, code, complaint[-2000:])
        if any(words in complaint for words in _NO_MEMORY) or code == -signal.SIGKILL:
            raise self._out_of_memory(name)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise CheckpointError(f"{name}: the process that read its files was ended {how}; they are not used")

    def _begin(self, request: Mapping[str, Any], seconds: float, told: Any, complained: Any) -> subprocess.Popen[bytes]:
        paths = [str(Path(jaxmodels.__file__).parents[1]), *filter(None, sys.path)]
        limits = (os.getpid(), self._memory, int(seconds) + 1, _TOLD)
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", _BEGINNING + self._program),
                *(*map(str, limits), "\x1f".join(paths), json.dumps(request)),
            ],
            stdin=subprocess.PIPE,  # nothing is written: it ends when the child is alone
            stdout=told,
            stderr=complained,
            # Nothing of this process' secrets; and no threads, each of which would reserve memory.
            env={"OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.defpath},
            cwd="/",
            pass_fds=tuple(request["files"].values()),
            start_new_session=True,
        )

    def _out_of_memory(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{name}: out of memory: reading its files needs more than {self._memory} bytes (setting load_memory)"
        )


@contextmanager
def _killing(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        child.kill()


__all__: Sequence[str] = ("Building", "CheckpointSandbox", "Load", "LoadEnded", "Places", "begin_building")
