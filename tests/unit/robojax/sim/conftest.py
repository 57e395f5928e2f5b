"""A simulated arm to test with, and a skip with its reason where nothing can draw."""

from collections.abc import Iterator

import pytest

import robojax.sim  # noqa: F401  before MuJoCo, for which it chooses the way to draw

pytest.importorskip("mujoco", reason="the simulated arm needs the extra `sim`")
pytest.importorskip("PIL", reason="the simulated arm needs the extra `sim`")

from robojax.sim.arm import Arm


@pytest.fixture(scope="session")
def arm() -> Iterator[Arm]:
    arm = Arm()
    yield arm
    arm.close()


@pytest.fixture(scope="session")
def can_draw(arm: Arm) -> None:
    arm.reset(0)
    try:
        arm.picture("front", 32, 32)
    except RuntimeError as error:
        pytest.skip(str(error))
