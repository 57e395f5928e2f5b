"""LeRobot's processor files and their older formats.

Each file lists steps in order. Steps that move arrays are ignored, and steps that change numbers in an unknown way are
refused. Sources: lerobot/processor/{pipeline,migrate_policy_normalization}.py and
lerobot/policies/act/processor_act.py (0.4.4), lerobot/common/policies/normalize.py (before 0.4).
"""

import logging
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints.files import WEIGHTS, read_floats, read_json, write_json, write_safetensors
from jaxmodels.checkpoints.folder import PLAIN, STATE_BYTES, Folder, open_source
from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.normalization import EPSILON, IDENTITY, Normalization, Normalizer, ProcessorStep, mask_relative
from jaxmodels.ranges import Range, check_unknown_fields, is_number, shorten_value
from jaxmodels.types import ACTION, MODES, TYPES, Feature, dump_features, is_empty_camera, parse_features

PRE = "policy_preprocessor"
POST = "policy_postprocessor"
EPSILONS = Range(0, 1, above=True, below=True)
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95}){0,2}")
MOVING = ("to_batch_processor", "device_processor")
# Keys of ``robojax.json``: prefix of the robot's statistics; whether features without statistics stay unchanged.
GROUP, NORMALIZATION = "statistics", "normalization"
WRITE_IDENTITY = f'write {{"{NORMALIZATION}": "identity"}} into robojax.json'
OTHERS = 100  # Maximum number of names of other features' statistics in a description.
DATASET_STATISTICS = "stats.json"
TOKENIZE = "tokenizer_processor"
RELATIVE, ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
# Steps that some policy types compute themselves (`PolicyConfig.processor_steps`), before or after normalising.
ONLY_BEFORE = frozenset({RELATIVE})
ONLY_AFTER = frozenset({"pi05_prepare_state_tokenizer_processor_step", ABSOLUTE})
OF_TYPES = ONLY_BEFORE | ONLY_AFTER | {TOKENIZE, "smolvla_new_line_processor", "pi0_new_line_processor"}
_NORMALIZE = frozenset({"eps", "features", "norm_map", "normalize_observation_keys"})
FILE_FIELDS = frozenset({"name", "steps"})
ENTRY_FIELDS = frozenset({"registry_name", "class", "config", "state_file"})
# Fields of each step's config (lerobot/processor, 0.6.1); steps that are not listed have none.
STEP_FIELDS: Mapping[str, Set[str]] = {
    "normalizer_processor": _NORMALIZE,
    "unnormalizer_processor": _NORMALIZE,
    "rename_observations_processor": frozenset({"rename_map"}),
    "device_processor": frozenset({"device", "float_dtype"}),
    TOKENIZE: frozenset({"tokenizer_name", "max_length", "task_key", "padding_side", "padding", "truncation"}),
    RELATIVE: frozenset({"enabled", "exclude_joints", "action_names"}),
    ABSOLUTE: frozenset({"enabled"}),
    "pi05_prepare_state_tokenizer_processor_step": frozenset({"max_state_dim", "task_key"}),
}
FLOAT_DTYPES = (None, "float32")  # Accepted values of device_processor's float_dtype.

logger = logging.getLogger(__name__)


def read_processors(folder: Folder) -> Normalization:
    """Read a policy's normalization and renamed features; raises CheckpointError for malformed or unknown steps."""
    inputs, renames, before = _read(folder, PRE, "normalizer_processor")
    outputs, other, after = _read(folder, POST, "unnormalizer_processor")
    if other:
        raise CheckpointError(f"{POST}.json: renames {sorted(other)}; only observations can be renamed")
    return Normalization(inputs, outputs, renames, (*before, *(replace(step, is_output=True) for step in after)))


def check_steps(normalization: Normalization, known: Set[str], policy_type: str) -> None:
    """Raise CheckpointError for steps that are unknown to this policy type or on the wrong side of normalising."""
    for step in normalization.steps:
        where = f"{POST if step.is_output else PRE}.json"
        if step.name not in known:
            raise CheckpointError(
                f"{where}: step {step.name!r} does not belong to policy type {policy_type}; its steps, except "
                f"normalising, are {', '.join(sorted(known)) or 'none'}"
            )
        if step.name in ONLY_AFTER | ONLY_BEFORE and step.comes_after != (step.name in ONLY_AFTER):
            raise CheckpointError(
                f"{where}: step {step.name!r} comes {'after' if step.comes_after else 'before'} normalising; wanted it "
                "on the other side, as LeRobot 0.6.1 writes it"
            )


