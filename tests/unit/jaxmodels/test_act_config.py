"""Reading and refusing configs of ACT."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxmodels.errors import ConfigError
from jaxmodels.policies import get_policy_type, policy_types
from jaxmodels.policies.act.config import ActConfig
from jaxmodels.types import Feature

GOLDEN = Path(__file__).parents[2] / "golden" / "lerobot_act"
ACTION = {"type": "ACTION", "shape": [6]}


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_cameras_have_the_order_of_the_file() -> None:
    values = read("act_two_cameras_no_vae")
    cameras = [camera.name for camera in ActConfig.from_json(values).cameras]
    values["input_features"] = dict(reversed(values["input_features"].items()))
    assert [camera.name for camera in ActConfig.from_json(values).cameras] == cameras[::-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim_model": 18, "n_heads": 4}, "not a multiple of n_heads 4"),
        ({"dim_model": 18, "n_heads": 2}, "not a multiple of 4"),
        ({"n_action_steps": 7}, "more than chunk_size 6"),
        ({"temporal_ensemble_coeff": 0.01}, "it must be 1"),
        ({"n_obs_steps": 2}, "act reads 1 observation"),
        ({"feedforward_activation": "tanh"}, "known: relu, gelu, glu"),
        ({"feedforward_activation": "glu", "dim_feedforward": 25}, "cannot be halved"),
        ({"vision_backbone": "vit"}, "known: resnet18"),
        ({"vision_backbone": "resnet18", "replace_final_stride_with_dilation": True}, "use resnet50"),
        ({"use_peft": True}, "merge the adapter"),
        ({"normalization_mapping": (("STATE", "GUESS"),)}, "STATE: GUESS"),
        ({"output_features": ()}, "no feature 'action'"),
        ({"input_features": (Feature("observation.state", "STATE", (3,)),)}, "neither an image nor"),
        ({"input_features": (Feature("observation.env", "ENV", (3,)),)}, "observation.environment_state"),
    ],
)
def test_invalid_config_is_refused_with_the_reason(small, changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(small(cameras=("front",)), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_vae": 1}, "use_vae is 1"),
        ({"input_features": [1]}, "wanted an object of features"),
        ({"input_features": {"observation.state": {"type": "STATE"}}}, "with type and shape"),
        ({"input_features": {"observation.images.a": {"type": "VISUAL", "shape": [96, 96, 3]}}}, "3, height, width"),
        ({"input_features": {"observation.state": {"type": "FORCE", "shape": [2]}}}, "wanted one of STATE"),
        ({"normalization_mapping": ["MEAN_STD"]}, "is not an object"),
        ({"output_features": {"action": {**ACTION, "names": ["a", "b"]}}}, "2 names for 6 numbers"),
    ],
)
def test_malformed_file_is_refused_with_the_field(changes, words) -> None:
    with pytest.raises(ConfigError, match=words):
        ActConfig.from_json({**read("act_one_camera"), **changes})


def test_pretrained_revision_is_read_and_written() -> None:
    values = read("act_one_camera")
    config = ActConfig.from_json({**values, "pretrained_revision": "main"})
    assert config.to_json()["pretrained_revision"] == "main"
    unset = ActConfig.from_json({**values, "pretrained_revision": None})
    assert "pretrained_revision" not in unset.to_json()  # LeRobot 0.4.4 lacks the field.


def test_folder_is_the_registry_of_types() -> None:
    assert "act" in policy_types()
    for name in policy_types():
        assert get_policy_type(name).config is not None
    for wrong in ("groot", None, "../act", "__init__"):
        with pytest.raises(ConfigError, match="known: act"):
            get_policy_type(wrong)
