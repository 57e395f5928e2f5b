"""Reading and checking of the fields that all policy configs share."""

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxmodels.errors import ConfigError
from jaxmodels.layers.vision import RESNETS
from jaxmodels.ranges import (
    CHUNK,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE_BELOW_ONE,
    WIDTH,
    Number,
    Range,
    check_unknown_fields,
    find_choice_errors,
    find_number_errors,
    list_numbers,
    shorten_value,
)
from jaxmodels.samplers import FlowSchedule
from jaxmodels.samplers.real_time_chunking import BOUND
from jaxmodels.samplers.sampling import draw_for_each
from jaxmodels.text.encoder import TextConfig
from jaxmodels.types import (
    ACTION,
    ENVIRONMENT_STATE,
    MODES,
    STATE,
    TYPES,
    Feature,
    Observation,
    dump_features,
    parse_features,
    wrong_sizes,
)

Config = TypeVar("Config", bound="PolicyConfig")
FEATURES = ("input_features", "output_features")
LEROBOT_VERSIONS = ("0.4", "0.6")  # Versions of LeRobot that read some files differently.

OTHER = "other"  # The config's field that holds unknown fields of the file.

_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "bool": bool,
    "str": str,
    "str | None": (str, type(None)),
    "bool | None": (bool, type(None)),
}
_NAMES, _INTEGERS, _OPTIONS = tuple[str, ...], tuple[int, ...], tuple[tuple[str, Any], ...] | None


def _read(name: str, declared: Any, number: Number | None, value: Any) -> Any:
    """Return the value of a field from its JSON, checked against the declared type and range of the field."""
    if name in FEATURES:
        return parse_features(name, value)
    if name == "normalization_mapping":
        if not isinstance(value, Mapping):
            raise ConfigError("normalization_mapping is not an object of types and modes")
        return tuple((str(kind), str(mode)) for kind, mode in value.items())
    if value is not None and declared in (_NAMES, _NAMES | None, _INTEGERS):
        kind, words = (int, "integers") if declared == _INTEGERS else (str, "strings")
        if not isinstance(value, list | tuple) or not all(isinstance(part, kind) for part in value):
            raise ConfigError(f"{name} is {shorten_value(value)}; wanted a list of {words}")
        return tuple(value)
    if value is not None and declared == _OPTIONS:
        if not isinstance(value, Mapping) or any(isinstance(part, list | dict) for part in value.values()):
            raise ConfigError(f"{name} is {shorten_value(value)}; wanted an object of numbers, texts and booleans")
        return tuple(value.items())
    if name == "text_encoder" and value is not None:
        return TextConfig.from_json(value)
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
    """Field that all configs inherit; `PolicyConfig` is not a dataclass, because its fields have no defaults."""

    other: Mapping[str, Any] = field(default_factory=dict, compare=False, kw_only=True)


