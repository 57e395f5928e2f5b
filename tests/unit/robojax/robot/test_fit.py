"""Comparison of a policy with an arm: joints, units, rate."""

from typing import Any

import pytest

from robojax.robot.arm import JOINTS, JointCalibration, compute_ranges
from robojax.robot.fit import compare_joints, compare_rates, compare_units, read_policy_fit

WIRE = ["Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw"]
ALOHA = [f"{side}_{number}" for side in ("left", "right") for number in range(7)]
CALIBRATION = {name: JointCalibration(servo, 0, 0, 1024, 3072) for name, servo in JOINTS.items()}  # +-90 degrees.


def answer(names: Any = WIRE, **more: Any) -> dict[str, Any]:
    """Return the server's description of a policy with these joints."""
    width = more.pop("width", 6)
    needs = {"action": width, "joint_names": names, "rate": 30.0, "controls_joints": True, "action_range": None}
    needs |= {name: more.pop(name) for name in tuple(more) if name in needs}
    reply = {"fits": True, "misfits": [], "policy_type": "act", "camera_names": [], "joint_names": names, "rate": 30.0}
    return reply | more | {"requirements": needs}


@pytest.mark.parametrize(
    ("reply", "joint_names", "level", "message"),
    [
        (answer(), None, "ok", "shoulder_pan, shoulder_lift"),
        (answer([f"{name}.pos" for name in JOINTS]), None, "ok", "wrist_roll, gripper"),
        (answer(ALOHA, width=14), None, "fail", "14 joints (left_0, left_1"),
        (answer(None, width=14), None, "fail", "this arm has 6"),
        (answer(None, width=7), None, "fail", "moves 7 joints"),
        (answer(ALOHA[:6]), None, "fail", "the policy moves left_0"),
        (answer(controls_joints=False), None, "fail", "not targets of joints"),
        (answer(None, fits=False, misfits=["joint_names is missing"]), None, "fail", "joint_names is missing"),
        (answer(None), list(JOINTS), "ok", "shoulder_pan"),
        (answer(None), ALOHA[:6], "fail", "the policy moves left_0"),
    ],
)
def test_joints_of_policy_and_arm_must_match(reply: Any, joint_names: Any, level: str, message: str) -> None:
    found = compare_joints(read_policy_fit(reply), joint_names)
    assert (found.name, found.level) == ("joints", level), found
    assert message in found.found
    assert (found.fix == "") is (level == "ok")
    if "does not name" in found.found:
        assert "--policy.joint_names=shoulder_pan,shoulder_lift" in found.fix


def ranges(**ends: float) -> list[list[float]]:
    """Return trained ranges of -50..50, except for the named joints."""
    high = [ends.get(name, 50.0) for name in JOINTS]
    return [[-end for end in high], high]


@pytest.mark.parametrize(
    ("action_range", "use_degrees", "level", "message"),
    [
        (ranges(), False, "ok", "-100..100 of the range"),
        (ranges(shoulder_pan=118.0), False, "fail", "shoulder_pan reaches"),
        (ranges(shoulder_pan=80.0), True, "ok", "degrees"),
        (ranges(shoulder_pan=118.0), True, "warn", "cuts targets at 100"),
        (ranges(wrist_flex=100.0), True, "warn", "where -100..100 of a range ends"),
        (ranges(wrist_flex=99.3), True, "warn", "of this arm's range"),
        (ranges(**dict.fromkeys(JOINTS, 1.5)), False, "fail", "radians"),
        (ranges(**dict.fromkeys(JOINTS, 1.5)), True, "fail", "radians"),
        (ranges(shoulder_pan=118.0), None, "fail", "--robot.use_degrees is missing; shoulder_pan"),
        (None, None, "fail", "--robot.use_degrees is missing"),
        (None, False, "warn", "cannot be compared"),
    ],
)
def test_unit_is_compared_with_training(action_range: Any, use_degrees: bool | None, level: str, message: str) -> None:
    fit = read_policy_fit(answer(action_range=action_range))
    found = compare_units(fit, use_degrees, compute_ranges(CALIBRATION))
    assert (found.name, found.level) == ("units", level), found
    assert message in found.found
    if level == "fail" and "118" in found.found:
        assert "--robot.use_degrees=true" in found.fix


@pytest.mark.parametrize(
    ("trained", "use_degrees", "limit", "level", "message"),
    [
        (1.5, True, 3.0, "ok", "degrees"),
        (1.5, True, 170.0, "fail", "radians"),
        (150.0, True, 170.0, "ok", "left_0 reaches"),
        (150.0, True, 90.0, "warn", "beyond the 90 degrees"),
        (150.0, False, 100.0, "fail", "not -100..100"),
    ],
)
def test_unit_of_another_robot_is_compared_with_training(
    trained: float, use_degrees: bool, limit: float, level: str, message: str
) -> None:
    """The robot has no joint of an SO-101; its limits are in its own unit."""
    fit = read_policy_fit(answer(ALOHA[:6], action_range=[[-trained] * 6, [trained] * 6]))
    found = compare_units(fit, use_degrees, dict.fromkeys(ALOHA[:6], (-limit, limit)))
    assert (found.name, found.level) == ("units", level), found
    assert message in found.found


@pytest.mark.parametrize(
    ("rate", "fps", "readings", "camera", "timeout", "level", "message"),
    [
        (30.0, 30.0, 200.0, 30.0, 0.5, "ok", "30 times a second"),
        (50.0, 30.0, 200.0, 50.0, 0.5, "fail", "--fps=50"),
        (50.0, 50.0, 20.0, 50.0, 0.5, "fail", "latency timer"),
        (50.0, 50.0, None, 50.0, 0.5, "ok", "50 times a second"),
        (30.0, 100.0, 60.0, 30.0, 0.5, "warn", "--fps=30"),
        (50.0, 50.0, 200.0, 15.0, 0.5, "warn", "front (15)"),
        (2.0, 30.0, 200.0, 30.0, 0.5, "fail", "--watchdog-ms=1000"),
    ],
)
def test_rate_of_the_policy_is_compared_with_the_arm(
    rate: float, fps: float, readings: float | None, camera: float, timeout: float, level: str, message: str
) -> None:
    fit = read_policy_fit(answer() | {"rate": rate})
    found = compare_rates(fit, fps, readings=readings, cameras={"front": camera}, command_timeout=timeout)
    assert (found.name, found.level) == ("rate", level), found
    assert message in found.found + found.fix


def test_policy_without_a_rate_uses_the_rate_of_the_server() -> None:
    reply = answer()
    reply["requirements"]["rate"] = None
    found = compare_rates(read_policy_fit(reply), 30.0, readings=None, cameras={}, command_timeout=0.5)
    assert (found.level, "does not say its rate" in found.found) == ("warn", True)
    assert "robojax.json" in found.fix
