"""Processes of LeRobot, and servers that they use, in tests."""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.testing.child_process import child_process
from tests.testing.compiling import QUICK

ROOT = Path(__file__).parents[2]


def running(*command: str, folder: Path, cwd: Path) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """Start a program that keeps its files in this folder."""
    folders = {"XDG_CACHE_HOME": str(folder), "HF_LEROBOT_HOME": str(folder / "lerobot")}
    return child_process(*command, cwd=cwd, env={**os.environ, **QUICK, **folders})
