"""Strategies that join a new chunk with the remaining plan.

Sources: lerobot/async_inference/configs.py, AGGREGATE_FUNCTIONS; lerobot/policies/act/modeling_act.py,
ACTTemporalEnsembler; Zhao et al., arXiv 2304.13705, algorithm 2; Black et al., arXiv 2506.07339 (real-time chunking).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from jaxmodels import Requirements

CROSSFADE_SECONDS = 0.24  # See docs/robots/motion.md.
DEFAULT_COEFFICIENT = 0.01  # ACT's default.
MAX_COEFFICIENT = 10
ALL_ACTIONS = 1 << 30


class Aggregation(Protocol):
    """Strategy that joins a new chunk with the remaining plan."""

    @property
    def name(self) -> str: ...

    @property
    def lasting_actions(self) -> int:
        """Largest number of planned actions that still count after the next chunk."""
        ...

    @property
    def sends_plan(self) -> bool:
        """Whether the policy gets the rest of the plan as an input."""
        ...

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> np.ndarray | float:
        """Return the weight (n,) in 0..1 of each new action that has a planned action at its time.

        Args:
            counts: number of predictions (n,) in each planned action.
            after: position (n,) of each action, from 1 for the first action that can still be executed.
        """
        ...


@dataclass(frozen=True)
class WeightedAggregation:
    """Weighted average with a constant ``weight`` of new actions; 1 replaces the plan."""

    name: str
    weight: float
    sends_plan: bool = False

    @property
    def lasting_actions(self) -> int:
        """All actions, unless the plan is replaced."""
        return ALL_ACTIONS if self.weight < 1 else 0

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> float:
        """Return the constant weight."""
        return self.weight


@dataclass(frozen=True)
class EnsembleAggregation:
    """Temporal ensemble, in which the k-th prediction for a moment weighs exp(-coefficient * k), the oldest 1."""

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
        if c > 0:  # Each branch avoids an overflow for its sign.
            ratio = math.exp(-c)
            return ratio**counts * (1 - ratio) / (1 - ratio ** (counts + 1.0))
        ratio = math.exp(c)
        return (1 - ratio) / (1 - ratio ** (counts + 1.0))


@dataclass(frozen=True)
class CrossfadeAggregation:
    """Crossfade from the plan to the new chunk over ``steps`` actions, or over the rest of a shorter plan."""

    steps: int
    name: str = "crossfade"
    sends_plan: bool = False

    @property
    def lasting_actions(self) -> int:
        """Number of actions of the crossfade."""
        return self.steps

    def new_weights(self, counts: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return weights that grow evenly from the old plan to the new chunk."""
        steps = min(self.steps, int(after[-1])) if len(after) else self.steps
        return np.clip(after / (max(steps, 0) + 1.0), 0.0, 1.0)


REPLACE = WeightedAggregation("replace", 1.0)
ENSEMBLE, CROSSFADE, RTC = "ensemble", "crossfade", "rtc"
# Chosen by benchmarks/smoothness.py.
DEFAULT_AGGREGATION = CROSSFADE
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
            # A policy need not follow the plan exactly, so real-time chunking also needs a crossfade.
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
        name: a key of ``AGGREGATIONS``. Defaults to the checkpoint's, then to the product's default.
        coefficient: coefficient of ``ensemble``. Defaults to the checkpoint's, then to ACT's.
        action_rate: actions per second.

    Raises:
        ValueError: the name is unknown or not possible with this policy; the text lists the possible names.
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
            f"real-time chunking needs a policy that continues a plan, and this policy (of type "
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
