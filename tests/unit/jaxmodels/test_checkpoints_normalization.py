"""Normalisation: LeRobot's formulas, its processor files, and its older buffers."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import jaxmodels
from jaxmodels.errors import CheckpointError, ConfigError, ObservationError
from jaxmodels.normalization import Normalizer
from jaxmodels.policies import lerobot_folder
from jaxmodels.types import ACTION, Feature
from tests.testing.models import edit_json
from tests.unit.jaxmodels import small_policies

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
    """Apply LeRobot's formulas in float64."""
    s = {name: value.astype(np.float64) for name, value in STATISTICS.items()}
    if mode == "IDENTITY":
        return x
    if mode == "MEAN_STD":
        return x * s["std"] + s["mean"] if inverse else (x - s["mean"]) / (s["std"] + 1e-8)
    low, high = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}[mode]
    span = np.where(s[high] == s[low], 1e-8, s[high] - s[low])
    return (x + 1) / 2 * span + s[low] if inverse else 2 * (x - s[low]) / span - 1


@pytest.mark.parametrize("mode", ["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"])
def test_each_mode_has_the_formula_of_lerobot(mode: str) -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", mode),), {VECTOR.name: STATISTICS})
    x = vector(0.3, 0.0, 100.2)
    found, back = normalizer.get_affine(VECTOR).normalize(x), normalizer.get_affine(VECTOR, inverse=True).unnormalize(x)
    np.testing.assert_allclose(found, by_hand(mode, x.astype(float), inverse=False), rtol=1e-4)
    np.testing.assert_allclose(back, by_hand(mode, x.astype(float), inverse=True), rtol=1e-6)


@given(st.tuples(*[st.floats(-100, 100, width=32)] * 3), st.sampled_from(["MEAN_STD", "QUANTILES", "QUANTILE10"]))
def test_unnormalising_inverts_normalising(values: tuple[float, ...], mode: str) -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", mode),), {VECTOR.name: STATISTICS})
    x = vector(*values)
    back = normalizer.get_affine(VECTOR, inverse=True).unnormalize(normalizer.get_affine(VECTOR).normalize(x))
    # LeRobot adds its epsilon to a standard deviation only when normalizing; the rest is rounding.
    lost = np.abs(x - STATISTICS["mean"]) * 1e-8 / STATISTICS["std"] if mode == "MEAN_STD" else 0.0
    assert (np.abs(back - x) <= lost + 6e-5).all()


def test_features_without_a_mode_are_refused_or_unchanged() -> None:
    other = Feature("observation.environment_state", "ENV", (2,))
    modes, stats = (("STATE", "MEAN_STD"), ("ENV", "MEAN_STD")), {VECTOR.name: STATISTICS}
    normalizer = Normalizer((VECTOR, other), modes, stats, source="a file")
    with pytest.raises(CheckpointError, match=r"a file: feature .* \(type ENV, mode MEAN_STD\) has no statistics"):
        normalizer.get_mode(other)
    assert replace(normalizer, unnormalized=frozenset({other.name})).get_mode(other) == "IDENTITY"
    assert replace(normalizer, modes=modes[:1]).get_mode(other) == "IDENTITY"
    with pytest.raises(CheckpointError, match="no mode for the type STATE"):
        replace(normalizer, modes=modes[1:]).get_mode(VECTOR)
    chosen = Normalizer((VECTOR,), modes, stats, only=("observation.other",))
    assert chosen.get_mode(VECTOR) == "IDENTITY"


@pytest.fixture
def folder(golden_folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden_folder("act_state_only"), tmp_path / "policy"))


def edit_step(path: Path, place: int, **changes) -> None:
    edit_json(path, lambda values: values["steps"][place]["config"].update(changes))


def measure_chunk(policy: jaxmodels.Policy, folder: Path, **renamed: str) -> float:
    """Return the largest error of the recorded chunk, as a share of the largest action."""
    with np.load(folder / "io.npz") as file:
        names = [key.removeprefix("in.0.") for key in file if key.startswith("in.0.")]
        observation: Any = {renamed.get(name.rpartition(".")[2], name): file[f"in.0.{name}"] for name in names}
        wanted = file["out.0.chunk"]
    return float(np.abs(policy.act(observation) - wanted).max() / np.abs(wanted).max())


LOW, HIGH = vector(-1, -1, 40, -1, -1, 2), vector(1, 1, -40, 1, 1, 2)


