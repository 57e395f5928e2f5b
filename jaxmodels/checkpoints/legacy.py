"""LeRobot policies from before processor files: normalisation as buffers among the weights, and older config fields.

Source: lerobot/processor/migrate_policy_normalization.py (0.4.4), lerobot/common/policies/normalize.py (before 0.4).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmodels.errors import CheckpointError
from jaxmodels.features import ACTION, Feature
from jaxmodels.normalization import Normalization, Normalizer
from jaxmodels.ranges import shown

INPUTS = "normalize_inputs.buffer_"
TARGETS = "normalize_targets.buffer_"
OUTPUTS = "unnormalize_outputs.buffer_"
OLD_FIELDS = ("input_shapes", "output_shapes", "input_normalization_modes", "output_normalization_modes")
OLD_MODES = {"mean_std": "MEAN_STD", "min_max": "MIN_MAX"}


def is_buffer(name: str) -> bool:
    """Whether a tensor of the weights is a statistic."""
    return name.startswith((INPUTS, TARGETS, OUTPUTS))


def modern_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of early 2025 or before, with the fields of today.

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
                    f"config.json: {side}_normalization_modes has {shown(mode)}; wanted names of modes"
                )
            kind, wanted = _old_type(name), OLD_MODES.get(mode, mode)
            if modes.setdefault(kind, wanted) != wanted:
                raise CheckpointError(f"config.json: features of type {kind} have modes {modes[kind]} and {wanted}")
    modern["normalization_mapping"] = modes
    return modern


def _old_type(name: str) -> str:
    if name == ACTION:
        return "ACTION"
    if "image" in name:
        return "VISUAL"
    return "ENV" if name == "observation.environment_state" else "STATE"


def buffered_normalization(
    inputs: tuple[Feature, ...],
    outputs: tuple[Feature, ...],
    modes: tuple[tuple[str, str], ...],
    buffers: Mapping[str, np.ndarray],
) -> Normalization:
    """Normalisation out of the buffers of a weight file.

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
    lacking = [
        feature.name
        for stats, features in ((before, inputs), (after, outputs))
        for feature in features
        if dict(modes).get(feature.type, "IDENTITY") != "IDENTITY" and feature.name not in stats
    ]
    if unused or lacking:
        raise CheckpointError(
            "model.safetensors: normalisation buffers do not fit the config; "
            f"belong to no feature: {sorted(unused) or 'none'}; features without theirs: {lacking or 'none'}"
        )
    return Normalization(
        inputs=Normalizer((*inputs, *outputs), modes, {**before, **(targets or after)}),
        outputs=Normalizer(outputs, modes, after),
    )
