"""Normalisation: LeRobot's formulas, its processor files, and the buffers it used before them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import jaxmodels
from jaxmodels.errors import CheckpointError
from jaxmodels.normalization import Normalizer
from jaxmodels.policies import lerobot_folder
from jaxmodels.types import ACTION, Feature

PRE = "policy_preprocessor.json"
POST = "policy_postprocessor.json"
STATS = "policy_preprocessor_step_3_normalizer_processor.safetensors"
VECTOR = Feature("observation.state", "STATE", (3,))


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


STATISTICS = {
    "mean": vector(1, -2, 100),
    "std": vector(0.5, 2, 0.01),
    "min": vector(-1, 0, 99),
    "max": vector(3, 0, 101),
    "q01": vector(-0.5, -3, 99.5),
    "q99": vector(2, 3, 100.5),
    "q10": vector(0, -1, 99.9),
    "q90": vector(1, 1, 100.1),
}


def by_hand(mode: str, x: np.ndarray, *, inverse: bool) -> np.ndarray:
    """The formulas of lerobot/processor/normalize_processor.py (0.4.4), in float64."""
    s = {name: value.astype(np.float64) for name, value in STATISTICS.items()}
    if mode == "IDENTITY":
        return x
    if mode == "MEAN_STD":
        return x * s["std"] + s["mean"] if inverse else (x - s["mean"]) / (s["std"] + 1e-8)
    low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}[mode]
    span = np.where(s[high] == s[low], 1e-8, s[high] - s[low])
    return (x + 1) / 2 * span + s[low] if inverse else 2 * (x - s[low]) / span - 1


@pytest.mark.parametrize("mode", ["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"])
def test_every_mode_has_lerobots_formula(mode: str) -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", mode),), {VECTOR.name: STATISTICS})
    x = vector(0.3, 0.0, 100.2)
    np.testing.assert_allclose(
        normalizer.get_forward(VECTOR).normalize(x), by_hand(mode, x.astype(float), inverse=False), rtol=1e-4
    )
    np.testing.assert_allclose(
        normalizer.get_backward(VECTOR).unnormalize(x), by_hand(mode, x.astype(float), inverse=True), rtol=1e-6
    )


def test_a_joint_that_never_moved_is_minus_one_and_not_infinite() -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", "MIN_MAX"),), {VECTOR.name: STATISTICS})
    assert normalizer.get_forward(VECTOR).normalize(vector(0, 0, 100))[1] == -1.0


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3),
    st.sampled_from(["MEAN_STD", "QUANTILES", "QUANTILE10"]),
)
def test_unnormalising_undoes_normalising(values: list[float], mode: str) -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", mode),), {VECTOR.name: STATISTICS})
    x = vector(*values)
    back = normalizer.get_backward(VECTOR).unnormalize(normalizer.get_forward(VECTOR).normalize(x))
    # LeRobot adds its epsilon to a standard deviation on the way in only; the rest is rounding.
    lost = np.abs(x - STATISTICS["mean"]) * 1e-8 / STATISTICS["std"] if mode == "MEAN_STD" else 0.0
    assert (np.abs(back - x) <= lost + 6e-5).all()


def test_what_is_not_listed_or_has_no_statistics_is_left_as_it_is() -> None:
    other = Feature("observation.environment_state", "ENV", (2,))
    normalizer = Normalizer((VECTOR, other), (("STATE", "MEAN_STD"), ("ENV", "MEAN_STD")), {VECTOR.name: STATISTICS})
    assert normalizer.get_mode(other) == "IDENTITY"
    assert normalizer.without_stats() == [other.name]
    chosen = Normalizer((VECTOR,), (("STATE", "MEAN_STD"),), {VECTOR.name: STATISTICS}, only=("observation.other",))
    assert chosen.get_mode(VECTOR) == "IDENTITY"


@pytest.fixture
def folder(golden_folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_folder("act_state_only"), tmp_path / "policy"))


def edit_step(path: Path, place: int, **changes) -> None:
    values = json.loads(path.read_text())
    values["steps"][place]["config"] |= changes
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("statistic", "value", "words"),
    [
        ("observation.state.mean", vector(1, 2, np.nan, 4, 5, 6), "mean holds a NaN"),
        ("observation.state.std", vector(1, 2, np.inf, 4, 5, 6), "std holds a NaN or an infinity"),
        ("observation.state.std", vector(1, 2, -3, 4, 5, 6), "std is negative"),
        ("observation.state.mean", vector(1, 2), r"shape \[2\]; wanted \[6\]"),
    ],
)
def test_statistics_that_make_no_sense_are_refused(folder: Path, statistic: str, value, words: str) -> None:
    stats = load_file(folder / STATS)
    stats[statistic] = value
    save_file(stats, folder / STATS)
    with pytest.raises(CheckpointError, match=rf"observation\.state.*{words}"):
        lerobot_folder.read_checkpoint(folder)


def test_a_statistic_that_the_mode_needs_must_be_there(folder: Path) -> None:
    edit_step(folder / PRE, 3, norm_map={"STATE": "QUANTILES"})
    with pytest.raises(CheckpointError, match="QUANTILES needs the statistic 'q01'; found max, mean, min, std"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "place", "changes", "words"),
    [
        (PRE, 3, {"norm_map": {"STATE": "GUESS"}}, "norm_map"),
        (PRE, 3, {"eps": -1}, "eps is -1"),
        (PRE, 3, {"features": {"a": 3}}, "type and shape"),
        (PRE, 3, {"normalize_observation_keys": "all"}, "normalize_observation_keys"),
        (PRE, 0, {"rename_map": {"a": 3}}, "rename_map"),
        (PRE, 0, {"rename_map": {"a": "c", "b": "c"}}, "one name twice: 'a' and 'b' are both 'c'"),
        (PRE, 0, {"rename_map": {"a": "c"}}, "calls 'a' 'c', which the policy does not read"),
        (PRE, 2, {"float_dtype": "float16"}, "device_processor"),
    ],
)
def test_a_malformed_step_is_refused(folder: Path, name: str, place: int, changes, words: str) -> None:
    edit_step(folder / name, place, **changes)
    with pytest.raises(CheckpointError, match=words):
        lerobot_folder.read_checkpoint(folder)


def test_a_step_that_is_not_known_is_refused_by_name(folder: Path) -> None:
    values = json.loads((folder / PRE).read_text())
    values["steps"].insert(1, {"registry_name": "delta_action_processor", "config": {"scale": 2}})
    (folder / PRE).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"'delta_action_processor'.*not known here"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden.safetensors", 3])
def test_a_statistics_file_outside_the_folder_is_refused(folder: Path, name) -> None:
    values = json.loads((folder / PRE).read_text())
    values["steps"][3]["state_file"] = name
    (folder / PRE).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="plain name"):
        lerobot_folder.read_checkpoint(folder)


def test_renamed_observations_are_accepted_under_both_names(folder: Path) -> None:
    edit_step(folder / PRE, 0, rename_map={"observation.joints": "observation.state"})
    policy = jaxmodels.load_policy(folder)
    with np.load(folder / "io.npz") as file:
        state, environment = file["in.0.observation.state"], file["in.0.observation.environment_state"]
        wanted = file["out.0.chunk"]
    for name in ("observation.joints", "observation.state"):
        chunk = policy.act({name: state, "observation.environment_state": environment})
        np.testing.assert_allclose(chunk, wanted, atol=1e-5 * np.abs(wanted).max())


def test_requirements_name_cameras_as_the_robots_side_does(small, checkpoint_of, tmp_path: Path) -> None:
    lerobot_folder.write_checkpoint(tmp_path / "policy", checkpoint_of(small(cameras=("camera1", "camera2"))))
    edit_step(tmp_path / "policy" / PRE, 0, rename_map={"observation.images.front": "observation.images.camera1"})
    policy = jaxmodels.load_policy(tmp_path / "policy")
    assert list(policy.requirements.cameras) == ["front", "camera2"]
    policy.save(tmp_path / "saved")
    assert jaxmodels.load_policy(tmp_path / "saved").requirements == policy.requirements


def old_style(folder: Path, **renamed: str) -> dict[str, np.ndarray]:
    """Turns a folder into one from before processor files: statistics as buffers among the weights."""
    tensors = load_file(folder / "model.safetensors")
    for name, array in load_file(folder / STATS).items():
        feature, _, statistic = name.rpartition(".")
        if statistic not in ("mean", "std"):
            continue
        buffer = f"buffer_{feature.replace('.', '_')}.{statistic}"
        if feature == ACTION:
            tensors[f"normalize_targets.{buffer}"] = array.copy()
            tensors[f"unnormalize_outputs.{buffer}"] = array.copy()
        elif feature != "observation.environment_state":  # ENV has no mode in this config
            tensors[f"normalize_inputs.{buffer}"] = array.copy()
    for path in [*folder.glob("policy_*")]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("name", ["act_state_only", "act_one_camera"])
def test_buffers_of_older_policies_give_the_same_actions(name: str, golden_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden_folder(name), tmp_path / "policy"))
    old_style(folder)
    policy = jaxmodels.load_policy(folder)
    with np.load(folder / "io.npz") as file:
        observation = {key.removeprefix("in.0."): file[key] for key in file if key.startswith("in.0.")}
        wanted = file["out.0.chunk"]
    np.testing.assert_allclose(policy.act(observation), wanted, atol=1e-5 * np.abs(wanted).max())


def test_an_older_policy_is_saved_with_processor_files(folder: Path, tmp_path: Path) -> None:
    old_style(folder)
    checkpoint = lerobot_folder.read_checkpoint(folder)
    lerobot_folder.write_checkpoint(tmp_path / "saved", checkpoint)
    assert (tmp_path / "saved" / PRE).exists()
    assert not [name for name in load_file(tmp_path / "saved" / "model.safetensors") if "buffer" in name]
    back = lerobot_folder.read_checkpoint(tmp_path / "saved").normalization
    for feature in checkpoint.config.output_features:
        for before, after in zip(
            checkpoint.normalization.outputs.get_backward(feature), back.outputs.get_backward(feature), strict=True
        ):
            np.testing.assert_array_equal(before, after)


def test_a_config_of_2024_is_read_with_its_old_fields(folder: Path) -> None:
    old_style(folder)
    values = json.loads((folder / "config.json").read_text())
    inputs, outputs = values.pop("input_features"), values.pop("output_features")
    del values["type"], values["normalization_mapping"]
    values |= {
        "input_shapes": {name: feature["shape"] for name, feature in inputs.items()},
        "output_shapes": {name: feature["shape"] for name, feature in outputs.items()},
        "input_normalization_modes": {"observation.state": "mean_std"},
        "output_normalization_modes": {"action": "mean_std"},
    }
    (folder / "config.json").write_text(json.dumps(values))
    policy = jaxmodels.load_policy(folder)
    with np.load(folder / "io.npz") as file:
        observation = {key.removeprefix("in.0."): file[key] for key in file if key.startswith("in.0.")}
        wanted = file["out.0.chunk"]
    np.testing.assert_allclose(policy.act(observation), wanted, atol=1e-5 * np.abs(wanted).max())


def test_buffers_that_do_not_fit_the_config_are_listed(folder: Path) -> None:
    tensors = old_style(folder)
    tensors["normalize_inputs.buffer_observation_force.mean"] = vector(1)
    for statistic in ("mean", "std"):
        del tensors[f"normalize_inputs.buffer_observation_state.{statistic}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"observation_force\.mean.*without theirs: \['observation\.state'\]"):
        lerobot_folder.read_checkpoint(folder)


def test_a_policy_without_normalisation_is_refused_when_it_needs_one(folder: Path) -> None:
    for path in [*folder.glob("policy_*")]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no normalisation; wanted policy_preprocessor\.json"):
        lerobot_folder.read_checkpoint(folder)
    values = json.loads((folder / "config.json").read_text())
    values["normalization_mapping"] = {"STATE": "IDENTITY", "ACTION": "IDENTITY"}
    (folder / "config.json").write_text(json.dumps(values))
    assert lerobot_folder.read_checkpoint(folder).normalization.inputs.stats == {}


def test_normalisation_in_both_places_is_refused(folder: Path) -> None:
    kept = {path.name: path.read_bytes() for path in folder.glob("policy_*")}
    old_style(folder)
    for name, raw in kept.items():
        (folder / name).write_bytes(raw)
    with pytest.raises(CheckpointError, match="keep one of them"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize("mode", ["IDENTITY", "QUANTILES"])
def test_statistics_of_a_feature_are_given_whatever_the_mode(mode: str) -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", mode),), {VECTOR.name: STATISTICS | {"count": vector(7)}})
    found = normalizer.get_statistics(VECTOR)
    assert found is not None
    assert list(found) == ["mean", "std", "min", "max", "q01", "q99"]
    assert found["min"] == (-1, 0, 99)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"mean": vector(1, 2, 3, 4), "q01": vector(np.nan, 0, 0)}, ["min", "max"]),
        ({"min": np.float32(2), "mean": vector(5)}, ["mean", "std", "min", "max", "q01", "q99"]),
    ],
)
def test_statistics_of_another_shape_or_not_finite_are_left_out(changes, names) -> None:
    normalizer = Normalizer((VECTOR,), (), {VECTOR.name: STATISTICS | changes})
    found = normalizer.get_statistics(VECTOR)
    assert found is not None
    assert list(found) == names
    assert {len(values) for values in found.values()} == {3}
    assert Normalizer((VECTOR,), ()).get_statistics(VECTOR) is None
    assert Normalizer((VECTOR,), (), {VECTOR.name: {"std": vector(1, 1, 1)}}).get_statistics(VECTOR) is None
