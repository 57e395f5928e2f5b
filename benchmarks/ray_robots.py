"""Simulated robots on a session's stream, without rooms, that record when commands came."""

import asyncio
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from robojax.client import AsyncClient
from robojax.client.errors import ClientError
from robojax.client.stream import Command, Status

FPS = 20.0


@dataclass
class Heard:
    """What one robot heard.

    Attributes:
        commands: monotonic times.
        holds: times and codes; None when a hold ended.
    """

    commands: list[float] = field(default_factory=list)
    holds: list[tuple[float, str | None]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Commands, the longest pause between two, and the holds of a time."""
        came = [begin, *(at for at in self.commands if begin <= at <= end), end]
        codes = [code for at, code in self.holds if begin <= at <= end and code]
        return {
            "commands": len(came) - 2,
            "longest_pause_s": round(float(np.diff(came).max()), 3),
            "holds": {code: codes.count(code) for code in dict.fromkeys(codes)},
        }


class ObedientRobot:
    """Goes at once where it is told, and shows a picture that changes a little."""

    def __init__(self, name: str, url: str):
        self.name, self.url = name, url
        self.heard = Heard()
        self.troubles: list[str] = []
        self._state: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def moves(self) -> bool:
        """Whether it is being told where to go."""
        return bool(self.heard.commands) and time.monotonic() - self.heard.commands[-1] < 0.2

    def begin(self) -> None:
        """Be there until ``end``."""
        self._task = asyncio.create_task(self._live(), name=self.name)

    async def end(self) -> None:
        """Be gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self) -> None:
        while True:
            try:
                async with AsyncClient(self.url) as client, client.session(self.name).stream() as stream:
                    joints = stream.welcome.joint_names
                    self._state = self._state or dict.fromkeys(joints, 0.0)
                    seeing = asyncio.create_task(self._show(stream, tuple(stream.welcome.cameras)))
                    try:
                        async for message in stream:
                            self._hear(message)
                    finally:
                        seeing.cancel()
            except (ClientError, OSError, TimeoutError) as error:
                self.troubles.append(type(error).__name__)
            await asyncio.sleep(0.2)

    async def _show(self, stream: Any, cameras: tuple[str, ...]) -> None:
        number, start = 0, time.monotonic()
        while True:
            await stream.observe(dict.fromkeys(cameras, PICTURES[number % len(PICTURES)]), self._state)
            number += 1
            await asyncio.sleep(max(start + number / FPS - time.monotonic(), 0))

    def _hear(self, message: object) -> None:
        now = time.monotonic()
        if isinstance(message, Command):
            self.heard.commands.append(now)
            self._state |= message.joints
        elif isinstance(message, Status):
            self.heard.holds.append((now, message.hold_code))


def summary(robots: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Of all robots' figures of one time."""
    pauses = sorted(one["longest_pause_s"] for one in robots.values())
    held = [name for name, one in robots.items() if one["holds"]]
    return {
        "robots": len(robots),
        "commands": sum(one["commands"] for one in robots.values()),
        "longest_pause_s": pauses[-1],
        "median_of_longest_pauses_s": pauses[len(pauses) // 2],
        "robots_held": len(held),
    }


def _pictures() -> list[bytes]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(8):
        held = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8)).resize((96, 96)).save(held, "JPEG")
        found.append(held.getvalue())
    return found


PICTURES = _pictures()
