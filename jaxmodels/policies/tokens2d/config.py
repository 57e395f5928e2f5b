"""Config of a tokens2d policy."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from jaxmodels.policies.transformer2d_config import Transformer2dPolicyConfig
from jaxmodels.ranges import NOT_NEGATIVE, SHARE, Range
from jaxmodels.samplers import MaskSchedule
from jaxmodels.samplers.sampling import STEPS
from jaxmodels.transformer2d.config import Transformer2DConfig

BOUNDED = ("MIN_MAX", "QUANTILES")
MAX_BINS = 65_536


@dataclass(frozen=True)
class Tokens2dConfig(Transformer2dPolicyConfig):
    """Config of a policy that decodes a chunk of masked action tokens with a 2D transformer over cameras and joints.

    Attributes:
        bins: classes of each number of an action, of equal width over [-1, 1]. Actions must be normalised to that
            range, by MIN_MAX or by QUANTILES, which clips the outermost hundredths: more precise where data have
            outliers, but what is done rarely (closing a gripper to the end) must not be among them.
        label_smoothing: how far, in bins, the right answer spreads over its neighbours in training
            (`spread_targets`); 0 for the one bin.
        neighbours: bins on either side of the one chosen, over which the number that comes out is the mean; 0 for the
            bin's centre.
        num_inference_steps: passes of the decoder.
        remasking: whether a pass may take back tokens of earlier ones that were chosen with less confidence.
        temperature: 0 takes the likeliest tokens, the surest first. Above, tokens are drawn as the model says (at 1),
            and so is, to begin with, their order.
        noise_seed: of that draw: always the same one, so that the same observation has the same answer, whenever it
            comes and with whomever it shares a batch.
        prefix_rate: share of the chunks in training whose first actions are given, as those of a plan are when it is
            continued.

    Further attributes, and errors, as of `Transformer2dPolicyConfig`.
    """

    type: ClassVar[str] = "tokens2d"
    indifferent: ClassVar[tuple[str, ...]] = (*Transformer2dPolicyConfig.indifferent, "label_smoothing", "prefix_rate")

    bins: Annotated[int, Range(1, MAX_BINS)] = 256
    label_smoothing: Annotated[float, NOT_NEGATIVE] = 0.75
    neighbours: Annotated[int, Range(0, MAX_BINS)] = 8
    num_inference_steps: Annotated[int, STEPS] = 8
    remasking: bool = True
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    noise_seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    prefix_rate: Annotated[float, SHARE] = 0.2

    def find_errors(self) -> list[str]:
        wrong = []
        if self.bins < 2:
            wrong.append(f"bins is {self.bins}; wanted 2 or more")
        if not 0 <= self.neighbours < self.bins:
            wrong.append(f"neighbours is {self.neighbours}; wanted 0 to {self.bins - 1}, less than bins")
        mode = dict(self.normalization_mapping).get("ACTION")
        if mode not in BOUNDED:
            wrong.append(
                f"normalization_mapping has ACTION: {mode}; bins lie in [-1, 1], wanted one of {', '.join(BOUNDED)}"
            )
        return wrong

    def architecture(self) -> "Tokens2dConfig":
        """The config with fields that shape no program at their defaults; policies with equal ones share programs."""
        # Bins are bins, whichever way actions come to lie in [-1, 1].
        return replace(super().architecture(), normalization_mapping=(("ACTION", BOUNDED[0]),))

    @property
    def transformer(self) -> Transformer2DConfig:
        """Config of the 2D transformer, in which each number of a chunk is a pixel."""
        return Transformer2DConfig(
            num_attention_heads=self.n_heads,
            attention_head_dim=self.dim_model // self.n_heads,
            num_layers=self.n_layers,
            dropout=self.dropout,
            cross_attention_dim=self.dim_model,
            attention_bias=True,
            sample_size=max(self.chunk_size, self.action.shape[0]),
            num_vector_embeds=self.bins + 1,
            activation_fn="geglu-approximate",
        )

    @property
    def schedule(self) -> MaskSchedule:
        """Mask schedule of training and decoding."""
        return MaskSchedule(
            num_classes=self.bins + 1,
            temperature=(self.temperature, 0.0),
            class_temperature=self.temperature,
            remasking=self.remasking,
            begins_with_one=True,
        )
