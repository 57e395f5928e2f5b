"""The simulated arm as a program with an event loop has it: its physics and its pictures on a thread of their own."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from service.demo.arm import CAMERA, FRAME, Arm
from service.demo.episodes import Outcome
from service.demo.film import save_film
from service.demo.tasks import PICK, Task


class Body:
    """The simulation on one thread, because an OpenGL context belongs to the thread that made it.

    Args:
        films: a folder for a video of each episode.
    """

    def __init__(self, task: Task = PICK, films: Path | None = None) -> None:
        self._thread = ThreadPoolExecutor(1, "arm")
        self._task, self._films = task, films
        self._arm: Arm | None = None
        self._frames: list[np.ndarray] = []

    async def reset(self, seed: int) -> str:
        """Folds the arm and lays the cubes of `seed`; the instruction."""
        return await self._run(self._reset, seed)

    async def tick(self, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step towards `target`; the pose after it and what the camera sees."""
        return await self._run(self._tick, target)

    async def outcome(self, number: int, seed: int, ticks: int) -> Outcome:
        """How the episode ended, and its film when it is filmed."""
        return await self._run(self._outcome, number, seed, ticks)

    async def close(self) -> None:
        await self._run(lambda: self._arm.close() if self._arm else None)
        self._thread.shutdown()

    def _run(self, call, *arguments):
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _reset(self, seed: int) -> str:
        self._arm = self._arm or Arm(self._task)
        self._arm.reset(seed)
        self._frames.clear()
        return self._arm.asked.instruction

    def _tick(self, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._arm is not None, "reset comes first"
        self._arm.step(target)
        picture = self._arm.picture(CAMERA, *FRAME)
        if self._films is not None:
            self._frames.append(picture)
        return self._arm.joints, picture

    def _outcome(self, number: int, seed: int, ticks: int) -> Outcome:
        assert self._arm is not None, "reset comes first"
        outcome = Outcome(number, seed, self._arm.asked.instruction, self._arm.is_lifted, self._arm.wrong, ticks)
        if self._films is not None:
            save_film(self._films, self._frames, outcome)
        return outcome
