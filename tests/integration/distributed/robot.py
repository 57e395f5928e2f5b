"""A robot on a session's stream that goes slowly where it is told, so that where it is tells a hold from a motion."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from PIL import Image

from robojax.client import AsyncClient
from robojax.client.stream import Command, Status

PERIOD = 0.04
PATIENCE = 60.0
# Of the way that is left, what it goes from one picture to the next.
SPEED = 0.2


class SlowRobot:
    """What one robot was told.

    Attributes:
        pose: where it is.
        targets: monotonic times, where it was to go, and whether it was there or had been lately.
        stages: monotonic times, the session's stages with the codes and texts of its holds, and reasons.
    """

    def __init__(self, joints: tuple[str, ...]):
        self.pose = dict.fromkeys(joints, 0.0)
        self.targets: list[tuple[float, Mapping[str, float], bool]] = []
        self.stages: list[tuple[float, Status]] = []
        self._been: list[dict[str, float]] = [self.pose]

    def go_on(self) -> None:
        """One period has passed."""
        target = self.targets[-1][1] if self.targets else self.pose
        self.pose = {name: at + SPEED * (target[name] - at) for name, at in self.pose.items()}
        self._been.append(self.pose)

    def hear(self, message: object) -> None:
        """Of the session."""
        now = time.monotonic()
        if isinstance(message, Command):
            target = {**self.pose, **message.joints}
            # A hold leaves the jaw where it was sent last.
            near = [
                max(abs(target[name] - at) for name, at in been.items() if name != "Jaw") for been in self._been[-25:]
            ]
            self.targets.append((now, target, min(near) < 1e-3))
        elif isinstance(message, Status):
            self.stages.append((now, message))

    def motions(self, since: float) -> list[tuple[float, Mapping[str, float]]]:
        """When and where it was told to go somewhere else than where it was."""
        return [(at, target) for at, target, is_hold in self.targets if at >= since and not is_hold]

    async def shown(self, count: int) -> None:
        """Wait until so many of its pictures were sent."""
        await until(lambda: len(self._been) > count)

    async def moves(self, since: float, count: int = 10) -> None:
        """Wait for so many motions."""
        await until(lambda: len(self.motions(since)) >= count)

    async def stage(self, since: float, claim: Callable[[Status], Any]) -> tuple[float, Status]:
        """The first of which this is true, and when it came."""
        return await until(
            lambda: next((found for found in self.stages if found[0] >= since and claim(found[1])), None)
        )


async def until(claim: Callable[[], Any]) -> Any:
    """What is claimed, as soon as it is true."""
    began = time.monotonic()
    while not (found := claim()):
        assert time.monotonic() < began + PATIENCE, f"not within {PATIENCE:g} s"
        await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def slow_robot(url: str, session_id: str) -> AsyncIterator[SlowRobot]:
    """On its session's stream until the context ends."""
    async with AsyncClient(url) as client, client.session(session_id).stream() as stream:
        robot = SlowRobot(stream.welcome.joint_names)

        async def show() -> None:
            number, due = 0, time.monotonic()
            while True:
                robot.go_on()
                await stream.observe({"front": PICTURES[number % len(PICTURES)]}, robot.pose)
                number += 1
                due = max(due + PERIOD, time.monotonic() - PERIOD)
                await asyncio.sleep(due - time.monotonic())

        async def listen() -> None:
            async for message in stream:
                robot.hear(message)

        tasks = [asyncio.create_task(show()), asyncio.create_task(listen())]
        try:
            yield robot
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _pictures() -> list[bytes]:
    random, found = np.random.default_rng(0), []
    for _ in range(8):
        held = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8)).resize((96, 96)).save(held, "JPEG")
        found.append(held.getvalue())
    return found


PICTURES = _pictures()
