"""The real server on a loopback port with scripted policies, rooms in memory, and a simulated arm."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmodels import Requirements
from jaxmodels.errors import CheckpointError
from service.auth.caller import Role
from service.auth.keys import KeyFile
from tests.testing import rig
from tests.testing.doubles import SO100_REQUIREMENTS, MemoryLink
from tests.testing.rig import JOINTS

PERIOD = 0.04


class Arm:
    """Simulated arm that sees a moving square, follows commands, and reports its pose."""

    def __init__(self, link: MemoryLink):
        self.link = link
        self.pose = {name: 10.0 * number for number, name in enumerate(JOINTS)}
        self.is_seeing = True
        self._ticks = 0
        self._obeyed = 0

    async def live(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(PERIOD)

    def step(self) -> None:
        for sent in self.link.sent[self._obeyed :]:
            self.pose.update(sent.values)
        self._obeyed = len(self.link.sent)
        self._ticks += 1
        picture = np.full((48, 64, 3), (40, 60, 90), np.uint8)
        at = self._ticks % 48
        picture[16:32, at : at + 16] = (229, 72, 77)
        if self.is_seeing:
            self.link.deliver_frame("front", picture)
        self.link.deliver_joints(self.pose)


@dataclass
class Server(rig.Server):
    arms: list[Arm] = field(default_factory=list)
    _living: list["asyncio.Task[None]"] = field(default_factory=list)

    async def create(self, session_id: str = "arm", by: str | None = None, **more: Any) -> Arm:
        """Create a session, wait until it is ready, and return its arm."""
        status, reply = await super().create(session_id, by, **more)
        assert status == 200, reply
        return self.connect()

    def connect(self) -> Arm:
        """Connect an arm to the rooms of the newest session."""
        arm = Arm(self.transport.link)
        arm.step()
        self.arms.append(arm)
        self._living.append(asyncio.create_task(arm.live()))
        return arm

    async def close(self) -> None:
        for task in self._living:
            task.cancel()
        await asyncio.gather(*self._living, return_exceptions=True)


def read_requirements(path: str, revision: str | None) -> Requirements:
    if "missing" in path:
        raise CheckpointError("config.json: cannot be read; wanted it in the folder")
    return replace(SO100_REQUIREMENTS, language="language" in path)


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[Server]:
    parts = {"read_requirements": read_requirements}
    async with rig.started(Server, parts=parts, **settings) as server:
        try:
            yield server
        finally:
            await server.close()


@pytest.fixture
def serve() -> Any:
    return started


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with started() as server:
        yield server


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    """Return a key file with one key, so that a server with this file requires a key."""
    file = KeyFile(tmp_path / "keys.json")
    file.create("first", Role.ADMIN, None, time.time())
    return file
