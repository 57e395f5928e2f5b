"""Reading and checking of the fields that all policy configs share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np

from jaxmodels.errors import ConfigError
from jaxmodels.layers.vision import RESNETS
from jaxmodels.ranges import Range, check_unknown_fields, find_number_errors, read_number_type, shorten_value
from jaxmodels.text.encoder import TextConfig
from jaxmodels.types import ACTION, MODES, TYPES, Feature, dump_features, parse_features, wrong_sizes

Config = TypeVar("Config", bound="LerobotConfig")
FEATURES = ("input_features", "output_features")

OTHER = "other"  # the config's field that holds unknown fields of the file

_KINDS: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {
        "bool": bool,
        "str": str,
        "str | None": (str, type(None)),
        "bool | None": (bool, type(None)),
    }
)


def read_fields(cls: type[Any], values: Mapping[str, Any], what: str, advice: str) -> dict[str, Any]:
    """Read the arguments of a config's dataclass from a parsed ``config.json``.

    Args:
        cls: the dataclass, a subclass of `PolicyConfig`.
        values: the fields of the file.
        what: name of the config in errors, e.g. ``act config``.
        advice: which version's fields are known, for the error about unknown fields.

    Raises:
        ConfigError: unknown fields that are on, or values of the wrong type; all of them together.
    """
    known = {entry.name: entry for entry in fields(cls) if entry.name != OTHER}
    read: dict[str, Any] = {name: None for name in FEATURES}
    read |= {name: value for name, value in values.items() if name in known}
    unknown = {name: value for name, value in values.items() if name not in known and name != "type"}
    check_unknown_fields(what, unknown, advice)
    wrong: list[str] = []
    for name in read:
        try:
            read[name] = _read(name, known[name].type, read[name])
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError(f"{what}: " + "; ".join(wrong))
    return {**read, OTHER: unknown}


def dump_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config as LeRobot writes them, ``type`` first and unknown fields last."""
    values: dict[str, Any] = {"type": config.type}
    values |= {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name != OTHER}
    for name in FEATURES:
        values[name] = dump_features(values[name])
    values["normalization_mapping"] = dict(config.normalization_mapping)
    if values.get("tags") is not None:
        values["tags"] = list(values["tags"])
    if values.get("text_encoder") is not None:
        values["text_encoder"] = values["text_encoder"].to_json()
    return values | dict(config.other)


def _read(name: str, declared: Any, value: Any) -> Any:
    """The value of a field from its JSON."""
    if name in FEATURES:
        return parse_features(name, value)
    if name == "normalization_mapping":
        if not isinstance(value, Mapping):
            raise ConfigError("normalization_mapping is no object of type and mode")
        return tuple((str(kind), str(mode)) for kind, mode in value.items())
    if name == "tags" and value is not None:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"tags is {shorten_value(value)}; wanted a list of strings, or null")
        return tuple(str(tag) for tag in value)
    if name == "text_encoder" and value is not None:
        return TextConfig.from_json(value)
    return _typed(name, declared, value)


def _typed(name: str, declared: Any, value: Any) -> Any:
    """Checks a JSON value against the declared type and range of its field."""
    number = read_number_type(declared)
    if number is not None:
        if error := number.describe_error(name, value):
            raise ConfigError(error)
        if value is None:
            return None
        kind = int if number.is_integer else float
        return kind(value) if number.count is None else tuple(kind(part) for part in value)
    expected = str(declared).removeprefix("<class '").removesuffix("'>")
    kinds = _KINDS.get(expected)
    if kinds is not None and not isinstance(value, kinds):
        raise ConfigError(f"{name} is {shorten_value(value)}; wanted {expected}")
    return value


SMALL_CNN = "small_cnn"
BACKBONES = (*RESNETS, SMALL_CNN)


@dataclass(frozen=True)
class _OtherFields:
    """The field that all configs inherit; `PolicyConfig` is no dataclass itself, because it has no fields' defaults."""

    other: Mapping[str, Any] = field(default_factory=dict, compare=False, kw_only=True)


