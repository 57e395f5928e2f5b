"""Strict reader and writer of LeRobot's policy folders: files and config must have exactly the same tensors."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.checkpoints import orbax
from jaxmodels.checkpoints.bundle import Manifest, check_files
from jaxmodels.checkpoints.files import (
    NEVER_USED,
    SERVED,
    WEIGHTS,
    WEIGHTS_INDEX,
    Stored,
    find_policy_weights,
    has_policy_weights,
    read_json,
    write_json,
    write_safetensors,
)
from jaxmodels.checkpoints.folder import BUNDLE, PARAMS, SHARD, STATE_BYTES, Folder, PolicyFolder
from jaxmodels.checkpoints.tensor_layouts import read_tensors, their_shapes, write_tensors
from jaxmodels.checkpoints.tokenizer_files import TOKENIZER, read_tokenizer
from jaxmodels.errors import CheckpointError, ConfigError, WeightsMismatch
from jaxmodels.memory import Needs, check_layers, check_tables
from jaxmodels.normalization import IDENTITY, Normalization, check_normalization
from jaxmodels.policies import PolicyType, get_policy_type, lerobot_processors, openpi_configs
from jaxmodels.policies.config import LEROBOT_VERSIONS, PolicyConfig
from jaxmodels.policies.integrity import CONFIG, SIDECAR, describe_missing_weights, read_config, read_sidecar
from jaxmodels.policies.lerobot_processors import (
    NORMALIZATION,
    POST,
    PRE,
    WRITE_IDENTITY,
    complete_statistics,
    parse_names,
    read_processors,
    write_processors,
)
from jaxmodels.ranges import Range, is_number, shorten_value
from jaxmodels.types import ACTION
from jaxmodels.weights import Blueprint, blueprint_of, check_fit, not_finite

RATE = Range(0, 10_000, above=True)  # Actions per second.


@dataclass(frozen=True)
class Sidecar:
    """Contents of ``robojax.json``, a file next to LeRobot's files, which refuse unknown keys.

    Attributes:
        rate: actions per second the policy was trained at.
        joint_names: names of the action's numbers in order.
        other: further keys, which are kept; ``normalization`` may be ``identity``, see `complete_statistics`.
    """

    rate: float | None = None
    joint_names: tuple[str, ...] | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], joints: int) -> "Sidecar":
        for key in values:
            near = get_close_matches(key.lower(), SIDECAR_KEYS, 1, cutoff=0.8)
            if near and key not in SIDECAR_KEYS:
                raise CheckpointError(f"robojax.json: unknown key {shorten_value(key)}; did you mean {near[0]!r}?")
        rate, names = values.get("rate"), values.get("joint_names")
        if rate is not None and not is_number(rate, RATE):
            raise CheckpointError(
                f"robojax.json: rate is {shorten_value(rate)}; wanted actions per second, e.g. 25, "
                f"{RATE.maximum:g} at most"
            )
        if names is not None and not (
            isinstance(names, list) and len(names) == joints and all(isinstance(name, str) for name in names)
        ):
            raise CheckpointError(
                f"robojax.json: joint_names are {shorten_value(names)}; wanted a list of {joints} names"
            )
        if NORMALIZATION in values and not lerobot_processors.allows_identity(values):
            raise CheckpointError(
                f'robojax.json: {NORMALIZATION} is {shorten_value(values[NORMALIZATION])}; wanted "identity", for a '
                "policy that was trained without normalization, or no such key"
            )
        other = {key: value for key, value in values.items() if key not in ("rate", "joint_names")}
        return cls(
            rate=None if rate is None else float(rate), joint_names=None if names is None else tuple(names), other=other
        )

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = dict(self.other)
        if self.rate is not None:
            values["rate"] = self.rate
        if self.joint_names is not None:
            values["joint_names"] = list(self.joint_names)
        return values


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a policy's folder.

    Attributes:
        weights: arrays by our flat names (jaxmodels/weights.py), float32; a bundle has the arrays of its program.
        bundle: manifest of a bundle; None for other folders.
    """

    config: PolicyConfig
    weights: Mapping[str, np.ndarray]
    normalization: Normalization
    sidecar: Sidecar = field(default_factory=Sidecar)
    tokenizer: bytes | None = None
    bundle: Manifest | None = None


