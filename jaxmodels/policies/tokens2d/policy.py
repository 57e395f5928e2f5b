"""tokens2d: action chunks as tokens, decoded by confidence on the 2D transformer.

Neighbouring classes are neighbouring numbers: training spreads targets (`spread_targets`), and a distribution over
classes gives a finer number than its class (`compute_expectation`). Each number of an action is a pixel; the longer of
chunk and action lies along the rows, so that one embedding is of the time and the other of the joint.

Sources: https://arxiv.org/abs/2202.04200 (masked prediction and decoding by confidence),
https://arxiv.org/abs/2508.20072 (the same for actions), https://arxiv.org/abs/2403.03950 (bins with a spread).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.scipy.stats import norm
from jax.tree_util import Partial
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.policies.transformer2d_policy import (
    Transformer2dPolicy,
    Transformer2dPolicyConfig,
    build_model,
    transformer2d_policy_type,
)
from jaxmodels.ranges import NOT_NEGATIVE, SHARE, Range
from jaxmodels.samplers import MaskSchedule, begin_with, maskgit
from jaxmodels.samplers.maskgit import ranks
from jaxmodels.samplers.sampling import STEPS
from jaxmodels.transformer2d import Conditioning, Transformer2DModel
from jaxmodels.transformer2d.block import BlockKeyValues
from jaxmodels.transformer2d.config import Transformer2DConfig
from jaxmodels.types import Observation

BOUNDED = ("MIN_MAX", "QUANTILES")
MAX_BINS = 65_536


@dataclass(frozen=True)
class Tokens2dConfig(Transformer2dPolicyConfig):
    """Config of a policy that decodes a chunk of masked action tokens with a 2D transformer over cameras and joints.

    Attributes:
        bins: classes of each number of an action, of equal width over [-1, 1]. Actions must be normalised by MIN_MAX,
            or by QUANTILES, which is more precise with outliers but clips rare actions.
        label_smoothing: spread of training targets over neighbouring bins, in bins (`spread_targets`); 0 for none.
        neighbours: bins on either side of the chosen bin that are averaged; 0 for the bin's centre.
        num_inference_steps: passes of the decoder.
        remasking: whether a pass may mask less confident tokens of earlier passes again.
        temperature: 0 takes the most likely tokens, the most confident first; 1 draws from the model's distribution.
        noise_seed: seed of the draw, which is the same for each observation.
        prefix_rate: share of training chunks whose first actions are given, like a plan that is continued.

    Further attributes and errors as in `Transformer2dPolicyConfig`.
    """

    type: ClassVar[str] = "tokens2d"
    indifferent: ClassVar[tuple[str, ...]] = (*Transformer2dPolicyConfig.indifferent, "label_smoothing", "prefix_rate")

    bins: Annotated[int, Range(2, MAX_BINS)] = 256
    label_smoothing: Annotated[float, NOT_NEGATIVE] = 0.75
    neighbours: Annotated[int, Range(0, MAX_BINS)] = 8
    num_inference_steps: Annotated[int, STEPS] = 8
    remasking: bool = True
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    noise_seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    prefix_rate: Annotated[float, SHARE] = 0.2

    def _wrong_numbers(self) -> list[str]:
        wrong = super()._wrong_numbers()
        if not 0 <= self.neighbours < self.bins:
            wrong.append(f"neighbours is {self.neighbours}; wanted 0 to {self.bins - 1}, less than bins")
        mode = dict(self.normalization_mapping).get("ACTION")
        if mode not in BOUNDED:
            wrong.append(
                f"normalization_mapping has ACTION: {mode}; bins are in [-1, 1]; wanted one of {', '.join(BOUNDED)}"
            )
        return wrong

    def architecture(self) -> "Tokens2dConfig":
        # The mode that scales actions to [-1, 1] does not change the program.
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


def get_bin_centres(bins: int) -> Float[np.ndarray, " {bins}"]:
    """Return the centres of the bins over [-1, 1]."""
    return ((2 * np.arange(bins) + 1) / bins - 1).astype(np.float32)


def quantise(x: Float[Array, "*n"], bins: int) -> Int[Array, "*n"]:
    """Return the bin of each number; numbers outside of [-1, 1] get the first or last bin."""
    return jnp.clip(jnp.floor((x + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)


def spread_targets(x: Float[Array, "*n"], bins: int, width: float) -> Float[Array, "*n {bins}"]:
    """Return a target distribution over bins for each number, whose expectation is the number.

    Bins get shares of a normal distribution of `width` bins (0: only one bin). Source: HL-Gauss, arXiv 2403.03950.
    """
    if not width:
        return (quantise(x, bins)[..., None] == jnp.arange(bins)).astype(jnp.float32)
    edges = jnp.linspace(-1, 1, bins + 1)
    below = norm.cdf((edges - jnp.clip(x, -1, 1)[..., None]) * (bins / (2 * width)))
    return jnp.diff(below, axis=-1) / (below[..., -1:] - below[..., :1])


def compute_expectation(
    log_probabilities: Float[Array, "b v n"], ids: Int[Array, "b n"], neighbours: int
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """Return the mean of each token's distribution within `neighbours` of the chosen class, and its probability.

    Distant classes are excluded because they may belong to another way to do the task.
    """
    classes = jnp.arange(log_probabilities.shape[1])
    is_near = jnp.abs(classes[:, None] - ids[:, None]) <= neighbours
    shares = jnp.where(is_near, jnp.exp(log_probabilities), 0)
    total = jnp.sum(shares, axis=1)
    weighted = jnp.sum(shares * jnp.asarray(get_bin_centres(len(classes)))[:, None], axis=1)
    return weighted / total, total


def draw_even_shares(key: PRNGKeyArray, batch: int) -> Float[Array, " {batch}"]:
    """Draw uniform numbers in [0, 1) that are evenly spread over the batch (arXiv 2107.00630, appendix I.1)."""
    return (jax.random.uniform(key, (), jnp.float32) + jnp.arange(batch, dtype=jnp.float32) / batch) % 1


def mask_tokens(
    schedule: MaskSchedule, is_pad: Bool[Array, "b t"], width: int, prefix_rate: float, key: PRNGKeyArray
) -> Bool[Array, "b t {width}"]:
    """Draw a mask of tokens to predict, at least one token of each chunk; actions have `width` numbers.

    The mask excludes padded steps and, in a share `prefix_rate` of the chunks, some first actions.
    """
    batch, steps = is_pad.shape
    share_key, prefix_key, delay_key, order_key = jax.random.split(key, 4)
    planned = jnp.sum(~is_pad, axis=1).astype(jnp.float32)
    delay = jnp.floor(jax.random.uniform(delay_key, (batch,), jnp.float32) * planned)
    has_prefix = jax.random.uniform(prefix_key, (batch,), jnp.float32) < prefix_rate
    is_past = jnp.arange(steps)[None] < jnp.where(has_prefix, delay, 0).astype(jnp.int32)[:, None]
    can_hide = jnp.repeat(~is_pad & ~is_past, width, axis=1)
    count = schedule.share(draw_even_shares(share_key, batch)) * jnp.sum(can_hide, axis=1).astype(jnp.float32)
    count = jnp.maximum(jnp.ceil(count), 1)
    order = jnp.where(can_hide, jax.random.uniform(order_key, can_hide.shape, jnp.float32), jnp.inf)
    return (can_hide & (ranks(order) < count.astype(jnp.int32)[:, None])).reshape(batch, steps, width)


class EncodedObservation(NamedTuple):
    """Keys and values of an observation, which all decoding passes attend to, and the mask (b, n) of valid tokens."""

    key_values: BlockKeyValues
    mask: Bool[Array, "b n"] | None


def make_bin_embeddings(bins: int, width: int, seed: Array) -> Float[Array, "{bins} {width}"]:
    """Return initial embeddings of the bins: waves, so that neighbours are similar."""
    phase_key, length_key = jax.random.split(seed)
    cycles = 0.5 * jnp.exp(jax.random.uniform(length_key, (width,), jnp.float32) * np.log(bins / 2))
    phase = jax.random.uniform(phase_key, (width,), jnp.float32)
    position = jnp.arange(bins, dtype=jnp.float32)[:, None] / bins
    return np.float32(np.sqrt(2)) * jnp.sin(2 * np.pi * (cycles * position + phase))


class Tokens2d(Transformer2dPolicy):
    """Network that predicts log-probabilities of the tokens of a normalised chunk."""

    def __init__(self, config: Tokens2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        table = self.transformer.latent_image_embedding.emb.embedding
        waves = make_bin_embeddings(config.bins, config.dim_model, rngs.params())
        table[...] = table[...].at[:-1].set(waves.astype(table.dtype))

    def encode_observation(self, observation: Observation) -> EncodedObservation:
        """Encode an observation for all decoding passes."""
        tokens, mask = self.observation_tokens(observation)
        return EncodedObservation(self.transformer.prepare_context(tokens), mask)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Return the mean cross-entropy of all masked tokens in the batch, and its parts.

        A random share of each chunk is masked (`mask_tokens`). With `do_mask_loss_for_padding`, padded steps are masked
        and have no loss.

        Args:
            rngs: streams ``noise`` and ``dropout``; None evaluates with a fixed mask.

        Returns:
            The loss, and also ``bins_off``, the mean distance of the most likely bin from the right bin.
        """
        config = self.config
        key = jax.random.key(config.noise_seed) if rngs is None else rngs.noise()
        is_out = is_pad if config.do_mask_loss_for_padding else jnp.zeros_like(is_pad)
        is_hidden = mask_tokens(config.schedule, is_out, actions.shape[2], config.prefix_rate, key)
        ids = quantise(actions, config.bins)
        visible = jnp.where(is_hidden | is_out[..., None], config.schedule.mask, ids)
        rngs = rngs if config.dropout else None
        tokens, mask = self.observation_tokens(observation, rngs)
        (answer,) = self.transformer(
            to_pixels(visible), tokens, encoder_attention_mask=mask, return_dict=False, rngs=rngs
        )
        log_probabilities = rearrange(answer, "b v n -> b n v")
        targets = spread_targets(to_pixels(actions), config.bins, config.label_smoothing)
        entropies = -jnp.sum(targets * log_probabilities, axis=-1)
        off = jnp.abs(jnp.argmax(log_probabilities, axis=-1).astype(jnp.int32) - to_pixels(ids))
        counts = to_pixels(is_hidden)
        total = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
        loss, off = (jnp.sum(jnp.where(counts, x, 0)) / total for x in (entropies, off.astype(jnp.float32)))
        return loss, {"cross_entropy": loss, "bins_off": off}