class PolicyConfig(_OtherFields):
    """Base class of policy configs: features by LeRobot's names. Subclasses are dataclasses that add fields.

    Attributes:
        other: unknown fields of the ``config.json``, all off, which are written when the policy is saved.
        input_features: in the order of their tokens.
        normalization_mapping: pairs of feature type and mode (`TYPES` and `MODES` of `jaxmodels.types`).
    """

    type: ClassVar[str]
    input_features: tuple[Feature, ...]
    output_features: tuple[Feature, ...]
    chunk_size: Any  # Actions of a chunk.
    n_action_steps: Any  # Actions of a chunk to execute.
    normalization_mapping: tuple[tuple[str, str], ...]

    # Supported version, for the error about unknown fields.
    advice: ClassVar[str] = "this reads the fields of LeRobot 0.6.1"
    # Prefixes of fields that neither a program nor its weights depend on.
    indifferent: ClassVar[tuple[str, ...]] = ()
    # Accepted values of fields.
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Types of features of which a policy reads one at most, and the feature's name.
    names: ClassVar[Mapping[str, str]] = {"STATE": STATE, "ENV": ENVIRONMENT_STATE}
    needs_state: ClassVar[bool] = False
    # Steps of LeRobot's processors, except renaming and normalising, that the policy computes itself.
    processor_steps: ClassVar[frozenset[str]] = frozenset()
    # Whether `act` receives frames in their original size; for other policies they are stretched to `frames`.
    resizes_frames: ClassVar[bool] = False
    # Whether a camera may be absent in an observation.
    allows_absent_cameras: ClassVar[bool] = False
    # Defaults, which policy types replace by fields or properties. Other modules read only what is declared here.
    temporal_ensemble_coeff: Any = None  # Decay of the weights of older chunks (`TemporalEnsembler`); None to use one.
    text_encoder: Any = None  # `TextConfig` of the encoder of instructions; None without one.
    prompt_reads_state: Any = False  # Whether the prompt contains the numbers of the state (`format_prompt`).
    prompt_length: Any = None  # Tokens of an instruction that the program embeds; None if it embeds none.
    short_prompts: Any = ()  # Lengths of shorter prompts that have a program of their own, ascending.
    prefix_tokens: Any = 0  # Tokens of images and words that are computed once per chunk, for all steps.
    vocabulary: Any = 0  # Number of tokens that the program embeds, if it has a `prompt_length`.
    tokenizer_name: Any = None  # Model of the tokenizer, if the processors name none.
    joint_map: Any = None  # Conversion from the robot's joints to the joints of the training (`AlohaJoints`).
    controls_joints: Any = True  # Whether actions are targets of the joints that the state measures.
    observation_steps: Any = 1  # Consecutive observations in one input, including the newest.
    noise: Any = None  # Shape (t, a) of the sampler's first noise; None if callers cannot give it.
    num_inference_steps: Any = None  # Steps of the sampler.
    noise_steps: Any = 0  # Number of further noises that the sampler adds in its steps.
    trained_delay: Any = 0  # Longest delay after which the policy is trained to continue a plan; 0 if it is guided.
    prefix_bound: Any = BOUND  # Maximum pull of a plan, see `jaxmodels.samplers.continuing`.
    relative_action_mask: Any = None  # Which numbers of an action are relative to the raw state; None for none.
    action_feature_names: Any = None  # Names of the action's numbers in order.
    lerobot: Any = None  # Version of LeRobot whose reading of the files is followed; None if all read them alike.
    openpi: Any = None  # `OpenpiConfig` of a policy that openpi trained.

    # Defaults for training, with LeRobot's names.
    vision_backbone: Any = None
    pretrained_backbone_weights: Any = None  # Initial weights of the backbone; None to draw them.
    drop_n_last_frames: Any = 0  # Last frames of an episode that no training chunk begins with.
    use_amp: Any = False  # Whether to train in bfloat16.
    push_to_hub: Any = False  # Must be false: nothing is uploaded.
    # Optimizer; None for the default of `OptimizerConfig`.
    optimizer_type: ClassVar[Any] = None
    optimizer_lr: Any = None
    optimizer_lr_backbone: Any = None
    optimizer_weight_decay: Any = None
    optimizer_betas: Any = None
    optimizer_eps: Any = None
    optimizer_grad_clip_norm: Any = None
    # Schedule of the learning rate: with decay steps a cosine to `scheduler_decay_lr`, otherwise by name.
    scheduler_name: Any = "constant"
    scheduler_warmup_steps: Any = 0
    scheduler_decay_steps: Any = None
    scheduler_decay_lr: Any = 0.0

    def __post_init__(self) -> None:
        wrong = find_number_errors(self, integers=True) or [
            *find_choice_errors(self, self.choices),
            *self._wrong_numbers(),
            *find_number_errors(self, integers=False),
            *self.wrong_features(),
        ]
        if wrong := wrong or self._wrong_parts():
            raise ConfigError(f"{self.type} config: " + "; ".join(wrong))

    @property
    def client_metadata(self) -> Mapping[str, Any]:
        """JSON that the checkpoint has for its clients."""
        return {}

    @property
    def cameras(self) -> tuple[Feature, ...]:
        """Image features in the order of their tokens."""
        return tuple(feature for feature in self.input_features if feature.type == "VISUAL")

    @property
    def frames(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each camera's frames as the policy processes them."""
        return tuple((camera.shape[1], camera.shape[2]) for camera in self.cameras)

    @property
    def state(self) -> Any:
        """`Feature` of the robot's state, only under LeRobot's usual name; None without one."""
        return next((f for f in self.input_features if f.type == "STATE" and f.name == STATE), None)

    @property
    def environment_state(self) -> Feature | None:
        return next((f for f in self.input_features if f.type == "ENV"), None)

    @property
    def action(self) -> Feature:
        return next(f for f in self.output_features if f.type == "ACTION" and f.name == ACTION)

    @property
    def action_delta_indices(self) -> range:
        """Actions that are learned together, in steps from the newest observation (LeRobot's name)."""
        return range(self.chunk_size)

    @property
    def table_numbers(self) -> int:
        """Numbers in the tables, such as positions, that are computed while a network is built and traced."""
        return 2 * max((height * width for height, width in self.frames), default=0)

    def format_prompt(self, task: str, state: np.ndarray | None) -> str:
        """Return the text that is tokenized for an instruction; `state` (s,) is normalised."""
        del state
        return task

    def architecture(self: Config) -> Config:
        """Return the config with every indifferent field at its default; equal results share programs."""
        return self._with_defaults()

    def _with_defaults(self: Config, **fixed: Any) -> Config:
        """Return the config with these values, and with the defaults of all other indifferent fields."""
        defaults = {entry.name: entry.default for entry in fields(self) if entry.name.startswith(self.indifferent)}
        return replace(self, **defaults | fixed)

    @classmethod
    def from_json(cls: builtins.type[Config], values: Mapping[str, Any]) -> Config:
        """Read a parsed ``config.json``; raises ConfigError with all unknown fields that are on or all wrong values."""
        what = f"{cls.type} config"
        known = {entry.name: entry for entry in fields(cls) if entry.name != OTHER}
        read: dict[str, Any] = {name: None for name in FEATURES}
        read |= {name: value for name, value in values.items() if name in known}
        unknown = {name: value for name, value in values.items() if name not in known and name != "type"}
        check_unknown_fields(what, unknown, cls.advice)
        wrong: list[str] = []
        numbers = list_numbers(cls)
        for name in read:
            try:
                read[name] = _read(name, known[name].type, numbers.get(name), read[name])
            except ConfigError as error:
                wrong.append(str(error))
        if wrong:
            raise ConfigError(f"{what}: " + "; ".join(wrong))
        return cls(**read, other=unknown)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as LeRobot writes them, ``type`` first and unknown fields last."""
        values: dict[str, Any] = {"type": self.type}
        values |= {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != OTHER}
        for name in FEATURES:
            values[name] = dump_features(values[name])
        values["normalization_mapping"] = dict(self.normalization_mapping)
        if values.get("rtc_config") is not None:
            values["rtc_config"] = dict(values["rtc_config"])
        values |= {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
        if values.get("text_encoder") is not None:
            values["text_encoder"] = values["text_encoder"].to_json()
        return values | dict(self.other)

    def dump_architecture(self) -> Mapping[str, Any]:
        """Return the JSON files with sizes of underlying models, by their names in the policy's folder."""
        return {}

    def _wrong_numbers(self) -> list[str]:
        """Return the errors of combinations of numbers that are each in range; each policy type adds its own."""
        steps, chunk = self.n_action_steps, self.chunk_size
        return [f"n_action_steps is {steps}, more than chunk_size {chunk}"] if steps > chunk else []

    def _wrong_parts(self) -> list[str]:
        """Return the errors of parts that are computed from valid fields."""
        return []

    def wrong_features(self) -> list[str]:
        """Return the errors of features that no policy type supports; each type adds its own."""
        wrong = [
            f"normalization_mapping has {kind[:40]}: {mode[:40]}; wanted types {', '.join(TYPES)} and modes "
            + ", ".join(MODES)
            for kind, mode in self.normalization_mapping
            if kind not in TYPES or mode not in MODES
        ]
        wrong += wrong_sizes(self.input_features, self.output_features)
        if not any(feature.name == ACTION and feature.type == "ACTION" for feature in self.output_features):
            wrong.append(f"output_features has no feature {ACTION!r} of type ACTION")
        for kind, name in self.names.items():
            found = [feature.name for feature in self.input_features if feature.type == kind]
            if found not in ([], [name]):
                wrong.append(f"features of type {kind} are {found}; wanted at most one, {name!r}")
        if self.needs_state and self.state is None:
            wrong.append(f"input_features has no {STATE!r}, which {self.type} always reads")
        return wrong


@dataclass(frozen=True)
class LerobotConfig(PolicyConfig):
    """Fields of all of LeRobot's policy configs (lerobot/configs/policies.py); ConfigError lists all wrong values."""

    # LeRobot's policies draw new noise for each chunk; here the same observation has the same answer.
    noise_seed: ClassVar[int] = 0
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

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.n_obs_steps != self.observation_steps:
            wrong.append(f"n_obs_steps is {self.n_obs_steps}; {self.type} reads 1 observation")
        if self.use_peft:
            wrong.append("use_peft is true; merge the adapter into the weights first")
        return wrong


@dataclass(frozen=True)
class VlaConfig(LerobotConfig):
    """Base config of policies with a vision-language model and a flow over padded actions."""

    resizes_frames: ClassVar[bool] = True
    allows_absent_cameras: ClassVar[bool] = True
    names: ClassVar[Mapping[str, str]] = {"STATE": STATE}
    needs_state: ClassVar[bool] = True

    indifferent: ClassVar[tuple[str, ...]] = (
        *LerobotConfig.indifferent,
        "freeze_vision_encoder",
        "train_expert_only",
        "optimizer_",
        "scheduler_",
        "compile_",
    )

    chunk_size: Annotated[int, Range(1, CHUNK)] = 50
    n_action_steps: Annotated[int, Range(1, CHUNK)] = 50
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "IDENTITY"),
        ("STATE", "MEAN_STD"),
        ("ACTION", "MEAN_STD"),
    )
    max_state_dim: Annotated[int, Range(1, WIDTH)] = 32
    max_action_dim: Annotated[int, Range(1, WIDTH)] = 32
    empty_cameras: Annotated[int, Range(0, 64)] = 0
    tokenizer_max_length: Annotated[int, Range(1, 4096)] = 48
    min_period: Annotated[float, POSITIVE] = 4e-3
    max_period: Annotated[float, POSITIVE] = 4.0
    rtc_config: tuple[tuple[str, Any], ...] | None = None
    compile_model: bool = False
    compile_mode: str = "max-autotune"
    optimizer_betas: Annotated[tuple[float, float], SHARE_BELOW_ONE] = (0.9, 0.95)
    optimizer_eps: Annotated[float, NOT_NEGATIVE] = 1e-8
    scheduler_warmup_steps: Annotated[int, Range(0, 10**9)] = 1000
    scheduler_decay_steps: Annotated[int, Range(0, 10**9)] = 30_000
    scheduler_decay_lr: Annotated[float, NOT_NEGATIVE] = 2.5e-6

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.min_period >= self.max_period:
            wrong.append(f"min_period is {self.min_period}; wanted less than max_period {self.max_period}")
        return wrong

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        if not self.cameras:
            wrong.append(f"input_features has no image; {self.type} reads one or more")
        if wrong:
            return wrong
        return [
            f"the {what} has {feature.shape[0]} numbers; {name} is {getattr(self, name)}, to which it is padded"
            for what, feature, name in (
                ("state", self.state, "max_state_dim"),
                ("action", self.action, "max_action_dim"),
            )
            if feature.shape[0] > getattr(self, name)
        ]

    @property
    def prompt_length(self) -> int:
        return self.tokenizer_max_length

    @property
    def noise(self) -> tuple[int, int]:
        """Shape of one member's first noise; actions are padded."""
        return (self.chunk_size, self.max_action_dim)

    @property
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(spacing="uniform")

    def make_noise(self, observation: Observation) -> Float[Array, "b t a"]:
        """Return the noise of the observation, or the policy's own, which is the same for each member."""
        if observation.noise is not None:
            return observation.noise
        return draw_for_each(jax.random.key(self.noise_seed), self.noise, observation.state.shape[0])
