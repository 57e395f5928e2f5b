"""Child processes that end with their parent, and whose last words are kept."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

GRACE = 6.0  # seconds between asking a child to end and killing it; the server promises five
LAST_WORDS = 4000  # characters of a child's errors


class ChildDied(Exception):
    """A child process ended by itself; the text holds its last words."""


class Child:
    """A running Python module."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: str):
        self.name, self._process, self._errors = name, process, errors

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def check(self) -> None:
        """Raises ChildDied when it is gone."""
        if not self.is_alive:
            raise ChildDied(f"{self.name} ended with code {self._process.returncode}\n{self.last_words()}".rstrip())

    def last_words(self) -> str:
        """The end of what it wrote to its standard error."""
        with open(self._errors, errors="replace") as file:
            return file.read()[-LAST_WORDS:].strip()

    async def next_line(self) -> str | None:
        """The next line of its standard output; None when it has ended."""
        assert self._process.stdout is not None, "children are started with a pipe"
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            return None
        return line.decode(errors="replace").rstrip("\n")

    async def end(self) -> None:
        """Asks it to end, waits, and kills it if it does not."""
        if not self.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), GRACE)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def child(name: str, module: str, *arguments: str) -> AsyncIterator[Child]:
    """Runs ``python -m module arguments`` until the context ends."""
    with tempfile.NamedTemporaryFile("w", prefix="robojax-", suffix=".log") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.leash",
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
