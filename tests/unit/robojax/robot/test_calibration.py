"""LeRobot's calibration files are found, read and checked."""

import json
from pathlib import Path

import pytest

from robojax.robot.arm import (
    JOINTS,
    JointCalibration,
    Unit,
    find_calibration,
    from_steps,
    get_calibration_folder,
    read_calibration,
    to_steps,
)
from robojax.robot.errors import RobotError

# The content as LeRobot writes it.
GOOD = {
    name: {"id": servo, "drive_mode": 0, "homing_offset": -100 * servo, "range_min": 700, "range_max": 3300}
    for name, servo in JOINTS.items()
}


def written(folder: Path, content: object, name: str = "mine.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(json.dumps(content))
    return file


def test_lerobot_calibration_is_read_in_the_order_of_the_arm(tmp_path: Path) -> None:
    found = read_calibration(written(tmp_path, dict(reversed(GOOD.items()))), JOINTS)
    assert list(found) == list(JOINTS)
    assert (found["gripper"].id, found["gripper"].homing_offset, found["gripper"].range_max) == (6, -600, 3300)


@pytest.mark.parametrize("place", ["so_follower", "so101_follower"])
def test_calibration_of_old_and_new_lerobot_versions_is_found(tmp_path: Path, monkeypatch, place: str) -> None:
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    monkeypatch.delenv("HF_LEROBOT_CALIBRATION", raising=False)
    file = written(tmp_path / "calibration" / "robots" / place, GOOD)
    assert find_calibration("so101_follower", "mine") == file


def test_conflicting_calibrations_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_LEROBOT_CALIBRATION", str(tmp_path))
    assert get_calibration_folder() == tmp_path
    written(tmp_path / "robots" / "so_follower", GOOD)
    written(tmp_path / "robots" / "so101_follower", GOOD | {"x": 1})
    with pytest.raises(RobotError, match="two calibrations"):
        find_calibration("so101_follower", "mine")


@pytest.mark.parametrize("name", ["../mine", "", "..", "a/b"])
def test_id_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RobotError, match="cannot be a file's name"):
        find_calibration("so101_follower", name, tmp_path)


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    bad: dict[str, dict[str, object]] = {name: {**joint} for name, joint in GOOD.items()}
    bad["elbow"] = {}
    del bad["shoulder_pan"]
    bad["elbow_flex"]["id"] = 5
    bad["wrist_roll"]["range_max"] = 700
    bad["gripper"]["drive_mode"] = 2
    bad["wrist_flex"]["homing_offset"] = "0"
    with pytest.raises(RobotError) as refused:
        read_calibration(written(tmp_path, bad), JOINTS)
    for text in (
        "'shoulder_pan' is missing",
        "'elbow' does not belong",
        "is servo 5, wanted 3",
        "700..700",
        "drive_mode is 2",
    ):
        assert text in str(refused.value)
    assert "homing_offset is not an integer" in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_invalid_calibration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(RobotError, match=r"cannot be read|not a JSON object"):
        read_calibration(file, JOINTS)


# Results of LeRobot 0.4.4.
CASES = json.loads((Path(__file__).parent / "lerobot_units.json").read_text())
JOINT = JointCalibration(1, 0, 0, 1000, 3000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['unit']}-{case['drive_mode']}-{case['range'][0]}")
def test_steps_and_units_are_converted_exactly_like_lerobot(case) -> None:
    low, high = case["range"]
    joint, unit = JointCalibration(1, case["drive_mode"], 0, low, high), Unit(case["unit"])
    assert [from_steps(steps, joint, unit) for steps, _ in case["from_steps"]] == [v for _, v in case["from_steps"]]
    # LeRobot also sends degrees beyond the calibrated range; robojax clamps them.
    expected = [min(high, max(low, steps)) for _, steps in case["to_steps"]]
    assert [to_steps(value, joint, unit) for value, _ in case["to_steps"]] == expected


@pytest.mark.parametrize("unit", Unit)
def test_no_target_leaves_the_calibrated_range(unit: Unit) -> None:
    assert [to_steps(value, JOINT, unit) for value in (-1e9, 1e9)] == [1000, 3000]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_target_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="wanted a finite number"):
        to_steps(value, JOINT, Unit.PERCENT)
