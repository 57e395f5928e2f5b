"""Folders of demonstrations, written once: each version, and pictures in the rows."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.jaxmodels.data import demonstrations

WRITERS: dict[str, Callable[[Path], Path]] = {
    "v3.0": demonstrations.write,
    "v2.1": demonstrations.write_old,
    "v2.1 with pictures": lambda folder: demonstrations.write_old(folder, kind="image"),
}


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders by kind; tests must not change them."""
    root = tmp_path_factory.mktemp("datasets")
    return {name: write(root / name.replace(" ", "_")) for name, write in WRITERS.items()}


@pytest.fixture(params=WRITERS)
def folder(written, request: pytest.FixtureRequest) -> Path:
    """Return the folder of each kind in turn."""
    return written[request.param]


@pytest.fixture
def copy(written, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a folder, so that a test can change it."""
    return lambda name: Path(shutil.copytree(written[name], tmp_path / "dataset"))
