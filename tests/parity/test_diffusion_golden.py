"""Diffusion Policy against outputs of LeRobot 0.6.1 (tests/golden/lerobot_diffusion/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest

import jaxmodels

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_diffusion"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
pytestmark = pytest.mark.fully_compiled
TOLERANCE = 1e-4  # of the largest magnitude; the same weights through other torch kernels differ by 3e-6


def chunks(name: str):
    """(observation with its history, noises, recorded arrays) of every frame at which LeRobot predicted a chunk."""
    with np.load(GOLDEN / name / "io.npz") as file:
        io = dict(file)
    steps = json.loads((GOLDEN / name / "config.json").read_text())["n_obs_steps"]
    features = [key.removeprefix("in.0.") for key in io if key.startswith("in.0.observation.")]
    for frame in (int(key.split(".")[1]) for key in io if key.endswith(".noise") and key.startswith("in.")):
        # What lies before the first frame is a copy of it.
        window = [max(frame - back, 0) for back in reversed(range(steps))]
        seen = {key: np.stack([io[f"in.{at}.{key}"] for at in window], axis=1) for key in features}
        observation = seen if steps > 1 else {key: array[:, 0] for key, array in seen.items()}
        noises = {key: io[f"in.{frame}.{key}"] for key in ("noise", "step_noise") if f"in.{frame}.{key}" in io}
        yield observation, noises, {key.removeprefix(f"out.{frame}."): array for key, array in io.items()}


def error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_those_of_lerobot(name: str, golden_folder) -> None:
    policy = jaxmodels.load_policy(golden_folder(name))
    found = list(chunks(name))
    assert len(found) == 2
    for observation, noises, recorded in found:
        assert error(policy.act(observation, **noises), recorded["chunk"]) < TOLERANCE