class PolicyConfig(_OtherFields):
    """Base class of policy configs: features by LeRobot's names. The dataclass below it adds its fields.

    Attributes:
        other: unknown fields of the ``config.json``, all off. They change nothing and are written when the policy is
            saved, because a version that knows them may have another default.
        input_features: in the order of their tokens.
        normalization_mapping: type of a feature and mode, as `jaxmodels.types` lists both.
    """

    type: ClassVar[str]
    input_features: tuple[Feature, ...]
    output_features: tuple[Feature, ...]
    chunk_size: Any
    normalization_mapping: tuple[tuple[str, str], ...]

    # Values of the policy types that have neither; the others declare a field.
    temporal_ensemble_coeff: Any = None
    text_encoder: Any = None
    # Steps of LeRobot's processors, besides renaming and normalising, that the policy's own arithmetic stands for.
    processor_steps: ClassVar[frozenset[str]] = frozenset()
    # Whether frames go into the program's `act` at the size in which they arrive; others are stretched to `frames`.
    resizes_frames: ClassVar[bool] = False
    # Whether a camera may be left out of an observation.
    allows_absent_cameras: ClassVar[bool] = False

    @property
    def prompt_reads_state(self) -> bool:
        """Whether the numbers of the state are part of what is made of an instruction (`format_prompt`)."""
        return False

    @property
    def joint_map(self) -> Any:
        """Functions from the robot's joints to what the policy was trained with, where they differ (pi0's of ALOHA)."""
        return None

    @property
    def client_metadata(self) -> Mapping[str, Any]:
        """What the checkpoint wants clients to be told, JSON."""
        return {}

    @property
    def controls_joints(self) -> bool:
        """Whether actions are targets of the joints that the state measures; else velocities or displacements."""
        return True

    @property
    def cameras(self) -> tuple[Feature, ...]:
        """Image features in the order of their tokens."""
        return tuple(feature for feature in self.input_features if feature.type == "VISUAL")

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each camera's frames as the policy processes them."""
        return tuple((camera.shape[1], camera.shape[2]) for camera in self.cameras)

    @property
    def environment_state(self) -> Feature | None:
        return next((f for f in self.input_features if f.type == "ENV"), None)

    @property
    def action(self) -> Feature:
        return next(f for f in self.output_features if f.type == "ACTION" and f.name == ACTION)

    @property
    def observation_steps(self) -> int:
        """Observations that are looked at together, the newest included."""
        return 1

    @property
    def action_delta_indices(self) -> range:
        """Actions that are learned together, in steps from the newest observation on (LeRobot's name)."""
        return range(self.chunk_size)

    @property
    def noise(self) -> tuple[int, int] | None:
        """Shape (t, a) of the noise that a chunk is made of; None where there is none, or nobody may give it."""
        return None

    @property
    def noise_steps(self) -> int:
        """How many more such noises the sampler adds on its way."""
        return 0

    @property
    def prompt_length(self) -> int | None:
        """Tokens of an instruction that the program embeds itself; None where it reads none, or encoded ones."""
        return None

    @property
    def prefix_tokens(self) -> int:
        """Tokens of images and words that are computed once per chunk, for all steps; 0 for a policy without them."""
        return 0

    @property
    def table_numbers(self) -> int:
        """Numbers in the tables, such as positions, that are computed while a network is built, folded and traced.

        Tracing gives no other array memory, so these are what a config can ask for before its program is measured.
        """
        return 2 * max((height * width for height, width in self.frames), default=0)

    @property
    def vocabulary(self) -> int:
        """How many tokens the program knows, where it has a `prompt_length`."""
        return 0

    @property
    def tokenizer_name(self) -> str | None:
        """Name of the model whose tokenizer is meant, where the processors do not say."""
        return None

    def format_prompt(self, task: str, state: np.ndarray | None) -> str:
        """The text that is tokenized for an instruction; `state` (s,) is normalised, given if it is part of it."""
        del state
        return task

    def to_json(self) -> dict[str, Any]:
        """Return the fields as LeRobot writes them, ``type`` first."""
        return dump_fields(self)

    def dump_architecture(self) -> Mapping[str, Any]:
        """Contents of the JSON files with sizes of models that the policy is built on, by their names in its folder."""
        return {}

    @property
    def relative_action_mask(self) -> tuple[bool, ...] | None:
        """Which numbers of an action are relative to the raw state; None for none."""
        return None

    def wrong_features(self) -> list[str]:
        """Errors of features that no policy type supports; each type adds its own."""
        wrong = [
            f"normalization_mapping has {kind[:40]}: {mode[:40]}; wanted types {', '.join(TYPES)} and modes "
            + ", ".join(MODES)
            for kind, mode in self.normalization_mapping
            if kind not in TYPES or mode not in MODES
        ]
        wrong += wrong_sizes(self.input_features, self.output_features)
        if not any(feature.name == ACTION and feature.type == "ACTION" for feature in self.output_features):
            wrong.append(f"output_features has no feature {ACTION!r} of type ACTION")
        return wrong


@dataclass(frozen=True)
class LerobotConfig(PolicyConfig):
    """Fields that all of LeRobot's policy configs begin with (lerobot/configs/policies.py).

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    # LeRobot's policies draw new noise for each chunk; here the same observation has the same answer.
    noise_seed: ClassVar[int] = 0
    # Fields, or how their names begin, that neither a program nor its weights depend on.
    indifferent: ClassVar[tuple[str, ...]] = (
        *("device", "use_amp", "use_peft", "push_to_hub", "repo_id", "private", "tags", "license"),
        "pretrained_",
        "normalization_mapping",
    )

    n_obs_steps: Annotated[int, Range(1, 64)] = 1
    input_features: tuple[Feature, ...] = ()
    output_features: tuple[Feature, ...] = ()
    device: str | None = None
    use_amp: bool = False
    use_peft: bool = False
    push_to_hub: bool = True
    repo_id: str | None = None
    private: bool | None = None
    tags: tuple[str, ...] | None = None
    license: str | None = None
    pretrained_path: str | None = None
    pretrained_revision: str | None = None

    def __post_init__(self) -> None:
        wrong = find_number_errors(self, integers=True) or [
            *self._wrong_numbers(),
            *find_number_errors(self, integers=False),
            *self.wrong_features(),
        ]
        if wrong:
            raise ConfigError(f"{self.type} config: " + "; ".join(wrong))

    def _wrong_numbers(self) -> list[str]:
        """Errors of fields whose numbers are each in range; each policy type has its own."""
        return []

    def architecture(self: Config) -> Config:
        """The config with every indifferent field at its default: equal ones share programs."""
        defaults = {entry.name: entry.default for entry in fields(self) if entry.name.startswith(self.indifferent)}
        return replace(self, **defaults)
