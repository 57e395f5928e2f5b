"""A simulated arm, a skip without rendering, and the console command as a process."""

import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

import robojax.sim  # noqa: F401 - it selects MuJoCo's renderer before MuJoCo is imported

pytest.importorskip("mujoco", reason="the simulated arm needs the extra `sim`")
pytest.importorskip("PIL", reason="the simulated arm needs the extra `sim`")

from robojax.sim.arm import SimulatedArm

ROBOJAX = (sys.executable, "-m", "robojax.cli")


def run_robojax(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROBOJAX, *arguments], env=env, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="session")
def arm() -> Iterator[SimulatedArm]:
    arm = SimulatedArm()
    yield arm
    arm.close()


@pytest.fixture(scope="session")
def can_draw(arm: SimulatedArm) -> None:
    arm.reset(0)
    try:
        arm.picture("front", 32, 32)
    except RuntimeError as error:
        pytest.skip(str(error))