def predict(
    transformer: Transformer2DModel, context: EncodedObservation, ids: Int[Array, "b n"], t: Array
) -> Float[Array, "b v n"]:
    """Return log-probabilities of all classes but the masked class, for each pixel of a chunk."""
    del t  # The number of masked tokens implies the time.
    conditioning = Conditioning(context.key_values, transformer.prepare_modulations())
    (answer,) = transformer(ids, encoder_attention_mask=context.mask, conditioning=conditioning, return_dict=False)
    return answer


def to_pixels(chunk: Array) -> Array:
    """Arrange a chunk (b, t, a) as latent pixels (b, n), the longer axis along the rows."""
    return rearrange(chunk, "b t a -> b (a t)" if chunk.shape[1] >= chunk.shape[2] else "b t a -> b (t a)")


def from_pixels(pixels: Array, steps: int) -> Array:
    """Arrange latent pixels (b, n) as a chunk (b, t, a)."""
    width = pixels.shape[1] // steps
    return rearrange(pixels, "b (a t) -> b t a" if steps >= width else "b (t a) -> b t a", t=steps)


class Decoded(NamedTuple):
    """Decoded chunk `actions`, normalised, its `ids`, and each number's probability when it was chosen (plans: 1)."""

    actions: Float[Array, "b t a"]
    confidence: Float[Array, "b t a"]
    ids: Int[Array, "b t a"]


