"""Features, observations and requirements of policies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxmodels.errors import ConfigError
from jaxmodels.ranges import WIDTH, Range, are_numbers, check_unknown_fields, shorten_value

# The un-normalised `Prefix` of policies that continue a plan (`Requirements.takes_prefix`).
PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH = "prefix.actions", "prefix.delay", "prefix.length"
# LeRobot's name of the instructions of policies that read language: a text for each member of the batch.
TASK = "task"
# Part that is cut from a long prompt: the end of the instruction or (LeRobot) of the prompt; a text per member.
PROMPT_CUT = "prompt_cut"
CUT_TASK, CUT_AS_LEROBOT = "task", "lerobot"
PROMPT_CUTS = (CUT_TASK, CUT_AS_LEROBOT)


class Prefix(NamedTuple):
    """Executing plan that a new chunk continues (`PREFIX_ACTIONS` and so on), as a tree of arrays.

    Attributes:
        actions: (b, t, a), aligned with the new chunk, read up to `length`.
        delay: (b,) int32, actions that will have been executed when the chunk arrives.
        length: (b,) int32, number of actions; 0 for none.
    """

    actions: Any
    delay: Any
    length: Any


class Language(NamedTuple):
    """Tokens of an instruction and their mask.

    Attributes:
        tokens: (b, n, d) numbers of a text encoder; or (b, n) int32 of the tokenizer, for policies that embed them.
        mask: (b, n) bool, which tokens belong to the text.
    """

    tokens: Any
    mask: Any


class Observation(NamedTuple):
    """Inputs of a policy in the order of its config; a NamedTuple and so a tree of arrays.

    Attributes:
        images: (b, h, w, 3) of each camera, None for an absent camera; uint8 outside a program, floats inside.
        state: (b, s), or None when the policy reads no state.
        environment_state: (b, e), or None.
        prefix: plan to continue; None for a policy that continues none.
        language: instructions; None for a policy that reads no language.
        noise: (b, t, a), first noise of the sampler; None for the policy's own.
        step_noise: (n, b, t, a), noise that the sampler adds in its steps; None for the policy's own.
        image_masks: (b, cameras) bool, which images count; None for all.

    With several `Requirements.observation_steps`, images and states have a time axis after the batch axis, oldest
    first. Fields have no jaxtyping, because JAX also builds trees of shapes and of gradients with this class.
    """

    images: tuple[Any, ...] = ()
    state: Any = None
    environment_state: Any = None
    prefix: Prefix | None = None
    language: Language | None = None
    noise: Any = None
    step_noise: Any = None
    image_masks: Any = None


@dataclass(frozen=True)
class Requirements:
    """What a policy needs from a robot, and the shape of its actions.

    Attributes:
        policy_type: the registry name, e.g. ``"act"``.
        cameras: camera name (``"front"`` for the feature ``observation.images.front``) to
            (height, width) in pixels; frames of other sizes are resized inside the program.
        state: width of ``observation.state``, or None when the policy reads no state.
        environment_state: width of ``observation.environment_state``, or None.
        action: width of one action.
        chunk: steps in one action chunk.
        action_steps: number of actions to execute before the next inference.
        joint_names: names of the action's (and state's) joints in order, if the checkpoint has them.
        rate: actions per second the policy was trained at, if the checkpoint has it.
        temporal_ensemble_coeff: LeRobot's exponential weight of older predictions; None is off.
        takes_prefix: whether an observation may hold the rest of the current plan (`PREFIX_ACTIONS`), which the new
            chunk continues: real-time chunking.
        trained_delay: longest delay after which the policy is trained to continue a plan; 0 if guidance continues it.
        language: whether an observation must have an instruction (`TASK`).
        observation_steps: consecutive observations in one input, at the policy's `rate`. With two or more, every
            feature has a time axis after the batch axis, oldest first.
        controls_joints: whether actions are targets of the joints that the state measures. Velocities and displacements
            need a client without rooms.
        is_positional: whether clients take actions by position (openpi's protocol), so that a session without rooms
            needs no names of joints.
        metadata: JSON that the checkpoint has for its clients; openpi's ``policy_metadata``.
        action_range: smallest and largest value of each joint in the training data, if the checkpoint has them.
        state_statistics: statistics of ``observation.state`` in the training data, in the robot's units: ``mean``,
            ``std``, ``min``, ``max``, ``q01``, ``q99``, one number per joint each; None without a pair of them.
        prompt_cuts: `PROMPT_CUTS` that a loaded policy can apply to an instruction; empty for a prompt without state.

    Example:
        >>> Requirements("act", cameras={"front": (96, 96)}, state=6, action=6, chunk=20).controls_joints
        True
    """

    policy_type: str
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    state: int | None = None
    environment_state: int | None = None
    action: int = 0
    chunk: int = 1
    action_steps: int = 1
    joint_names: tuple[str, ...] | None = None
    rate: float | None = None
    temporal_ensemble_coeff: float | None = None
    takes_prefix: bool = False
    trained_delay: int = 0
    language: bool = False
    observation_steps: int = 1
    controls_joints: bool = True
    is_positional: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    action_range: tuple[tuple[float, ...], tuple[float, ...]] | None = field(default=None, compare=False)
    state_statistics: Mapping[str, tuple[float, ...]] | None = field(default=None, compare=False)
    prompt_cuts: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.state not in (None, self.action):
            object.__setattr__(self, "controls_joints", False)


@dataclass(frozen=True)
class StageTime:
    """Seconds of one run of a part of `Policy.act`, and how often it runs for one chunk."""

    name: str
    seconds: float
    count: int


def describe_cut(tokens: int, *, cuts: Sequence[str], prompt_cut: str) -> str | None:
    """Return the warning about an instruction that is too long for a policy's prompt; None when it fits.

    Args:
        tokens: number of tokens of the prompt that the policy does not read.
        cuts: `Requirements.prompt_cuts`.
        prompt_cut: the chosen value of `PROMPT_CUTS`.
    """
    if tokens <= 0:
        return None
    if not cuts:
        return f"the instruction is too long for the policy: the last {tokens} tokens are cut off; shorten it"
    lost = f"the last {tokens} tokens of the prompt are cut off, and with them joints that the policy does not see"
    if CUT_TASK not in cuts:
        return f"the joints leave no room for an instruction in the policy's prompt: {lost}, as in LeRobot"
    if prompt_cut == CUT_TASK:
        return (
            f"the instruction is too long for the policy: its last {tokens} tokens are left out, so that the prompt "
            "has room for the joints; shorten it"
        )
    return (
        f"the instruction is too long for the policy: {lost} (prompt_cut is {prompt_cut!r}); shorten it, or set "
        f"prompt_cut to {CUT_TASK!r}"
    )


def rename_cameras(requirements: Requirements, rename: Mapping[str, str]) -> Requirements:
    """Return the requirements with a robot's names of cameras.

    Args:
        rename: the policy's camera names to the robot's; other cameras keep their names.

    Raises:
        ConfigError: the policy has no such camera, or two cameras would get the same name.
    """
    names, cameras = {camera: rename.get(camera, camera) for camera in requirements.cameras}, requirements.cameras
    for camera, name in rename.items():
        if camera not in cameras:
            turned = f"; the policy's name comes first, as {name}={camera}" if name in cameras else ""
            if camera.rpartition(".")[2].lower() == name.lower():
                turned = f"; did you mean {name}={name}?" if name in cameras else ""
            raise ConfigError(
                f"rename {camera}={name} names no camera of the policy, which has "
                f"{', '.join(sorted(cameras)) or 'none'}{turned}"
            )
        if others := [other for other in names if names[other] == name and other != camera]:
            raise ConfigError(
                f"rename {camera}={name} gives two cameras of the policy one name, {camera} and {others[0]}; a robot's "
                "camera can be one of them"
            )
    return replace(requirements, cameras={names[camera]: size for camera, size in cameras.items()})


ACTION = "action"
STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
IMAGES = "observation.images."
# LeRobot's suffix of a feature (b,) bool: which members have an image of a camera that may be absent.
PADDING_MASK = "_padding_mask"
EMPTY_CAMERA = f"{IMAGES}empty_camera_"  # LeRobot's name of cameras that no robot has.

TYPES = ("STATE", "VISUAL", "ENV", "ACTION", "REWARD", "LANGUAGE")
MODES = ("MEAN_STD", "MIN_MAX", "IDENTITY", "QUANTILES", "QUANTILE10")

SIDE = Range(1, 8192)  # Pixels of the frames a policy was trained with.
FRAME_SIDE = Range(1, 16_384)  # Pixels of the frames of an observation.
AXIS = Range(1, WIDTH)  # Sizes of other features than images and actions.
ACTIONS = Range(1, 1024)  # Numbers of one action.
AXES = Range(1, 8)
FEATURES = Range(0, 256)
CAMERAS = Range(0, 64)
PIXELS = 1 << 25  # Pixels of all cameras together: sixteen frames of 1080x1920.


@dataclass(frozen=True)
class Feature:
    """Name, type and shape of one array.

    Attributes:
        name: LeRobot's key, e.g. ``observation.images.front``.
        type: value of `TYPES`.
        shape: without the batch axis; images are (channels, height, width), as in LeRobot's files.
        names: names of the numbers of a vector, e.g. joint names; None when the file has none.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if wrong := self._find_error():
            raise ConfigError(f"feature {shorten_value(self.name)}: {wrong}")

    def _find_error(self) -> str | None:
        if self.type not in TYPES:
            return f"type is {shorten_value(self.type)}; wanted one of {', '.join(TYPES)}"
        if wrong := self._find_shape_error():
            return f"shape is {shorten_value(list(self.shape))}; {wrong}"
        if self.names is not None and len(self.names) != self.shape[0]:
            return f"{len(self.names)} names for {self.shape[0]} numbers"
        return None

    def _find_shape_error(self) -> str | None:
        is_image = self.type == "VISUAL"
        sizes = SIDE if is_image else ACTIONS if self.type == "ACTION" else AXIS
        if len(self.shape) not in AXES or not are_numbers(self.shape, sizes, integer=True):
            bounds = f"{sizes.minimum:g} or more, at most {sizes.maximum:g}"
            return f"wanted sizes of {bounds}, on {AXES.maximum:g} axes at most"
        if is_image and (len(self.shape) != 3 or self.shape[0] != 3):
            return "images are [3, height, width]"
        if self.type in ("STATE", "ENV", "ACTION") and len(self.shape) != 1:
            return "wanted a vector, e.g. [6]"
        return None


def wrong_sizes(inputs: Iterable[Feature], outputs: Iterable[Feature]) -> list[str]:
    """Return the errors of features that are too many or too large together."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    wrong = [
        f"{name} has {len(features)} features; wanted {FEATURES.maximum:g} at most"
        for name, features in (("input_features", inputs), ("output_features", outputs))
        if len(features) not in FEATURES
    ]
    cameras = [feature for feature in inputs if feature.type == "VISUAL"]
    if len(cameras) not in CAMERAS:
        wrong.append(f"input_features has {len(cameras)} cameras; wanted {CAMERAS.maximum:g} at most")
    pixels = sum(camera.shape[1] * camera.shape[2] for camera in cameras)
    if pixels > PIXELS:
        wrong.append(f"frames of all {len(cameras)} cameras have {pixels} pixels; wanted {PIXELS} at most")
    return wrong


def camera_name(feature: str) -> str:
    """Return a feature's camera: ``observation.images.front`` is ``front``, ``observation.image`` is ``image``."""
    return feature.removeprefix(IMAGES) if feature.startswith(IMAGES) else feature.removeprefix("observation.")


CHANNELS = (1, 3, 4)  # Channels of gray, RGB and RGBA pictures.


def describe_channels(channels: int) -> str:
    """Return why a picture with this number of channels is refused, and what to do; policies look at three."""
    advice = {1: "; repeat a gray picture, np.repeat(image, 3, axis=-1)", 4: "; drop the alpha channel, image[..., :3]"}
    return f"{channels} channel{'' if channels == 1 else 's'}, wanted 3: RGB{advice.get(channels, '')}"


def is_empty_camera(feature: str) -> bool:
    """Return whether a feature is a camera of the policy that no robot has."""
    return feature.startswith(EMPTY_CAMERA)


def parse_features(where: str, value: Any) -> tuple[Feature, ...]:
    """Parse ``{name: {type, shape[, names]}}`` in its order, which is the order of the cameras' tokens."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {type(value).__name__}; wanted an object of features")
    return tuple(parse_feature(f"{where}.{name}", str(name), entry) for name, entry in value.items())


def parse_feature(where: str, name: str, entry: Any) -> Feature:
    """Parse ``{type, shape[, names]}``; raises ConfigError with `where` as its place."""
    if not isinstance(entry, Mapping) or not {"type", "shape"} <= set(entry):
        raise ConfigError(
            f"{where} is {shorten_value(entry)}; wanted an object with type and shape (and perhaps names)"
        )
    unknown = {field: value for field, value in entry.items() if field not in ("type", "shape", "names")}
    check_unknown_fields(where, unknown, "a feature has type, shape and names")
    shape = entry["shape"]
    if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
        raise ConfigError(f"{where}: shape is {shorten_value(shape)}; wanted a list of integers")
    return Feature(name, str(entry["type"]), tuple(shape), parse_names(where, entry.get("names")))


def parse_names(where: str, value: Any) -> tuple[str, ...] | None:
    """Parse joint names: a list, or a map as datasets have it: ``{"motors": ["shoulder_pan", ...]}``."""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None) if len(value) == 1 else value
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: names are {shorten_value(value)}; wanted a list of strings")
    return tuple(value)


def dump_features(features: Iterable[Feature]) -> dict[str, dict[str, Any]]:
    """Return the features as JSON, without `names`, because LeRobot accepts only type and shape."""
    return {feature.name: {"type": feature.type, "shape": list(feature.shape)} for feature in features}
