"""Units of a measured state: states that cause a hold, states that cause a warning, and states that pass."""

import numpy as np
import pytest

from service.control.joints import SO100, JointTable
from service.control.units import StateUnits
from service.errors import UnitsDiffer

NAMES = tuple(joint.name for joint in SO100)
GRIPPERS = JointTable(SO100).grippers
LOW, HIGH = np.array([joint.low for joint in SO100]), np.array([joint.high for joint in SO100])
# Statistics of an SO-100 that picks up cubes: the wrist stays far from 0, and the jaw is never closed.
PERCENT = {
    "mean": (3, -4, 7, 78, -2, 36),
    "std": (17, 19, 23, 12, 12, 18),
    "min": (-33, -46, -76, 59, -26, 17),
    "max": (37, 37, 47, 100, 23, 63),
}
RADIANS = {name: (*np.deg2rad(values[:5]), values[5] / 100) for name, values in PERCENT.items()}
HOME = np.array([0, -46, 40, 78, 0, 20.0])


def units(statistics=PERCENT, *, is_accepted: bool = False) -> StateUnits:
    return StateUnits(NAMES, statistics, is_accepted=is_accepted, grippers=GRIPPERS)


def select(*names: str, statistics=PERCENT):
    return {name: statistics[name] for name in names}


@pytest.mark.parametrize(
    ("statistics", "state"),
    [
        (PERCENT, np.full(6, 2048.0)),
        (PERCENT, np.array([2048, 900, 3000, 1500, 2048, 1200.0])),
        (select("mean", "std"), np.full(6, 2048.0)),
        ({"q01": PERCENT["min"], "q99": PERCENT["max"]}, np.full(6, 2048.0)),
        ({"min": (-180,) * 6, "max": (180,) * 6}, np.full(6, 2048.0)),
        (RADIANS, np.array([0, -90, 90, 0, 0, 10.0])),
        (RADIANS, np.array([0, 0, 0, 1, 0, 50.0])),
    ],
)
def test_a_state_far_outside_the_statistics_is_refused(statistics, state) -> None:
    with pytest.raises(UnitsDiffer, match=r"joint '\w+' is at .*, the checkpoint's statistics are \w+ ") as found:
        units(statistics).check(state)
    assert '"accept_units": true' in str(found.value)
    assert units(statistics, is_accepted=True).find_mismatch(state) is None


def test_the_refusal_names_joint_value_and_statistics() -> None:
    text = units().find_mismatch(np.array([0, 0, 0, 70, 0, 2000.0]))
    assert "joint 'Jaw' is at 2000, the checkpoint's statistics are mean 36, std 18, min 17, max 63" in text
    assert "and 3 more joints" in units().find_mismatch(np.full(6, 2048.0))


@pytest.mark.parametrize(
    "statistics",
    [
        PERCENT,
        select("mean", "std"),
        # A joint that never moves in the data may be at any position.
        PERCENT | {"min": (0, -46, -76, 59, 0, 17), "max": (0, 37, 47, 100, 0, 63)},
        # Data that covers a fifth of the range.
        {"min": (-20, -20, -20, -20, -20, 0), "max": (20, 20, 20, 20, 20, 20)},
    ],
)
def test_no_pose_within_the_range_of_the_arm_is_refused(statistics) -> None:
    rng = np.random.default_rng(0)
    corners = np.where(rng.random((200, 6)) < 0.5, LOW, HIGH)
    for state in (*rng.uniform(LOW, HIGH, (200, 6)), *corners, 1.1 * corners):
        assert units(statistics).find_mismatch(state) is None


@pytest.mark.parametrize(
    ("statistics", "word"),
    [
        (None, "no statistics of observation.state"),
        ({}, "no statistics of observation.state"),
        ({"mean": (0.0,) * 6, "std": (1.0,) * 6}, "placeholders"),
        ({"min": (0.5,) * 6, "max": (0.5,) * 6}, "no joint moves"),
        ({"min": (0.0,) * 8, "max": (1.0,) * 8}, "of 8 numbers"),
    ],
)
def test_unusable_statistics_are_reported_and_nothing_is_checked(statistics, word: str) -> None:
    unchecked = units(statistics)
    assert unchecked.describe().startswith("not checked: ")
    assert word in unchecked.describe()
    assert unchecked.find_mismatch(np.full(6, 2048.0)) is None
    assert unchecked.warn_of_radians(np.zeros(6)) is None
    assert unchecked.find_small_joint(np.zeros(6), np.ones(6, bool)) is None


def test_the_stats_report_whether_the_state_is_checked() -> None:
    assert units().describe() == "checked"
    assert units(is_accepted=True).describe().startswith("accepted")


@pytest.mark.parametrize(
    ("statistics", "state", "is_warned"),
    [
        (PERCENT, np.deg2rad(HOME), True),
        (PERCENT, np.zeros(6), True),
        (PERCENT, HOME, False),
        (PERCENT, np.array([0, -46, 40, 3.0, 0, 0]), False),
        ({"min": (-60, -60, -60, -60, -60, 0), "max": (60, 60, 60, 60, 60, 100)}, np.zeros(6), False),
    ],
)
def test_joints_that_may_be_in_radians_cause_a_warning(statistics, state, is_warned: bool) -> None:
    warning = units(statistics).warn_of_radians(state)
    assert (warning is not None) is is_warned
    if is_warned:
        assert "joint 'Wrist_Pitch' is at" in warning
        assert "min 59, max 100" in warning
    assert units(statistics).find_mismatch(state) is None
    assert units(RADIANS).warn_of_radians(state) is None
