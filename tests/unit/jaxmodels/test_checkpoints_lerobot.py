"""LeRobot's policy folder: round trips and refusals."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jaxmodels
from jaxmodels.checkpoints.files import write_floats
from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.policies import get_policy_type, lerobot_folder
from tests.testing.models import GOLDEN, edit_json


@pytest.fixture
def folder(golden_folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_folder("act_state_only"), tmp_path / "policy"))


@pytest.mark.parametrize(
    "name", sorted(path.name for path in GOLDEN.glob("lerobot_*/[adps]*_*") if (path / "io.npz").exists())
)
def test_round_trip_is_bit_exact(name: str, golden_folder, tmp_path: Path) -> None:
    source = golden_folder(name)
    checkpoint = lerobot_folder.read_checkpoint(source)
    lerobot_folder.write_checkpoint(tmp_path / "back", checkpoint)
    files, back = ({path.name for path in folder.iterdir() if path.is_file()} for folder in (source, tmp_path / "back"))
    is_language = name.startswith(("pi", "smolvla"))
    list_unused = get_policy_type(checkpoint.config.type).unused
    unused = list_unused(checkpoint.config) if list_unused else {}  # LeRobot needs these tensors, with any values.
    assert is_language or back == files - {"io.npz", "keys.json", "README.md"}
    assert {"config.json", "model.safetensors", "policy_postprocessor.json"} <= back
    with safe_open(tmp_path / "back" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}  # PyTorch's loader needs it.
    renumbered = {"policy_preprocessor.json"} if is_language else set()
    for path in (tmp_path / "back" / file for file in (back & files) - renumbered):
        if path.suffix == ".json":
            written, read = (json.loads((folder / path.name).read_text()) for folder in (path.parent, source))
            assert written == read
            assert is_language or list(written) == list(read)
        else:
            wanted, found = load_file(source / path.name), load_file(path)
            wanted = {key: array for key, array in wanted.items() if not key.endswith("num_batches_tracked")}
            assert {key: array.shape for key, array in found.items()} == {key: x.shape for key, x in wanted.items()}
            assert all(found[key].tobytes() == array.tobytes() for key, array in wanted.items() if key not in unused)


def test_all_misfits_of_the_weights_are_in_one_error(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.action_head.bias"]
    del tensors["model.decoder.norm.weight"]
    tensors["model.extra"] = np.zeros(3, np.float32)
    tensors["model.action_head.weight"] = np.zeros((6, 65), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsMismatch) as caught:
        lerobot_folder.read_checkpoint(folder)
    text = str(caught.value)
    assert "2 missing, 1 unused, 1 misshaped" in text
    assert "missing: model.action_head.bias [6]" in text
    assert "missing: model.decoder.norm.weight [64]" in text
    assert "unused: model.extra [3]" in text
    assert "misshaped: model.action_head.weight: found [6, 65], wanted [6, 64]" in text


def test_half_precision_weights_are_widened(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        shapes = {name: (np.dtype(dtype), array.shape) for name, array in tensors.items()}
        write_floats(folder / "model.safetensors", shapes, lambda name, dtype=dtype: tensors[name].astype(dtype))
        found = lerobot_folder.read_checkpoint(folder).weights["action_out.kernel"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, tensors["model.action_head.weight"].astype(dtype).T.astype(np.float32))


def test_requirements_are_read_without_the_weights(folder: Path) -> None:
    loaded = jaxmodels.load_policy(folder).requirements
    (folder / "model.safetensors").write_bytes(b"not read")
    assert jaxmodels.read_requirements(folder) == loaded


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused_by_name(folder: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.action_head.bias"][2] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"NaN or an infinity: action_out\.bias"):
        lerobot_folder.read_checkpoint(folder)


def test_batch_norm_counters_are_dropped_like_in_torchvision(golden_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden_folder("act_one_camera"), tmp_path / "policy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.backbone.bn1.num_batches_tracked"] = np.array(7, np.int64)
    save_file(tensors, folder / "model.safetensors")
    assert "backbone.stem_norm.mean" in lerobot_folder.read_checkpoint(folder).weights


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt", "policy.pkl"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(CheckpointError, match=rf"only {name}.*never opened.*safetensors"):
        lerobot_folder.read_checkpoint(folder)
    assert not (folder / "opened").exists()


def test_missing_files_and_unknown_types_are_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        lerobot_folder.read_checkpoint(folder / "nothing")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        lerobot_folder.read_checkpoint(folder)
    edit_json(folder / "config.json", type="groot")
    with pytest.raises(ConfigError, match="'groot'; known: act, diffusion"):
        lerobot_folder.read_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"type": "act", "dropout": NaN}', "NaN is no JSON number"),
        ('{"type": "act", "dropout": 1e999}', "1e999 is too large"),
        ('{"type": "act", "type": "act"}', "appears twice"),
        ("[1]", "holds a list"),
        ("{", "malformed JSON"),
        ("[" * 100_000, "nested too deeply"),
        (" " * (2 << 20), "2097152 bytes; wanted at most 1048576"),
        ('{"a": "\udcff"}', "malformed JSON"),
    ],
)
def test_malformed_json_is_refused_with_the_reason(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=rf"config\.json.*{words}"):
        lerobot_folder.read_checkpoint(folder)


def test_rate_and_joint_names_are_stored_in_the_sidecar(folder: Path, tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    (folder / "robojax.json").write_text(json.dumps({"rate": 25, "joint_names": names, "note": "kept"}))
    policy = jaxmodels.load_policy(folder)
    assert policy.requirements.rate == 25.0
    assert policy.requirements.joint_names == tuple(names)
    policy.save(tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "robojax.json").read_text())
    assert written == {"note": "kept", "rate": 25.0, "joint_names": names}
    assert "rate" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"joint_names": ["a"]}, "list of 6 names"),
        ({"rates": 5}, "unknown key 'rates'; did you mean 'rate'"),
        ({"joint_name": ["a"] * 6}, "unknown key 'joint_name'; did you mean 'joint_names'"),
        ({"normalisation": "identity"}, "unknown key 'normalisation'; did you mean 'normalization'"),
    ],
)
def test_invalid_sidecar_is_refused(folder: Path, values, words: str) -> None:
    (folder / "robojax.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"robojax\.json: {words}|{words}"):
        lerobot_folder.read_checkpoint(folder)


def test_joint_names_of_features_are_kept_in_the_sidecar(folder: Path, tmp_path: Path) -> None:
    names = {"motors": list("abcdef")}
    edit_json(folder / "config.json", lambda values: values["output_features"]["action"].update(names=names))
    checkpoint = lerobot_folder.read_checkpoint(folder)
    assert checkpoint.sidecar.joint_names == tuple("abcdef")
    lerobot_folder.write_checkpoint(tmp_path / "back", checkpoint)
    assert "names" not in json.loads((tmp_path / "back" / "config.json").read_text())["output_features"]["action"]
    assert lerobot_folder.read_checkpoint(tmp_path / "back").sidecar.joint_names == tuple("abcdef")


NAMES = ["gripper.pos", "wrist_roll.pos", "wrist_flex.pos", "elbow_flex.pos", "shoulder_lift.pos", "shoulder_pan.pos"]


@pytest.mark.parametrize("name", ["pi0_two_cameras", "pi05_two_cameras"])
def test_joint_names_come_from_sidecar_then_config_then_features(name: str, golden_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden_folder(name), tmp_path / name))
    values = json.loads((folder / "config.json").read_text())

    def write(**fields: Any) -> None:
        values.update(fields)
        (folder / "config.json").write_text(json.dumps(values))

    def read() -> tuple[str, ...] | None:
        found = lerobot_folder.read_checkpoint(folder).sidecar.joint_names
        assert jaxmodels.read_requirements(folder).joint_names == found
        return found

    write(action_feature_names=None)
    assert read() is None
    write(output_features={"action": values["output_features"]["action"] | {"names": list("abcdef")}})
    assert read() == tuple("abcdef")
    # LeRobot writes the group name of a dataset's {"motors": [...]}, which is not a joint name.
    write(action_feature_names=["motors"])
    assert read() == tuple("abcdef")
    write(action_feature_names=NAMES)
    assert read() == tuple(NAMES)
    (folder / "robojax.json").write_text(json.dumps({"joint_names": list("uvwxyz")}))
    assert read() == tuple("uvwxyz")
    for count in (5, 7):
        write(action_feature_names=[f"n{number}" for number in range(count)])
        with pytest.raises(CheckpointError, match=rf"has {count} names \(n0, .* of robojax.json are 6: u, v"):
            read()
    (folder / "robojax.json").unlink()
    with pytest.raises(CheckpointError, match=r"has 7 names \(n0, .*, but names of the feature 'action' are 6: a, b"):
        read()
    del values["output_features"]["action"]["names"]
    write()
    with pytest.raises(CheckpointError, match=r"has 7 names .*, but the feature 'action' has 6 numbers"):
        read()


def test_overwriting_a_policy_replaces_all_files(small, checkpoint_of, tmp_path: Path) -> None:
    first, second = (checkpoint_of(small(), seed=seed) for seed in (0, 1))
    lerobot_folder.write_checkpoint(tmp_path / "policy", first)
    lerobot_folder.write_checkpoint(tmp_path / "policy", second)
    assert lerobot_folder.read_checkpoint(tmp_path / "policy").weights["action_out.bias"].tolist() == (
        second.weights["action_out.bias"].tolist()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_weights_of_another_config_are_not_written(small, checkpoint_of, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(small())
    other = dataclasses.replace(checkpoint, config=small(dim_model=32))
    with pytest.raises(WeightsMismatch, match="misshaped"):
        lerobot_folder.write_checkpoint(tmp_path / "policy", other)
    assert not (tmp_path / "policy").exists()