def get_relative_actions(normalization: Normalization, width: int) -> tuple[bool, ...] | None:
    """Return which numbers of an action are relative to the state; None for none.

    Raises:
        CheckpointError: a step is malformed, or only one step is there.
    """
    before, after = normalization.find_step(RELATIVE), normalization.find_step(ABSOLUTE)
    enabled = [step is not None and step.fields.get("enabled", False) for step in (before, after)]
    if enabled not in ([False, False], [True, True]):
        raise CheckpointError(
            f"{PRE}.json and {POST}.json: one of {RELATIVE} and {ABSOLUTE} is on; wanted both or none"
        )
    if before is None or enabled == [False, False]:
        return None
    names, excluded = before.fields.get("action_names"), before.fields.get("exclude_joints") or []
    for value in (names or [], excluded):
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(f"{PRE}.json: {RELATIVE} has {shorten_value(value)}; wanted lists of names")
    return mask_relative(names, excluded, width)


def get_tokenizer_name(normalization: Normalization, length: int) -> str | None:
    """Return the name of the model whose tokenizer the processors use, if any, for prompts of `length` tokens.

    Raises:
        CheckpointError: the step asks for settings that are not supported.
    """
    step = normalization.find_step(TOKENIZE)
    if step is None:
        return None
    expected = {"max_length": length, "task_key": "task", "padding_side": "right", "truncation": True}
    if wrong := [
        f"{name} {shorten_value(step.fields[name])}"
        for name in expected
        if step.fields.get(name, expected[name]) != expected[name]
    ]:
        raise CheckpointError(f"{PRE}.json: {TOKENIZE} has {', '.join(wrong)}; wanted {shorten_value(expected)}")
    name = step.fields.get("tokenizer_name")
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        raise CheckpointError(f"{PRE}.json: tokenizer_name is {shorten_value(name)}; wanted one like 'owner/model'")
    return name


def complete_statistics(
    normalization: Normalization, config: Any, sidecar: Mapping[str, Any] | None, dataset: Mapping[str, Any]
) -> Normalization:
    """Add the robot's statistics to a policy without statistics, and refuse a policy that still lacks some.

    The robot's statistics are the policy's own with the prefix ``statistics`` of ``robojax.json``, or else the
    dataset's. Only names are compared, so a policy can be checked without reading its numbers.

    Args:
        dataset: statistics by feature, as `read_dataset_statistics` returns them.

    Returns:
        The normalization, in which features without statistics are `Normalizer.unnormalized` if ``robojax.json`` has
        ``"normalization": "identity"``.

    Raises:
        CheckpointError: statistics are missing. The text names each feature, the file and the statistics found.
    """
    sidecar = sidecar or {}
    gaps: list[str] = []
    completed: list[Normalizer] = []
    for step, used in (
        (_ignore_absent_cameras(normalization.inputs, config), list_inputs(config)),
        (normalization.outputs, (config.action,)),
    ):
        step = _add_robot_statistics(step, used, sidecar.get(GROUP), dataset)
        names: list[str] = []
        for feature in used:
            if step.leaves_out(feature):
                logger.info("%s: normalize_observation_keys leave %s unchanged", step.source, feature.name)
            elif gap := _find_mode_gap(step, feature, config) or step.find_gap(feature):
                names.append(feature.name)
                gaps.append(f"{step.source}: {gap}")
        completed.append(replace(step, unnormalized=step.unnormalized.union(names)))
    if gaps and not allows_identity(sidecar):
        found = sorted({name for step in (normalization.inputs, normalization.outputs) for name in step.stats})
        raise CheckpointError(_describe_gaps(gaps, found))
    if gaps:
        logger.info('robojax.json has "normalization": "identity"; not normalized: %s', "; ".join(gaps))
    return replace(normalization, inputs=completed[0], outputs=completed[1])


def allows_identity(sidecar: Mapping[str, Any] | None) -> bool:
    """Return whether features without statistics stay unchanged according to ``robojax.json``."""
    return (sidecar or {}).get(NORMALIZATION) == IDENTITY.lower()


