import mujoco
import numpy as np
import pytest

from robojax.sim import arm as scene
from robojax.sim.arm import HIGH, HOME, HORIZON, LOW, SimulatedArm, to_wire
from robojax.sim.expert import HOVER, UP, Kinematics, interpolate_targets, plan_legs


@pytest.fixture(scope="module")
def kinematics(arm: SimulatedArm) -> Kinematics:
    return Kinematics(arm)


def grip_of(arm: SimulatedArm, pose: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of the grip for this pose and the direction of the fingers."""
    data = mujoco.MjData(arm.model)
    data.qpos[arm.addresses] = pose
    mujoco.mj_kinematics(arm.model, data)
    hand = arm.model.site_bodyid[arm.model.site(scene.GRIP).id]
    return data.site(scene.GRIP).xpos.copy(), -data.xmat[hand].reshape(3, 3)[:, 1]


@pytest.mark.parametrize("seed", [0, 3, 5000, 5002])
def test_expert_lifts_the_cube(arm: SimulatedArm, kinematics: Kinematics, seed: int):
    arm.reset(seed)
    for target in interpolate_targets(plan_legs(arm, kinematics)):
        arm.step(target)
    assert arm.is_lifted


def test_planning_does_not_move_the_arm(arm: SimulatedArm, kinematics: Kinematics):
    arm.reset(3)
    before = arm.data.qpos.copy()
    plan_legs(arm, kinematics)
    np.testing.assert_array_equal(arm.data.qpos, before)


def test_solved_pose_reaches_its_target_with_fingers_down(arm: SimulatedArm, kinematics: Kinematics):
    for seed in range(5):
        arm.reset(seed)
        place = arm.cube + HOVER * UP
        pose = kinematics.solve(HOME, place)
        grip, fingers = grip_of(arm, pose)
        assert np.linalg.norm(grip - place) < 0.012
        assert fingers[2] < -0.9
        assert ((pose >= LOW) & (pose <= HIGH)).all()


def test_plan_begins_at_home_ends_in_time_and_never_jumps(arm: SimulatedArm, kinematics: Kinematics):
    arm.reset(9)
    path = np.stack([to_wire(HOME), *interpolate_targets(plan_legs(arm, kinematics))])
    assert len(path) - 1 <= HORIZON
    arm_joints = np.abs(np.diff(path[:, :5], axis=0))
    assert arm_joints.max() < 8  # Wire units per tick; the longest way takes 25 ticks.


def test_expert_with_a_wrong_position_lifts_nothing(arm: SimulatedArm, kinematics: Kinematics):
    arm.reset(2)
    legs = plan_legs(arm, kinematics)
    arm.reset(30)
    for target in interpolate_targets(legs):
        arm.step(target)
    assert not arm.is_lifted
