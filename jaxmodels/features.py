"""Features: the named arrays a policy reads and writes, as LeRobot describes them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmodels.errors import ConfigError

ACTION = "action"
STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
IMAGES = "observation.images."

TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD", "LANGUAGE")
MODES = ("MEAN_STD", "MIN_MAX", "IDENTITY", "QUANTILES", "QUANTILE10")


@dataclass(frozen=True)
class Feature:
    """One named array.

    Attributes:
        name: LeRobot's key, e.g. ``observation.images.front``.
        type: one of `TYPES`.
        shape: without the batch axis; images are (channels, height, width), as in LeRobot's files.
        names: what each number of a vector stands for, e.g. joint names; None when the file does not say.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ConfigError(f"feature {self.name!r}: type is {self.type!r}; wanted one of {', '.join(TYPES)}")
        if not self.shape or any(size < 1 for size in self.shape):
            raise ConfigError(f"feature {self.name!r}: shape is {list(self.shape)}; wanted sizes of 1 or more")
        if self.type == "VISUAL" and (len(self.shape) != 3 or self.shape[0] != 3):
            raise ConfigError(f"feature {self.name!r}: shape is {list(self.shape)}; images are [3, height, width]")
        if self.type in ("STATE", "ENV", "ACTION") and len(self.shape) != 1:
            raise ConfigError(f"feature {self.name!r}: shape is {list(self.shape)}; wanted a vector, e.g. [6]")
        if self.names is not None and len(self.names) != self.shape[0]:
            raise ConfigError(f"feature {self.name!r}: {len(self.names)} names for {self.shape[0]} numbers")


def camera_name(feature: str) -> str:
    """``observation.images.front`` is the camera ``front``; ``observation.image`` is ``image``."""
    return feature.removeprefix(IMAGES) if feature.startswith(IMAGES) else feature.removeprefix("observation.")


def parse_features(where: str, value: Any) -> tuple[Feature, ...]:
    """Reads ``{name: {type, shape[, names]}}``, keeping the order: it is the order of the cameras' tokens."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {type(value).__name__}; wanted an object of features")
    return tuple(parse_feature(f"{where}.{name}", str(name), entry) for name, entry in value.items())


def parse_feature(where: str, name: str, entry: Any) -> Feature:
    if not isinstance(entry, Mapping) or not {"type", "shape"} <= set(entry) <= {"type", "shape", "names"}:
        raise ConfigError(f"{where}: wanted an object with type and shape (and perhaps names)")
    shape = entry["shape"]
    if not isinstance(shape, list | tuple) or not all(isinstance(size, int) for size in shape):
        raise ConfigError(f"{where}: shape is {shape!r}; wanted a list of integers")
    return Feature(name, str(entry["type"]), tuple(shape), parse_names(where, entry.get("names")))


def parse_names(where: str, value: Any) -> tuple[str, ...] | None:
    """Joint names, as a list or as datasets write them: ``{"motors": ["shoulder_pan", ...]}``."""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None) if len(value) == 1 else value
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: names are {value!r}; wanted a list of strings")
    return tuple(value)


def dump_features(features: Iterable[Feature]) -> dict[str, dict[str, Any]]:
    """The way back, without `names`: LeRobot refuses a feature with more than type and shape."""
    return {feature.name: {"type": feature.type, "shape": list(feature.shape)} for feature in features}
