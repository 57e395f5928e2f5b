"""The goals of the servos, at given times and without threads."""

import math

import pytest

from robojax.robot.arm import JOINTS, normalize_joint_name
from robojax.robot.arm_thread import JointTracker

POSE = dict.fromkeys(JOINTS, 10.0)


@pytest.fixture
def each() -> JointTracker:
    return JointTracker(JOINTS, command_timeout=0.5)


def test_first_command_is_followed_with_any_joint_names(each: JointTracker) -> None:
    assert each.compute_goal(POSE, 0.9).targets is None
    assert each.hold == "no command has arrived yet"
    each.command({"Rotation": 12.0, "gripper": 50.0, "wrist_flex.pos": 9.0}, 1.0)
    assert each.compute_goal(POSE, 1.1).targets == {"shoulder_pan": 12.0, "gripper": 50.0, "wrist_flex": 9.0}
    assert each.hold is None


def test_joints_missing_in_a_message_keep_their_target(each: JointTracker) -> None:
    each.command({"Rotation": 12.0, "Elbow": 13.0}, 1.0)
    each.command({"Elbow": 14.0}, 1.1)
    assert each.compute_goal(POSE, 1.2).targets == {"shoulder_pan": 12.0, "elbow_flex": 14.0}


def test_silence_holds_the_arm_once_in_place_and_keeps_the_grip(each: JointTracker) -> None:
    each.command({"Rotation": 90.0, "Jaw": 3.0}, 1.0)
    each.compute_goal(POSE, 1.0)
    held = each.compute_goal(POSE, 1.6)
    assert held.targets == POSE | {"gripper": 3.0}
    assert each.hold == "no command for 500 ms"
    # Repeatedly using the measured, sagging pose as the goal would let the arm sink.
    assert each.compute_goal(dict.fromkeys(JOINTS, 8.0), 1.7).targets is None
    each.command({"Rotation": 20.0}, 2.0)
    assert (each.compute_goal(POSE, 2.0).targets or {})["shoulder_pan"] == 20.0


def test_distance_of_targets_is_limited() -> None:
    each = JointTracker(JOINTS, command_timeout=0.5, max_relative_target=5.0)
    each.command({"Rotation": 90.0, "Elbow": 12.0, "Pitch": -90.0}, 1.0)
    goal = each.compute_goal(POSE, 1.0)
    assert goal.targets == {"shoulder_pan": 15.0, "elbow_flex": 12.0, "shoulder_lift": 5.0}
    assert set(goal.clamped) == {"shoulder_pan", "shoulder_lift"}


def test_no_command_is_followed_after_an_emergency_stop(each: JointTracker) -> None:
    each.command({"Rotation": 90.0}, 1.0)
    each.compute_goal(POSE, 1.0)
    each.stop("emergency stop", is_latched=True)
    assert each.compute_goal(POSE, 1.1).targets == POSE
    each.command({"Rotation": 90.0}, 1.2)
    assert each.compute_goal(POSE, 1.2).targets is None
    assert (each.hold, each.latch is not None, each.commands) == ("emergency stop", True, 1)


def test_reset_releases_the_latch_and_forgets_older_targets(each: JointTracker) -> None:
    each.command({"Rotation": 90.0, "Elbow": 80.0}, 1.0)
    each.stop("emergency stop", is_latched=True, now=1.1)
    assert each.compute_goal(POSE, 1.1).targets == POSE
    each.stop("emergency stop again", is_latched=True, now=1.2)
    assert (each.latch.number, each.latch.reason) == (2, "emergency stop again")
    assert each.compute_goal(dict.fromkeys(JOINTS, 8.0), 1.3).targets is None  # It is already held.
    each.reset()
    assert each.latch is None
    assert each.compute_goal(POSE, 1.4).targets is None  # A reset does not move the arm.
    each.command({"Rotation": 20.0}, 1.5)
    assert each.compute_goal(POSE, 1.5).targets == {"shoulder_pan": 20.0}
    each.stop("the arm does not answer", is_latched=True, is_final=True)
    each.stop("emergency stop", is_latched=True)
    assert each.latch.is_final


def test_newer_reason_of_a_hold_sends_nothing(each: JointTracker) -> None:
    each.command({"Rotation": 90.0}, 1.0)
    each.compute_goal(POSE, 1.0)
    assert each.compute_goal(POSE, 1.6).targets is not None
    each.stop("the server is gone")
    assert each.compute_goal(dict.fromkeys(JOINTS, 8.0), 1.7).targets is None
    assert each.hold == "the server is gone"
    each.stop("emergency stop", is_latched=True)
    each.stop("the server is gone")
    assert each.hold == "emergency stop"


@pytest.mark.parametrize(
    "bad",
    [
        *({"Rotation": math.nan}, {"Rotation": 1.0, "Elbow": math.inf}),
        *({"leg": 1.0}, {}, {"Rotation": 1, "shoulder_pan": 2}),
    ],
)
def test_invalid_command_is_refused_whole(bad, each: JointTracker) -> None:
    each.command(bad, 1.0)
    assert each.compute_goal(POSE, 1.0).targets is None
    assert each.commands == 0


def test_names_of_old_and_new_datasets_are_equivalent() -> None:
    assert {normalize_joint_name(name) for name in ("Jaw", "gripper", "gripper.pos", "main_gripper")} == {"gripper"}
