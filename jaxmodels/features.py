"""Features: the named arrays a policy reads and writes, as LeRobot describes them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmodels.errors import ConfigError
from jaxmodels.ranges import WIDTH, Range, is_number, shown

ACTION = "action"
STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
IMAGES = "observation.images."

TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD", "LANGUAGE")
MODES = ("MEAN_STD", "MIN_MAX", "IDENTITY", "QUANTILES", "QUANTILE10")

SIDE = Range(1, 8192)  # pixels; of the frames a policy was trained with
AXIS = Range(1, WIDTH)  # of everything else but actions
ACTIONS = Range(1, 1024)  # numbers of one action
AXES = Range(1, 8)
FEATURES = Range(0, 256)
CAMERAS = Range(0, 64)
PIXELS = 1 << 25  # of all cameras together: sixteen frames of 1080x1920


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
            raise ConfigError(
                f"feature {shown(self.name)}: type is {shown(self.type)}; wanted one of {', '.join(TYPES)}"
            )
        if wrong := self._wrong_shape():
            raise ConfigError(f"feature {shown(self.name)}: shape is {shown(list(self.shape))}; {wrong}")
        if self.names is not None and len(self.names) != self.shape[0]:
            raise ConfigError(f"feature {shown(self.name)}: {len(self.names)} names for {self.shape[0]} numbers")

    def _wrong_shape(self) -> str | None:
        is_image = self.type == "VISUAL"
        sizes = SIDE if is_image else ACTIONS if self.type == "ACTION" else AXIS
        if len(self.shape) not in AXES or not all(is_number(size, sizes, integer=True) for size in self.shape):
            return f"wanted sizes of {sizes.least:g} or more, at most {sizes.most:g}, on {AXES.most:g} axes at most"
        if is_image and (len(self.shape) != 3 or self.shape[0] != 3):
            return "images are [3, height, width]"
        if self.type in ("STATE", "ENV", "ACTION") and len(self.shape) != 1:
            return "wanted a vector, e.g. [6]"
        return None


def wrong_sizes(inputs: Iterable[Feature], outputs: Iterable[Feature]) -> list[str]:
    """Complaints about features that are one by one as they should be, and together too many or too large."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    wrong = [
        f"{name} has {len(features)} features; wanted {FEATURES.most:g} at most"
        for name, features in (("input_features", inputs), ("output_features", outputs))
        if len(features) not in FEATURES
    ]
    cameras = [feature for feature in inputs if feature.type == "VISUAL"]
    if len(cameras) not in CAMERAS:
        wrong.append(f"input_features has {len(cameras)} cameras; wanted {CAMERAS.most:g} at most")
    pixels = sum(camera.shape[1] * camera.shape[2] for camera in cameras)
    if pixels > PIXELS:
        wrong.append(f"frames of all {len(cameras)} cameras have {pixels} pixels; wanted {PIXELS} at most")
    return wrong


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
    if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
        raise ConfigError(f"{where}: shape is {shown(shape)}; wanted a list of integers")
    return Feature(name, str(entry["type"]), tuple(shape), parse_names(where, entry.get("names")))


def parse_names(where: str, value: Any) -> tuple[str, ...] | None:
    """Joint names, as a list or as datasets write them: ``{"motors": ["shoulder_pan", ...]}``."""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None) if len(value) == 1 else value
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: names are {shown(value)}; wanted a list of strings")
    return tuple(value)


def dump_features(features: Iterable[Feature]) -> dict[str, dict[str, Any]]:
    """The way back, without `names`: LeRobot refuses a feature with more than type and shape."""
    return {feature.name: {"type": feature.type, "shape": list(feature.shape)} for feature in features}