def list_inputs(config: Any) -> tuple[Feature, ...]:
    """Return the observations that a policy reads."""
    return tuple(
        feature for feature in (*config.cameras, config.state, config.environment_state) if feature is not None
    )


def _ignore_absent_cameras(step: Normalizer, config: Any) -> Normalizer:
    """Return the step without a need for statistics of cameras that no robot has."""
    absent = [camera for camera in config.cameras if config.allows_absent_cameras and is_empty_camera(camera.name)]
    return replace(step, unnormalized=frozenset(camera.name for camera in absent if step.find_gap(camera) is not None))


def _find_mode_gap(step: Normalizer, feature: Feature, config: Any) -> str | None:
    """Describe a type that has a mode in the config but not in the step; LeRobot leaves it unchanged."""
    mode = dict(config.normalization_mapping).get(feature.type, IDENTITY)
    if feature.type in dict(step.modes) or mode == IDENTITY or feature.name in step.unnormalized:
        return None
    return (
        f"feature {shorten_value(feature.name)}: norm_map has no mode for the type {feature.type}, and config.json has "
        f"{mode}; write the mode into norm_map"
    )


def _add_robot_statistics(
    step: Normalizer, used: Iterable[Feature], group: Any, dataset: Mapping[str, Any]
) -> Normalizer:
    missing = [feature for feature in used if step.find_gap(feature) is not None]
    if group is not None:
        if wrong := [feature.name for feature in missing if f"{group}.{feature.name}" not in step.stats]:
            raise CheckpointError(
                f"robojax.json: {GROUP} is {shorten_value(group)}, which has no statistics for {', '.join(wrong)}; "
                f"there are {', '.join(sorted(step.stats)[:20]) or 'none'}"
            )
        dataset = {feature.name: step.stats[f"{group}.{feature.name}"] for feature in missing}
    added = [feature for feature in missing if feature.name in dataset]
    listed = {feature.name for feature in step.features}
    return replace(
        step,
        features=(*step.features, *(feature for feature in added if feature.name not in listed)),
        stats={**step.stats, **{feature.name: dataset[feature.name] for feature in added}},
    )


def _describe_gaps(gaps: Iterable[str], found: list[str]) -> str:
    """Return the error text for a policy whose actions would not be scaled to the robot's joints."""
    others = f" and {len(found) - 20} more" if len(found) > 20 else ""
    return (
        f"{'; '.join(gaps)}. Statistics found: {', '.join(map(shorten_value, found[:20])) or 'none'}{others}. Without "
        "statistics its actions are numbers around 0 instead of positions of joints. Train it on your dataset; or copy "
        f"meta/stats.json of your dataset into the folder as {DATASET_STATISTICS}; or, if the statistics of your robot "
        f'have another prefix, name it in robojax.json, e.g. {{"{GROUP}": "so100.buffer"}} for so100.buffer.action; '
        f"or, if the policy was trained without normalization, {WRITE_IDENTITY}"
    )


def read_dataset_statistics(folder: Folder) -> dict[str, dict[str, np.ndarray]]:
    """Read a LeRobotDataset's ``stats.json`` in a policy's folder: statistics by feature, none without the file.

    Raises:
        CheckpointError: the file is malformed.
    """
    if not (folder / DATASET_STATISTICS).exists():
        return {}
    found: dict[str, dict[str, np.ndarray]] = {}
    for feature, statistics in read_json(folder / DATASET_STATISTICS).items():
        if not isinstance(statistics, Mapping):
            raise CheckpointError(f"{DATASET_STATISTICS}: {feature[:80]} is not an object of statistics by name")
        for name, values in statistics.items():
            try:
                found.setdefault(feature, {})[name] = np.asarray(values, np.float32)
            except (ValueError, TypeError, OverflowError) as error:
                raise CheckpointError(
                    f"{DATASET_STATISTICS}: {feature[:80]}.{name[:80]} is {shorten_value(values)}; wanted numbers"
                ) from error
    return found


