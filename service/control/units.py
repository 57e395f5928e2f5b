"""Units of a robot's state: comparison of measured joints with statistics of the policy's training data."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxmodels import Requirements
from service.control.joints import JointTable
from service.errors import UnitsDiffer

# Distance from the training data, in spans of the widest joint, from which a state is in another unit. States in the
# policy's unit are at most 4 spans outside data that covers a fifth of the range; servo ticks in place of percent or
# degrees are at least 5.2 spans outside, and degrees in place of radians at least 20.
FAR_SPANS = 5.0
RADIANS = 1.05 * math.pi  # Joints within this range may be in radians: half a turn to each side, and calibration.
MIN_ANGLE_SPAN = 30.0  # Smallest span of a policy's widest joint in degrees or percent; radians cover at most 6.3.
# Range of a gripper in 0..1; the span of its data is at least 0.1 in this unit, and at least 10 in percent or degrees.
UNIT_GRIPPER = (-0.05, 1.05)
MIN_GRIPPER_SPAN, MIN_UNIT_SPAN = 10.0, 0.1
UNLIKELY_SPANS = 0.5  # Distance of a joint from its data, in its own spans, from which radians are reported.
MAX_NAMED = 3  # Largest number of joints named in a text.


class StateUnits:
    """Ranges of the state in a policy's training data, with which measured states are compared.

    Attributes:
        is_accepted: whether the session accepts another unit (``accept_units``).
        unchecked: reason why the state cannot be compared, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        statistics: Mapping[str, Sequence[float]] | None,
        *,
        is_accepted: bool = False,
        grippers: np.ndarray | None = None,
    ):
        """Create it from a checkpoint's statistics.

        Args:
            names: names of the numbers of the state, in order.
            statistics: statistics of ``observation.state``, see ``Requirements.state_statistics``.
            is_accepted: whether the session accepts another unit.
            grippers: grippers (n,) bool; None for a robot without grippers.
        """
        self.is_accepted = is_accepted
        self._names = tuple(names)
        self._grippers = np.zeros(len(names), bool) if grippers is None else grippers
        self._statistics = {name: np.asarray(values, np.float64) for name, values in (statistics or {}).items()}
        self.unchecked = self._find_gap()
        if self.unchecked is None:
            self._low, self._high = _find_ranges(self._statistics)
            self._spans = spans = self._high - self._low
            low, high = UNIT_GRIPPER
            in_unit = self._grippers & (self._low >= low) & (self._high <= high) & (spans >= MIN_UNIT_SPAN)
            margin = FAR_SPANS * np.where(in_unit, 1.0, spans.max())
            self._far = self._low - margin, self._high + margin
            self._are_angles = bool(spans[~self._grippers].max(initial=0.0) >= MIN_ANGLE_SPAN)
            self._percent_grippers = self._grippers & (spans >= MIN_GRIPPER_SPAN)

    def describe(self) -> str:
        """Return for the session's stats whether the state is compared."""
        if self.unchecked is not None:
            return f"not checked: {self.unchecked}"
        return "accepted (accept_units), not checked" if self.is_accepted else "checked"

    def find_mismatch(self, state: np.ndarray) -> str | None:
        """Return why a measured state (n,) cannot be in the policy's unit; None if it can be, or is accepted."""
        if self.is_accepted or self.unchecked is not None:
            return None
        low, high = self._far
        if ((low <= state) & (state <= high)).all():
            return None
        far = [index for index in range(len(state)) if not low[index] <= state[index] <= high[index]]
        named = [f"joint {self._names[index]!r} is at {state[index]:g}, {self._describe(index)}" for index in far]
        more = f"; and {len(named) - MAX_NAMED} more joints" if len(named) > MAX_NAMED else ""
        return (
            f"the state is far outside the policy's training data, as in another unit: {'; '.join(named[:MAX_NAMED])}"
            f"{more}. {_REMEDY}"
        )

    def check(self, state: np.ndarray) -> None:
        """Raise UnitsDiffer for a state of a request in which ``find_mismatch`` finds a mismatch."""
        if (text := self.find_mismatch(state)) is not None:
            raise UnitsDiffer(text)

    def warn_of_radians(self, state: np.ndarray) -> str | None:
        """Return a warning if a state (n,) may be in radians: small in all joints, and outside the training data.

        This does not hold an arm, because it may rest at such a state in any unit.
        """
        index = self.find_small_joint(state, np.ones(len(state), bool))
        if index is None or self._grippers[index]:
            return None
        outside = np.maximum(self._low - state, state - self._high) - UNLIKELY_SPANS * self._spans
        worst = int(np.where(self._grippers, -np.inf, outside).argmax())
        if outside[worst] <= 0:
            return None
        return (
            f"all joints are within {RADIANS:.2g} of 0, as in radians: joint {self._names[worst]!r} is at "
            f"{state[worst]:.3g}, {self._describe(worst)}. {_REMEDY}"
        )

    def find_small_joint(self, state: np.ndarray, still: np.ndarray) -> int | None:
        """Return the clearest sign of joints in radians or grippers in 0..1: the index of a joint, or None.

        Args:
            state: measured state (n,).
            still: joints (n,) bool that do not follow their commands.
        """
        if self.is_accepted or self.unchecked is not None:
            return None
        arm = ~self._grippers
        if self._are_angles and still[arm].all() and (np.abs(state[arm]) <= RADIANS).all():
            return int(np.where(arm, self._spans, -1.0).argmax())
        low, high = UNIT_GRIPPER
        small = self._percent_grippers & still & (low <= state) & (state <= high)
        return int(small.argmax()) if small.any() else None

    def describe_spread(self, index: int, spread: float, commanded: float) -> str:
        """Return the text of a hold for a joint whose measured spread is too small for its commands."""
        unit = "a gripper in 0..1" if self._grippers[index] else "radians"
        return (
            f"joint {self._names[index]!r} moved by {spread:.3g} while its commands moved by {commanded:.3g}, as with "
            f"{unit}; {self._describe(index)}. {_REMEDY} If the robot does not move at all, check its power"
        )

    def _describe(self, index: int) -> str:
        values = [f"{name} {array[index]:.4g}" for name, array in self._statistics.items()]
        return f"the checkpoint's statistics are {', '.join(values)}"

    def _find_gap(self) -> str | None:
        statistics = self._statistics
        if not statistics:
            return "the checkpoint has no statistics of observation.state"
        if len(next(iter(statistics.values()))) != len(self._names):
            width = len(next(iter(statistics.values())))
            return f"the checkpoint has statistics of {width} numbers, and the robot has {len(self._names)} joints"
        if (statistics.get("mean", np.ones(1)) == 0).all() and (statistics.get("std", np.zeros(1)) == 1).all():
            return "the checkpoint's statistics are placeholders (mean 0, std 1 for every joint)"
        low, high = _find_ranges(statistics)
        if not (high - low).max(initial=0.0) > 0:
            return "no joint moves in the checkpoint's statistics"
        return None


_REMEDY = (
    'Let the robot report in the policy\'s unit, or set "accept_units": true in the session (POST /sessions, or PATCH)'
    " if the state is right."
)


def _find_ranges(statistics: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and highest value (n,) of the data, estimated if the statistics have no extremes."""
    for low, high in (("min", "max"), ("q01", "q99")):
        if low in statistics and high in statistics:
            return statistics[low], np.maximum(statistics[low], statistics[high])
    mean, std = statistics["mean"], statistics["std"]
    return mean - 3 * std, mean + 3 * std


def create_units(requirements: Requirements, table: JointTable, *, is_accepted: bool) -> StateUnits:
    """Create the units of a session's state, which consists of joints only if actions are targets of joints."""
    if requirements.controls_joints:
        names, grippers = table.names, table.grippers
    else:
        names, grippers = [f"state_{number + 1}" for number in range(requirements.state or 0)], None
    return StateUnits(names, requirements.state_statistics, is_accepted=is_accepted, grippers=grippers)
