"""Training of each policy type: instructions, frozen parts, and use of the trained policy."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmodels
from jaxmodels.data import Dataset, open_dataset
from jaxmodels.errors import ConfigError, DatasetError
from jaxmodels.policies import lerobot_folder, trained_types
from jaxmodels.training import OptimizerConfig, Start, TrainingProgress, new_policy, policy_fields, train
from jaxmodels.training.initial_policy import read_clip_text
from jaxmodels.training.train_state import read_instructions
from tests.unit.jaxmodels.training.conftest import TINY, MakeConfig, write_demos

CLIP = Path(__file__).parents[3] / "golden" / "clip_text"  # A small CLIP with random weights.
TEXT = {"kind": "small", "length": 24, "width": 8, "n_layers": 1, "n_heads": 2, "hidden": 16}


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("data") / "two_tasks"
    return open_dataset(write_demos(folder, tasks=("go there", "go the other way")))


def start_of(kind: str, dataset: Dataset, **text: Any) -> Start:
    reads = {"text_encoder": {**TEXT, **text}} if "text_encoder" in policy_fields(kind) else {}
    return new_policy(dataset, kind, values={**TINY[kind], **reads})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="the extra language is not installed")
    folder = shutil.copytree(CLIP / "quick", tmp_path_factory.mktemp("data") / "clip")
    shutil.copy(CLIP / "tokenizer.json", folder)
    return Path(folder)


# ACT has its own tests in `test_training.py`, and Diffusion Policy below, because its ResNet compiles for long.
@pytest.mark.parametrize("kind", [kind for kind in trained_types() if kind not in ("act", "diffusion")])
def test_trained_policy_is_usable(kind: str, two_tasks: Dataset, clip: Path, tmp_path: Path, config) -> None:
    if kind == "diffusion2d":
        start = new_policy(two_tasks, kind, text_encoder=clip, values=TINY[kind])
    else:
        start = start_of(kind, two_tasks)
    train(two_tasks, start, config(steps=2, log_freq=1), tmp_path / "run")
    policy = jaxmodels.load_policy(tmp_path / "run" / "policy")
    assert policy.requirements.language == ("text_encoder" in policy_fields(kind))
    observation: dict[str, Any] = {
        "observation.state": np.zeros((1, 2), np.float32),
        "observation.images.front": np.zeros((1, 16, 16, 3), np.uint8),
    }
    there, elsewhere = (policy.act({**observation, "task": [task]}) for task in two_tasks.tasks)
    assert there.shape == (1, policy.requirements.chunk, 2)
    assert np.isfinite(there).all()
    assert (there != elsewhere).any() == policy.requirements.language
    if kind == "diffusion2d":  # The CLIP stays frozen.
        weights = lerobot_folder.read_checkpoint(tmp_path / "run" / "policy").weights
        for name, array in read_clip_text(clip).weights.items():
            np.testing.assert_array_equal(weights[f"text.{name}"], array, err_msg=name)


def test_policy_of_two_observations_learns(places: Dataset, tmp_path: Path, config: MakeConfig) -> None:
    """The loss falls, and the served chunk begins at the newest observation."""
    reported: list[TrainingProgress] = []
    adam = OptimizerConfig("adam", lr=1e-2, betas=(0.95, 0.999))
    # Predicting samples needs a tenth of the training steps.
    start = start_of("diffusion", places).with_values({"prediction_type": "sample"})
    long = config(steps=120, batch_size=32, optimizer=adam, log_freq=12, save_freq=1000)
    train(places, start, long, tmp_path / "run", on_progress=reported.append)
    assert reported[-1].loss < 0.1 * reported[0].loss
    policy = jaxmodels.load_policy(tmp_path / "run" / "policy")
    assert (policy.requirements.observation_steps, policy.requirements.chunk) == (2, 4)
    rows = np.arange(len(places))[np.arange(len(places)) % 8 < 4]  # Rows that are followed by a whole chunk.
    windows, _ = places.window_rows(rows, (-1, 0))
    seen = {name: places.vectors(name)[windows] for name in ("observation.state", "observation.environment_state")}
    wanted, _ = places.window("action", rows, range(4))
    error = np.abs(policy.act(seen) - wanted)
    assert error.mean() < 0.03 * np.abs(wanted).max(), (error.mean(), error.max())


def test_misspelt_training_fields_are_refused_even_when_off(places: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"diffusion config: unknown fields crop_is_randon; known: .*crop_is_random"):
        new_policy(places, "diffusion", values={"crop_is_randon": False})
    with pytest.raises(ConfigError, match="unknown fields other"):
        start_of("diffusion", places).with_values({"other": None})


def test_clip_and_another_text_encoder_exclude_each_other(two_tasks: Dataset, tmp_path: Path) -> None:
    values = {**TINY["diffusion2d"], "text_encoder": "small"}
    with pytest.raises(ConfigError, match=r"'small' among the policy's fields; wanted one of --text_encoder"):
        new_policy(two_tasks, "diffusion2d", text_encoder=tmp_path, values=values)
    with pytest.raises(ConfigError, match=r"folder or repo of a CLIP is given as --text_encoder"):
        new_policy(two_tasks, "diffusion2d", values={**TINY["diffusion2d"], "text_encoder": "openai/clip"})


def test_encoders_without_weights_and_data_without_tasks_are_refused(two_tasks: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"text_encoder stays as it is in training, but has no weights"):
        start_of("diffusion2d", two_tasks, is_frozen=True)
    with pytest.raises(DatasetError, match=r"the dataset's tasks are \['go', ''\]"):
        read_instructions(start_of("diffusion2d", two_tasks).policy, ("go", ""), None)


def test_preset_makes_a_policy_and_fields_override_it(dataset: Dataset) -> None:
    for kind in trained_types():
        policy = new_policy(dataset, kind, preset="small", image_size=(48, 32), values={"n_action_steps": 3}).policy
        assert policy.cameras[0].shape == (3, 48, 32)
        assert policy.action.shape == (2,)
        assert policy.n_action_steps == 3
        # LeRobot's Diffusion Policy supports only ResNets as backbones.
        assert policy.vision_backbone in ("resnet18" if kind == "diffusion" else "small_cnn", None)
    with pytest.raises(ConfigError, match="preset is 'tiny'; known: small"):
        new_policy(dataset, "act", preset="tiny")
    with pytest.raises(ConfigError, match=r"'smolvla' is served and not trained here; .* or train act, diffusion, "):
        new_policy(dataset, "smolvla")
    # A backbone starts from random weights on request only.
    with pytest.raises(ConfigError, match=r"pretrained_backbone_weights .* is what torchvision would download"):
        new_policy(dataset, "act")
    assert new_policy(dataset, "act", values={"pretrained_backbone_weights": None}).backbone is None
