"""Strategies that join a new chunk with the remaining plan.

Sources: lerobot/async_inference/configs.py, AGGREGATE_FUNCTIONS (old and new, of one time step, over all that both
have); lerobot/policies/act/modeling_act.py, ACTTemporalEnsembler, and Zhao et al., arXiv 2304.13705, algorithm 2;
real-time chunking: Black et al., arXiv 2506.07339.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from jaxmodels import Requirements

# Seconds; see docs/robots/motion.md.
CROSSFADE_SECONDS = 0.24
# ACT's own default.
DEFAULT_COEFFICIENT = 0.01
MAX_COEFFICIENT = 10
ALL_ACTIONS = 1 << 30


class Aggregation(Protocol):
    """Strategy that joins a new chunk with the remaining plan."""

    @property
    def name(self) -> str: ...

    @property
    def lasting_actions(self) -> int:
        """Largest number of actions of a plan that still count after the next chunk has taken over."""
        ...

    @property
    def sends_plan(self) -> bool:
        """Whether the rest of the plan is an input of the policy."""
        ...

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> np.ndarray | float:
        """Return the weight (n,) in 0..1 of each new action for whose moment there is a planned one.

        Args:
            counts: (n,) of how many predictions the planned one is made.
            after: (n,) 1 for the first action that can still be done, 2 for the next; 0 and below: it is over.
        """
        ...


@dataclass(frozen=True)
class WeightedAggregation:
    """Weighted average in which a new action always weighs the same.

    Attributes:
        weight: of the new one; 1 replaces the plan.
    """

    name: str
    weight: float
    sends_plan: bool = False

    @property
    def lasting_actions(self) -> int:
        """All actions, unless the plan is replaced."""
        return ALL_ACTIONS if self.weight < 1 else 0

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> float:
        """Return the weight, whatever the counts are."""
        return self.weight


@dataclass(frozen=True)
class EnsembleAggregation:
    """Temporal ensemble: of the predictions for one moment the oldest weighs 1 and the k-th exp(-coefficient * k)."""

    coefficient: float = DEFAULT_COEFFICIENT
    name: str = "ensemble"
    lasting_actions: int = ALL_ACTIONS
    sends_plan: bool = False

    def __post_init__(self) -> None:
        if not abs(self.coefficient) <= MAX_COEFFICIENT:
            raise ValueError(
                f"temporal_ensemble_coeff is {self.coefficient:g}, wanted -{MAX_COEFFICIENT:g} to "
                f"{MAX_COEFFICIENT:g}; above 0 the older predictions weigh more, below the newer ones"
            )

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the weight of the newest prediction among ``counts + 1``; all weights are a geometric series."""
        c = self.coefficient
        if abs(c) < 1e-9:
            return 1.0 / (counts + 1.0)
        # Written so that nothing overflows, whichever sign.
        if c > 0:
            ratio = math.exp(-c)
            return ratio**counts * (1 - ratio) / (1 - ratio ** (counts + 1.0))
        ratio = math.exp(c)
        return (1 - ratio) / (1 - ratio ** (counts + 1.0))


@dataclass(frozen=True)
class CrossfadeAggregation:
    """Crossfade from the plan into the new chunk over ``steps`` actions, or over the rest of a shorter plan.

    ``sends_plan`` makes it real-time chunking, in which the policy continues the plan.
    """

    steps: int
    name: str = "crossfade"
    sends_plan: bool = False

    @property
    def lasting_actions(self) -> int:
        """As many actions as the crossfade takes."""
        return self.steps

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return weights that grow evenly from the old plan to the new chunk."""
        steps = min(self.steps, int(after[-1])) if len(after) else self.steps
        return np.clip(after / (max(steps, 0) + 1.0), 0.0, 1.0)


REPLACE = WeightedAggregation("replace", 1.0)
ENSEMBLE, CROSSFADE, RTC = "ensemble", "crossfade", "rtc"
# Chosen by benchmarks/smoothness.py.
DEFAULT_AGGREGATION = CROSSFADE
# Keyed by the names that requests use.
AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {
        one.name: one
        for one in (
            REPLACE,
            WeightedAggregation("weighted_average", 0.7),
            WeightedAggregation("latest_only", 1.0),
            WeightedAggregation("average", 0.5),
            WeightedAggregation("conservative", 0.3),
            EnsembleAggregation(),
            CrossfadeAggregation(6),
            # What follows the actions that were given is only suggested to the policy: the seam is led over, too.
            CrossfadeAggregation(6, RTC, sends_plan=True),
        )
    }
)

# The same names in words, for the API's documentation.
AGGREGATIONS_TEXT = (
    "replace (latest_only); LeRobot's weighted_average (0.3 old, 0.7 new), average, conservative (0.7 old); ensemble "
    "(ACT's, over time); crossfade; rtc, for policies that continue a plan"
)


def choose_aggregation(
    requirements: Requirements, name: str | None = None, coefficient: float | None = None, *, action_rate: float = 25.0
) -> Aggregation:
    """Choose how chunks of this policy are joined.

    Args:
        name: a key of ``AGGREGATIONS``; None for the checkpoint's, else the default.
        coefficient: of ``ensemble``; None for the checkpoint's, else ACT's.
        action_rate: actions per second.

    Raises:
        ValueError: it is not possible with this policy, or there is no such way; says what is possible.
    """
    own = requirements.temporal_ensemble_coeff
    if name is None:
        name = ENSEMBLE if own is not None or coefficient is not None else DEFAULT_AGGREGATION
    possible = [one for one, overlap in AGGREGATIONS.items() if requirements.takes_prefix or not overlap.sends_plan]
    if name not in AGGREGATIONS:
        raise ValueError(
            f"overlap {name!r}: there is none of this name; possible with this policy: {_join_names(possible)}"
        )
    if name not in possible:
        raise ValueError(
            f"real-time chunking wants a policy that continues the plan it is shown, and this one (of type "
            f"{requirements.policy_type!r}) does not; possible with this policy: {_join_names(possible)}"
        )
    if name == ENSEMBLE:
        return EnsembleAggregation(next((one for one in (coefficient, own) if one is not None), DEFAULT_COEFFICIENT))
    if coefficient is not None:
        raise ValueError(
            f"overlap {name!r} has no coefficient; leave temporal_ensemble_coeff out, or ask for 'ensemble'"
        )
    aggregation = AGGREGATIONS[name]
    return (
        replace(aggregation, steps=max(round(CROSSFADE_SECONDS * action_rate), 1))
        if isinstance(aggregation, CrossfadeAggregation)
        else aggregation
    )


def _join_names(names: list[str]) -> str:
    return ", ".join(map(repr, names))