# The sidecar's key for the version of LeRobot that the files are read as.
LEROBOT = "lerobot"
SIDECAR_KEYS = ("rate", "joint_names", NORMALIZATION, lerobot_processors.GROUP, LEROBOT, openpi_configs.KEY)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Description:
    """Contents of a policy's folder without its weights.

    Attributes:
        renames: the robot's names of features to the policy's, if they differ.
        action_range: smallest and largest value of each joint in the training data; None if unknown without weights.
    """

    config: Any
    sidecar: Sidecar
    renames: Mapping[str, str] = field(default_factory=dict)
    action_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None


def build_description(small: Mapping[str, Any]) -> Description:
    """Build the description from what `describe_folder` read; raises ConfigError or CheckpointError."""
    values = small["config"]
    config: Any = read_config_values(values, small["sidecar"])
    lerobot_processors.check_renames(small["renames"], config.input_features)
    low, high = small.get("action_range") or ((), ())
    action_range = (tuple(low), tuple(high)) if len(low) == len(high) == config.action.shape[0] else None
    return Description(config, _sidecar(small["sidecar"], config), small["renames"], action_range)


def check_statistics(small: Mapping[str, Any], config: Any) -> None:
    """Raise CheckpointError, as `complete_statistics`, if `describe_folder` read too few statistics for a policy."""
    names, buffers, sidecar = small["normalization"], small["buffers"], small["sidecar"]
    if names is not None:
        complete_statistics(parse_names(names), config, sidecar, names["dataset"])
    elif buffers is not None:
        stats = dict.fromkeys(buffers, np.empty(0, np.float32))
        complete_statistics(_read_buffers(config, stats, sidecar), config, sidecar, {})


def read_config_values(values: Mapping[str, Any], sidecar: Mapping[str, Any] | None) -> Any:
    """Return the config from ``config.json`` and ``robojax.json``; raises ConfigError for wrong fields or values."""
    version = (sidecar or {}).get(LEROBOT)
    values = dict(values)
    if openpi_configs.KEY in (sidecar or {}):
        if values.get("type") not in openpi_configs.MODELS:
            raise ConfigError(
                f"{SIDECAR}: has {openpi_configs.KEY!r}, and the policy is of type "
                f"{shorten_value(values.get('type'))}; openpi's are {', '.join(openpi_configs.MODELS)}"
            )
        values[openpi_configs.KEY] = openpi_configs.read_openpi_config((sidecar or {})[openpi_configs.KEY])
    if version is not None and version not in LEROBOT_VERSIONS:
        raise ConfigError(
            f"{SIDECAR}: {LEROBOT} is {shorten_value(version)}; wanted one of {', '.join(LEROBOT_VERSIONS)}"
        )
    kind = get_policy_type(values.get("type"))
    if version is not None and kind.depends_on_version:
        values[LEROBOT] = version
    return kind.config(values)