@pytest.mark.parametrize(
    ("mode", "changes", "words"),
    [
        ("MEAN_STD", {"mean": vector(1, 2, np.nan, 4, 5, 6)}, "mean holds a NaN"),
        ("MEAN_STD", {"std": vector(1, 2, np.inf, 4, 5, 6)}, "std holds a NaN or an infinity"),
        ("MEAN_STD", {"std": vector(1, 2, -3, 4, 5, 6)}, "std is negative"),
        ("MEAN_STD", {"mean": vector(1, 2)}, r"shape \[2\]; wanted \[6\]"),
        ("MIN_MAX", {"min": LOW, "max": HIGH}, "min of number 2 is 40, above its max -40"),
        ("QUANTILES", {"q01": LOW, "q99": HIGH}, "q01 of number 2 is 40, above its q99 -40"),
        ("QUANTILES", {}, r"QUANTILES\) has no statistic q01 and q99; found max, mean, min, std"),
    ],
)
def test_invalid_statistics_are_refused(folder: Path, mode: str, changes: dict[str, np.ndarray], words: str) -> None:
    edit_step(folder / PRE, 3, norm_map={"STATE": mode})
    stats = load_file(folder / STATS)
    save_file(stats | {f"observation.state.{name}": value for name, value in changes.items()}, folder / STATS)
    for read in (lerobot_folder.read_checkpoint, jaxmodels.read_requirements):
        with pytest.raises(CheckpointError, match=rf"observation\.state.*{words}"):
            read(folder)


CLIPPED = {"type": "STATE", "shape": [6], "clip": 5}


@pytest.mark.parametrize(
    ("name", "place", "changes", "words"),
    [
        (PRE, 3, {"norm_map": {"STATE": "GUESS"}}, "norm_map"),
        (PRE, 3, {"eps": -1}, "eps is -1"),
        (PRE, 3, {"features": {"a": 3}}, "features.a is 3; wanted an object with type and shape"),
        (PRE, 3, {"features": {"a": CLIPPED}}, "features.a: unknown fields clip = 5; a feature has type, shape and"),
        (PRE, 3, {"normalize_observation_keys": "all"}, "normalize_observation_keys"),
        (PRE, 0, {"rename_map": {"a": 3}}, "rename_map"),
        (PRE, 0, {"rename_map": {"a": "c", "b": "c"}}, "one name twice: 'a' and 'b' are both 'c'"),
        (PRE, 0, {"rename_map": {"a": "c"}}, "calls 'a' 'c', which the policy does not read"),
        (PRE, 2, {"float_dtype": "bfloat16"}, "float_dtype of device_processor is 'bfloat16'"),
        (PRE, 3, {"clip": 5}, "normalizer_processor: unknown fields clip = 5; this reads the fields of LeRobot 0.6.1"),
        (PRE, 2, {"move": "later"}, "device_processor: unknown fields move = 'later'"),
        (PRE, 1, {"axis": 1}, "to_batch_processor: unknown fields axis = 1"),
        (POST, 0, {"clip": True}, f"{POST}: unnormalizer_processor: unknown fields clip = True"),
    ],
)
def test_malformed_step_is_refused(folder: Path, name: str, place: int, changes, words: str) -> None:
    edit_step(folder / name, place, **changes)
    with pytest.raises(CheckpointError, match=words):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize(
    ("depth", "words"),
    [("file", PRE), ("step", "step normalizer_processor"), ("config", "normalizer_processor"), ("feature", "state")],
)
def test_unknown_fields_that_are_off_load_at_each_depth(folder: Path, depth: str, words: str, caplog) -> None:
    values = json.loads((folder / PRE).read_text())
    step = values["steps"][3]
    feature = step["config"]["features"]["observation.state"]
    place = {"file": values, "step": step, "config": step["config"], "feature": feature}[depth]
    place["new"] = None
    (folder / PRE).write_text(json.dumps(values))
    lerobot_folder.read_checkpoint(folder)
    assert "ignoring unknown fields that are off: 'new'" in caplog.text
    place["new"] = True
    (folder / PRE).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"{words}: unknown fields new = True"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("normalizer_processor", "has two steps normalizer_processor; wanted one"),
        ("rename_observations_processor", "step rename_observations_processor comes after normalizer_processor"),
        ("delta_action_processor", "'delta_action_processor'.*not known here"),
        ([1], r"registry_name is \[1\]; wanted a string"),
        ({}, "registry_name is {}; wanted a string"),
    ],
)
def test_misplaced_steps_are_refused_with_the_reason(folder: Path, name: object, words: str) -> None:
    edit_json(folder / PRE, lambda values: values["steps"].append({"registry_name": name, "config": {}}))
    with pytest.raises(CheckpointError, match=words):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden.safetensors", 3])
