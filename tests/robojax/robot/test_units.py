"""Conversions compared with LeRobot 0.4.4's own, whose results are in ``lerobot_units.json``."""

import json
from pathlib import Path

import pytest

from robojax.robot.calibration import JointCalibration
from robojax.robot.units import Unit, from_steps, to_steps

CASES = json.loads((Path(__file__).parent / "lerobot_units.json").read_text())
JOINT = JointCalibration(1, 0, 0, 1000, 3000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['unit']}-{case['drive_mode']}-{case['range'][0]}")
def test_steps_and_units_are_converted_to_the_bit_as_lerobot_does(case) -> None:
    low, high = case["range"]
    joint, unit = JointCalibration(1, case["drive_mode"], 0, low, high), Unit(case["unit"])
    assert [from_steps(steps, joint, unit) for steps, _ in case["from_steps"]] == [v for _, v in case["from_steps"]]
    # Only here do we differ: LeRobot sends degrees beyond the calibrated range.
    wanted = [min(high, max(low, steps)) for _, steps in case["to_steps"]]
    assert [to_steps(value, joint, unit) for value, _ in case["to_steps"]] == wanted


@pytest.mark.parametrize("unit", Unit)
def test_no_target_leaves_the_calibrated_range(unit: Unit) -> None:
    assert [to_steps(value, JOINT, unit) for value in (-1e9, 1e9)] == [1000, 3000]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_target_that_is_not_finite_is_no_position(value: float) -> None:
    with pytest.raises(ValueError, match="is no position"):
        to_steps(value, JOINT, Unit.PERCENT)