def act(config: Tokens2dConfig, weights: Mapping[str, Array], observation: Observation) -> Float[Array, "b t a"]:
    """Decode a normalised chunk for a normalised observation; members of a batch do not depend on each other."""
    return decode(config, weights, observation).actions


def decode(config: Tokens2dConfig, weights: Mapping[str, Array], observation: Observation) -> Decoded:
    """Decode a chunk as `act` does, together with its tokens and confidences."""
    model = build_model(Tokens2d, config, weights)
    context = model.encode_observation(observation)
    batch = jax.tree.leaves(observation)[0].shape[0]
    shape = (batch, config.chunk_size, config.action.shape[0])
    known, prefix = None, observation.prefix
    if prefix is not None:
        planned = quantise(prefix.actions.astype(jnp.float32), config.bins)
        past = jnp.arange(shape[1])[None] < jnp.minimum(prefix.delay, prefix.length)[:, None]
        known = to_pixels(jnp.where(past[..., None], planned, config.schedule.mask))
    decoded = maskgit(
        Partial(predict, model.transformer, context),
        (batch, shape[1] * shape[2]),
        jax.random.key(config.noise_seed),
        config.schedule,
        steps=config.num_inference_steps,
        known=known,
        alike=True,
        distributions=True,
    )
    assert decoded.distribution is not None
    values, confidence = compute_expectation(decoded.distribution, decoded.ids, config.neighbours)
    confidence = jnp.minimum(confidence, 1)  # Known tokens have a distribution of zeros.
    values, confidence, ids = (from_pixels(array, shape[1]) for array in (values, confidence, decoded.ids))
    return Decoded(values if prefix is None else begin_with(prefix, values), confidence, ids)


POLICY = transformer2d_policy_type(Tokens2dConfig, Tokens2d, act)