def read_checkpoint(
    folder: Folder,
    *,
    admit: Callable[[Any, int | Needs], None] = lambda config, size: None,
    lerobot: str | None = None,
    needs_statistics: bool = True,
) -> Checkpoint:
    """Read a policy's folder.

    Args:
        folder: a path, or a folder with open files, of which none may have changed.
        admit: called before weights are read with the config and the number of its parameters, or the bytes of a
            bundle; raises ConfigError to refuse the policy.
        lerobot: version of LeRobot, which replaces the sidecar's.
        needs_statistics: False for a policy whose normalization will be replaced by a dataset's.

    Raises:
        ConfigError: the config has unknown fields or values that make no sense.
        CheckpointError: a file is missing, malformed, or does not fit the config (`WeightsMismatch`), or statistics are
            missing.
    """
    if isinstance(folder, Path):
        if not folder.is_dir():
            raise CheckpointError(f"{folder.name}: no such folder; wanted one with {CONFIG} and {WEIGHTS}")
        with PolicyFolder(folder) as opened:
            return read_checkpoint(opened, admit=admit, lerobot=lerobot, needs_statistics=needs_statistics)
    checkpoint = _read(folder, admit, lerobot, needs_statistics)
    folder.check_unchanged()
    return checkpoint


def _read(
    folder: PolicyFolder, admit: Callable[[Any, int | Needs], None], lerobot: str | None, needs_statistics: bool
) -> Checkpoint:
    sidecar = read_sidecar(folder)
    values = read_config(folder, sidecar)
    if lerobot is not None:
        sidecar = {**(sidecar or {}), LEROBOT: lerobot}
    config = read_config_values(values, sidecar)
    own = _sidecar(sidecar, config)
    kind = get_policy_type(values.get("type"))
    if kind.openpi is not None and openpi_configs.is_openpi(folder, sidecar):
        config = kind.openpi.complete(folder.tree(PARAMS), config)
    check_tables(config)
    bundle = Manifest.from_json(read_json(folder / BUNDLE)) if (folder / BUNDLE).exists() else None
    if bundle is None:
        weights, buffers = _read_weights(folder, kind, config, admit)
    else:
        stored = find_policy_weights(folder, dtypes=SERVED)
        size = sum(tensor.bytes for tensor in stored.values())
        admit(config, Needs(size, size))
        check_files(folder, bundle)
        weights, buffers = {name: tensor.read() for name, tensor in stored.items()}, {}
    normalization = _read_normalization(folder, config, buffers, sidecar)
    if needs_statistics:
        try:
            dataset = lerobot_processors.read_dataset_statistics(folder)
            normalization = complete_statistics(normalization, config, sidecar, dataset)
            check_normalization(normalization, lerobot_processors.list_inputs(config), (config.action,))
        except CheckpointError as error:
            raise CheckpointError(f"{folder.name}: {error}") from error
    lerobot_processors.check_renames(normalization.renames, config.input_features)
    lerobot_processors.check_steps(normalization, config.processor_steps, values["type"])
    relative = lerobot_processors.get_relative_actions(normalization, config.action.shape[0])
    if relative != config.relative_action_mask:
        raise CheckpointError(
            f"{folder.name}: config.json and {PRE}.json do not agree on which actions are relative to the state: "
            f"{config.relative_action_mask} and {relative}; wanted the files of one training"
        )
    model = None
    if config.prompt_length is not None:
        model = lerobot_processors.get_tokenizer_name(normalization, config.prompt_length) or config.tokenizer_name
    return Checkpoint(config, weights, normalization, own, read_tokenizer(folder, model), bundle)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a policy in LeRobot's current layout; each file appears whole or not at all, the weights last.

    Tensors that LeRobot's files have and that acting does not need (`PolicyType.unused`) are zeros.

    Raises:
        WeightsMismatch: the weights do not fit the config.
        ConfigError: the checkpoint is a bundle.
    """
    if checkpoint.bundle is not None:
        raise ConfigError("a bundle has only the weights of its serving program; use the folder that it was made from")
    kind = get_policy_type(checkpoint.config.type)
    plan = model_blueprint(checkpoint.config)
    shapes = {name: tuple(np.shape(array)) for name, array in checkpoint.weights.items()}
    check_fit(shapes, {name: shape.shape for name, shape in plan.shapes.items()}, where="weights to be written")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        draft = Path(name)
        write_description(draft, checkpoint)
        tensors = write_tensors(kind.tensors(plan.shapes), dict(checkpoint.weights))
        # LeRobot refuses a file without an unused tensor, or reads it as another model.
        for name, shape in ({} if kind.unused is None else kind.unused(checkpoint.config)).items():
            tensors.setdefault(name, np.zeros(shape, np.float32))
        write_safetensors(draft / WEIGHTS, tensors)
        files = [path for path in draft.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: path.name == WEIGHTS):
            (folder / path.relative_to(draft)).parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, folder / path.relative_to(draft))
        for path in folder.iterdir():  # Remove the shards of earlier weights.
            if path.name == WEIGHTS_INDEX or SHARD.fullmatch(path.name):
                path.unlink()


def write_description(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files of a policy except its weights."""
    write_json(folder / CONFIG, checkpoint.config.to_json(), indent=4)
    write_processors(folder, checkpoint.normalization, checkpoint.config.to_json().get("device"))
    if sidecar := checkpoint.sidecar.to_json():
        write_json(folder / SIDECAR, sidecar, indent=2)
    if checkpoint.tokenizer is not None:
        (folder / TOKENIZER).write_bytes(checkpoint.tokenizer)
    for file, values in checkpoint.config.dump_architecture().items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / file, dict(values), indent=2)


