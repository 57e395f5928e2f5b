"""The arm's thread, with the real arm on simulated servos."""

import time

from robojax.robot import registers
from robojax.robot.arm import JOINTS, Arm
from robojax.robot.body import Body
from robojax.robot.follower import Follower
from robojax.robot.simulated import SimulatedBus


def test_a_reading_that_fails_at_the_end_is_no_reason_not_to_hold(arm: Arm, servos: SimulatedBus, monkeypatch) -> None:
    arm.engage()
    shoulder, body = servos.servo(1), Body(arm, Follower(JOINTS, patience=5.0), rate=50.0)
    read = arm.pose
    unread: list[bool] = []

    def pose() -> dict[str, float] | None:
        if body.is_over and not unread:
            unread.append(True)
            return None
        return read()

    monkeypatch.setattr(arm, "pose", pose)
    monkeypatch.setattr(shoulder, "_speed", 100.0)  # on its way for seconds, however busy the machine is
    with body:
        body.command({"shoulder_pan": 100.0})
        deadline = time.monotonic() + 60
        while shoulder[registers.GOAL_POSITION] < 3395 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert unread
    assert body.failure is None
    while shoulder[registers.GOAL_POSITION] == 3395 and time.monotonic() < deadline:
        time.sleep(0.005)  # no servo confirms a target, and these have a thread of their own
    assert shoulder[registers.GOAL_POSITION] < 3395
