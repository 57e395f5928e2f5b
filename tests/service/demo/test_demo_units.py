"""Radians and wire values."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from service.demo.units import HIGH, JOINTS, LOW, to_radians, to_wire
from service.motion.joints import SO100

poses = st.lists(st.floats(-4, 4), min_size=6, max_size=6).map(np.array)


@given(poses)
def test_a_pose_survives_the_way_to_the_wire_and_back(pose: np.ndarray) -> None:
    np.testing.assert_allclose(to_radians(to_wire(pose)), pose, atol=1e-9)


def test_the_ends_of_a_joints_range_are_the_ends_of_the_wires_range() -> None:
    np.testing.assert_allclose(to_wire(LOW), [-100, -100, -100, -100, -100, 0])
    np.testing.assert_allclose(to_wire(HIGH), [100] * 6)


def test_the_arm_has_the_joints_of_the_wire_in_their_order() -> None:
    assert tuple(joint.name for joint in SO100) == JOINTS
