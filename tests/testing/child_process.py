"""Programs that tests start."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tests.testing.compiling import QUICK

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def child_process(
    *command: str, cwd: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program with pipes, and kill it at the end."""
    process = await asyncio.create_subprocess_exec(
        *command, env=env, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def serving(folder: Path, *flags: str) -> AsyncIterator[asyncio.StreamReader]:
    """Start ``robojax serve`` on a free port, yield its output, and check that SIGTERM ends it without an error."""
    command = (sys.executable, "-m", "robojax.cli", "serve", "--port", "0", "--state", "off", *flags)
    async with child_process(*command, cwd=ROOT, env={**os.environ, **QUICK, "XDG_CACHE_HOME": str(folder)}) as process:
        assert process.stdout is not None
        yield process.stdout
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