def dump_names(normalization: Normalization, known: Iterable[str]) -> dict[str, Any]:
    """Return a normalization without its numbers, as JSON for `parse_names`, with at most `OTHERS` unknown features."""
    names = set(known)

    def dump(step: Normalizer) -> dict[str, Any]:
        others = sorted(set(step.stats) - names)[:OTHERS]
        stats = {name: list(step.stats[name]) for name in step.stats if name in names}
        return {
            "features": dump_features(step.features),
            "modes": dict(step.modes),
            "only": step.only,
            "stats": stats | {name[:200]: [] for name in others},
            "source": step.source,
        }

    return {"inputs": dump(normalization.inputs), "outputs": dump(normalization.outputs)}


def parse_names(values: Mapping[str, Any]) -> Normalization:
    """Return a normalization whose statistics have names and no numbers, from what `dump_names` returned."""
    inputs, outputs = (
        Normalizer(
            parse_features("features", step["features"]),
            tuple(step["modes"].items()),
            {name: dict.fromkeys(statistics, np.empty(0, np.float32)) for name, statistics in step["stats"].items()},
            only=None if step["only"] is None else tuple(step["only"]),
            source=step["source"],
        )
        for step in (values["inputs"], values["outputs"])
    )
    return Normalization(inputs, outputs)


def write_processors(folder: Path, normalization: Normalization, device: str | None) -> None:
    """Write a policy's two processor files as LeRobot does."""

    def dump(*, is_output: bool, comes_after: bool) -> list[dict[str, Any]]:
        chosen = [step for step in normalization.steps if step.is_output == is_output]
        chosen = [step for step in chosen if is_output or step.comes_after == comes_after]
        return [{"registry_name": step.name, "config": dict(step.fields)} for step in chosen]

    prepared = dump(is_output=False, comes_after=False)
    move = {"registry_name": "device_processor", "config": {"device": device or "cpu", "float_dtype": None}}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": dict(normalization.renames)}},
        {"registry_name": "to_batch_processor", "config": {}},
        *prepared,
        move,
        _write_step(folder, PRE, 3 + len(prepared), "normalizer_processor", normalization.inputs),
        *dump(is_output=False, comes_after=True),
    ]
    after = [
        _write_step(folder, POST, 0, "unnormalizer_processor", normalization.outputs),
        *dump(is_output=True, comes_after=True),
        {**move, "config": {"device": "cpu", "float_dtype": None}},
    ]
    write_json(folder / f"{PRE}.json", {"name": PRE, "steps": before}, indent=2)
    write_json(folder / f"{POST}.json", {"name": POST, "steps": after}, indent=2)


def _read(folder: Folder, name: str, kind: str) -> tuple[Normalizer, dict[str, str], list[ProcessorStep]]:
    where = f"{name}.json"
    values = read_json(folder / where)
    steps = values.get("steps")
    if not isinstance(steps, list):
        raise CheckpointError(f"{where}: has no list of steps")
    _check_fields(where, values, FILE_FIELDS)
    normalizers: list[Normalizer] = []
    renames: dict[str, str] = {}
    others: list[ProcessorStep] = []
    for step in steps:
        if not isinstance(step, Mapping) or not isinstance(step.get("config", {}), Mapping):
            raise CheckpointError(f"{where}: a step is not an object with a name and a config")
        step_kind, config = step.get("registry_name"), step.get("config", {})
        if not isinstance(step_kind, str | None):
            raise CheckpointError(f"{where}: a step's registry_name is {shorten_value(step_kind)}; wanted a string")
        _check_fields(f"{where}: step {step_kind}", step, ENTRY_FIELDS)
        if step_kind == kind and not normalizers:
            normalizers.append(_read_step(folder, where, step, config))
        elif step_kind == "rename_observations_processor" and not normalizers:
            renames |= _read_renames(where, config, renames)
        elif step_kind in OF_TYPES:
            others.append(ProcessorStep(step_kind, dict(config), comes_after=bool(normalizers)))
        elif step_kind not in MOVING:
            raise CheckpointError(_describe_unknown_step(where, step, kind, is_late=bool(normalizers)))
        elif config.get("float_dtype") not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{where}: float_dtype of {step_kind} is {shorten_value(config['float_dtype'])}, which is not read; "
                "wanted null or 'float32'. The type that a policy computes in is the dtype that it is loaded with: set "
                "float_dtype to null"
            )
        _check_fields(f"{where}: {step_kind}", config, STEP_FIELDS.get(str(step_kind), frozenset()))
    if not normalizers:
        raise CheckpointError(f"{where}: has no step {kind}")
    return normalizers[0], renames, others