def model_blueprint(config: PolicyConfig) -> Blueprint[Any]:
    """Return the network of a config, without weights and dropout, as the policy's program uses it."""
    return blueprint_of(get_policy_type(config.type).model, config.architecture())


def _get_weights_name(folder: Folder) -> str:
    """Return the name of a policy's weights in errors: their file, or the index of their shards."""
    return WEIGHTS_INDEX if (folder / WEIGHTS_INDEX).exists() else WEIGHTS


def _find_tensors(folder: Folder, kind: PolicyType, config: Any) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Return the tensors that acting needs, and the statistics that older policies keep among them.

    Raises:
        WeightsMismatch: an unused tensor has a wrong shape, or a tensor occurs twice.
    """
    where = _get_weights_name(folder)
    tensors = find_policy_weights(folder, lambda name: not name.endswith(NEVER_USED))
    buffers = {name: tensors.pop(name) for name in list(tensors) if lerobot_processors.is_buffer(name)}
    renamed = {kind.rename(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = sorted(name for name in tensors if kind.rename(name) != name and kind.rename(name) in tensors)
        raise WeightsMismatch(f"{where}: {', '.join(twice)[:400]} has two names in the file; remove one")
    tensors = renamed
    for name, same in kind.tied.items():
        if name not in tensors and same in tensors:
            tensors[name] = tensors[same]
    unused = {} if kind.unused is None else kind.unused(config)
    found = {name: tensors.pop(name).shape for name in unused if name in tensors}
    check_fit(found, {name: unused[name] for name in found}, where=where)
    return tensors, buffers


def _read_weights(
    folder: PolicyFolder, kind: PolicyType, config: Any, admit: Callable[[Any, int | Needs], None]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return our weights, and the statistics that older policies keep among theirs."""
    if has_policy_weights(folder):
        weights, buffers = _read_tensors(folder, kind, config, admit)
    else:
        plan = model_blueprint(config)
        admit(config, plan.count_parameters())
        if folder.has_tree():
            restored = orbax.restore(folder.tree(), dict(plan.shapes))
            weights, buffers = {name: np.asarray(array) for name, array in restored.items()}, {}
        elif kind.openpi is not None and folder.has_tree(PARAMS):
            weights, buffers = kind.openpi.read(folder.tree(PARAMS), config), {}
        else:
            raise CheckpointError(describe_missing_weights(folder))
    if wrong := not_finite(weights):
        raise CheckpointError(f"{folder.name}: weights hold a NaN or an infinity: {', '.join(sorted(wrong))}")
    return weights, buffers


