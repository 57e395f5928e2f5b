import json
import shutil
from pathlib import Path

import pytest

import jaxmodels
from jaxmodels.errors import CheckpointError, ConfigError, HubError

POLICY = Path(__file__).parents[3] / "robojax" / "sim" / "policy"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(POLICY, tmp_path / "policy"))


def test_a_policy_says_the_same_of_itself_without_its_weights(folder: Path) -> None:
    loaded = jaxmodels.load_policy(folder).requirements
    (folder / "model.safetensors").write_bytes(b"not looked into")
    assert jaxmodels.read_requirements(folder) == loaded
    assert loaded.cameras == {"front": (96, 96)}


def test_a_renamed_camera_is_called_as_the_robot_calls_it(folder: Path) -> None:
    path = folder / "policy_preprocessor.json"
    steps = json.loads(path.read_text())
    rename = next(step for step in steps["steps"] if step["registry_name"] == "rename_observations_processor")
    rename["config"]["rename_map"] = {"observation.images.wrist": "observation.images.front"}
    path.write_text(json.dumps(steps))
    assert set(jaxmodels.read_requirements(folder).cameras) == {"wrist"}
    assert jaxmodels.read_requirements(folder) == jaxmodels.load_policy(folder).requirements


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), CheckpointError, "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), CheckpointError, "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"type": "act", "chunk_size": -1}'), ConfigError, "chunk"),
    ],
    ids=["no weights", "no config", "a config that makes no sense"],
)
def test_what_cannot_be_a_policy_is_refused(folder: Path, spoil, error, text) -> None:
    spoil(folder)
    with pytest.raises(error, match=text):
        jaxmodels.read_requirements(folder)


def test_a_name_that_is_neither_a_folder_nor_a_repo_is_refused() -> None:
    with pytest.raises(HubError, match="neither a folder"):
        jaxmodels.read_requirements("no such/place/at all")
