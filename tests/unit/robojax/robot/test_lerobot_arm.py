"""Robots of LeRobot as arms, without LeRobot: limits, targets and failures."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from robojax.robot.arm import Unit
from robojax.robot.checks import check_robot
from robojax.robot.errors import BusLost, RobotError
from robojax.robot.lerobot_arm import LeRobotArm, compute_limits, configure_lerobot_arm, find_limits, read_limits
from robojax.robot.runner import RobotRunner


class FakeRobot:
    """A robot with LeRobot's interface, joints (by default ``elbow`` from -45 to 45 degrees) and ``gripper``."""

    name = id = "fake"

    def __init__(self, joints: Sequence[str] = ("elbow",), unit: Unit = Unit.DEGREES, **changes: Any):
        joint = SimpleNamespace(range_min=1536, range_max=2560)
        modes = dict.fromkeys(joints, unit) | {"gripper": Unit.GRIPPER}
        motors = {
            name: SimpleNamespace(model="m", norm_mode=SimpleNamespace(value=mode)) for name, mode in modes.items()
        }
        self.bus = SimpleNamespace(motors=motors, model_resolution_table={"m": 4097}, apply_drive_mode=True)
        self.calibration = dict.fromkeys(modes, joint)
        self.config = SimpleNamespace(disable_torque_on_disconnect=True)
        self.pose = dict.fromkeys([f"{name}.pos" for name in joints], 50.0) | {"gripper.pos": 5.0}
        self.action_features = dict.fromkeys(self.pose, float)
        self.observation_features = self.action_features | {"front": (48, 64, 3), "depth": (48, 64, 1)}
        self.is_calibrated, self.is_connected, self.sent = True, False, []
        vars(self).update(changes)

    def connect(self, calibrate: bool) -> None:
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def get_observation(self) -> dict[str, Any]:
        return self.pose | {"front": np.zeros((48, 64, 3), np.uint8), "depth": "depth"}

    def send_action(self, action: dict[str, float]) -> None:
        self.sent.append(action)


@pytest.mark.parametrize(
    ("unit", "limits"),
    [(Unit.DEGREES, (-45.0, 45.0)), (Unit.PERCENT, (-100.0, 100.0)), (Unit.GRIPPER, (0.0, 100.0))],
)
def test_limits_are_the_calibrated_range_in_the_unit(unit: Unit, limits: tuple[float, float]) -> None:
    assert compute_limits(unit, 1000, 2024, 4097) == limits


def test_robot_with_two_arms_has_the_limits_of_both() -> None:
    left, right = FakeRobot(), FakeRobot(config=SimpleNamespace(joint_limits={"elbow": (0.0, 1.0)}))
    both = find_limits(SimpleNamespace(left_arm=left, right_arm=right, config=SimpleNamespace()))
    ranges = {"left_elbow": (-45.0, 45.0), "right_elbow": (0.0, 1.0)}
    assert both == ranges | dict.fromkeys(("left_gripper", "right_gripper"), (0.0, 100.0))


@pytest.mark.parametrize("text", ["elbow", "elbow=5", "elbow=5:5", "elbow=9:1", "elbow=nan:1", "=1:2"])
def test_invalid_limits_are_refused(text: str) -> None:
    assert read_limits(["elbow.pos=-1.5:2"]) == {"elbow": (-1.5, 2.0)}
    with pytest.raises(RobotError) as refused:
        read_limits([text])
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"calibration": {}}, {"elbow": (0.0, 1.0)}, "gripper"),
        ({"bus": None}, {}, "elbow"),
        ({}, {"wrist": (0.0, 1.0)}, "wrist"),
        ({"action_features": {"elbow.pos": float, "x.vel": float}}, {}, "x.vel"),
    ],
    ids=["no calibration", "no motors", "unknown joint", "velocities"],
)
def test_robot_without_limits_is_refused(changes: dict[str, Any], given: Any, message: str) -> None:
    with pytest.raises(RobotError) as refused:
        LeRobotArm(FakeRobot(**changes), given)
    assert message in str(refused.value)


def test_targets_stay_in_limits_and_start_from_the_pose() -> None:
    robot = FakeRobot()
    arm = LeRobotArm(robot, {"gripper": (1.0, 9.0)})
    assert arm.cameras == ("front",)
    assert configure_lerobot_arm(arm).max_relative_target == {"elbow": 9.0, "gripper": 0.8}
    arm.enable_torque()
    assert arm.pictures["front"].shape == (48, 64, 3)
    arm.move({"elbow": 80.0})
    arm.move({"elbow": -80.0, "gripper": 0.0})
    assert robot.sent == [
        {"elbow.pos": 50.0, "gripper.pos": 5.0},  # The joint is outside its limits and stays there.
        {"elbow.pos": 50.0, "gripper.pos": 5.0},
        {"elbow.pos": -45.0, "gripper.pos": 1.0},
    ]


@pytest.mark.parametrize(
    ("unit", "elbow"),
    [(Unit.DEGREES, ("warn", "50.0, limits -45 to 45")), (Unit.PERCENT, ("ok", "50.0, limits -100 to 100"))],
)
def test_check_compares_the_pose_with_the_limits_without_motion(unit: Unit, elbow: tuple[str, str]) -> None:
    robot = FakeRobot(unit=unit)
    arm = LeRobotArm(robot, {})
    config = configure_lerobot_arm(arm)
    assert config.use_degrees is (unit is Unit.DEGREES)
    findings = list(check_robot(RobotRunner(config, "http://127.0.0.1:9", lerobot=arm)))
    found = {each.name: (each.level, each.found) for each in findings}
    assert found["elbow"] == elbow
    assert (found["gripper"][0], found["camera front"]) == ("ok", ("ok", "64x48"))
    assert found["server"][0] == "fail"
    assert robot.sent == []

    robot.is_calibrated = False
    (robot_found,) = [
        each for each in check_robot(RobotRunner(config, "http://127.0.0.1:9", lerobot=arm)) if each.name == "robot"
    ]
    assert (robot_found.level, "calibration" in robot_found.found) == ("fail", True)


def test_lost_robot_is_held_when_it_is_disconnected() -> None:
    robot = FakeRobot()
    arm = LeRobotArm(robot, {})
    arm.enable_torque()
    arm.move({"elbow": 0.0, "gripper": 50.0})
    robot.pose = {"elbow.pos": float("nan"), "gripper.pos": 5.0}
    assert [arm.read_pose(), arm.read_pose()] == [None, None]
    with pytest.raises(BusLost, match="not finite"):
        arm.read_pose()
    assert arm.hold_responding_servos() == ["elbow", "gripper"]
    assert robot.sent[-1] == {"elbow.pos": 50.0, "gripper.pos": 50.0}
    assert robot.config.disable_torque_on_disconnect is False


def test_robot_that_differs_from_its_calibration_does_not_move() -> None:
    robot = FakeRobot(is_calibrated=False)
    with pytest.raises(RobotError, match="calibration"):
        LeRobotArm(robot, {}).enable_torque()
    assert robot.sent == []
