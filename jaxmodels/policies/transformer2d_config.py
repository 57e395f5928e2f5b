"""Base config of policies on the 2D transformer."""

import builtins
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, TypeVar

from jaxmodels.errors import ConfigError
from jaxmodels.layers.vision import measure_feature_map
from jaxmodels.policies.config import BACKBONES, SMALL_CNN, PolicyConfig, read_fields
from jaxmodels.ranges import (
    CHUNK,
    HEADS,
    LAYERS_STACKED,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE_BELOW_ONE,
    WIDTH,
    Range,
    find_number_errors,
    shorten_value,
)
from jaxmodels.text.encoder import TextConfig
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.types import ENVIRONMENT_STATE, STATE, Feature

SCHEDULERS = ("constant", "cosine")
Config = TypeVar("Config", bound="Transformer2dPolicyConfig")


@dataclass(frozen=True)
class Transformer2dPolicyConfig(PolicyConfig):
    """Fields that diffusion2d and tokens2d share, with LeRobot's names where LeRobot has them.

    Attributes:
        input_features: in the order of their tokens.
        chunk_size: actions that are sampled together.
        n_action_steps: how many of them are meant to be executed.
        vision_backbone: one of `BACKBONES`; all cameras share it.
        pretrained_backbone_weights: where a ResNet's training starts from: a file, a folder or a repo of the Hub.
        dim_model: width of all tokens.
        n_encoder_layers: blocks in which what is seen looks at itself, once for each chunk; 0 for none.
        n_layers: of the transformer over actions.
        dropout: rate in both, in training.
        text_encoder: reads instructions; None for a policy that is told nothing.
        do_mask_loss_for_padding: whether actions beyond the end of a demonstration, where a dataset repeats the last
            one, are left out of the training. If not, the policy learns to hold still there.
        optimizer_lr_backbone: of the vision backbone alone.
        optimizer_betas, optimizer_eps, optimizer_weight_decay: AdamW's.
        optimizer_grad_clip_norm: largest global norm of a gradient; 0 does not clip.
        scheduler_name: constant after the warm-up, or falling as a cosine.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    # Fields, or how their names begin, that neither a program nor its weights depend on.
    indifferent: ClassVar[tuple[str, ...]] = (
        "device",
        "pretrained_backbone_weights",
        "dropout",
        "n_action_steps",
        "do_mask_loss_for_padding",
        "optimizer_",
        "scheduler_",
    )

    input_features: tuple[Feature, ...] = ()
    output_features: tuple[Feature, ...] = ()
    normalization_mapping: tuple[tuple[str, str], ...] = (
        ("VISUAL", "MEAN_STD"),
        ("STATE", "MIN_MAX"),
        ("ENV", "MIN_MAX"),
        ("ACTION", "MIN_MAX"),
    )
    device: str | None = None
    chunk_size: Annotated[int, Range(1, CHUNK)] = 16
    n_action_steps: Annotated[int, Range(1, CHUNK)] = 8
    vision_backbone: str = SMALL_CNN
    pretrained_backbone_weights: str | None = None
    dim_model: Annotated[int, Range(1, WIDTH)] = 256
    n_heads: Annotated[int, Range(1, HEADS)] = 8
    n_encoder_layers: Annotated[int, Range(0, LAYERS_STACKED)] = 2
    n_layers: Annotated[int, Range(1, LAYERS_STACKED)] = 6
    dropout: Annotated[float, SHARE_BELOW_ONE] = 0.0
    text_encoder: TextConfig | None = None
    do_mask_loss_for_padding: bool = False
    optimizer_lr: Annotated[float, POSITIVE] = 1e-4
    optimizer_lr_backbone: Annotated[float, NOT_NEGATIVE] = 1e-4
    optimizer_betas: Annotated[tuple[float, float], SHARE_BELOW_ONE] = (0.95, 0.999)
    optimizer_eps: Annotated[float, POSITIVE] = 1e-8
    optimizer_weight_decay: Annotated[float, NOT_NEGATIVE] = 1e-6
    optimizer_grad_clip_norm: Annotated[float, NOT_NEGATIVE] = 10.0
    scheduler_name: str = "cosine"
    scheduler_warmup_steps: Annotated[int, Range(0, 10**9)] = 500

    def __post_init__(self) -> None:
        wrong = find_number_errors(self, integers=True) or [
            *self._wrong_numbers(),
            *find_number_errors(self, integers=False),
            *self.describe_unknown("vision_backbone", BACKBONES),
            *self.describe_unknown("scheduler_name", SCHEDULERS),
            *self.wrong_features(),
            *self.find_errors(),
        ]
        if wrong:
            raise ConfigError(f"{self.type} config: " + "; ".join(wrong))

    def find_errors(self) -> list[str]:
        """Errors of the fields that a policy type adds; called when all integers are in range."""
        return []

    def _wrong_numbers(self) -> list[str]:
        wrong = []
        if self.n_action_steps > self.chunk_size:
            wrong.append(f"n_action_steps is {self.n_action_steps}, more than chunk_size {self.chunk_size}")
        if self.dim_model % (4 * self.n_heads):
            wrong.append(f"dim_model {self.dim_model} is not a multiple of 4 n_heads ({4 * self.n_heads})")
        return wrong

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        for kind, name in (("STATE", STATE), ("ENV", ENVIRONMENT_STATE)):
            names = [feature.name for feature in self.input_features if feature.type == kind]
            if names not in ([], [name]):
                wrong.append(f"features of type {kind} are {names}; wanted at most one, {name!r}")
        if not (self.cameras or self.state or self.environment_state):
            wrong.append("input_features has neither an image nor a state; there is nothing to look at")
        return wrong

    def describe_unknown(self, name: str, known: tuple[str, ...]) -> list[str]:
        """A list with the error of a field whose value has to be one of `known`, or an empty one."""
        value = getattr(self, name)
        return [] if value in known else [f"{name} is {shorten_value(value)}; known: {', '.join(known)}"]

    @property
    def state(self) -> Feature | None:
        return next((f for f in self.input_features if f.type == "STATE"), None)

    @property
    def transformer(self) -> Transformer2DConfig:
        """Config of the 2D transformer over a chunk; each type has its own."""
        raise NotImplementedError

    @property
    def table_numbers(self) -> int:
        maps = (measure_feature_map(self.vision_backbone, frame) for frame in self.frames)
        tokens = self.chunk_size + sum(map(math.prod, maps))
        return super().table_numbers + tokens * self.dim_model

    @property
    def observation_transformer(self) -> Transformer2DConfig | None:
        """Config of the transformer blocks over the observation's tokens; None without such blocks."""
        if not self.n_encoder_layers:
            return None
        return Transformer2DConfig(
            num_attention_heads=self.n_heads,
            attention_head_dim=self.dim_model // self.n_heads,
            in_channels=self.dim_model,
            norm_num_groups=1,
            num_layers=self.n_encoder_layers,
            dropout=self.dropout,
            attention_bias=True,
            activation_fn="gelu-approximate",
        )

    def architecture(self: Config) -> Config:
        """The config with fields that shape no program at their defaults; policies with equal ones share programs."""
        defaults = {field.name: field.default for field in fields(self) if field.name.startswith(self.indifferent)}
        # Numbers of a normalisation are weights; of its modes only the actions' says anything, how far these reach.
        modes = tuple((kind, mode) for kind, mode in self.normalization_mapping if kind == "ACTION")
        return replace(self, **{**defaults, "n_action_steps": 1, "normalization_mapping": modes})

    @classmethod
    def from_json(cls: builtins.type[Config], values: Mapping[str, Any]) -> Config:
        """Read a parsed ``config.json``.

        Raises:
            ConfigError: unknown fields, or values that make no sense.
        """
        advice = "the policy is of a newer version, or of another"
        return cls(**read_fields(cls, values, f"{cls.type} config", advice))
