"""What the simulated arm may be asked to do: a table of tasks, each with its cubes and where they may lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import NamedTuple

import numpy as np

RADIUS, BEARING, YAW = (0.20, 0.28), 0.6, 0.25  # where cubes may lie: metres from the base, radians


class TaskName(StrEnum):
    """What commands call the tasks."""

    PICK = "pick"
    TWO_CUBES = "two-cubes"


@dataclass(frozen=True)
class Cube:
    """A cube that can be asked for.

    Attributes:
        name: its colour, as a person says it.
        colour: the same as red, green and blue, 0..1.
    """

    name: str
    colour: tuple[float, float, float]

    @property
    def instruction(self) -> str:
        """What a policy is told."""
        return f"pick up the {self.name} cube"


class Place(NamedTuple):
    """Where a cube lies on the table: metres from the arm's base, radians from straight ahead, radians of its turn."""

    radius: float
    bearing: float
    yaw: float

    @property
    def centre(self) -> tuple[float, float]:
        """x and y in metres; the arm reaches towards -y."""
        return self.radius * np.sin(self.bearing), -self.radius * np.cos(self.bearing)


@dataclass(frozen=True)
class Task:
    """Cubes on the table, one of which is asked for in each episode.

    Attributes:
        apart: metres between the centres of any two cubes, at least.
        policy: folder beside this file with the policy that is shipped for it; None when there is none.
    """

    name: TaskName
    cubes: tuple[Cube, ...]
    apart: float = 0.0
    policy: str | None = None

    @property
    def instructions(self) -> tuple[str, ...]:
        """One for each cube."""
        return tuple(cube.instruction for cube in self.cubes)

    def asked(self, seed: int) -> Cube:
        """The cube of an episode: in turn, so that any even run of seeds asks for each as often as for another."""
        return self.cubes[seed % len(self.cubes)]

    def places(self, seed: int) -> tuple[Place, ...]:
        """Where the cubes of an episode lie; which of them is asked for has no part in it."""
        random = np.random.default_rng(seed)
        while True:
            drawn = tuple(
                Place(random.uniform(*RADIUS), random.uniform(-BEARING, BEARING), random.uniform(-YAW, YAW))
                for _ in self.cubes
            )
            if all(np.hypot(*np.subtract(a.centre, b.centre)) >= self.apart for a, b in combinations(drawn, 2)):
                return drawn


RED = Cube("red", (0.85, 0.08, 0.08))
BLUE = Cube("blue", (0.08, 0.16, 0.85))
PICK = Task(TaskName.PICK, (RED,), policy="policy")
# The expert touches no other cube from 5 cm on; a policy is not as exact.
TWO_CUBES = Task(TaskName.TWO_CUBES, (RED, BLUE), apart=0.09)
TASKS: Mapping[str, Task] = {task.name: task for task in (PICK, TWO_CUBES)}
