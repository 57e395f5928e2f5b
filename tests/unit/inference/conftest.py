"""Fixtures: observations for engines, and quick compilation."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.testing.compiling import compiling_quickly


def observe(height: int = 48, width: int = 64, position: float = 0.0) -> dict[str, np.ndarray]:
    """Return an observation of a robot whose joints are all at one position, with a frame of this size."""
    return {
        "observation.images.front": np.zeros((1, height, width, 3), np.uint8),
        "observation.state": np.full((1, 6), position, np.float32),
    }


@pytest.fixture(scope="module")
def compilation() -> Iterator[None]:
    """Compile the policies of a module quickly and without the cache on the disk."""
    with pytest.MonkeyPatch.context() as patch, compiling_quickly():
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")
        yield
