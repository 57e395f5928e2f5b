"""SmolVLA against outputs of LeRobot 0.6.1 (tests/golden/lerobot_smolvla/README.md)."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxmodels
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.smolvla import POLICY, SmolVlaConfig
from jaxmodels.text import PromptTokenizer
from jaxmodels.types import Language, Observation

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot_smolvla"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
pytestmark = pytest.mark.fully_compiled
TOLERANCE = 1e-5  # of the largest magnitude; every weight moved by 1e-6 of itself makes up to 5e-6


def read_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "io.npz") as file:
        return dict(file)


def measure_error(found: Any, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_chunks_are_those_of_lerobot(name: str, golden_folder) -> None:
    io = read_arrays(name)
    observation: dict[str, Any] = {key.removeprefix("in.0."): io[key] for key in io if key.startswith("in.0.obs")}
    policy = jaxmodels.load_policy(golden_folder(name))
    chunk = policy.act({**observation, "task": io["in.0.task"].tolist()}, noise=io["in.0.noise"])
    assert measure_error(chunk, io["out.0.chunk"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("quick_compilation")
def test_tokens_and_the_first_velocity_are_those_of_lerobot(name: str, golden_folder) -> None:
    io, checkpoint = read_arrays(name), lerobot_folder.read_checkpoint(golden_folder(name))
    config, tokens, mask = checkpoint.config, io["mid.0.tokens"].astype(np.int32), io["mid.0.token_mask"]
    assert isinstance(config, SmolVlaConfig)
    assert checkpoint.tokenizer is not None
    tokenizer = PromptTokenizer(checkpoint.tokenizer, config.prompt_length, config.vocabulary)
    for task, row, is_token in zip(io["in.0.task"].tolist(), tokens, mask, strict=True):
        ids, used, _ = tokenizer(config.format_prompt(task))
        np.testing.assert_array_equal(ids[used], row[is_token])
    frames = [io.get(f"in.0.{camera.name}") for camera in config.cameras]
    observation = Observation(
        images=tuple(None if frame is None else frame.astype(np.float32) / 255 for frame in frames),
        state=io["mid.0.state_normalized"],
        language=Language(tokens, mask),
        noise=io["in.0.noise"],
    )

    def predict(weights: dict[str, jax.Array], observation: Observation) -> jax.Array:
        given = None
        for stage in POLICY.stages:
            given = stage.run(config, weights, observation, given)
        return given

    velocity = jax.jit(predict)(dict(checkpoint.weights), observation)
    assert measure_error(velocity, io["mid.0.velocity"][0]) < TOLERANCE
