"""Fixtures of models, quick compilation, and a check for silent dtype promotion."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.testing.models import *  # noqa: F403 - fixtures
from tests.testing.models import GOLDEN


@pytest.fixture(scope="session")
def small_folder(
    golden_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return the folder of a small policy of any type; it has two cameras if the type has golden files of LeRobot."""
    from jaxmodels import Policy
    from tests.unit.jaxmodels.small_policies import CONFIGS, make_checkpoint

    def find(kind: str) -> Path:
        golden = sorted(path.name for path in GOLDEN.glob(f"lerobot_{kind}/{kind}_two_cameras*"))
        if golden:
            return golden_folder(golden[0])
        folder = tmp_path_factory.mktemp(kind) / "policy"
        Policy(make_checkpoint(CONFIGS[kind])).save(folder)
        return folder

    return find