def test_statistics_file_outside_the_folder_is_refused(folder: Path, name) -> None:
    edit_json(folder / PRE, lambda values: values["steps"][3].update(state_file=name))
    with pytest.raises(CheckpointError, match="plain name"):
        lerobot_folder.read_checkpoint(folder)


def test_renamed_observations_are_accepted_under_both_names(folder: Path) -> None:
    edit_step(folder / PRE, 0, rename_map={"observation.joints": "observation.state"})
    policy = jaxmodels.load_policy(folder)
    assert measure_chunk(policy, folder) < 1e-5
    assert measure_chunk(policy, folder, state="observation.joints") < 1e-5
    edit_normalizers(folder, clear_step, PRE)
    assert "feature 'observation.state'" in refuse(folder)


def test_requirements_use_the_robots_camera_names(small, checkpoint_of, tmp_path: Path) -> None:
    lerobot_folder.write_checkpoint(tmp_path / "policy", checkpoint_of(small(cameras=("camera1", "camera2"))))
    edit_step(tmp_path / "policy" / PRE, 0, rename_map={"observation.images.front": "observation.images.camera1"})
    policy = jaxmodels.load_policy(tmp_path / "policy")
    assert list(policy.requirements.cameras) == ["front", "camera2"]
    assert jaxmodels.read_requirements(tmp_path / "policy") == policy.requirements
    policy.save(tmp_path / "saved")
    assert jaxmodels.load_policy(tmp_path / "saved").requirements == policy.requirements


def test_cameras_may_have_any_name(small, checkpoint_of, observation_of, tmp_path: Path) -> None:
    cameras = ("Top Cam", "caméra", "上", "a.b/c", "4: left")
    config = small(cameras=cameras)
    lerobot_folder.write_checkpoint(tmp_path / "policy", checkpoint_of(config))
    assert tuple(jaxmodels.read_requirements(tmp_path / "policy").cameras) == cameras
    policy, seen = jaxmodels.load_policy(tmp_path / "policy"), observation_of(config)
    chunk = policy.act(seen)
    for camera in cameras:
        name = f"observation.images.{camera}"
        with pytest.raises(ObservationError, match=re.escape(f"{name} is missing")):
            policy.act({other: array for other, array in seen.items() if other != name})
        with pytest.raises(ObservationError, match=re.escape(f"{name} has shape")):
            policy.act({**seen, name: seen[name][..., :1]})
    with pytest.raises(ConfigError, match=re.escape(f"which has {', '.join(sorted(cameras))}")):
        jaxmodels.load_policy(tmp_path / "policy", rename={"front": "top"})
    rename = {camera: f"front{number}" for number, camera in enumerate(cameras)}
    renamed = jaxmodels.load_policy(tmp_path / "policy", rename=rename)
    for camera, other in rename.items():
        seen[f"observation.images.{other}"] = seen.pop(f"observation.images.{camera}")
    np.testing.assert_array_equal(renamed.act(seen), chunk)


def old_style(folder: Path) -> dict[str, np.ndarray]:
    """Move the statistics of a folder from processor files to buffers among the weights, as in older versions."""
    tensors = load_file(folder / "model.safetensors")
    for name, array in load_file(folder / STATS).items():
        feature, _, statistic = name.rpartition(".")
        if statistic not in ("mean", "std"):
            continue
        buffer = f"buffer_{feature.replace('.', '_')}.{statistic}"
        if feature == ACTION:
            tensors[f"normalize_targets.{buffer}"] = array.copy()
            tensors[f"unnormalize_outputs.{buffer}"] = array.copy()
        elif feature != "observation.environment_state":  # ENV has no mode in this config.
            tensors[f"normalize_inputs.{buffer}"] = array.copy()
    for path in folder.glob("policy_*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def assert_same_affine(before: Any, after: Any) -> None:
    for mine, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("name", ["act_state_only", "act_one_camera"])
def test_older_policies_act_the_same_and_save_the_new_layout(name: str, golden_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(golden_folder(name), tmp_path / "policy"))
    old_style(folder)
    policy = jaxmodels.load_policy(folder)
    assert measure_chunk(policy, folder) < 1e-5
    policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / PRE).exists()
    assert not [name for name in load_file(tmp_path / "saved" / "model.safetensors") if "buffer" in name]
    before, after = (
        one.normalization.outputs for one in (policy.checkpoint, lerobot_folder.read_checkpoint(tmp_path / "saved"))
    )
    for feature in policy.checkpoint.config.output_features:
        assert_same_affine(before.get_affine(feature, inverse=True), after.get_affine(feature, inverse=True))


