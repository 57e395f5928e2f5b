"""Normalization of observations and actions, with LeRobot's modes, constants and file contents.

Every mode is ``(x - offset) / scale + shift``, so that one compiled program serves the numbers of any policy.
Source: lerobot/processor/normalize_processor.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from jaxmodels.errors import CheckpointError
from jaxmodels.ranges import shorten_value
from jaxmodels.types import ACTION, Feature

EPSILON = 1e-8
IDENTITY = "IDENTITY"

# Mode to its two statistics.
STATISTICS = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
# Pairs of statistics that describe a feature's values in every mode.
DESCRIPTIVE = (("mean", "std"), ("min", "max"), ("q01", "q99"))


class Affine(NamedTuple):
    """Scale and offset of one feature: a tree of three vectors, channels last."""

    offset: np.ndarray
    scale: np.ndarray
    shift: np.ndarray

    def normalize(self, x):
        return (x - self.offset) / self.scale + self.shift

    def unnormalize(self, y):
        return (y - self.shift) * self.scale + self.offset


@dataclass(frozen=True)
class Normalizer:
    """One normalizing or un-normalizing step of a LeRobot processor file.

    A feature stays unchanged only if its type has the mode IDENTITY, `only` excludes it, or `unnormalized` contains it.
    LeRobot also leaves features without statistics unchanged; here they are an error.

    Attributes:
        features: features that the step lists.
        modes: pairs of feature type and mode.
        stats: feature name to statistic to float32 array; arrays of images are (3, 1, 1).
        epsilon: added to a standard deviation, and used for a range of zero.
        only: names of the observations that the step applies to; None for all.
        unnormalized: names of features that stay unchanged although their type has a mode.
        source: file that the step was read from, for errors.
    """

    features: tuple[Feature, ...]
    modes: tuple[tuple[str, str], ...]
    stats: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    epsilon: float = EPSILON
    only: tuple[str, ...] | None = None
    unnormalized: frozenset[str] = frozenset()
    source: str = "normalization"

    def get_mode(self, feature: Feature) -> str:
        """Return the mode of a feature; raises CheckpointError if it needs statistics that the step does not have."""
        if (gap := self.find_gap(feature)) is not None:
            raise CheckpointError(f"{self.source}: {gap}")
        if feature.name in self.unnormalized or self.leaves_out(feature):
            return IDENTITY
        return dict(self.modes).get(feature.type, IDENTITY)

    def leaves_out(self, feature: Feature) -> bool:
        """Return whether the step is restricted to other observations."""
        return self.only is not None and feature.name not in self.only and feature.type != "ACTION"

    def find_gap(self, feature: Feature) -> str | None:
        """Describe what the step lacks to normalize a feature; None when it lacks nothing.

        As in LeRobot, the step need not list actions, and the type ENV without a mode is IDENTITY.
        """
        if feature.name in self.unnormalized or self.leaves_out(feature):
            return None
        mode = dict(self.modes).get(feature.type, IDENTITY if feature.type == "ENV" else None)
        name, kind = shorten_value(feature.name), feature.type
        if mode is None:
            return f"feature {name}: norm_map has no mode for the type {kind}; write one, e.g. IDENTITY"
        if mode == IDENTITY:
            return None
        if feature.type != "ACTION" and all(known.name != feature.name for known in self.features):
            return f"feature {name} (type {kind}, mode {mode}) is missing in the features of the step"
        if not (found := self.stats.get(feature.name)):
            return f"feature {name} (type {kind}, mode {mode}) has no statistics"
        if missing := [statistic for statistic in STATISTICS[mode] if statistic not in found]:
            return (
                f"feature {name} (type {kind}, mode {mode}) has no statistic {' and '.join(missing)}; "
                f"found {', '.join(sorted(found))[:200]}"
            )
        return None

    def get_range(self, feature: Feature) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Return the smallest and largest value of each number of a feature in the data, in every mode."""
        stats = self.stats.get(feature.name, {})
        if not {"min", "max"} <= set(stats):
            return None
        low, high = (np.broadcast_to(stats[name].reshape(-1), feature.shape[:1]) for name in ("min", "max"))
        if not (np.isfinite(low) & np.isfinite(high) & (low <= high)).all():
            return None
        return tuple(map(float, low)), tuple(map(float, high))

    def get_statistics(self, feature: Feature) -> dict[str, tuple[float, ...]] | None:
        """Return statistic to one number per channel, from complete, finite pairs of `DESCRIPTIVE`; else None."""
        stats, found = self.stats.get(feature.name, {}), {}
        for names in DESCRIPTIVE:
            pair = [np.asarray(stats[name], np.float64).reshape(-1) for name in names if name in stats]
            if len(pair) == 2 and all(len(v) in (1, feature.shape[0]) and np.isfinite(v).all() for v in pair):
                vectors = (np.broadcast_to(values, feature.shape[:1]) for values in pair)
                found |= {name: tuple(map(float, vector)) for name, vector in zip(names, vectors, strict=True)}
        return found or None

    def get_affine(self, feature: Feature, *, inverse: bool = False) -> Affine:
        """Return the numbers for `Affine.normalize`, or with `inverse` for `Affine.unnormalize`.

        Raises:
            CheckpointError: statistics are missing, misshaped, not finite or reversed.
        """
        width = feature.shape[0]
        mode = self.get_mode(feature)
        if mode == IDENTITY:
            return Affine(np.zeros(width, np.float32), np.ones(width, np.float32), np.zeros(width, np.float32))
        low, high = (self._get_statistic(feature, name) for name in STATISTICS[mode])
        if mode != "MEAN_STD" and (is_reversed := low > high).any():
            # Such a range would reverse the direction of the joint.
            low_name, high_name = STATISTICS[mode]
            number = int(np.argmax(is_reversed))
            raise CheckpointError(
                f"normalisation of {feature.name!r}: {low_name} of number {number} is {low[number]:g}, above its "
                f"{high_name} {high[number]:g}; write the statistics of the dataset the policy was trained on"
            )
        epsilon = np.float32(self.epsilon)
        if mode == "MEAN_STD":  # The epsilon is in the forward direction only.
            return Affine(low, high if inverse else high + epsilon, np.zeros(width, np.float32))
        span = high - low
        span = np.where(span == 0, epsilon, span)
        # With 2 (x - low) / span - 1, halving the span is exact, and x == low gives exactly -1.
        return Affine(low, span / np.float32(2), np.full(width, -1, np.float32))

    def _get_statistic(self, feature: Feature, name: str) -> np.ndarray:
        """Return one statistic as a float32 vector over the feature's channels."""
        values = self.stats[feature.name][name]
        shape = (feature.shape[0], 1, 1) if feature.type == "VISUAL" else feature.shape
        if values.shape not in (shape, (1,) * len(shape), ()):
            raise CheckpointError(
                f"normalisation of {feature.name!r}: {name} has shape {list(values.shape)}; wanted {list(shape)}"
            )
        vector = np.broadcast_to(values.reshape(-1), feature.shape[:1]).astype(np.float32)
        if not np.isfinite(vector).all():
            raise CheckpointError(
                f"normalisation of {feature.name!r}: {name} holds a NaN or an infinity; "
                "write the statistics of the dataset the policy was trained on"
            )
        if name == "std" and (vector < 0).any():
            raise CheckpointError(f"normalisation of {feature.name!r}: std is negative; wanted a spread of 0 or more")
        return vector


