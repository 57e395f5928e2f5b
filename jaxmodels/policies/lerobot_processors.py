"""LeRobot's processor files and their older formats.

Each file lists steps in order. Steps that only move arrays about need nothing here; renaming and normalising are read;
any other step would change numbers in a way this package does not know, so it is refused. Source:
lerobot/processor/pipeline.py, lerobot/policies/act/processor_act.py (0.4.4). Older formats:
lerobot/processor/migrate_policy_normalization.py (0.4.4), lerobot/common/policies/normalize.py (before 0.4).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.files import read_floats, read_json, write_json, write_safetensors
from jaxmodels.checkpoints.folder import STATE_BYTES, Folder, open_source
from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.normalization import EPSILON, Normalization, Normalizer
from jaxmodels.ranges import Range, is_number, shorten_value
from jaxmodels.types import ACTION, MODES, TYPES, Feature, dump_features, parse_features

PRE = "policy_preprocessor"
POST = "policy_postprocessor"
STATE_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
EPSILONS = Range(0, 1, above=True, below=True)
MOVING = ("to_batch_processor", "device_processor")


def read_processors(folder: Folder) -> Normalization:
    """Read a policy's normalization and renamed features from its processor files.

    Raises:
        CheckpointError: malformed, a step that is not known, or statistics that are missing or unreadable.
    """
    inputs, renames = _read(folder, PRE, "normalizer_processor")
    outputs, other = _read(folder, POST, "unnormalizer_processor")
    if other:
        raise CheckpointError(f"{POST}.json: renames {sorted(other)}; only observations can be renamed")
    return Normalization(inputs, outputs, renames)


def write_processors(folder: Path, normalization: Normalization, device: str | None) -> None:
    """Write a policy's two processor files as LeRobot does."""
    move = {"registry_name": "device_processor", "config": {"device": device or "cpu", "float_dtype": None}}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": dict(normalization.renames)}},
        {"registry_name": "to_batch_processor", "config": {}},
        move,
        _write_step(folder, PRE, 3, "normalizer_processor", normalization.inputs),
    ]
    after = [
        _write_step(folder, POST, 0, "unnormalizer_processor", normalization.outputs),
        {**move, "config": {"device": "cpu", "float_dtype": None}},
    ]
    write_json(folder / f"{PRE}.json", {"name": PRE, "steps": before}, indent=2)
    write_json(folder / f"{POST}.json", {"name": POST, "steps": after}, indent=2)


def _read(folder: Folder, name: str, kind: str) -> tuple[Normalizer, dict[str, str]]:
    where = f"{name}.json"
    steps = read_json(folder / where).get("steps")
    if not isinstance(steps, list):
        raise CheckpointError(f"{where}: has no list of steps")
    normalizers: list[Normalizer] = []
    renames: dict[str, str] = {}
    for step in steps:
        if not isinstance(step, Mapping) or not isinstance(step.get("config", {}), Mapping):
            raise CheckpointError(f"{where}: a step is no object with a name and a config")
        step_kind, config = step.get("registry_name"), step.get("config", {})
        if step_kind == kind and not normalizers:
            normalizers.append(_read_step(folder, where, step, config))
        elif step_kind == "rename_observations_processor" and not normalizers:
            renames |= _read_renames(where, config, renames)
        elif step_kind not in MOVING or config.get("float_dtype") not in (None, "float32"):
            actual = step_kind or step.get("class")
            raise CheckpointError(
                f"{where}: step {actual!r} with {sorted(config)} is not known here; "
                f"wanted renaming and then one {kind}, as LeRobot 0.4.4 writes for ACT"
            )
    if not normalizers:
        raise CheckpointError(f"{where}: has no step {kind}")
    return normalizers[0], renames


def _read_renames(where: str, config: Mapping[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    renames = config.get("rename_map", {})
    if not isinstance(renames, Mapping) or not all(isinstance(name, str) for name in renames.values()):
        raise CheckpointError(f"{where}: rename_map is {shorten_value(renames)}; wanted an object of names")
    if (before and renames) or len(set(renames.values())) < len(renames):
        raise CheckpointError(f"{where}: rename_map gives one name twice, or there are two of them")
    return dict(renames)


def _read_step(folder: Folder, where: str, step: Mapping[str, Any], config: Mapping[str, Any]) -> Normalizer:
    modes = config.get("norm_map", {})
    epsilon = config.get("eps", EPSILON)
    only = config.get("normalize_observation_keys")
    if not isinstance(modes, Mapping) or not all(kind in TYPES and mode in MODES for kind, mode in modes.items()):
        raise CheckpointError(
            f"{where}: norm_map is {shorten_value(modes)}; wanted types of {TYPES} and modes of {MODES}"
        )
    if not is_number(epsilon, EPSILONS):
        raise CheckpointError(f"{where}: eps is {shorten_value(epsilon)}; wanted a small positive number, e.g. 1e-8")
    if only is not None and not (isinstance(only, list) and all(isinstance(name, str) for name in only)):
        raise CheckpointError(f"{where}: normalize_observation_keys is {shorten_value(only)}; wanted a list of names")
    try:
        features = parse_features(f"{where}: features", config.get("features"))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    stats: dict[str, dict[str, np.ndarray]] = {}
    for key, array in _read_state(folder, where, step.get("state_file")).items():
        feature, _, statistic = key.rpartition(".")
        stats.setdefault(feature, {})[statistic] = array
    return Normalizer(features, tuple(modes.items()), stats, float(epsilon), None if only is None else tuple(only))


def _read_state(folder: Folder, where: str, name: Any) -> dict[str, np.ndarray]:
    if name is None:
        return {}
    # The name comes from a file of a stranger: it must not lead out of the folder.
    if not isinstance(name, str) or not STATE_FILE.fullmatch(name):
        raise CheckpointError(
            f"{where}: state_file is {shorten_value(name)}; wanted the plain name of a .safetensors file"
        )
    try:
        with open_source(folder / name) as file:
            if file.size > STATE_BYTES:
                raise CheckpointError(f"{name}: {file.size} bytes; statistics of features have at most {STATE_BYTES}")
            return {key: array.astype(np.float32) for key, array in read_floats(file).items()}
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error.strerror}); wanted a safetensors file") from error


