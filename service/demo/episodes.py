"""Episodes of the simulated arm: how each ended, and how many cubes were lifted for each instruction."""

from dataclasses import dataclass, field
from statistics import NormalDist


@dataclass(frozen=True)
class Outcome:
    """How one episode ended.

    Attributes:
        number: counted from 1.
        instruction: what was asked for.
        lifted: the asked cube was up at the end, and no other ever was.
        wrong: another cube that was up at any moment; None when there was none.
        ticks: from the first command to the end.
    """

    number: int
    seed: int
    instruction: str
    lifted: bool
    wrong: str | None
    ticks: int

    @property
    def verdict(self) -> str:
        """In words."""
        if self.wrong is not None:
            return f"wrong, lifted the {self.wrong} cube"
        return "lifted" if self.lifted else "missed"


@dataclass
class Score:
    """Outcomes so far."""

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
        """Wilson's 95 % interval of the share that is lifted; (0, 1) before the first episode."""
        return wilson(self.lifted, self.done)

    def by_instruction(self) -> dict[str, "Score"]:
        """The same for each instruction, in the order in which they came first."""
        found: dict[str, Score] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.instruction, Score()).outcomes.append(outcome)
        return found

    def __str__(self) -> str:
        wrong = f", {self.wrong} times a wrong one" if self.wrong else ""
        return f"{self.lifted} of {self.done} cubes lifted{wrong}"


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share (https://doi.org/10.1080/01621459.1927.10502953, without continuity
    correction): unlike the usual one it stays inside 0..1 and is not empty when all or none succeeded."""
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = (spread * (share * (1 - share) + spread / 4)) ** 0.5
    # A bound that is 0 or 1 exactly comes out a rounding error beside it.
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)
