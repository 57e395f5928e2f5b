"""The arm: engaging it causes no jump or fall, and mismatching hardware is refused."""

import time

import pytest

from robojax.robot import _scservo, arm_thread, bus
from robojax.robot.arm import JOINTS, Arm
from robojax.robot.arm_thread import ArmThread, JointTracker
from robojax.robot.errors import BusLost, RobotError
from robojax.robot.simulated_bus import SimulatedBus
from tests.testing.waiting import wait_until

ALL = tuple(JOINTS.values())


def test_limp_arm_is_configured_like_lerobot_and_held_in_place(arm: Arm, servos: SimulatedBus) -> None:
    for servo in ALL:
        servos.line.servos[servo].set_position(1000 + servo)
        servos.line.servos[servo][bus.GOAL_POSITION] = 3000  # Left from an earlier run.
    arm.enable_torque()
    for servo in ALL:
        memory = servos.line.servos[servo]
        assert (memory[bus.P_COEFFICIENT], memory[bus.RETURN_DELAY]) == (16, 0)
        assert memory[bus.TORQUE_ENABLE] == 1
        assert memory[bus.GOAL_POSITION] == 1000 + servo
        assert all(goal == 1000 + servo for _, goal in memory.written)
    assert servos.line.servos[6][bus.MAX_TORQUE] == 500
    arm.disable_torque()
    assert arm.held == []


def test_held_arm_is_not_released(arm: Arm, servos: SimulatedBus) -> None:
    servos.line.servos[2][bus.TORQUE_ENABLE] = 1
    arm.enable_torque()
    # Its torque was never off, so nothing was configured, and its goal is unchanged.
    assert servos.line.servos[2][bus.P_COEFFICIENT] == 32
    assert servos.line.servos[2].written == []
    assert arm.held == list(JOINTS)


def test_pose_and_targets_use_the_units_of_the_policy(arm: Arm, servos: SimulatedBus) -> None:
    arm.enable_torque()
    arm.move({"shoulder_pan": 100.0, "gripper": 0.0})
    arm.read_pose()  # Servos do not confirm a target, but they answer the next request.
    assert [servos.line.servos[servo][bus.GOAL_POSITION] for servo in (1, 6, 3)] == [3395, 700, 2048]
    arm.move({"wrist_roll": -100.0})
    arm.read_pose()
    servos.line.servos[5].set_position(700)
    assert (arm.read_pose() or {})["wrist_roll"] == pytest.approx(-100.0, abs=0.5)


@pytest.mark.parametrize("what", ["missing", "model", "calibration"])
def test_mismatching_hardware_is_refused_before_holding(arm: Arm, servos: SimulatedBus, what: str) -> None:
    if what == "missing":
        servos.line.silent.add(3)
    elif what == "model":
        servos.line.servos[3][bus.MODEL] = 2825
    else:
        servos.line.servos[3][bus.HOMING_OFFSET] = 5
    with pytest.raises(RobotError, match="elbow_flex"):
        arm.enable_torque()
    assert all(servos.line.servos[servo][bus.TORQUE_ENABLE] == 0 for servo in ALL)


def test_three_lost_readings_mean_a_lost_servo(arm: Arm, servos: SimulatedBus, monkeypatch: pytest.MonkeyPatch) -> None:
    servos.line.silent.add(2)
    with monkeypatch.context() as quick:
        quick.setattr(_scservo, "PACKET_TIMEOUT", 300.0)
        assert arm.read_pose() is None
    servos.line.silent.clear()
    assert arm.read_pose() is not None
    monkeypatch.setattr(_scservo, "PACKET_TIMEOUT", 300.0)
    servos.line.silent.add(2)
    assert (arm.read_pose(), arm.read_pose()) == (None, None)
    with pytest.raises(BusLost, match="servo 2"):
        arm.read_pose()


@pytest.mark.parametrize("how", ["position", "sensor"])
def test_servo_without_a_position_gets_no_goal(arm: Arm, servos: SimulatedBus, how: str) -> None:
    arm.enable_torque()
    if how == "position":
        servos.line.servos[2].set_position(30_000)
    else:
        servos.line.servos[2].status = 2
    assert (arm.read_pose(), arm.read_pose()) == (None, None)
    with pytest.raises(BusLost, match="shoulder_lift: servo 2 does not know its position"):
        arm.read_pose()
    before = servos.line.servos[2].written[:]
    held = arm.hold_responding_servos()
    assert set(JOINTS) - set(held) == {"shoulder_lift"}
    assert servos.line.servos[2].written == before


def test_active_servo_in_another_mode_is_refused(arm: Arm, servos: SimulatedBus) -> None:
    servos.line.servos[1][bus.TORQUE_ENABLE] = 1
    servos.line.servos[1][bus.OPERATING_MODE] = 1
    with pytest.raises(RobotError, match="not in position mode"):
        arm.enable_torque()


def test_arm_is_held_even_if_the_last_reading_fails(arm: Arm, servos: SimulatedBus, monkeypatch) -> None:
    arm.enable_torque()
    shoulder, body = servos.line.servos[1], ArmThread(arm, JointTracker(JOINTS, command_timeout=5.0), rate=50.0)
    read = arm.read_pose
    unread: list[bool] = []

    def pose() -> dict[str, float] | None:
        if body.is_over and not unread:
            unread.append(True)
            return None
        return read()

    monkeypatch.setattr(arm, "read_pose", pose)
    monkeypatch.setattr(shoulder, "_speed", 100.0)  # The motion takes seconds on any machine.
    with body:
        body.command({"shoulder_pan": 100.0})
        wait_until(lambda: shoulder[bus.GOAL_POSITION] >= 3395)
    assert unread
    assert body.failure is None
    wait_until(lambda: shoulder[bus.GOAL_POSITION] < 3395)  # Servos do not confirm a target.


def test_reset_does_not_release_an_unreadable_arm(arm: Arm, servos: SimulatedBus, monkeypatch) -> None:
    monkeypatch.setattr(arm_thread, "MAX_POSE_AGE", 0.2)
    arm.enable_torque()
    read, is_failing = arm.read_pose, False
    monkeypatch.setattr(arm, "read_pose", lambda: None if is_failing else read())
    with ArmThread(arm, JointTracker(JOINTS, command_timeout=5.0), rate=50.0) as body:
        wait_until(lambda: body.pose is not None)
        body.stop("emergency stop", is_latched=True)
        is_failing = True
        time.sleep(0.4)
        assert "cannot be read" in str(body.reset(1))
        assert body.latch is not None
        is_failing = False
        wait_until(lambda: body.reset(1) is None)
        assert body.latch is None
        # A reset of one stop does not release a later stop.
        body.stop("emergency stop", is_latched=True)
        body.stop("second stop", is_latched=True)
        assert body.reset(2) == "second stop"
        servos.line.silent.add(3)
        wait_until(lambda: body.is_over)
        assert body.latch is not None
        assert "servo 3" in str(body.reset(body.latch.number))
        assert body.latch is not None
