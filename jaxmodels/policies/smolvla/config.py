"""SmolVlaConfig: every field of LeRobot's configuration of SmolVLA, and the sizes of the model it is built on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from jaxmodels.errors import ConfigError
from jaxmodels.policies.config import VlaConfig
from jaxmodels.ranges import LAYERS_WRITTEN_OUT, NOT_NEGATIVE, POSITIVE, Range, is_number, shorten_value
from jaxmodels.samplers.sampling import STEPS
from jaxmodels.vlm.decoder import DecoderSizes
from jaxmodels.vlm.smolvlm import AROUND_IMAGE, BEFORE_IMAGE, SMOLVLM2_500M, VLMS, SmolVlmSizes

MODES = ("cross_attn", "self_attn")
PADDINGS = ("longest", "max_length")
TOKENIZER_FILE = "tokenizer.json"
ALOHA_JOINTS = 14
_LAYERS = Range(-1, LAYERS_WRITTEN_OUT)


class ExpertStep(NamedTuple):
    """Layer of the action expert; `vlm_layer` is the language model's layer whose keys and values it attends to.

    Attributes:
        is_cross: whether it attends only to the language model, and not to other actions.
        has_context: whether it projects the language model's keys and values.
    """

    vlm_layer: int
    is_cross: bool
    has_context: bool


@dataclass(frozen=True)
class SmolVlaConfig(VlaConfig):
    """LeRobot's `SmolVLAConfig`, field by field (lerobot/policies/smolvla/configuration_smolvla.py, 0.6.1).

    Features are tuples in the order of the cameras' tokens.

    Attributes:
        resize_imgs_with_padding: (width, height) that images are resized to; None for no resize.
        empty_cameras: maximum number of absent cameras with special tokens.
        num_vlm_layers: layers of the language model; 0 or less for all.
        num_expert_layers: layers of the action expert; 0 or less for the same number.
        self_attn_every_n_layers: every how many layers actions attend to each other; 0 or less for never.
        vlm: sizes of the vision-language model; not a field of LeRobot.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    type: ClassVar[str] = "smolvla"
    processor_steps: ClassVar[frozenset[str]] = frozenset({"tokenizer_processor", "smolvla_new_line_processor"})
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"attention_mode": MODES, "pad_language_to": PADDINGS}
    # Nothing attends to the padding of the prefix (`prefix_length`, `pad_language_to`).
    indifferent: ClassVar[tuple[str, ...]] = (
        *VlaConfig.indifferent,
        "tokenizer_max_length",
        "train_",
        "vlm_model_name",
        "load_vlm_weights",
        "prefix_length",
        "pad_language_to",
    )

    resize_imgs_with_padding: Annotated[tuple[int, int] | None, Range(1, 8192)] = (512, 512)
    adapt_to_pi_aloha: bool = False
    use_delta_joint_actions_aloha: bool = False
    num_steps: Annotated[int, STEPS] = 10
    use_cache: bool = True
    freeze_vision_encoder: bool = True
    train_expert_only: bool = True
    train_state_proj: bool = True
    optimizer_lr: Annotated[float, NOT_NEGATIVE] = 1e-4
    optimizer_weight_decay: Annotated[float, NOT_NEGATIVE] = 1e-10
    optimizer_grad_clip_norm: Annotated[float, NOT_NEGATIVE] = 10.0
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    load_vlm_weights: bool = False
    add_image_special_tokens: bool = False
    attention_mode: str = "cross_attn"
    prefix_length: Annotated[int, Range(-1, 1 << 20)] = -1
    pad_language_to: str = "longest"
    num_expert_layers: Annotated[int, _LAYERS] = -1
    num_vlm_layers: Annotated[int, _LAYERS] = 16
    self_attn_every_n_layers: Annotated[int, _LAYERS] = 2
    expert_width_multiplier: Annotated[float, Range(0, 16, above=True)] = 0.75
    vlm: SmolVlmSizes = SMOLVLM2_500M

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        weight = dict(self.rtc_config or ()).get("max_guidance_weight")
        if weight is not None and not is_number(weight, POSITIVE):
            wrong.append(f"max_guidance_weight is {shorten_value(weight)}; wanted a number above 0")
        if self.use_delta_joint_actions_aloha:
            wrong.append("use_delta_joint_actions_aloha is true, which LeRobot does not support either")
        if not self.use_cache:
            wrong.append("use_cache is false, with which LeRobot predicts nothing; wanted true")
        if self.add_image_special_tokens and None in (self.vlm.around_image, self.vlm.before_image):
            wrong.append(
                f"add_image_special_tokens is true, but the numbers of {AROUND_IMAGE} and {BEFORE_IMAGE} are unknown; "
                f"copy the model's {TOKENIZER_FILE} to {self.vlm_model_name}/{TOKENIZER_FILE} in the folder"
            )
        return wrong

    def _wrong_parts(self) -> list[str]:
        return [*self._wrong_layers(), *self._wrong_images()]

    def _wrong_layers(self) -> list[str]:
        wrong, layers, count = [], self.vlm_layers, self.expert_layers
        if layers % count:
            return [
                f"num_expert_layers is {count}; wanted a divisor of {layers}, the layers of the language model, or -1"
            ]
        if self.expert.width < 2 or self.expert.width % 2:
            wrong.append(
                f"expert_width_multiplier {self.expert_width_multiplier} makes the action expert {self.expert.width} "
                "wide; wanted an even number, sines and cosines of the time"
            )
        every = self._self_attn_every
        alone = [i for i in range(layers) if every and i % every == 0 and i % (layers // count)]
        if alone:
            wrong.append(
                f"layers {alone} of the language model are to attend together with the action expert, which has none "
                f"for them: num_expert_layers {count}, self_attn_every_n_layers {self.self_attn_every_n_layers}, "
                f"attention_mode {self.attention_mode!r}"
            )
        keys = self.vlm.text.kv_heads * self.vlm.text.head_width
        if keys != self.expert.width and any(step.has_context and not step.is_cross for step in self.expert_steps):
            wrong.append(
                f"num_expert_layers {count} and self_attn_every_n_layers {self.self_attn_every_n_layers} give layers "
                "that look at other actions keys made for the language model's; LeRobot cannot run them either"
            )
        return wrong

    def _wrong_images(self) -> list[str]:
        sizes = set(self.frames)
        if self.resize_imgs_with_padding is not None:
            sizes = {self.resize_imgs_with_padding[::-1]}
        return [
            f"images of {height}x{width} are {' x '.join(map(str, self.vlm.vision.grid(height, width)))} patches, of "
            f"which no square of a multiple of {self.vlm.scale_factor} can be made"
            for height, width in sorted(sizes)
            if self.vlm.count_image_tokens(height, width) is None
        ]

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        aloha = ALOHA_JOINTS if self.adapt_to_pi_aloha else 0
        if wrong:
            return wrong
        return [
            f"adapt_to_pi_aloha is true, and the {what} has {feature.shape[0]} numbers; wanted {aloha} or more"
            for what, feature in (("state", self.state), ("action", self.action))
            if feature.shape[0] < aloha
        ]

    @property
    def environment_state(self) -> None:
        """SmolVLA reads no environment state."""
        return None

    @property
    def vlm_layers(self) -> int:
        """Layers of the language model that LeRobot keeps."""
        every = self.vlm.text.layers
        return min(self.num_vlm_layers, every) if self.num_vlm_layers > 0 else every

    @property
    def expert_layers(self) -> int:
        return self.num_expert_layers if self.num_expert_layers > 0 else self.vlm_layers

    @property
    def expert(self) -> DecoderSizes:
        """Sizes of the action expert, which has the heads of the language model."""
        text = self.vlm.text
        width = int(text.width * self.expert_width_multiplier)
        hidden = 256 * -(-4 * int(2 * width / 3) // 256)
        return replace(text, width=width, hidden=hidden, layers=self.expert_layers)

    @property
    def _self_attn_every(self) -> int:
        """Every how many layers of the language model actions attend to each other; 0 for never."""
        return 1 if self.attention_mode == "self_attn" else max(self.self_attn_every_n_layers, 0)

    @property
    def expert_steps(self) -> tuple[ExpertStep, ...]:
        """Plan of each layer of the action expert."""
        apart, every = self.vlm_layers // self.expert_layers, self._self_attn_every
        return tuple(
            ExpertStep(
                vlm_layer=i * apart,
                is_cross=not every or i * apart % every != 0,
                # LeRobot shapes the projections by the expert's own count of layers.
                has_context=not every or i % every != 0,
            )
            for i in range(self.expert_layers)
        )

    @property
    def vocabulary(self) -> int:
        return self.vlm.vocabulary

    @property
    def prefix_tokens(self) -> int:
        resized = self.resize_imgs_with_padding
        frames = self.frames if resized is None else [resized[::-1]] * len(self.frames)
        special = 3 * len(self.cameras) if self.add_image_special_tokens else 0
        images = sum(self.vlm.count_image_tokens(*frame) or 0 for frame in frames)
        return images + special + self.prompt_length + 1

    @property
    def tokenizer_name(self) -> str:
        return self.vlm_model_name

    def format_prompt(self, task: str, state: np.ndarray | None = None) -> str:
        """Return the task on its own line."""
        del state
        return task if task.endswith("\n") else f"{task}\n"

    @property
    def num_inference_steps(self) -> int:
        return self.num_steps

    @property
    def prefix_bound(self) -> float:
        return dict(self.rtc_config or ()).get("max_guidance_weight") or super().prefix_bound

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SmolVlaConfig":
        """Read a parsed ``config.json``; raises ConfigError for unknown fields, wrong values or an unknown model.

        `values` may also have ``vlm``, the parsed config of the vision-language model, and ``vlm_tokens``, numbers of
        its special tokens by name; otherwise the model must be in `VLMS`.
        """
        read = dict(values)
        file, tokens = read.pop("vlm", None), read.pop("vlm_tokens", None)
        name = read.get("vlm_model_name", cls.vlm_model_name)
        if file is not None:
            read["vlm"] = SmolVlmSizes.from_json(file, tokens)
        elif name in VLMS:
            read["vlm"] = VLMS[name]
        else:
            raise ConfigError(
                f"smolvla config: vlm_model_name is {shorten_value(name)}, whose sizes are not known; known: "
                f"{', '.join(VLMS)}. Copy the model's config.json to {str(name)[:90]}/config.json in the folder"
            )
        return super().from_json(read)

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        del values["vlm"]
        return values

    def dump_architecture(self) -> dict[str, Any]:
        """Return the vision-language model's ``config.json``, by its name in the policy's folder."""
        file = self.vlm.to_json()
        return {f"{self.vlm_model_name}/config.json": file} if file else {}
