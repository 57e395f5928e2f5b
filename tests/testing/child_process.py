"""Programs that tests start."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path


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
