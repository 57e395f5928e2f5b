"""Episodes of the simulated arm: where it is in one, and how many cubes were lifted; pure, moved on by its owner."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """How one episode ended.

    Attributes:
        number: counted from 1.
        ticks: from the first command to the end.
    """

    number: int
    seed: int
    lifted: bool
    ticks: int


@dataclass
class Score:
    """Outcomes so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def lifted(self) -> int:
        return sum(outcome.lifted for outcome in self.outcomes)

    @property
    def done(self) -> int:
        return len(self.outcomes)

    def __str__(self) -> str:
        return f"{self.lifted} of {self.done} cubes lifted"
