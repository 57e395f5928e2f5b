"""What a policy's folder holds, whatever its format: config, weights, normalisation and a sidecar."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxmodels.errors import CheckpointError
from jaxmodels.features import Feature
from jaxmodels.normalization import Normalization
from jaxmodels.ranges import Range, is_number, shown
from jaxmodels.text.config import TextConfig

RATE = Range(0, 10_000, above=True)  # actions per second


@runtime_checkable
class PolicyConfig(Protocol):
    """What every policy's config has."""

    @property
    def output_features(self) -> tuple[Feature, ...]: ...
    @property
    def action(self) -> Feature: ...
    @property
    def text_encoder(self) -> TextConfig | None: ...
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Sidecar:
    """The file ``robojax.json`` beside LeRobot's files, which refuse unknown keys.

    Attributes:
        rate: actions per second the policy was trained at.
        joint_names: names of the action's numbers in order.
        other: further keys, kept as they are.
    """

    rate: float | None = None
    joint_names: tuple[str, ...] | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], joints: int) -> "Sidecar":
        rate, names = values.get("rate"), values.get("joint_names")
        if rate is not None and not is_number(rate, RATE):
            raise CheckpointError(
                f"robojax.json: rate is {shown(rate)}; wanted actions per second, e.g. 25, {RATE.most:g} at most"
            )
        if names is not None and not (
            isinstance(names, list) and len(names) == joints and all(isinstance(name, str) for name in names)
        ):
            raise CheckpointError(f"robojax.json: joint_names are {shown(names)}; wanted a list of {joints} names")
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
    """A policy at rest.

    Attributes:
        config: of the policy's type, e.g. `ActConfig`.
        weights: our flat names (jaxmodels/weights.py) to float32 arrays.
        tokenizer: the content of ``tokenizer.json``, for policies whose text encoder needs one.
    """

    config: PolicyConfig
    weights: Mapping[str, np.ndarray]
    normalization: Normalization
    sidecar: Sidecar = field(default_factory=Sidecar)
    tokenizer: bytes | None = None
