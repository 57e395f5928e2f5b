"""Tasks: positions of cubes, the target cube, and the verdict."""

from collections.abc import Iterator

import numpy as np
import pytest

from robojax.sim import arm as scene
from robojax.sim.arm import JOINTS, LIFTED, SimulatedArm
from robojax.sim.expert import Kinematics, interpolate_targets, plan_legs
from robojax.sim.tasks import BEARING, BLUE, PICK, RADIUS, RED, TWO_CUBES


@pytest.fixture(scope="module")
def two() -> Iterator[SimulatedArm]:
    two = SimulatedArm(TWO_CUBES)
    yield two
    two.close()


def test_places_of_the_task_pick_do_not_change():
    # The published scores of the shipped policy depend on these radii, bearings and yaws.
    for seed in (0, 1, 299, 5000, 5099, 6000):
        random = np.random.default_rng(seed)
        place = random.uniform(0.20, 0.28), random.uniform(-0.6, 0.6), random.uniform(-0.25, 0.25)
        assert PICK.draw_positions(seed) == (place,)


def test_two_cubes_are_on_opposite_sides():
    differences = []
    for seed in range(200):
        red, blue = TWO_CUBES.draw_positions(seed)
        for place in (red, blue):
            assert RADIUS[0] <= place.radius <= RADIUS[1]
            assert abs(place.bearing) <= BEARING
        assert np.hypot(*np.subtract(red.centre, blue.centre)) >= TWO_CUBES.apart
        differences.append(red.bearing > blue.bearing)
    assert 80 <= sum(differences) <= 120


def test_target_alternates_and_is_independent_of_positions(two: SimulatedArm):
    for seed in range(6):
        two.reset(seed)
        assert two.target_cube.name == ("red", "blue")[seed % 2]
    for cube in (0, 1):
        bearings = np.array([TWO_CUBES.draw_positions(seed)[cube].bearing for seed in range(400)])
        assert abs(bearings[::2].mean() - bearings[1::2].mean()) < 0.1


def test_same_seed_gives_the_same_episode(two: SimulatedArm):
    two.reset(7)
    before = two.data.qpos.copy()
    two.reset(8)
    two.reset(7)
    np.testing.assert_array_equal(two.data.qpos, before)


@pytest.mark.parametrize("seed", [2, 3])
def test_expert_lifts_only_the_target_cube(two: SimulatedArm, seed: int):
    two.reset(seed)
    other = BLUE if two.target_cube == RED else RED
    before = two.data.joint(scene.get_body_name(other)).qpos.copy()
    for target in interpolate_targets(plan_legs(two, Kinematics(two))):
        two.step(target)
    assert two.is_lifted
    assert two.wrong is None
    np.testing.assert_allclose(two.data.joint(scene.get_body_name(other)).qpos, before, atol=0.002)


def test_lifting_the_wrong_cube_is_a_named_failure(two: SimulatedArm):
    two.reset(0)
    assert two.target_cube == RED
    two.target_cube = BLUE  # The expert lifts this cube.
    legs = plan_legs(two, Kinematics(two))
    two.reset(0)
    for target in interpolate_targets(legs):
        two.step(target)
    assert (two.is_lifted, two.wrong) == (False, "blue")


def test_wrong_cube_that_was_put_back_still_counts(two: SimulatedArm):
    two.reset(0)
    asked, other = (two.data.joint(scene.get_body_name(cube)) for cube in (RED, BLUE))
    other.qpos[2] = LIFTED + 0.02
    two.step(two.joints)
    other.qpos[2] = scene.CUBE_SIZE / 2
    two.step(two.joints)
    asked.qpos[2] = LIFTED + 0.02
    assert (two.is_lifted, two.wrong) == (False, "blue")
    two.reset(0)
    assert two.wrong is None


def test_task_with_one_cube_has_no_wrong_cube(arm: SimulatedArm):
    arm.reset(3)
    arm.data.joint(scene.get_body_name(RED)).qpos[2] = LIFTED + 0.02
    arm.step(arm.joints)
    assert (arm.is_lifted, arm.wrong) == (True, None)


def test_cubes_do_not_change_the_motion_of_the_arm(arm: SimulatedArm, two: SimulatedArm):
    # The joints and motors come first in both models, with the names of the wire.
    for each in (arm, two):
        assert [each.model.actuator(number).name for number in range(each.model.nu)] == list(JOINTS)
    assert (arm.addresses == two.addresses).all()


@pytest.mark.usefixtures("can_draw")
def test_front_camera_sees_both_cubes(two: SimulatedArm):
    for seed in range(8):
        two.reset(seed)
        picture = two.picture("front", 120, 120).astype(int)
        red, green, blue = (picture[..., channel] for channel in range(3))
        seen = {"red": (red > 80) & (green < 60) & (abs(green - blue) < 12), "blue": (blue > 120) & (red < 60)}
        for cube, place in zip(TWO_CUBES.cubes, TWO_CUBES.draw_positions(seed), strict=True):
            assert seen[cube.name].sum() > 20, f"{cube.name} of seed {seed}"
            column = np.nonzero(seen[cube.name])[1].mean() / 120
            assert abs(column - (0.5 + 2.2 * place.centre[0])) < 0.05
