"""LeRobot's Diffusion Policy: its config, memory, noise and history."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import ConfigError, ObservationError
from jaxmodels.policies.diffusion.config import DiffusionConfig

GOLDEN = Path(__file__).parents[2] / "golden" / "lerobot_diffusion"


def read(name: str = "diffusion_two_cameras_ddpm", **changes: Any) -> DiffusionConfig:
    return DiffusionConfig.from_json(json.loads((GOLDEN / name / "config.json").read_text()) | changes)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"horizon": 18}, "horizon is 18; wanted a multiple of 4"),
        ({"n_action_steps": 16}, "n_action_steps is 16; wanted 15 at most"),
        ({"kernel_size": 4}, "kernel_size is 4; wanted an odd number"),
        ({"down_dims": [32, 60]}, "down_dims has 60, which is not a multiple of n_groups 8"),
        ({"down_dims": []}, r"down_dims is \[\]; wanted 1 to 16 integers"),
        ({"down_dims": 64}, "down_dims is 64; wanted a list of integers"),
        ({"noise_scheduler_type": "PNDM"}, "noise_scheduler_type is 'PNDM'; known: DDPM, DDIM"),
        ({"prediction_type": "v_prediction"}, "prediction_type is 'v_prediction'; known: epsilon, sample"),
        ({"num_inference_steps": 101}, "num_inference_steps is 101; wanted 1 to 100"),
        ({"crop_shape": [80, 85]}, r"the crop is \[80, 85\] of images of \[72, 96\]"),
        ({"crop_shape": [64]}, r"crop_shape is \[64\]; wanted two integers"),
        ({"vision_backbone": "vit"}, "vision_backbone is 'vit'; known: resnet18"),
        ({"pretrained_backbone_weights": "x"}, "pretrained_backbone_weights have batch norms"),
        ({"use_peft": True}, "merge the adapter"),
        ({"input_features": {"observation.state": {"type": "STATE", "shape": [6]}}}, "neither an image nor"),
        ({"beta_start": 0.5}, "betas go from 0.5 to 0.02"),
    ],
)
def test_invalid_config_is_refused_with_accepted_values(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"crop_shape": None}, (72, 96)),
        ({"resize_shape": [48, 64], "crop_shape": None}, (48, 64)),
        ({"resize_shape": [48, 64]}, (48, 64)),  # The crop is derived, or absent.
        ({"resize_shape": [48, 65], "crop_ratio": 0.9, "crop_shape": None}, (43, 58)),
    ],
)
def test_visible_part_of_a_picture_follows_from_resize_and_crop(changes: dict[str, Any], seen: tuple[int, int]) -> None:
    assert read(**changes).encoder_size == seen


@pytest.fixture(scope="module")
def policy(golden_folder) -> jaxmodels.Policy:
    return jaxmodels.load_policy(golden_folder("diffusion_env_state_ddim"))


def observation(batch: int = 1, steps: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "observation.state": random.normal(size=(batch, steps, 2)).astype(np.float32),
        "observation.environment_state": random.normal(size=(batch, steps, 16)).astype(np.float32),
    }


def test_chunks_without_noise_do_not_depend_on_the_batch(policy: jaxmodels.Policy) -> None:
    assert (policy.requirements.observation_steps, policy.requirements.chunk) == (2, 8)
    several = policy.act(observation(3))
    assert several.shape == (3, 8, 2)
    assert np.array_equal(several, policy.act(observation(3)))
    first = {name: array[:1] for name, array in observation(3).items()}
    assert np.abs(policy.act(first) - several[:1]).max() < 1e-4 * np.abs(several).max()
    noise = np.random.default_rng(1).standard_normal((3, 16, 2)).astype(np.float32)
    assert np.abs(policy.act(observation(3), noise=noise) - several).max() > 0.1


@pytest.mark.parametrize(
    ("changes", "noises", "wrong"),
    [
        ({"observation.state": np.zeros((1, 2), np.float32)}, {}, r"has shape \(1, 2\); wanted \(batch, 2, 2\): add a"),
        ({"observation.state": np.zeros((1, 3, 2), np.float32)}, {}, "3 observations on the axis of time, wanted 2"),
        ({}, {"noise": np.zeros((1, 8, 2), np.float32)}, r"noise is float32\[1, 8, 2\]; wanted float32\[1, 16, 2\]"),
        ({}, {"noise": np.full((1, 16, 2), np.nan, np.float32)}, "noise holds nan at"),
        ({}, {"step_noise": np.zeros((7, 1, 16, 2), np.float32)}, "the policy's sampler adds no noise in its steps"),
    ],
)
def test_invalid_histories_and_noises_are_refused(
    policy: jaxmodels.Policy, changes: dict[str, Any], noises: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ObservationError, match=wrong):
        policy.act(observation() | changes, **noises)
