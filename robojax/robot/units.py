"""Servo steps and the units that policies speak, converted as LeRobot does, to the step.

Three units: -100..100 of the calibrated range, 0..100 of it (grippers), or degrees from the middle of the range.
"""

import math
from enum import StrEnum

from robojax.robot.calibration import JointCalibration
from robojax.robot.registers import RESOLUTION


class Unit(StrEnum):
    """LeRobot's names of them."""

    PERCENT = "range_m100_100"
    GRIPPER = "range_0_100"
    DEGREES = "degrees"


def from_steps(steps: int, joint: JointCalibration, unit: Unit) -> float:
    """A servo's position in a policy's unit. Degrees are not bounded by the range, the others are."""
    low, high = joint.range_min, joint.range_max
    if unit is Unit.DEGREES:
        return (steps - (low + high) / 2) * 360 / (RESOLUTION - 1)
    share = (min(high, max(low, steps)) - low) / (high - low)
    if unit is Unit.GRIPPER:
        percent = share * 100
        return 100 - percent if joint.drive_mode else percent
    percent = share * 200 - 100
    return -percent if joint.drive_mode else percent


def to_steps(value: float, joint: JointCalibration, unit: Unit) -> int:
    """The position for a target, always within the calibrated range.

    LeRobot sends degrees beyond the range and relies on the servo's own limits; here the limit is the file's, too.

    Raises:
        ValueError: the target is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"a target of {value} is no position")
    low, high = joint.range_min, joint.range_max
    if unit is Unit.DEGREES:
        steps = int(value * (RESOLUTION - 1) / 360 + (low + high) / 2)
    elif unit is Unit.GRIPPER:
        percent = 100 - value if joint.drive_mode else value
        steps = int(min(100.0, max(0.0, percent)) / 100 * (high - low) + low)
    else:
        percent = -value if joint.drive_mode else value
        steps = int((min(100.0, max(-100.0, percent)) + 100) / 200 * (high - low) + low)
    return min(high, max(low, steps))
