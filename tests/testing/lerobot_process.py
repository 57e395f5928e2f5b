"""Processes of LeRobot, and servers that they use, in tests."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.testing.compiling import QUICK

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def running(*command: str, folder: Path, cwd: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {**os.environ, **QUICK, "XDG_CACHE_HOME": str(folder), "HF_LEROBOT_HOME": str(folder / "lerobot")}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
