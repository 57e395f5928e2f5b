"""Config of pi0: LeRobot's fields, sizes that are constants in LeRobot's code, and the joints of ALOHA."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmodels.errors import ConfigError
from jaxmodels.normalization import mask_relative
from jaxmodels.policies.config import LEROBOT_VERSIONS, VlaConfig
from jaxmodels.policies.openpi_configs import OpenpiConfig
from jaxmodels.policies.pi0 import FACTS
from jaxmodels.ranges import (
    HEADS,
    LAYERS_WRITTEN_OUT,
    NOT_NEGATIVE,
    POSITIVE,
    WIDTH,
    Range,
    find_number_errors,
    shorten_value,
)
from jaxmodels.samplers.sampling import STEPS
from jaxmodels.types import Observation

VARIANTS, DTYPES = ("gemma_300m", "gemma_2b"), ("bfloat16", "float32")
PROMPT = Range(1, 4096)  # Tokens of a prompt.
SHORT_PROMPTS = (64, 128)  # A prompt of pi0.5 has 200 tokens, of which most instructions use a third.
_LAYERS = Range(1, LAYERS_WRITTEN_OUT)
_SIDE = Range(1, 1024)  # Pixels of SigLIP's square.


@dataclass(frozen=True)
class GemmaSizes:
    """Sizes of a Gemma model, by openpi's names (openpi/models/gemma.py)."""

    width: Annotated[int, Range(2, WIDTH)]
    depth: Annotated[int, _LAYERS]
    mlp_dim: Annotated[int, Range(1, 4 * WIDTH)]
    num_heads: Annotated[int, Range(1, HEADS)]
    num_kv_heads: Annotated[int, Range(1, HEADS)]
    head_dim: Annotated[int, Range(2, WIDTH)]


@dataclass(frozen=True)
class SiglipSizes:
    """Sizes of a SigLIP vision tower, by transformers' names; So400m of PaliGemma."""

    hidden_size: Annotated[int, Range(1, WIDTH)] = 1152
    intermediate_size: Annotated[int, Range(1, 4 * WIDTH)] = 4304
    num_hidden_layers: Annotated[int, _LAYERS] = 27
    num_attention_heads: Annotated[int, Range(1, HEADS)] = 16
    patch_size: Annotated[int, _SIDE] = 14


@dataclass(frozen=True)
class PaliGemmaSizes:
    """Sizes that are constants in LeRobot's and openpi's code; a policy's ``architecture.json`` overrides them.

    Attributes:
        gemma_2b, gemma_300m: models for `paligemma_variant` and `action_expert_variant`.
        vocab_size: tokens of PaliGemma.
        vision: sizes of the vision tower.

    Raises:
        ConfigError: all wrong values together.
    """

    gemma_2b: GemmaSizes = GemmaSizes(2048, 18, 16_384, 8, 1, 256)
    gemma_300m: GemmaSizes = GemmaSizes(1024, 18, 4096, 8, 1, 256)
    vocab_size: Annotated[int, Range(1, 1 << 24)] = 257_152
    vision: SiglipSizes = SiglipSizes()

    def __post_init__(self) -> None:
        parts = {"": self, "gemma_2b: ": self.gemma_2b, "gemma_300m: ": self.gemma_300m, "vision: ": self.vision}
        wrong = [where + error for where, part in parts.items() for error in find_number_errors(part)]
        if not wrong:
            for variant in VARIANTS:
                wrong += _describe_heads(variant, getattr(self, variant))
            if self.vision.hidden_size % self.vision.num_attention_heads:
                wrong.append(
                    f"vision: hidden_size {self.vision.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.vision.num_attention_heads}"
                )
        if wrong:
            raise ConfigError("architecture.json: " + "; ".join(wrong))

    @classmethod
    def from_json(cls, values: Any) -> "PaliGemmaSizes":
        """Read a parsed ``architecture.json``; raises ConfigError for unknown or missing fields or wrong values."""
        read = dict(_check_names("architecture.json", cls, values))
        for name, kind in (("gemma_2b", GemmaSizes), ("gemma_300m", GemmaSizes), ("vision", SiglipSizes)):
            if name in read:
                read[name] = kind(**_check_names(f"architecture.json: {name}", kind, read[name]))
        return cls(**read)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _describe_heads(variant: str, sizes: GemmaSizes) -> list[str]:
    wrong = []
    if sizes.num_heads % sizes.num_kv_heads:
        wrong.append(f"{variant}: num_heads {sizes.num_heads} is not a multiple of num_kv_heads {sizes.num_kv_heads}")
    if sizes.head_dim % 2:
        wrong.append(f"{variant}: head_dim is {sizes.head_dim}; wanted an even number, because positions rotate pairs")
    if sizes.width % 2:
        wrong.append(f"{variant}: width is {sizes.width}; wanted an even number, sines and cosines of the time")
    return wrong


