import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robojax.sim import arm as scene
from robojax.sim.arm import HIGH, HOME, JOINTS, LIFTED, LOW, RATE, SimulatedArm, to_radians, to_wire
from robojax.sim.tasks import BEARING, RADIUS, RED
from service.control.joints import SO100


def test_tick_is_one_period_of_the_rate(arm: SimulatedArm):
    arm.reset(0)
    before = arm.data.time
    arm.step(to_wire(HOME))
    assert arm.data.time - before == pytest.approx(1 / RATE)


def test_cubes_are_within_reach_at_different_places(arm: SimulatedArm):
    places = []
    for seed in range(40):
        arm.reset(seed)
        x, y, z = arm.cube
        assert RADIUS[0] <= np.hypot(x, y) <= RADIUS[1]
        assert abs(np.arctan2(x, -y)) <= BEARING
        assert 0 < z < 0.02
        places.append((x, y))
    assert np.ptp(places, axis=0).min() > 0.05
    assert len({tuple(place) for place in places}) == 40


def test_folded_arm_and_cube_do_not_move(arm: SimulatedArm):
    arm.reset(5)
    cube = arm.cube
    for _ in range(50):
        arm.step(to_wire(HOME))
    np.testing.assert_allclose(arm.joints, to_wire(HOME), atol=1.5)
    np.testing.assert_allclose(arm.cube, cube, atol=0.002)
    assert not arm.is_lifted


def test_targets_outside_the_range_are_clipped(arm: SimulatedArm):
    arm.reset(0)
    for _ in range(40):
        arm.step(np.array([1e6, 0, 0, 0, 0, 50.0]))
    assert np.isfinite(arm.joints).all()
    assert arm.joints[0] <= 101


def test_cube_counts_as_lifted_above_six_centimetres(arm: SimulatedArm):
    arm.reset(0)
    for height, counts in ((LIFTED - 0.001, False), (LIFTED + 0.001, True)):
        arm.data.joint(scene.get_body_name(RED)).qpos[2] = height
        assert arm.is_lifted is counts


@pytest.mark.usefixtures("can_draw")
def test_picture_is_rgb_of_the_given_size_and_deterministic(arm: SimulatedArm):
    arm.reset(7)
    first = arm.picture("front", 60, 80)
    assert (first.shape, first.dtype) == ((60, 80, 3), np.uint8)
    np.testing.assert_array_equal(first, arm.picture("front", 60, 80))


def test_arm_moves_without_opengl_and_rendering_is_explained():
    code = (
        "from robojax.sim.arm import SimulatedArm\n"
        "arm = SimulatedArm(); arm.reset(0); arm.step(arm.joints); print('moved')\n"
        "try: arm.picture('front', 32, 32)\n"
        "except RuntimeError as error: print(error)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"MUJOCO_GL": "disabled"}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert "moved" in found.stdout
    assert "apt-get install libegl1" in found.stdout


poses = st.lists(st.floats(-4, 4), min_size=6, max_size=6).map(np.array)


@given(poses)
def test_pose_survives_conversion_to_the_wire_and_back(pose: np.ndarray) -> None:
    np.testing.assert_allclose(to_radians(to_wire(pose)), pose, atol=1e-9)


def test_arm_has_the_joints_and_ranges_of_the_wire() -> None:
    np.testing.assert_allclose(to_wire(LOW), [-100, -100, -100, -100, -100, 0])
    np.testing.assert_allclose(to_wire(HIGH), [100] * 6)
    assert tuple(joint.name for joint in SO100) == JOINTS
