"""Config of ACT: every field of LeRobot's, and one more vision backbone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from jaxmodels.layers.feed_forward import LEROBOT_ACTIVATIONS
from jaxmodels.layers.vision import RESNETS, measure_feature_map
from jaxmodels.policies.config import BACKBONES, LerobotConfig
from jaxmodels.ranges import (
    CHUNK,
    HEADS,
    LAYERS_WRITTEN_OUT,
    NOT_NEGATIVE,
    SHARE_BELOW_ONE,
    WIDTH,
    Range,
    shorten_value,
)
from jaxmodels.types import ENVIRONMENT_STATE

DEFAULT_NORMALIZATION = (("VISUAL", "MEAN_STD"), ("STATE", "MEAN_STD"), ("ACTION", "MEAN_STD"))
LAYERS = Range(1, LAYERS_WRITTEN_OUT)


@dataclass(frozen=True)
class ActConfig(LerobotConfig):
    """LeRobot's `ACTConfig`, field by field (lerobot/policies/act/configuration_act.py).

    Features are tuples in the order of the tokens. `vision_backbone` may also be ``small_cnn`` (see
    jaxmodels/layers/vision.py), which LeRobot lacks.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    type: ClassVar[str] = "act"
    advice: ClassVar[str] = "this reads the fields of LeRobot 0.4.4"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"feedforward_activation": tuple(LEROBOT_ACTIVATIONS)}
    names: ClassVar[Mapping[str, str]] = {"ENV": ENVIRONMENT_STATE}
    indifferent: ClassVar[tuple[str, ...]] = (
        *LerobotConfig.indifferent,
        "temporal_ensemble_coeff",
        "dropout",
        "kl_weight",
        "optimizer_",
    )

    chunk_size: Annotated[int, Range(1, CHUNK)] = 100
    n_action_steps: Annotated[int, Range(1, CHUNK)] = 100
    normalization_mapping: tuple[tuple[str, str], ...] = DEFAULT_NORMALIZATION
    vision_backbone: str = "resnet18"
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    replace_final_stride_with_dilation: bool = False
    pre_norm: bool = False
    dim_model: Annotated[int, Range(1, WIDTH)] = 512
    n_heads: Annotated[int, Range(1, HEADS)] = 8
    dim_feedforward: Annotated[int, Range(1, 4 * WIDTH)] = 3200
    feedforward_activation: str = "relu"
    n_encoder_layers: Annotated[int, LAYERS] = 4
    n_decoder_layers: Annotated[int, LAYERS] = 1
    use_vae: bool = True
    latent_dim: Annotated[int, Range(1, WIDTH)] = 32
    n_vae_encoder_layers: Annotated[int, LAYERS] = 4
    temporal_ensemble_coeff: Annotated[float | None, Range(-100, 100)] = None
    dropout: Annotated[float, SHARE_BELOW_ONE] = 0.1
    kl_weight: Annotated[float, NOT_NEGATIVE] = 10.0
    optimizer_lr: Annotated[float, NOT_NEGATIVE] = 1e-5
    optimizer_weight_decay: Annotated[float, NOT_NEGATIVE] = 1e-4
    optimizer_lr_backbone: Annotated[float, NOT_NEGATIVE] = 1e-5

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.temporal_ensemble_coeff is not None and self.n_action_steps != 1:
            wrong.append(f"n_action_steps is {self.n_action_steps}; with temporal_ensemble_coeff it must be 1")
        if self.dim_model % self.n_heads:
            wrong.append(f"dim_model {self.dim_model} is not a multiple of n_heads {self.n_heads}")
        activation = LEROBOT_ACTIVATIONS.get(self.feedforward_activation)
        if activation is not None and self.dim_feedforward % activation.inputs:
            wrong.append(f"dim_feedforward {self.dim_feedforward} cannot be halved by {self.feedforward_activation}")
        return wrong

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        if not self.cameras and self.environment_state is None:
            wrong.append("input_features has neither an image nor an environment state; ACT needs one of them")
        if self.cameras:
            if self.vision_backbone not in BACKBONES:
                wrong.append(f"vision_backbone is {shorten_value(self.vision_backbone)}; known: {', '.join(BACKBONES)}")
            elif self.replace_final_stride_with_dilation and not RESNETS.get(self.vision_backbone, (False,))[0]:
                wrong.append(
                    f"replace_final_stride_with_dilation is set, but {self.vision_backbone} has no bottlenecks to "
                    "dilate; set it to false or use resnet50"
                )
            if self.dim_model % 4:
                wrong.append(f"dim_model {self.dim_model} is not a multiple of 4, which image positions need")
        return wrong

    @property
    def table_numbers(self) -> int:
        name, is_dilated = self.vision_backbone, self.replace_final_stride_with_dilation
        tokens = 3 + sum(math.prod(measure_feature_map(name, frame, is_dilated)) for frame in self.frames)
        # Positions of the tokens, and of the chunk in the VAE.
        return super().table_numbers + (tokens + self.chunk_size * self.use_vae) * self.dim_model

    def architecture(self) -> "ActConfig":
        return self._with_defaults(n_action_steps=1)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ActConfig":
        read = dict(values)
        if read.get("replace_final_stride_with_dilation") in (0, 1):  # LeRobot declares this flag as an integer.
            read["replace_final_stride_with_dilation"] = bool(read["replace_final_stride_with_dilation"])
        return super().from_json(read)

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        if self.pretrained_revision is None:
            del values["pretrained_revision"]  # LeRobot 0.4.4 refuses a file with this field.
        return values