def _check_names(where: str, kind: type[Any], values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} is {shorten_value(values)}; wanted an object of sizes")
    known = {entry.name for entry in fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"{where}: unknown fields {', '.join(unknown)[:400]}; known: {', '.join(sorted(known))}")
    if kind is GemmaSizes and (missing := sorted(known - set(values))):
        raise ConfigError(f"{where}: lacks {', '.join(missing)}")
    return values


FLIPS = np.array([1, -1, -1, 1, 1, 1, 1] * 2, np.float32)
IS_GRIPPER = np.array([*[False] * 6, True] * 2)
LINEAR = (0.01844, 0.05800)  # Metres of ALOHA's measured fingers, closed and open.
ARM, HORN = 0.036, 0.022  # Metres of the linkage that moves them.
ANGLES = (0.5476, 1.6296)  # Radians of pi0's 0 and 1.
COMMANDS = (-0.6213, 1.4910)  # Radians of ALOHA's commanded 0 and 1.


class AlohaJoints:
    """Conversion of ALOHA's joints to pi0's and back, for arrays of NumPy or JAX.

    Some joints are reversed. ALOHA measures the distance of its fingers and takes commands in radians; pi0 uses the
    angle of the gripper's motor, from closed (0) to open (1). Source: openpi/policies/aloha_policy.py.
    """

    @staticmethod
    def read(observation: Observation) -> Observation:
        """Convert state and plan of an observation to the policy's joints."""
        prefix = observation.prefix
        if prefix is not None:
            prefix = prefix._replace(actions=AlohaJoints.read_actions(prefix.actions))
        return observation._replace(state=AlohaJoints.read_state(observation.state), prefix=prefix)

    @staticmethod
    def read_state(state: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
        """Convert a measured state to the policy's joints."""
        module: Any = jnp if isinstance(state, jax.Array) else np
        fingers = state * (LINEAR[1] - LINEAR[0]) + LINEAR[0]
        # 1 replaces joints that are not grippers, because the division could fail.
        fingers = module.where(IS_GRIPPER, fingers, 1.0)
        sine = (HORN**2 + fingers**2 - ARM**2) / (2 * HORN * fingers)
        angle = module.arcsin(module.clip(sine, -1.0, 1.0))
        grippers = (angle - ANGLES[0]) / (ANGLES[1] - ANGLES[0])
        return module.where(IS_GRIPPER, grippers, state * FLIPS).astype(state.dtype)

    @staticmethod
    def write_actions(actions: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
        """Convert actions of the policy to ALOHA's commands."""
        module: Any = jnp if isinstance(actions, jax.Array) else np
        grippers = (actions + ANGLES[0] - COMMANDS[0]) / (COMMANDS[1] - COMMANDS[0])
        return module.where(IS_GRIPPER, grippers, actions * FLIPS).astype(actions.dtype)

    @staticmethod
    def read_actions(actions: Float[Any, "*b 14"]) -> Float[Any, "*b 14"]:
        """Convert ALOHA's commands to actions of the policy."""
        module: Any = jnp if isinstance(actions, jax.Array) else np
        grippers = actions * (COMMANDS[1] - COMMANDS[0]) + COMMANDS[0] - ANGLES[0]
        return module.where(IS_GRIPPER, grippers, actions * FLIPS).astype(actions.dtype)


@dataclass(frozen=True)
class Pi0Config(VlaConfig):
    """LeRobot's `PI0Config`, field by field (lerobot/policies/pi0/configuration_pi0.py, 0.6.1).

    Features are tuples in the order of the tokens; `sizes`, `lerobot` and `openpi` are not fields of ``config.json``.

    Attributes:
        chunk_size: actions that are sampled together.
        max_state_dim, max_action_dim: widths that states and actions are padded to with zeros.
        num_inference_steps: steps of the flow, from noise (time 1) to actions (time 0).
        min_period, max_period: periods of the time's sines and cosines.
        use_relative_actions: whether actions are differences to the observed state; see `relative_action_mask`.
        relative_exclude_joints: parts of names of absolute actions.
        image_resolution: height and width of the square that each image is resized to with padding.
        tokenizer_max_length: tokens of a prompt.
        sizes: sizes of the networks, from ``architecture.json`` if the folder has it.
        lerobot: version of LeRobot's padding: 0.4 pads images darker than black (-3 of [-1, 1]) and the state in a
            prompt with zeros to `max_state_dim`.
        openpi: openpi's config of a policy that openpi trained, for its resize, prompts and joints.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    type: ClassVar[str] = "pi0"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "paligemma_variant": VARIANTS,
        "action_expert_variant": VARIANTS,
        "dtype": DTYPES,
        "lerobot": LEROBOT_VERSIONS,
    }
    processor_steps: ClassVar[frozenset[str]] = frozenset(
        {"tokenizer_processor", "pi0_new_line_processor", "relative_actions_processor", "absolute_actions_processor"}
    )
    indifferent: ClassVar[tuple[str, ...]] = (
        *VlaConfig.indifferent,
        "dtype",
        "time_sampling_",
        "rtc_config",
        "gradient_checkpointing",
    )

    paligemma_variant: str = "gemma_2b"
    action_expert_variant: str = "gemma_300m"
    dtype: str = "float32"
    num_inference_steps: Annotated[int, STEPS] = 10
    time_sampling_beta_alpha: Annotated[float, POSITIVE] = 1.5
    time_sampling_beta_beta: Annotated[float, POSITIVE] = 1.0
    time_sampling_scale: Annotated[float, NOT_NEGATIVE] = 0.999
    time_sampling_offset: Annotated[float, NOT_NEGATIVE] = 0.001
    use_relative_actions: bool = False
    relative_exclude_joints: tuple[str, ...] = ("gripper",)
    action_feature_names: tuple[str, ...] | None = None
    image_resolution: Annotated[tuple[int, int], _SIDE] = (224, 224)
    gradient_checkpointing: bool = False
    freeze_vision_encoder: bool = False
    train_expert_only: bool = False
    optimizer_lr: Annotated[float, NOT_NEGATIVE] = 2.5e-5
    optimizer_weight_decay: Annotated[float, NOT_NEGATIVE] = 0.01
    optimizer_grad_clip_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    sizes: PaliGemmaSizes = field(default_factory=PaliGemmaSizes)
    lerobot: str = "0.6"
    openpi: OpenpiConfig | None = None

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.image_resolution[0] != self.image_resolution[1]:
            wrong.append(f"image_resolution is {list(self.image_resolution)}; PaliGemma reads squares")
        elif self.image_resolution[0] < self.sizes.vision.patch_size:
            wrong.append(
                f"image_resolution is {list(self.image_resolution)}; wanted {self.sizes.vision.patch_size} or more, "
                "a patch"
            )
        return wrong

    def _wrong_parts(self) -> list[str]:
        shared = ("depth", "num_heads", "num_kv_heads", "head_dim")
        return [
            f"{name} of {self.paligemma_variant} is {getattr(self.vlm, name)} and of {self.action_expert_variant} "
            f"{getattr(self.expert, name)}; every layer of the expert attends to one layer of the language model, so "
            "both must be the same"
            for name in shared
            if getattr(self.vlm, name) != getattr(self.expert, name)
        ]

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        if self.environment_state is not None:
            wrong.append(
                f"input_features has {self.environment_state.name!r} of type ENV, which {self.type} never reads"
            )
        if wrong:
            return wrong
        if self.use_relative_actions and self.state.shape[0] < self.action.shape[0]:
            wrong.append(
                f"use_relative_actions is true, and the state has {self.state.shape[0]} numbers for "
                f"{self.action.shape[0]} of an action"
            )
        return wrong

    @property
    def vlm(self) -> GemmaSizes:
        """Sizes of PaliGemma's language model."""
        return getattr(self.sizes, self.paligemma_variant)

    @property
    def expert(self) -> GemmaSizes:
        """Sizes of the action expert."""
        return getattr(self.sizes, self.action_expert_variant)

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the vocabulary."""
        return self.sizes.vocab_size

    @property
    def short_prompts(self) -> tuple[int, ...]:
        return tuple(length for length in SHORT_PROMPTS if length < self.prompt_length)

    @property
    def prefix_tokens(self) -> int:
        image_tokens = (self.image_resolution[0] // self.sizes.vision.patch_size) ** 2
        return len(self.frames) * image_tokens + self.prompt_length

    @property
    def tokenizer_name(self) -> str | None:
        return FACTS.tokenizer

    @property
    def client_metadata(self) -> Mapping[str, Any]:
        return {} if self.openpi is None else dict(self.openpi.policy_metadata)

    @property
    def controls_joints(self) -> bool:
        return self.openpi is None or self.openpi.controls_joints

    @property
    def joint_map(self) -> Any:
        return AlohaJoints if self.openpi is not None and self.openpi.adapt_to_pi else None

    @property
    def image_padding(self) -> float:
        """Value that images in [0, 1] are padded with."""
        return -1.0 if self.lerobot == "0.4" else 0.0

    @property
    def relative_action_mask(self) -> tuple[bool, ...] | None:
        """Which numbers of an un-normalised action are relative to the raw state; None for none."""
        if not self.use_relative_actions:
            return None
        return mask_relative(self.action_feature_names, self.relative_exclude_joints, self.action.shape[0])

    def format_prompt(self, task: str, state: np.ndarray | None = None) -> str:
        """Return the task on its own line."""
        del state
        if self.openpi is not None:
            return f"{clean_task(task)}\n"
        return task if task.endswith("\n") else f"{task}\n"

    def dump_architecture(self) -> dict[str, Any]:
        return {} if self.sizes == PaliGemmaSizes() else {"architecture.json": self.sizes.to_json()}

    def architecture(self) -> "Pi0Config":
        openpi = None if self.openpi is None else self.openpi.reading
        return self._with_defaults(openpi=openpi)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Pi0Config":
        """Read a parsed ``config.json``; raises ConfigError for unknown fields or wrong values.

        `values` may also have the parsed ``architecture.json`` as ``architecture``, ``lerobot`` and ``openpi``.
        """
        what = f"{cls.type} config"
        read = dict(values)
        architecture, lerobot = read.pop("architecture", None), read.pop("lerobot", cls.lerobot)
        openpi = read.pop("openpi", None)
        if read.pop("sizes", None) is not None:
            raise ConfigError(f"{what}: unknown fields sizes; they belong to architecture.json")
        if read.get("relative_exclude_joints", ()) is None:
            read["relative_exclude_joints"] = ()
        sizes = PaliGemmaSizes() if architecture is None else PaliGemmaSizes.from_json(architecture)
        read |= {"sizes": sizes, "lerobot": lerobot, "openpi": openpi}
        return super().from_json(read)

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        del values["sizes"], values["lerobot"], values["openpi"]
        return values


def clean_task(task: str) -> str:
    """Return an instruction on one line, as in openpi's prompts."""
    return task.strip().replace("_", " ").replace("\n", " ")
