"""Tasks of the simulated arm, outcomes of episodes, success rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from math import comb
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RADIUS, BEARING, YAW = (0.20, 0.28), 0.6, 0.25  # range of cubes' positions: metres from the base, radians


class TaskName(StrEnum):
    """Names of the tasks in commands."""

    PICK = "pick"
    TWO_CUBES = "two-cubes"


@dataclass(frozen=True)
class Cube:
    """A cube; ``name`` is its colour as a word, ``colour`` as red, green and blue in 0..1."""

    name: str
    colour: tuple[float, float, float]

    @property
    def instruction(self) -> str:
        """Instruction text for a policy."""
        return f"pick up the {self.name} cube"


class CubePosition(NamedTuple):
    """Position of a cube on the table: metres from the arm's base, radians from straight ahead, radians of its turn."""

    radius: float
    bearing: float
    yaw: float

    @property
    def centre(self) -> tuple[float, float]:
        """Position (x, y) in metres; the arm reaches towards -y."""
        return self.radius * np.sin(self.bearing), -self.radius * np.cos(self.bearing)


@dataclass(frozen=True)
class Task:
    """Cubes on the table, one of which is the target in each episode.

    Attributes:
        apart: minimum distance in metres between the centres of two cubes.
        policy: folder next to this file with the included policy; None without a policy.
    """

    name: TaskName
    cubes: tuple[Cube, ...]
    apart: float = 0.0
    policy: str | None = None

    @property
    def instructions(self) -> tuple[str, ...]:
        """Instructions of all cubes."""
        return tuple(cube.instruction for cube in self.cubes)

    def choose_cube(self, seed: int) -> Cube:
        """Return the target cube of an episode; consecutive seeds choose each cube equally often."""
        return self.cubes[seed % len(self.cubes)]

    def draw_positions(self, seed: int) -> tuple[CubePosition, ...]:
        """Return random positions of an episode's cubes, independent of the target cube."""
        random = np.random.default_rng(seed)
        while True:
            drawn = tuple(
                CubePosition(random.uniform(*RADIUS), random.uniform(-BEARING, BEARING), random.uniform(-YAW, YAW))
                for _ in self.cubes
            )
            if all(np.hypot(*np.subtract(a.centre, b.centre)) >= self.apart for a, b in combinations(drawn, 2)):
                return drawn


RED = Cube("red", (0.85, 0.08, 0.08))
BLUE = Cube("blue", (0.08, 0.16, 0.85))
PICK = Task(TaskName.PICK, (RED,), policy="policy")
# The expert needs only 5 cm between cubes, but policies are less exact.
TWO_CUBES = Task(TaskName.TWO_CUBES, (RED, BLUE), apart=0.09)
TASKS: Mapping[str, Task] = {task.name: task for task in (PICK, TWO_CUBES)}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one episode.

    Attributes:
        number: number of the episode, from 1.
        instruction: instruction of the episode.
        lifted: whether the target cube was lifted at the end, and no other cube at any time.
        wrong: name of another cube that was lifted at any time; None without such a cube.
        ticks: ticks from the first command to the end.
    """

    number: int
    seed: int
    instruction: str
    lifted: bool
    wrong: str | None
    ticks: int

    @property
    def verdict(self) -> str:
        """The outcome in words."""
        if self.wrong is not None:
            return f"wrong, lifted the {self.wrong} cube"
        return "lifted" if self.lifted else "missed"


@dataclass
class Score:
    """Outcomes of the episodes so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def lifted(self) -> int:
        return sum(outcome.lifted for outcome in self.outcomes)

    @property
    def wrong(self) -> int:
        return sum(outcome.wrong is not None for outcome in self.outcomes)

    @property
    def done(self) -> int:
        return len(self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate; (0, 1) before the first episode."""
        return wilson(self.lifted, self.done)

    def by_instruction(self) -> dict[str, "Score"]:
        """Return the scores by instruction, in the order of their first episodes."""
        scores: dict[str, Score] = {}
        for outcome in self.outcomes:
            scores.setdefault(outcome.instruction, Score()).outcomes.append(outcome)
        return scores

    def __str__(self) -> str:
        wrong = f", {self.wrong} times a wrong one" if self.wrong else ""
        return f"{self.lifted} of {self.done} cubes lifted{wrong}"


def fisher(successes: int, trials: int, other_successes: int, other_trials: int) -> float:
    """Return the probability of these successes or fewer, if both success rates are equal (Fisher's exact test).

    Example:
        >>> round(fisher(15, 20, 20, 20), 3)
        0.024
    """
    total, both = trials + other_trials, successes + other_successes
    ways = sum(comb(trials, count) * comb(other_trials, both - count) for count in range(min(successes, both) + 1))
    return ways / comb(total, both)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of a proportion (https://doi.org/10.1080/01621459.1927.10502953).

    Unlike the normal interval, it stays inside 0..1 and is not empty if all or none succeeded.
    """
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = (spread * (share * (1 - share) + spread / 4)) ** 0.5
    # Exact bounds of 0 and 1, without rounding errors.
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)