@dataclass(frozen=True)
class ProcessorStep:
    """A step of LeRobot's processors that neither renames nor normalises.

    Attributes:
        name: name in LeRobot's registry.
        fields: fields of the file.
        comes_after: whether it follows the step that normalizes or un-normalizes.
        is_output: whether it belongs to the post-processor.
    """

    name: str
    fields: Mapping[str, Any]
    comes_after: bool
    is_output: bool = False


@dataclass(frozen=True)
class Normalization:
    """The two normalising steps of a policy: of its inputs and of its outputs.

    Attributes:
        inputs: the pre-processor's step; it also normalises actions for training.
        outputs: the post-processor's step.
        renames: the robot's name of an observation to the policy's.
        steps: further steps of the processors, in order.
    """

    inputs: Normalizer
    outputs: Normalizer
    renames: Mapping[str, str] = field(default_factory=dict)
    steps: tuple["ProcessorStep", ...] = ()

    def find_step(self, name: str) -> "ProcessorStep | None":
        """Return the first of the further steps with this name."""
        return next((step for step in self.steps if step.name == name), None)


def get_outside_name(renames: Mapping[str, str], feature: str) -> str:
    """Return the robot's name of a feature of the policy; `renames` are robot's names to policy's names."""
    return next((outside for outside, inside in renames.items() if inside == feature), feature)


def mask_relative(names: Iterable[str] | None, excluded: Iterable[str], width: int) -> tuple[bool, ...]:
    """Return which of an action's `width` numbers are relative: all but names with an `excluded` part (LeRobot)."""
    parts = [part.lower() for part in excluded if part]
    mask = [not any(part in name.lower() for part in parts) for name in islice(names or (), width)]
    return (*mask, *[True] * (width - len(mask)))


def build_normalization(
    inputs: tuple[Feature, ...],
    outputs: tuple[Feature, ...],
    modes: tuple[tuple[str, str], ...],
    stats: Mapping[str, Mapping[str, np.ndarray]],
) -> Normalization:
    """Build a new policy's normalization from a dataset's statistics; raises CheckpointError for wrong ones."""
    source = "statistics of the dataset"
    normalization = Normalization(
        inputs=Normalizer((*inputs, *outputs), modes, stats, source=source),
        outputs=Normalizer(outputs, modes, stats, source=source),
    )
    actions = tuple(feature for feature in outputs if feature.name == ACTION)
    check_normalization(normalization, (*inputs, *actions), actions)
    return normalization


def check_normalization(
    normalization: Normalization, inputs: tuple[Feature, ...], outputs: tuple[Feature, ...]
) -> None:
    """Compute all numbers once, so that bad statistics are found when a policy is read and not when it acts.

    Features of `inputs` and `outputs` need statistics; statistics of other features are checked if present.

    Raises:
        CheckpointError: statistics are missing, misshaped or not finite.
    """
    for step, used in ((normalization.inputs, inputs), (normalization.outputs, outputs)):
        names = {feature.name for feature in used}
        for feature in (*used, *(known for known in step.features if known.name not in names)):
            if feature.name in names or step.find_gap(feature) is None:
                step.get_affine(feature, inverse=step is normalization.outputs)