def _describe_unknown_step(where: str, step: Mapping[str, Any], kind: str, *, is_late: bool) -> str:
    """Return the error text for a step that is unknown or at the wrong position."""
    name = step.get("registry_name") or step.get("class")
    if is_late and name == kind:
        return f"{where}: has two steps {kind}; wanted one"
    if is_late and name == "rename_observations_processor":
        return f"{where}: step {name} comes after {kind}; wanted it before"
    known = ", ".join((kind, "rename_observations_processor", *MOVING, *sorted(OF_TYPES)))
    return (
        f"{where}: step {name!r} with {sorted(step.get('config', {}))} is not known here, and without it the numbers "
        f"may be wrong; known steps are {known}"
    )


def _check_fields(what: str, values: Mapping[str, Any], known: Set[str]) -> None:
    """Log unknown fields that are off; raise CheckpointError with all unknown fields that are on."""
    unknown = {field: value for field, value in values.items() if field not in known}
    try:
        check_unknown_fields(what, unknown, "this reads the fields of LeRobot 0.6.1")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def _read_renames(where: str, config: Mapping[str, Any], before: Mapping[str, str]) -> dict[str, str]:
    renames = config.get("rename_map", {})
    if not isinstance(renames, Mapping) or not all(isinstance(name, str) for name in renames.values()):
        raise CheckpointError(f"{where}: rename_map is {shorten_value(renames)}; wanted an object of names")
    if before and renames:
        raise CheckpointError(f"{where}: there are two steps that rename; wanted one")
    inside: dict[str, str] = {}
    for outside, name in renames.items():
        if inside.setdefault(name, outside) != outside:
            raise CheckpointError(
                f"{where}: rename_map gives one name twice: {shorten_value(inside[name])} and "
                f"{shorten_value(outside)} are both {shorten_value(name)}"
            )
    return dict(renames)


def check_renames(renames: Mapping[str, str], inputs: Iterable[Feature]) -> None:
    """Raise CheckpointError if a step renames to a feature that the policy does not read."""
    known = {feature.name for feature in inputs}
    for outside, inside in renames.items():
        if inside not in known:
            raise CheckpointError(
                f"{PRE}.json: rename_map calls {shorten_value(outside)} {shorten_value(inside)}, which the policy does "
                f"not read; its inputs are {', '.join(sorted(known))[:400]}"
            )


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
    names = None if only is None else tuple(only)
    return Normalizer(features, tuple(modes.items()), stats, float(epsilon), names, source=where)


def _read_state(folder: Folder, where: str, name: Any) -> dict[str, np.ndarray]:
    if name is None:
        return {}
    # The file is untrusted, so its name must not lead out of the folder.
    if not isinstance(name, str) or not PLAIN.fullmatch(name):
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
    """Return whether a tensor of a weights file is a statistic of the normalization."""
    return name.startswith((INPUTS, TARGETS, OUTPUTS))


def upgrade_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an early ``config.json`` with today's fields; raises CheckpointError if one type has several modes."""
    if not any(name in values for name in OLD_FIELDS):
        return dict(values)
    modern = {name: value for name, value in values.items() if name not in OLD_FIELDS}
    modern.setdefault("type", "act")
    modes: dict[str, str] = {}
    for side in ("input", "output"):
        shapes = values.get(f"{side}_shapes", {})
        if not isinstance(shapes, Mapping):
            raise CheckpointError(f"config.json: {side}_shapes is not an object of names and shapes")
        modern[f"{side}_features"] = {name: {"type": _old_type(name), "shape": shape} for name, shape in shapes.items()}
        old_modes = values.get(f"{side}_normalization_modes", {})
        if not isinstance(old_modes, Mapping):
            raise CheckpointError(f"config.json: {side}_normalization_modes is not an object of names and modes")
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
    """Read the normalization from the buffers of an older weights file; `complete_statistics` finds missing ones.

    Raises:
        CheckpointError: a buffer belongs to no feature.
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
    if unused:
        raise CheckpointError(f"{WEIGHTS}: normalization buffers belong to no feature of the config: {sorted(unused)}")
    return Normalization(
        inputs=Normalizer((*inputs, *outputs), modes, {**before, **(targets or after)}, source=WEIGHTS),
        outputs=Normalizer(outputs, modes, after, source=WEIGHTS),
    )
