"""Base config and network of policies on the 2D transformer.

A policy type consists of a config (`Transformer2dPolicyConfig`), a network (`Transformer2dPolicy`) with a ``loss``, and
an `act`, which `transformer2d_policy_type` joins to an entry of the registry.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, TypeVar

import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.checkpoints.tensor_layouts import SAME, Tensor
from jaxmodels.errors import InputError
from jaxmodels.layers.embeddings import sinusoidal_2d
from jaxmodels.layers.norm import LayerNorm
from jaxmodels.layers.vision import RESNETS, ResNet, SmallCnn, measure_feature_map
from jaxmodels.policies import PolicyType, as_stages
from jaxmodels.policies.config import BACKBONES, SMALL_CNN, PolicyConfig
from jaxmodels.ranges import CHUNK, HEADS, LAYERS_STACKED, NOT_NEGATIVE, POSITIVE, SHARE_BELOW_ONE, WIDTH, Range
from jaxmodels.text import TextEncoder
from jaxmodels.text.encoder import TextConfig
from jaxmodels.transformer2d import Transformer2DModel
from jaxmodels.transformer2d.attention import Dtypes, to_bias
from jaxmodels.transformer2d.block import (
    Biases,
    BlockKeyValues,
    BlockModulation,
    Execution,
    run_blocks,
    stack_blocks,
)
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.types import Feature, Language, Observation
from jaxmodels.weights import blueprint_of

SCHEDULERS = ("constant", "cosine")
Config = TypeVar("Config", bound="Transformer2dPolicyConfig")


@dataclass(frozen=True)
class Transformer2dPolicyConfig(PolicyConfig):
    """Fields that diffusion2d and tokens2d share, with LeRobot's names where LeRobot has them.

    Attributes:
        input_features: in the order of their tokens.
        chunk_size: actions that are sampled together.
        n_action_steps: number of actions to execute.
        vision_backbone: value of `BACKBONES`; all cameras share the backbone.
        pretrained_backbone_weights: initial weights of a ResNet: a file, a folder or a repo of the Hub.
        dim_model: width of all tokens.
        n_encoder_layers: self-attention blocks over the observation, once per chunk.
        n_layers: layers of the transformer over actions.
        dropout: rate in both, in training.
        text_encoder: config of the encoder of instructions; None for a policy without language.
        do_mask_loss_for_padding: whether training excludes actions after the end of a demonstration; otherwise the
            policy learns to hold still there.
        optimizer_lr_backbone: learning rate of the vision backbone.
        optimizer_betas, optimizer_eps, optimizer_weight_decay: parameters of AdamW.
        optimizer_grad_clip_norm: largest global norm of a gradient; 0 does not clip.
        scheduler_name: constant after the warm-up, or falling as a cosine.

    Raises:
        ConfigError: a value makes no sense; all errors together.
    """

    advice: ClassVar[str] = "the policy is of a newer version, or of another"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = {"vision_backbone": BACKBONES, "scheduler_name": SCHEDULERS}
    indifferent: ClassVar[tuple[str, ...]] = (
        "device",
        "pretrained_backbone_weights",
        "dropout",
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

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if self.dim_model % (4 * self.n_heads):
            wrong.append(f"dim_model {self.dim_model} is not a multiple of 4 n_heads ({4 * self.n_heads})")
        return wrong

    def wrong_features(self) -> list[str]:
        wrong = super().wrong_features()
        if not (self.cameras or self.state or self.environment_state):
            wrong.append("input_features has neither an image nor a state; there is nothing to look at")
        return wrong

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
        # Numbers of a normalisation are weights; only the mode of actions changes the program.
        modes = tuple((kind, mode) for kind, mode in self.normalization_mapping if kind == "ACTION")
        return self._with_defaults(n_action_steps=1, normalization_mapping=modes)


# About as large as the features, so that the network distinguishes cameras from the first step.
_embedding_init = nnx.initializers.normal(0.5)


class ObservationTokens(nnx.Module):
    """Encoder of an observation to tokens: state, environment state, feature maps of cameras, language.

    Each kind has a projection and a learned embedding; pixels have fixed positions. An instruction also scales and
    shifts the channels of feature maps (FiLM, arXiv 1709.07871, as in RT-1), which attention alone learns slowly. With
    `n_encoder_layers`, tokens attend to each other once per chunk instead of in each step of a sampler.
    """

    def __init__(self, config: Transformer2dPolicyConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        width = config.dim_model
        self.config = config
        if config.state is not None:
            self.state_in = nnx.Linear(config.state.shape[0], width, rngs=rngs)
        if config.environment_state is not None:
            self.environment_in = nnx.Linear(config.environment_state.shape[0], width, rngs=rngs)
        if config.cameras:
            name = config.vision_backbone
            self.backbone = ResNet(name, rngs=rngs) if name in RESNETS else SmallCnn(rngs=rngs)
            self.image_in = nnx.Linear(self.backbone.width, width, rngs=rngs)
        if config.text_encoder is not None:
            self.language_in = nnx.Linear(config.text_encoder.width, width, rngs=rngs)
            if config.cameras:
                self.film = nnx.Linear(config.text_encoder.width, 2 * width, rngs=rngs)
        kinds = sum(part is not None for part in (config.state, config.environment_state, config.text_encoder))
        self.embeddings = nnx.Param(_embedding_init(rngs.params(), (kinds + len(config.cameras), width)))
        if config.observation_transformer is not None:
            self.blocks = stack_blocks(config.observation_transformer, Dtypes(dtype, dtype), rngs)
        self.norm = LayerNorm(width)

    def __call__(
        self, observation: Observation, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[Array, "b n d"], Bool[Array, "b n"] | None]:
        """Return the tokens of a normalised observation, and which tokens count; None for all.

        Args:
            rngs: enables dropout.

        Raises:
            InputError: the policy reads language, and the observation has none.
        """
        config = self.config
        said = observation.language if config.text_encoder is not None else None
        if config.text_encoder is not None and said is None:
            raise InputError("the observation has no language; this policy wants an instruction (model.read)")
        parts = []
        if config.state is not None:
            parts.append(self.state_in(observation.state)[:, None])
        if config.environment_state is not None:
            parts.append(self.environment_in(observation.environment_state)[:, None])
        for image in observation.images:
            features = self.image_in(self.backbone(image))
            if said is not None:
                scale, shift = jnp.split(self.film(_mean(said))[:, None, None], 2, axis=-1)
                features = features * (1 + scale) + shift
            positions = sinusoidal_2d(features.shape[1], features.shape[2], config.dim_model)
            parts.append(rearrange(features + jnp.asarray(positions, features.dtype), "b h w d -> b (h w) d"))
        mask = None
        if said is not None:
            silent = jnp.ones((said.mask.shape[0], sum(part.shape[1] for part in parts)), bool)
            mask = jnp.concatenate((silent, said.mask), axis=1)
            parts.append(self.language_in(said.tokens))
        kinds = self.embeddings[...]
        tokens = jnp.concatenate([part + kinds[kind] for kind, part in enumerate(parts)], axis=1)
        return self.norm(self._encode_tokens(tokens, mask, rngs)), mask

    def _encode_tokens(
        self, tokens: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None, rngs: nnx.Rngs | None
    ) -> Float[Array, "b n d"]:
        if not self.config.n_encoder_layers:
            return tokens
        bias = None if mask is None else to_bias(mask, tokens.shape[0], self.config.n_heads)
        key = None if rngs is None or self.config.dropout == 0 else rngs.dropout()
        return run_blocks(
            self.blocks,
            tokens,
            BlockModulation(),
            BlockKeyValues(),
            Biases(bias),
            Execution(scan=True, remat=False),
            key=key,
        )


def _mean(said: Language) -> Float[Array, "b d"]:
    """Return the mean of the tokens that the mask keeps."""
    counts = said.mask[..., None].astype(said.tokens.dtype)
    return (said.tokens * counts).sum(1) / counts.sum(1)


# Fields for one 96x96 camera and a CPU.
SMALL = {
    "chunk_size": 20,
    "n_action_steps": 5,
    "vision_backbone": SMALL_CNN,
    "dim_model": 128,
    "n_heads": 4,
    "n_encoder_layers": 1,
    "n_layers": 4,
    "optimizer_lr": 1e-3,
    "optimizer_lr_backbone": 1e-3,
    "optimizer_weight_decay": 1e-4,
    "scheduler_warmup_steps": 200,
}


class Transformer2dPolicy(nnx.Module):
    """Base network: observation tokens, text encoder and transformer; policy types add the generation of a chunk."""

    def __init__(self, config: Transformer2dPolicyConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config: Any = config
        self.observation_tokens = ObservationTokens(config, dtype=dtype, rngs=rngs)
        if config.text_encoder is not None:
            self.text = TextEncoder(config.text_encoder, rngs=rngs)
        self.transformer = Transformer2DModel(**config.transformer.to_json(), dtype=dtype, rngs=rngs)

    def read(self, ids: Int[Array, "b n"], mask: Bool[Array, "b n"]) -> Language:
        return Language(self.text(ids, mask), mask)


Model = TypeVar("Model", bound=Transformer2dPolicy)


def transformer2d_policy_type(
    config: type[Transformer2dPolicyConfig], model: type[Transformer2dPolicy], act: Callable[..., Float[Array, "b t a"]]
) -> PolicyType:
    """Return the policy type with this config, network and `act`, which continues plans."""
    return PolicyType(
        config=config.from_json,
        model=model,
        tensors=_tensors,
        stages=as_stages(act),
        takes_prefix=True,
        read=partial(_read, model),
        small=SMALL,
    )


def build_model(model: Callable[..., Model], config: Transformer2dPolicyConfig, weights: Mapping[str, Array]) -> Model:
    """Return the network over weights for serving, in their precision."""
    dtype = next(iter(weights.values())).dtype
    return blueprint_of(model, config, dtype=dtype).assemble(weights)


def _tensors(names: Iterable[str]) -> tuple[Tensor, ...]:
    """Return a table with our names and layouts under ``model``, because LeRobot has no such policy."""
    return tuple(Tensor(f"model.{name}", (name,), SAME) for name in names)


def _read(
    model: type[Transformer2dPolicy],
    config: Transformer2dPolicyConfig,
    weights: Mapping[str, Array],
    ids: Int[Array, "b n"],
    mask: Bool[Array, "b n"],
) -> Language:
    """Encode an instruction with the text encoder, as a separate program."""
    return build_model(model, config, weights).read(ids, mask)