def _read_tensors(
    folder: Folder, kind: PolicyType, config: Any, admit: Callable[[Any, int | Needs], None]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    where = _get_weights_name(folder)
    tensors, buffers = _find_tensors(folder, kind, config)
    check_layers(config, len(tensors), where)
    plan = model_blueprint(config)
    table = kind.tensors(plan.shapes)
    check_fit(
        {name: tensor.shape for name, tensor in tensors.items()},
        their_shapes(table, {name: shape.shape for name, shape in plan.shapes.items()}),
        where=where,
    )
    if (size := sum(tensor.bytes for tensor in buffers.values())) > STATE_BYTES:
        raise CheckpointError(f"{where}: {size} bytes of statistics; wanted at most {STATE_BYTES}")
    admit(config, plan.count_parameters())
    return (
        read_tensors(table, tensors),
        {name: tensor.read() for name, tensor in buffers.items()},
    )


def _read_normalization(
    folder: Folder, config: Any, buffers: Mapping[str, np.ndarray], sidecar: Mapping[str, Any] | None
) -> Normalization:
    if (folder / f"{PRE}.json").exists() or (folder / f"{POST}.json").exists():
        if buffers:
            raise CheckpointError(
                f"{folder.name}: normalisation is in {PRE}.json and in {len(buffers)} buffers of {WEIGHTS}; "
                "keep one of them"
            )
        return read_processors(folder)
    openpi = config.openpi
    if openpi is not None:
        return openpi_configs.read_normalization(folder, openpi, sidecar)
    return _read_buffers(config, buffers, sidecar)


def _read_buffers(config: Any, buffers: Mapping[str, np.ndarray], sidecar: Mapping[str, Any] | None) -> Normalization:
    """Read the normalization of a folder without processor files, as LeRobot wrote them before 0.4."""
    inputs, outputs, modes = config.input_features, config.output_features, config.normalization_mapping
    is_needed = any(dict(modes).get(feature.type, IDENTITY) != IDENTITY for feature in (*inputs, *outputs))
    if is_needed and not buffers and not lerobot_processors.allows_identity(sidecar):
        raise CheckpointError(
            f"{CONFIG} has modes, but there is no normalization; wanted {PRE}.json and {POST}.json, or buffers in "
            f"{WEIGHTS} as LeRobot wrote before 0.4; if the policy was trained without normalization, {WRITE_IDENTITY}"
        )
    return lerobot_processors.read_buffered_normalization(inputs, outputs, modes, buffers)


def _sidecar(values: Mapping[str, Any] | None, config: Any) -> Sidecar:
    """Return the sidecar, completed with the rate and the names of the joints from the config."""
    width = config.action.shape[0]
    sidecar = Sidecar() if values is None else Sidecar.from_json(values, width)
    openpi = config.openpi
    if (
        openpi is not None
    ):  # `action_feature_names` marks relative actions in this config (`OpenpiConfig.build_values`).
        rate = openpi.rate if sidecar.rate is None else sidecar.rate
        return replace(sidecar, rate=rate, joint_names=sidecar.joint_names or openpi.joint_names)
    names = config.action_feature_names
    if names is not None and len(names) < min(width, 2):
        # LeRobot writes the group of a dataset's {"motors": [...]} instead of the names in it.
        logger.info("config.json: action_feature_names is %s, which does not name %d numbers", names, width)
        names = None
    if names is not None and len(names) != width:
        other = f"the feature {ACTION!r} has {width} numbers"
        if sidecar.joint_names or config.action.names:
            source = "joint_names of robojax.json" if sidecar.joint_names else f"names of the feature {ACTION!r}"
            other = f"{source} are {width}: {', '.join(sidecar.joint_names or config.action.names)}"
        raise CheckpointError(
            f"config.json: action_feature_names has {len(names)} names ({', '.join(names)[:400]}), but {other[:400]}; "
            f"wanted {width} names in the order of the actions"
        )
    return replace(sidecar, joint_names=sidecar.joint_names or names or config.action.names)
