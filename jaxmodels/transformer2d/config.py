"""Config of the 2D transformer: the constructor arguments of diffusers' Transformer2DModel."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from jaxmodels.errors import ConfigError
from jaxmodels.layers.feed_forward import DIFFUSERS_ACTIVATIONS
from jaxmodels.ranges import (
    HEADS,
    LAYERS_STACKED,
    SHARE_BELOW_ONE,
    WIDTH,
    Range,
    find_choice_errors,
    find_value_errors,
    list_numbers,
    read_number_type,
    shorten_value,
)

Kind: TypeAlias = Literal["continuous", "discrete", "patches"]

ADA_NORMS = ("ada_norm", "ada_norm_zero", "ada_norm_single")
NORMS = ("layer_norm", *ADA_NORMS)
GATED_ATTENTION = ("gated", "gated-text-image")
ATTENTION_TYPES = ("default", *GATED_ATTENTION)
TIME_CHANNELS = 256  # Channels of a timestep's sinusoid; fixed in diffusers.
ROWS = Range(1, 1 << 20)  # Rows of a table of embeddings.
CHANNELS = Range(1, WIDTH)
SIDE = Range(1, 16_384)  # Side of latents, in pixels or in numbers of a chunk.
CONDITIONED_SIZE = 128  # Sample size of PixArt's 1024-pixel models, which have additional conditions.


@dataclass(frozen=True)
class Transformer2DConfig:
    """The 25 constructor arguments of diffusers' `Transformer2DModel`, in its order and with its defaults.

    They determine the input (`kind`): ``in_channels`` alone is continuous (batch, channel, height, width);
    ``num_vector_embeds`` is discrete (batch, latent pixels); ``in_channels`` with ``patch_size`` is patches.

    Attributes:
        num_attention_heads: heads of every attention; times `attention_head_dim` they are `inner_dim`.
        attention_head_dim: channels per head.
        in_channels: channels of a continuous or patched input.
        out_channels: channels of a patched output; `in_channels` when None. A continuous output is added to its input,
            so it has the same number of channels, or one.
        num_layers: transformer blocks.
        dropout: rate after each attention and inside each feed-forward, in training.
        norm_num_groups: groups of the group norm over a continuous input.
        cross_attention_dim: width of `encoder_hidden_states`; None leaves cross-attention out.
        attention_bias: whether queries, keys and values have a bias.
        sample_size: height and width of a discrete or patched input; positions are made for it.
        num_vector_embeds: classes of a discrete input, the masked one (the last) included.
        patch_size: height and width of a patch.
        activation_fn: activation of the feed-forwards; ``geglu-approximate`` is not gated.
        num_embeds_ada_norm: with ada_norm the number of timesteps; with ada_norm_zero the number of classes.
        use_linear_projection: whether files have the projections of a continuous input as linear layers or as 1x1
            convolutions, which are equivalent.
        only_cross_attention: whether the first attention of a block also attends to `encoder_hidden_states`.
        double_self_attention: whether the second attention has keys as wide as the tokens.
        upcast_attention: has no effect, because softmax is always float32; written to files.
        norm_type: ``layer_norm`` with `num_embeds_ada_norm` means ``ada_norm``, as in older files (`block_norm`).
        norm_elementwise_affine: whether plain layer norms have weights.
        norm_eps: epsilon of plain layer norms.
        attention_type: ``gated`` and ``gated-text-image`` put GLIGEN's fuser into each block.
        caption_channels: width of the captions that a patched model projects to `inner_dim`.
        interpolation_scale: divisor of the positions of patches; ``max(sample_size // 64, 1)`` when None.
        use_additional_conditions: whether resolution and aspect ratio are added to the timestep (ada_norm_single); when
            None, only for sample size 128.

    Raises:
        ConfigError: values contradict each other or are out of range.

    Example:
        >>> from jaxmodels import Transformer2DConfig
        >>> config = Transformer2DConfig(
        ...     num_attention_heads=2, attention_head_dim=8, in_channels=4, patch_size=2, sample_size=8,
        ...     norm_type="ada_norm_zero", num_embeds_ada_norm=10,
        ... )
        >>> config.kind, config.inner_dim
        ('patches', 16)
    """

    num_attention_heads: Annotated[int, Range(1, HEADS)] = 16
    attention_head_dim: Annotated[int, CHANNELS] = 88
    in_channels: Annotated[int | None, CHANNELS] = None
    out_channels: Annotated[int | None, CHANNELS] = None
    num_layers: Annotated[int, Range(1, LAYERS_STACKED)] = 1
    dropout: Annotated[float | int, SHARE_BELOW_ONE] = 0.0
    norm_num_groups: Annotated[int, CHANNELS] = 32
    cross_attention_dim: Annotated[int | None, CHANNELS] = None
    attention_bias: bool = False
    sample_size: Annotated[int | None, SIDE] = None
    num_vector_embeds: Annotated[int | None, ROWS] = None
    patch_size: Annotated[int | None, Range(1, 1024)] = None
    activation_fn: str = "geglu"
    num_embeds_ada_norm: Annotated[int | None, ROWS] = None
    use_linear_projection: bool = False
    only_cross_attention: bool = False
    double_self_attention: bool = False
    upcast_attention: bool = False
    norm_type: str = "layer_norm"
    norm_elementwise_affine: bool = True
    norm_eps: Annotated[float | int, Range(0, 1, above=True)] = 1e-5
    attention_type: str = "default"
    caption_channels: Annotated[int | None, CHANNELS] = None
    interpolation_scale: Annotated[float | int | None, Range(0, 1e6, above=True)] = None
    use_additional_conditions: bool | None = None

    def __post_init__(self) -> None:
        wrong = self._wrong_types()
        if wrong:
            raise ConfigError("Transformer2DModel: " + "; ".join(wrong))
        self._check_kind()
        wrong = [*self._wrong_everywhere(), *_WRONG[self.kind](self)]
        if wrong:
            raise ConfigError(f"Transformer2DModel with {self.kind} input: " + "; ".join(wrong))

    def _wrong_types(self) -> list[str]:
        wrong = []
        for field in fields(self):
            value, number = getattr(self, field.name), read_number_type(field.type)
            if number is not None:
                error = number.describe_error(field.name, value)
                wrong += [] if error is None else [error]
            elif not isinstance(value, (kind := _TYPES[str(field.type)])[1]):
                wrong.append(f"{field.name} is {shorten_value(value)}; wanted {kind[0]}")
        if not wrong and self.inner_dim not in CHANNELS:
            wrong.append(
                f"num_attention_heads {self.num_attention_heads} of attention_head_dim {self.attention_head_dim} make "
                f"tokens {self.inner_dim} wide; wanted {WIDTH} at most"
            )
        return wrong

    def _check_kind(self) -> None:
        if self.in_channels is not None and self.num_vector_embeds is not None:
            meant = "patches" if self.patch_size is not None else "continuous"
            raise ConfigError(
                f"Transformer2DModel: in_channels {self.in_channels} means {meant} input and num_vector_embeds "
                f"{self.num_vector_embeds} means discrete input; make sure that one of them is None"
            )
        if self.in_channels is None and self.num_vector_embeds is None:
            raise ConfigError(
                f"Transformer2DModel: no input is defined (in_channels {self.in_channels}, num_vector_embeds "
                f"{self.num_vector_embeds}, patch_size {self.patch_size}); give in_channels for continuous input, "
                "num_vector_embeds for discrete input, or in_channels and patch_size for patches"
            )

    def _wrong_everywhere(self) -> list[str]:
        wrong = []
        if self.activation_fn not in DIFFUSERS_ACTIVATIONS:
            known = ", ".join(DIFFUSERS_ACTIVATIONS)
            wrong.append(f"activation_fn is {shorten_value(self.activation_fn)}; known (in lower case): {known}")
        wrong += find_choice_errors(self, {"attention_type": ATTENTION_TYPES})
        if self.has_fuser and self.cross_attention_dim is None:
            wrong.append(f"attention_type {self.attention_type!r} needs cross_attention_dim, the width of its objects")
        if self.norm_type not in NORMS:
            reason = _UNUSABLE_NORMS.get(self.norm_type, f"known: {', '.join(NORMS)}")
            wrong.append(f"norm_type is {shorten_value(self.norm_type)}; {reason}")
        elif self.norm_type in ("ada_norm", "ada_norm_zero") and self.num_embeds_ada_norm is None:
            what = "timesteps" if self.norm_type == "ada_norm" else "classes"
            wrong.append(f"norm_type {self.norm_type!r} needs num_embeds_ada_norm, its number of {what}")
        return wrong

    @property
    def kind(self) -> Kind:
        """Kind of input: continuous, discrete or patches."""
        if self.num_vector_embeds is not None:
            return "discrete"
        return "continuous" if self.patch_size is None else "patches"

    @property
    def inner_dim(self) -> int:
        """Width d of the tokens."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def block_norm(self) -> str:
        """Norm type of the blocks: ``layer_norm`` in older files means ``ada_norm``."""
        is_old = self.norm_type == "layer_norm" and self.num_embeds_ada_norm is not None
        return "ada_norm" if is_old else self.norm_type

    @property
    def outputs(self) -> int | None:
        """Number of channels of a continuous or patched output."""
        return self.in_channels if self.out_channels is None else self.out_channels

    @property
    def has_cross_attention(self) -> bool:
        """Whether blocks have a second attention."""
        return self.cross_attention_dim is not None or self.double_self_attention

    @property
    def has_fuser(self) -> bool:
        return self.attention_type in GATED_ATTENTION

    @property
    def first_context(self) -> int | None:
        """Width of the context of the first attention; None when it is always self-attention."""
        return (self.cross_attention_dim or self.inner_dim) if self.only_cross_attention else None

    @property
    def second_context(self) -> int:
        """Width of the context of the second attention."""
        is_own = self.double_self_attention or self.cross_attention_dim is None
        return self.inner_dim if is_own else self.cross_attention_dim or self.inner_dim

    @property
    def position_scale(self) -> float:
        """Divisor of the positions of patches."""
        if self.interpolation_scale is not None:
            return float(self.interpolation_scale)
        return float(max((self.sample_size or 0) // 64, 1))

    @property
    def has_conditions(self) -> bool:
        """Whether resolution and aspect ratio are conditions in addition to the timestep."""
        if self.kind != "patches" or self.norm_type != "ada_norm_single":
            return False
        if self.use_additional_conditions is None:
            return self.sample_size == CONDITIONED_SIZE
        return self.use_additional_conditions

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Transformer2DConfig":
        """Read a parsed ``config.json``; ignores unknown keys like diffusers; raises ConfigError for wrong values."""
        known = {field.name for field in fields(cls)}
        if wrong := find_value_errors(list_numbers(cls), values):
            raise ConfigError("Transformer2DModel: " + "; ".join(wrong))
        return cls(**{name: value for name, value in values.items() if name in known})

    def to_json(self) -> dict[str, Any]:
        """Return the constructor arguments by name."""
        return asdict(self)


_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "<class 'bool'>": ("true or false", (bool,)),
    "<class 'str'>": ("a string", (str,)),
    "bool | None": ("true, false or null", (bool, type(None))),
}
_UNUSABLE_NORMS = {
    "ada_norm_continuous": "diffusers' Transformer2DModel cannot be built with it either; wanted " + ", ".join(NORMS),
    "layer_norm_i2vgen": "diffusers builds it but fails in the forward pass; wanted " + ", ".join(NORMS),
}


def _wrong_continuous(config: Transformer2DConfig) -> list[str]:
    wrong = []
    if (config.in_channels or 0) % config.norm_num_groups:
        wrong.append(f"in_channels {config.in_channels} must be divisible by norm_num_groups {config.norm_num_groups}")
    may_be_one = not config.use_linear_projection
    if config.outputs != config.in_channels and not (may_be_one and config.outputs == 1):
        wrong.append(
            f"out_channels is {config.out_channels}; the output is added to the input, so wanted {config.in_channels}"
        )
    return wrong


def _wrong_discrete(config: Transformer2DConfig) -> list[str]:
    wrong = []
    if config.sample_size is None:
        wrong.append("sample_size is None; wanted the side of the square of latent pixels")
    if (config.num_vector_embeds or 0) < 2:
        wrong.append(f"num_vector_embeds is {config.num_vector_embeds}; wanted 2 or more, the masked class included")
    return wrong


def _wrong_patches(config: Transformer2DConfig) -> list[str]:
    wrong = []
    if config.norm_type not in ("ada_norm_zero", "ada_norm_single"):
        wrong.append(
            f"norm_type is {config.norm_type!r}, for which patches have no forward pass (nor in diffusers); wanted "
            "ada_norm_zero or ada_norm_single"
        )
    if config.sample_size is None:
        wrong.append("sample_size is None; wanted the side of the images that positions are made for")
    elif config.sample_size < (config.patch_size or 1):
        wrong.append(f"sample_size {config.sample_size} is smaller than patch_size {config.patch_size}")
    if config.inner_dim % 4:
        wrong.append(f"inner_dim {config.inner_dim} is not a multiple of 4, which positions of patches need")
    if config.has_conditions and config.inner_dim % 3:
        wrong.append(f"inner_dim {config.inner_dim} is not a multiple of 3, which use_additional_conditions needs")
    if config.caption_channels is not None and not (config.has_cross_attention or config.only_cross_attention):
        wrong.append("caption_channels is given without cross_attention_dim; no attention would read the captions")
    return wrong


_WRONG = {"continuous": _wrong_continuous, "discrete": _wrong_discrete, "patches": _wrong_patches}
