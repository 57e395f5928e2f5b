"""Sessions with scripted policies, and a robot in memory whose senses a test can spoil."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from jaxmodels.errors import ConfigError
from service.control.watchdog import WatchdogTimeouts
from service.inference.engine import Engine
from service.sessions.store import NewSession, Session, Sessions, SessionSettings
from service.testing import MemoryLink, MemoryTransport, ScriptedPolicy

POSE = {"Rotation": 1.0, "Pitch": 2.0, "Elbow": 3.0, "Wrist_Pitch": 4.0, "Wrist_Roll": 5.0, "Jaw": 6.0}
# The facts' times, ten times as quick, so that a test does not wait for them.
QUICK = WatchdogTimeouts(degraded_after=0.5, stop_after=1.0, frozen_after=0.2, bad_input_window=0.5)
# The same without the stop, which a pause of the machine would bring about before anybody saw what comes before it.
LENIENT = replace(QUICK, stop_after=60.0)


@dataclass
class Rig:
    """A store of sessions and robots that show and tell every 10 ms.

    Attributes:
        policies: by path.
        is_dark, is_dumb: no frames, no joints come any more.
        still: the picture that comes, or None for another one each time.
    """

    sessions: Sessions
    transport: MemoryTransport
    policies: dict[str, ScriptedPolicy] = field(default_factory=lambda: {"policy": ScriptedPolicy()})
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    robots: list[asyncio.Task[None]] = field(default_factory=list)
    is_dark: bool = False
    is_dumb: bool = False
    still: np.ndarray | None = None

    def load(self, path: str, revision: str | None = None, /, **_: object) -> ScriptedPolicy:
        if path not in self.policies:
            raise ConfigError(f"nothing at {path}")
        return self.policies[path]

    @property
    def link(self) -> MemoryLink:
        return self.transport.link

    @property
    def session(self) -> Session:
        found = self.sessions.get("s")
        assert isinstance(found, Session)
        return found

    @property
    def stats(self) -> dict[str, object]:
        return self.session.status().stats

    async def running(self, **new: object) -> Session:
        """A session that moves its robot."""
        session = await self.sessions.create(replace(NewSession("s", "policy", "memory://", rate=50), **new))  # type: ignore[arg-type]
        self.show()
        await self.sessions.start("s")
        await self.until(lambda: self.ticks() > 5)
        return session

    def show(self) -> None:
        """A robot begins to show and tell."""
        self.robots.append(asyncio.create_task(self._show(self.link)))

    def ticks(self) -> int:
        robot_io = self.session.robot_io
        assert robot_io is not None
        return robot_io.commands_sent + robot_io.commands_withheld

    async def _show(self, link: MemoryLink) -> None:
        count = 0
        while True:
            count += 1
            for camera in link.rooms.cameras if not self.is_dark else ():
                link.deliver_frame(
                    camera, np.full((48, 64, 3), count % 251, np.uint8) if self.still is None else self.still
                )
            if not self.is_dumb:
                link.deliver_joints(POSE)
            await asyncio.sleep(0.01)

    async def until(self, claim: Callable[[], bool], within: float = 30.0) -> float:
        """Wait until it is true; how long that took."""
        began = time.monotonic()
        while not claim():
            assert time.monotonic() < began + within, "it never came true"
            await asyncio.sleep(0.002)
        return time.monotonic() - began


Rigged = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def rigged() -> Rigged:
    @asynccontextmanager
    async def made(stuck_after: float = 5.0, **settings: object) -> AsyncIterator[Rig]:
        transport = MemoryTransport()
        rig: Rig
        sessions = Sessions(
            transport=transport,
            load=lambda path, revision=None, /, **more: rig.load(path, revision, **more),
            engine=Engine(stuck_after=stuck_after, switch_interval=None),
            settings=SessionSettings(**{"patience": QUICK, "frame_age_limit": 0.1, **settings}),  # type: ignore[arg-type]
            tell=lambda event, about: rig.events.append((event, about)),
        )
        rig = Rig(sessions, transport)
        try:
            yield rig
        finally:
            for robot in rig.robots:
                robot.cancel()
            await sessions.close()
            assert transport.existing == set()

    return made


@pytest.fixture
async def rig(rigged: Rigged) -> AsyncIterator[Rig]:
    async with rigged() as made:
        yield made