def _write_step(folder: Path, name: str, index: int, kind: str, normalizer: Normalizer) -> dict[str, Any]:
    config: dict[str, Any] = {
        "eps": normalizer.epsilon,
        "features": dump_features(normalizer.features),
        "norm_map": dict(normalizer.modes),
    }
    if normalizer.only is not None:
        config["normalize_observation_keys"] = sorted(normalizer.only)
    step: dict[str, Any] = {"registry_name": kind, "config": config}
    state = {
        f"{feature}.{statistic}": array
        for feature, statistics in normalizer.stats.items()
        for statistic, array in statistics.items()
    }
    if state:
        step["state_file"] = f"{name}_step_{index}_{kind}.safetensors"
        write_safetensors(folder / step["state_file"], state)
    return step


INPUTS = "normalize_inputs.buffer_"
TARGETS = "normalize_targets.buffer_"
OUTPUTS = "unnormalize_outputs.buffer_"
OLD_FIELDS = ("input_shapes", "output_shapes", "input_normalization_modes", "output_normalization_modes")
OLD_MODES = {"mean_std": "MEAN_STD", "min_max": "MIN_MAX"}


def is_buffer(name: str) -> bool:
    """Whether a tensor of a weights file is a statistic of the normalization."""
    return name.startswith((INPUTS, TARGETS, OUTPUTS))


def upgrade_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of early 2025 or before, with today's fields.

    Raises:
        CheckpointError: modes that differ within one type, which today's field cannot say.
    """
    if not any(name in values for name in OLD_FIELDS):
        return dict(values)
    modern = {name: value for name, value in values.items() if name not in OLD_FIELDS}
    modern.setdefault("type", "act")
    modes: dict[str, str] = {}
    for side in ("input", "output"):
        shapes = values.get(f"{side}_shapes", {})
        if not isinstance(shapes, Mapping):
            raise CheckpointError(f"config.json: {side}_shapes is no object of names and shapes")
        modern[f"{side}_features"] = {name: {"type": _old_type(name), "shape": shape} for name, shape in shapes.items()}
        old_modes = values.get(f"{side}_normalization_modes", {})
        if not isinstance(old_modes, Mapping):
            raise CheckpointError(f"config.json: {side}_normalization_modes is no object of names and modes")
        for name, mode in old_modes.items():
            if not isinstance(mode, str):
                raise CheckpointError(
                    f"config.json: {side}_normalization_modes has {shorten_value(mode)}; wanted names of modes"
                )
            kind, new_mode = _old_type(name), OLD_MODES.get(mode, mode)
            if modes.setdefault(kind, new_mode) != new_mode:
                raise CheckpointError(f"config.json: features of type {kind} have modes {modes[kind]} and {new_mode}")
    modern["normalization_mapping"] = modes
    return modern


def _old_type(name: str) -> str:
    if name == ACTION:
        return "ACTION"
    if "image" in name:
        return "VISUAL"
    return "ENV" if name == "observation.environment_state" else "STATE"


def read_buffered_normalization(
    inputs: tuple[Feature, ...],
    outputs: tuple[Feature, ...],
    modes: tuple[tuple[str, str], ...],
    buffers: Mapping[str, np.ndarray],
) -> Normalization:
    """Normalization out of the buffers of an older weights file.

    Raises:
        CheckpointError: buffers that belong to no feature of the config, or features without theirs, all listed.
    """
    unused = dict(buffers)

    def take(prefix: str, features: tuple[Feature, ...]) -> dict[str, dict[str, np.ndarray]]:
        stats: dict[str, dict[str, np.ndarray]] = {}
        for feature in features:
            start = f"{prefix}{feature.name.replace('.', '_')}."
            for name in [name for name in unused if name.startswith(start)]:
                stats.setdefault(feature.name, {})[name.removeprefix(start)] = unused.pop(name).astype(np.float32)
        return stats

    before = take(INPUTS, inputs)
    targets = take(TARGETS, outputs)
    after = take(OUTPUTS, outputs)
    missing = [
        feature.name
        for stats, features in ((before, inputs), (after, outputs))
        for feature in features
        if dict(modes).get(feature.type, "IDENTITY") != "IDENTITY" and feature.name not in stats
    ]
    if unused or missing:
        raise CheckpointError(
            "model.safetensors: normalisation buffers do not fit the config; "
            f"belong to no feature: {sorted(unused) or 'none'}; features without theirs: {missing or 'none'}"
        )
    return Normalization(
        inputs=Normalizer((*inputs, *outputs), modes, {**before, **(targets or after)}),
        outputs=Normalizer(outputs, modes, after),
    )
