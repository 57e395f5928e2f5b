"""diffusers' recorded numbers, and how near ours must be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOLDEN = Path(__file__).parents[2] / "golden" / "samplers"
TOLERANCE = 1e-5  # of the largest number


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((GOLDEN / "cases.json").read_text())
    with np.load(GOLDEN / "cases.npz") as arrays:
        for name, array in arrays.items():
            case, part = name.split("/")
            found[case][part] = array
    return found


def assert_close(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    scale = max(1.0, float(np.abs(theirs).max()))
    assert float(np.abs(ours - theirs).max()) <= tolerance * scale


@pytest.fixture(scope="session")
def same() -> Callable[..., None]:
    """Asserts that arrays agree to 1e-5 of their scale."""
    return assert_close