def test_config_of_2024_is_read_with_its_old_fields(folder: Path) -> None:
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
    assert measure_chunk(jaxmodels.load_policy(folder), folder) < 1e-5


def test_buffers_without_a_feature_are_listed(folder: Path) -> None:
    tensors = old_style(folder)
    tensors["normalize_inputs.buffer_observation_force.mean"] = vector(1)
    for statistic in ("mean", "std"):
        del tensors[f"normalize_inputs.buffer_observation_state.{statistic}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"belong to no feature of the config: .*observation_force\.mean"):
        lerobot_folder.read_checkpoint(folder)


@pytest.mark.parametrize(("side", "feature"), [("inputs", "observation.state"), ("outputs", "action")])
def test_missing_buffer_of_an_older_policy_is_refused(folder: Path, side: str, feature: str) -> None:
    buffer = f"{'un' * (side == 'outputs')}normalize_{side}.buffer_{feature.replace('.', '_')}"
    tensors = old_style(folder)
    left = {name: array for name, array in tensors.items() if not name.startswith(buffer)}
    assert len(left) == len(tensors) - 2
    save_file(left, folder / "model.safetensors")
    for read in (lerobot_folder.read_checkpoint, jaxmodels.read_requirements):
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: feature '{feature}' .*has no statistics"):
            read(folder)
    (folder / "robojax.json").write_text('{"normalization": "identity"}')
    assert getattr(lerobot_folder.read_checkpoint(folder).normalization, side).unnormalized == {feature}


def test_policy_that_lacks_its_normalisation_is_refused(folder: Path) -> None:
    for path in folder.glob("policy_*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no normalization; wanted policy_preprocessor\.json") as error:
        lerobot_folder.read_checkpoint(folder)
    with pytest.raises(CheckpointError, match="has modes, but there is no normalization"):
        jaxmodels.read_requirements(folder)
    assert '{"normalization": "identity"}' in str(error.value)
    (folder / "robojax.json").write_text('{"normalization": "identity"}')
    assert lerobot_folder.read_checkpoint(folder).normalization.outputs.unnormalized == {ACTION}
    (folder / "robojax.json").unlink()
    edit_json(folder / "config.json", normalization_mapping={"STATE": "IDENTITY", "ACTION": "IDENTITY"})
    assert lerobot_folder.read_checkpoint(folder).normalization.inputs.stats == {}


def test_normalisation_in_both_places_is_refused(folder: Path, golden_folder) -> None:
    old_style(folder)
    for path in golden_folder("act_state_only").glob("policy_*"):
        shutil.copy(path, folder)
    with pytest.raises(CheckpointError, match="keep one of them"):
        lerobot_folder.read_checkpoint(folder)


FAMILIES = {
    "act_one_camera": ("observation.state", "observation.images.front"),
    "act_state_only": ("observation.state",),
    "diffusion_two_cameras_ddpm": ("observation.state", "observation.images.front", "observation.images.wrist"),
    "smolvla_two_cameras": ("observation.state",),
    "pi0_two_cameras": ("observation.state",),
    "pi0_empty_camera": ("observation.state",),
    "pi05_two_cameras": ("observation.state",),
    "diffusion2d": ("observation.state",),
    "tokens2d": ("observation.state",),
}


@pytest.fixture
def family(golden_folder, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a golden policy of any family."""

    def make(name: str) -> Path:
        if name in small_policies.CONFIGS:
            jaxmodels.Policy(small_policies.make_checkpoint(small_policies.CONFIGS[name])).save(tmp_path / name)
            return tmp_path / name
        return Path(shutil.copytree(golden_folder(name), tmp_path / name))

    return make


def edit_normalizers(folder: Path, change: Callable[[dict[str, Any]], None], *names: str) -> None:
    """Change the normalizing step of both processor files, or only of the named files."""
    for name in names or (PRE, POST):
        edit_json(
            folder / name,
            lambda values: [change(step) for step in values["steps"] if "normalizer" in step["registry_name"]],
        )


def clear_step(step: dict[str, Any]) -> None:
    """Clear a step as public base models do."""
    step["config"]["features"] = {}
    step.pop("state_file", None)


def rename_statistics(folder: Path, rename: Callable[[str], str | None]) -> None:
    """Rename the tensors of statistics, or drop those without a new name."""
    for path in folder.glob("policy_*normalizer_processor.safetensors"):
        tensors = {name: array for old, array in load_file(path).items() if (name := rename(old)) is not None}
        save_file(tensors, path)


def refuse(folder: Path) -> str:
    """Return the error of a folder, which must be the same in loading and describing."""
    with pytest.raises(CheckpointError) as error:
        lerobot_folder.read_checkpoint(folder)
    with pytest.raises(CheckpointError) as other:
        jaxmodels.read_requirements(folder)
    assert str(error.value) == f"{folder.name}: {other.value}"
    return str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_step_without_features_is_refused_by_all_families(name: str, family, caplog) -> None:
    folder = family(name)
    edit_normalizers(folder, clear_step)
    text = refuse(folder)
    modes = json.loads((folder / "config.json").read_text())["normalization_mapping"]
    for feature in FAMILIES[name]:
        kind = "VISUAL" if "images" in feature else "STATE"
        assert f"{PRE}: feature '{feature}' (type {kind}, mode {modes[kind]}) is missing in the features" in text
    assert f"{POST}: feature 'action' (type ACTION, mode {modes['ACTION']}) has no statistics" in text
    assert "Statistics found: none" in text
    assert '{"normalization": "identity"}' in text
    (folder / "robojax.json").write_text('{"normalization": "identity"}')
    with caplog.at_level(logging.INFO):
        checkpoint = lerobot_folder.read_checkpoint(folder)
    assert 'robojax.json has "normalization": "identity"; not normalized' in caplog.text
    assert "action" in caplog.text
    assert set(FAMILIES[name]) <= checkpoint.normalization.inputs.unnormalized
    scale = checkpoint.normalization.outputs.get_affine(checkpoint.config.action, inverse=True)
    assert (scale.offset == 0).all()
    assert (scale.scale == 1).all()
    assert jaxmodels.read_requirements(folder).action == checkpoint.config.action.shape[0]
    lerobot_folder.write_checkpoint(folder.with_name("saved"), checkpoint)
    assert json.loads((folder.with_name("saved") / "robojax.json").read_text())["normalization"] == "identity"
    assert lerobot_folder.read_checkpoint(folder.with_name("saved")).normalization.outputs.unnormalized == {"action"}


@pytest.mark.parametrize("name", ["act_state_only", "diffusion_env_state_ddim", "smolvla_two_cameras", "tokens2d"])
@pytest.mark.parametrize(
    ("rename", "found"),
    [
        (lambda name: f"so100.buffer.{name}", "'so100.buffer.action'"),
        (lambda name: None if name.startswith("action.") else name, "'observation.state'"),
        (lambda name: None if name.startswith("observation.state.") else name, "'action'"),
    ],
    ids=["prefix", "without action", "without state"],
)
def test_feature_without_statistics_is_refused(name: str, rename, found: str, family) -> None:
    folder = family(name)
    rename_statistics(folder, rename)
    assert f"Statistics found: {found}" in refuse(folder) or f", {found}" in refuse(folder)


def test_postprocessor_needs_statistics_and_no_features(folder: Path) -> None:
    before = lerobot_folder.read_checkpoint(folder)
    edit_normalizers(folder, lambda step: step["config"].update(features={}), POST)
    after = lerobot_folder.read_checkpoint(folder)
    assert_same_affine(
        *(one.normalization.outputs.get_affine(one.config.action, inverse=True) for one in (before, after))
    )


@pytest.mark.parametrize(
    ("kind", "modes", "text"),
    [
        ("STATE", None, "has no mode for the type STATE, and config.json has MEAN_STD"),
        ("ACTION", None, "has no mode for the type ACTION, and config.json has MEAN_STD"),
        ("STATE", {}, "has no mode for the type STATE"),
        ("ENV", {"ENV": "MEAN_STD"}, "has no mode for the type ENV, and config.json has MEAN_STD"),
    ],
)
def test_type_without_a_mode_is_refused(kind: str, modes, text: str, folder: Path) -> None:
    if modes is not None:
        config = json.loads((folder / "config.json").read_text())
        edit_json(folder / "config.json", normalization_mapping=modes and config["normalization_mapping"] | modes)
    edit_normalizers(folder, lambda step: step["config"]["norm_map"].pop(kind, None))
    assert text in refuse(folder)


def test_unread_features_and_identity_need_no_statistics(folder: Path) -> None:
    unread = {"observation.force": {"type": "STATE", "shape": [3]}}
    edit_normalizers(folder, lambda step: step["config"]["features"].update(unread), PRE)
    edit_normalizers(folder, lambda step: step["config"]["features"].pop(ACTION), PRE)
    lerobot_folder.read_checkpoint(folder)
    jaxmodels.read_requirements(folder)
    edit_normalizers(folder, lambda step: step["config"]["norm_map"].update(STATE="IDENTITY"))
    rename_statistics(folder, lambda name: None if name.startswith("observation.state.") else name)
    normalization = lerobot_folder.read_checkpoint(folder).normalization
    assert normalization.inputs.unnormalized == frozenset()
    jaxmodels.read_requirements(folder)


def test_empty_camera_needs_no_statistics(family) -> None:
    folder = family("smolvla_empty_camera")
    edit_normalizers(folder, lambda step: step["config"]["norm_map"].update(VISUAL="MEAN_STD"), PRE)
    camera = "observation.images.empty_camera_0"
    rename_statistics(folder, lambda name: None if name.startswith(camera) else name)
    assert lerobot_folder.read_checkpoint(folder).normalization.inputs.unnormalized == {camera}
    rename_statistics(folder, lambda name: None if ".images." in name else name)
    text = refuse(folder)
    assert "'observation.images.top'" in text
    assert camera not in text


@pytest.mark.parametrize("value", ["none", None, True, ["identity"], "IDENTITY"])
def test_normalization_of_the_sidecar_is_identity_or_absent(value, folder: Path) -> None:
    (folder / "robojax.json").write_text(json.dumps({"normalization": value}))
    for read in (lerobot_folder.read_checkpoint, jaxmodels.read_requirements):
        with pytest.raises(CheckpointError, match=rf"robojax\.json: normalization is .*{value}.*; wanted \"identity\""):
            read(folder)


@pytest.mark.parametrize("source", ["robojax.json", "stats.json"])
def test_step_without_features_uses_the_robots_statistics(source: str, folder: Path) -> None:
    expected = lerobot_folder.read_checkpoint(folder)
    numbers = {**expected.normalization.inputs.stats, **expected.normalization.outputs.stats}
    edit_normalizers(folder, lambda step: step["config"].update(features={}))
    rename_statistics(folder, lambda name: f"so101.{name}")
    if source == "robojax.json":
        (folder / source).write_text('{"statistics": "so101"}')
    else:
        dataset = {name: {key: array.tolist() for key, array in part.items()} for name, part in numbers.items()}
        (folder / source).write_text(json.dumps(dataset))
    jaxmodels.read_requirements(folder)
    actual = lerobot_folder.read_checkpoint(folder)
    state = actual.config.state
    assert_same_affine(expected.normalization.inputs.get_affine(state), actual.normalization.inputs.get_affine(state))
    lerobot_folder.write_checkpoint(folder.with_name("saved"), actual)
    assert lerobot_folder.read_checkpoint(folder.with_name("saved")).normalization.inputs.get_mode(state) == "MEAN_STD"


@pytest.mark.parametrize("mode", ["IDENTITY", "QUANTILES"])
def test_statistics_of_a_feature_are_given_in_each_mode(mode: str) -> None:
    normalizer = Normalizer((VECTOR,), (("STATE", mode),), {VECTOR.name: STATISTICS | {"count": vector(7)}})
    found = normalizer.get_statistics(VECTOR) or {}
    assert list(found) == ["mean", "std", "min", "max", "q01", "q99"]
    assert found["min"] == (-1, 0, 99)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"mean": vector(1, 2, 3, 4), "q01": vector(np.nan, 0, 0)}, ["min", "max"]),
        ({"min": np.float32(2), "mean": vector(5)}, ["mean", "std", "min", "max", "q01", "q99"]),
    ],
)
def test_invalid_statistics_of_a_feature_are_omitted(changes, names) -> None:
    normalizer = Normalizer((VECTOR,), (), {VECTOR.name: STATISTICS | changes})
    found = normalizer.get_statistics(VECTOR) or {}
    assert list(found) == names
    assert {len(values) for values in found.values()} == {3}
    assert Normalizer((VECTOR,), ()).get_statistics(VECTOR) is None
    assert Normalizer((VECTOR,), (), {VECTOR.name: {"std": vector(1, 1, 1)}}).get_statistics(VECTOR) is None
