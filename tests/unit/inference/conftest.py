"""Observations for engines, and quick compilation."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.testing.compiling import compiling_quickly


def observe(height: int = 48, width: int = 64, place: float = 0.0) -> dict[str, np.ndarray]:
    """An observation of a robot whose joints are all at one place, with a picture of this size."""
    return {
        "observation.images.front": np.zeros((1, height, width, 3), np.uint8),
        "observation.state": np.full((1, 6), place, np.float32),
    }


@pytest.fixture(scope="module")
def compilation() -> Iterator[None]:
    """What a module's policies compile is compiled quickly, and not kept on the disk."""
    with pytest.MonkeyPatch.context() as patch, compiling_quickly():
        patch.setenv("ROBOJAX_COMPILE_CACHE", "off")
        yield
