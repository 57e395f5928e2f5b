"""Child processes that end with their parent, and the start of a process.

psutil cannot end the children of a killed parent.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

TERMINATE_TIMEOUT = 6.0  # seconds between asking a child to end and killing it; the server promises five
STDERR_TAIL_BYTES = 4000  # characters of a child's errors


class ChildDied(Exception):
    """A child process ended by itself; the text holds the end of its standard error."""


class Child:
    """Child process that runs a Python module."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: str):
        self.name, self._process, self._errors = name, process, errors

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def check(self) -> None:
        """Check that the process still runs."""
        if not self.is_alive:
            raise ChildDied(
                f"{self.name} ended with code {self._process.returncode}\n{self.read_stderr_tail()}".rstrip()
            )

    def read_stderr_tail(self) -> str:
        """Return the end of its standard error."""
        with open(self._errors, errors="replace") as file:
            return file.read()[-STDERR_TAIL_BYTES:].strip()

    async def next_line(self) -> str | None:
        """Return the next line of its standard output; None when the process has ended."""
        assert self._process.stdout is not None, "children are started with a pipe"
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            return None
        return line.decode(errors="replace").rstrip("\n")

    async def end(self) -> None:
        """Ask the process to end, and kill it if it does not within ``TERMINATE_TIMEOUT`` seconds."""
        if not self.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), TERMINATE_TIMEOUT)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def child(name: str, module: str, *arguments: str) -> AsyncIterator[Child]:
    """Run ``python -m module arguments`` until the context ends."""
    with tempfile.NamedTemporaryFile("w", prefix="robojax-", suffix=".log") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.processes",
            str(os.getpid()),
            module,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors.fileno(),
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        running = Child(name, process, errors.name)
        try:
            yield running
        finally:
            await running.end()


def exit_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Request a signal for this process when the thread of `parent` that started it has ended; on Linux only."""
    # The child calls this itself, because Python code between fork and exec is unsafe with several threads.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG, by its number: `service.inference.sandbox` copies this
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)


def main() -> None:
    """Run the module of the first arguments, with the arguments that follow it."""
    parent, module = sys.argv[1:3]
    exit_with_parent(int(parent))
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector during imports, and exclude all present objects from later collections.

    A collection of all modules takes 0.1 s. The import of JAX takes 1.6 s of processor time with this, else 2.0 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
