"""tokens2d's network: observation tokens, and a 2D transformer over a partly masked chunk.

Classes that are neighbours are numbers that are neighbours. Training says so (`spread_targets`), and a distribution
over classes tells a number more finely than its class does (`compute_expectation`).

Each number of an action is a pixel. The transformer adds an embedding of the row to one of the column, on a square, of
which it uses the first rows: the longer of chunk and action lies along them, so that one embedding is of the time and
the other of the joint, and no pixel is wasted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.scipy.stats import norm
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxmodels.policies.tokens2d.config import Tokens2dConfig
from jaxmodels.policies.transformer2d_policy import Transformer2dPolicy
from jaxmodels.samplers import MaskSchedule
from jaxmodels.samplers.maskgit import ranks
from jaxmodels.transformer2d import Conditioning, Transformer2DModel
from jaxmodels.transformer2d.block import KeyValues
from jaxmodels.types import Observation


def get_bin_centres(bins: int) -> Float[np.ndarray, " {bins}"]:
    """Centres of the bins over [-1, 1]."""
    return ((2 * np.arange(bins) + 1) / bins - 1).astype(np.float32)


def quantise(x: Float[Array, "*n"], bins: int) -> Int[Array, "*n"]:
    """Bin of each number; numbers outside of [-1, 1] go to the first or last one."""
    return jnp.clip(jnp.floor((x + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)


def spread_targets(x: Float[Array, "*n"], bins: int, width: float) -> Float[Array, "*n {bins}"]:
    """Target distribution over bins for each number; its expectation is the number.

    Args:
        width: standard deviation, in bins, of the normal distribution around the number of which each bin gets its
            share; 0 gives all to the bin of the number.

    Source: HL-Gauss, https://arxiv.org/abs/2403.03950, which recommends 0.75.
    """
    if not width:
        return (quantise(x, bins)[..., None] == jnp.arange(bins)).astype(jnp.float32)
    edges = jnp.linspace(-1, 1, bins + 1)
    below = norm.cdf((edges - jnp.clip(x, -1, 1)[..., None]) * (bins / (2 * width)))
    return jnp.diff(below, axis=-1) / (below[..., -1:] - below[..., :1])


def compute_expectation(
    log_probabilities: Float[Array, "b v n"], ids: Int[Array, "b n"], neighbours: int
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """Mean of each token's distribution near the chosen class, and the probability there.

    Near it, because a distribution may have several humps, each a way to do the task, and between them there is none.

    Args:
        neighbours: how many classes on either side count; 0 gives the centre of the bin.

    Returns:
        The number, and the probability that the model gave to it or its neighbours.
    """
    classes = jnp.arange(log_probabilities.shape[1])
    is_near = jnp.abs(classes[:, None] - ids[:, None]) <= neighbours
    shares = jnp.where(is_near, jnp.exp(log_probabilities), 0)
    total = jnp.sum(shares, axis=1)
    weighted = jnp.sum(shares * jnp.asarray(get_bin_centres(len(classes)))[:, None], axis=1)
    return weighted / total, total


def draw_even_shares(key: PRNGKeyArray, batch: int) -> Float[Array, " {batch}"]:
    """Random numbers in [0, 1), each uniform, and evenly spread over the batch.

    Less noise than independent ones: https://arxiv.org/abs/2107.00630, appendix I.1.
    """
    return (jax.random.uniform(key, (), jnp.float32) + jnp.arange(batch, dtype=jnp.float32) / batch) % 1


def mask_tokens(
    schedule: MaskSchedule, is_pad: Bool[Array, "b t"], width: int, prefix_rate: float, key: PRNGKeyArray
) -> Bool[Array, "b t {width}"]:
    """A random mask of the tokens to predict: of each chunk at least one.

    Padded steps are not among them. Nor are, in a share `prefix_rate` of the chunks, the first actions, however many:
    a policy that continues a plan sees those.

    Args:
        width: numbers of an action.
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


class Context(NamedTuple):
    """Keys and values of an observation, which all decoding passes attend to: a tree of arrays.

    Attributes:
        key_values: keys and values of the observation's tokens.
        mask: (b, n), which tokens there are; None for all.
    """

    key_values: KeyValues
    mask: Bool[Array, "b n"] | None


def make_bin_embeddings(bins: int, width: int, seed: Array) -> Float[Array, "{bins} {width}"]:
    """Initial embeddings of the bins: waves, so that those of neighbours are similar.

    A table of independent numbers would have to learn which bins are neighbours, from as many examples of each.
    """
    phase_key, length_key = jax.random.split(seed)
    cycles = 0.5 * jnp.exp(jax.random.uniform(length_key, (width,), jnp.float32) * np.log(bins / 2))
    phase = jax.random.uniform(phase_key, (width,), jnp.float32)
    position = jnp.arange(bins, dtype=jnp.float32)[:, None] / bins
    return np.float32(np.sqrt(2)) * jnp.sin(2 * np.pi * (cycles * position + phase))


class Tokens2d(Transformer2dPolicy):
    """Network that predicts log-probabilities of the tokens of a normalised chunk."""

    def __init__(self, config: Tokens2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config = config
        self.transformer = Transformer2DModel(**config.transformer.to_json(), dtype=dtype, rngs=rngs)
        table = self.transformer.latent_image_embedding.emb.embedding
        waves = make_bin_embeddings(config.bins, config.dim_model, rngs.params())
        table[...] = table[...].at[:-1].set(waves.astype(table.dtype))

    def encode_observation(self, observation: Observation) -> Context:
        """Everything about an observation that does not change between decoding passes."""
        tokens, mask = self.observation_tokens(observation)
        return Context(self.transformer.prepare_context(tokens), mask)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Mean cross-entropy of all masked tokens in the batch, and its parts.

        A random share of each chunk is masked (`mask_tokens`). With `do_mask_loss_for_padding` padded steps are masked
        too, but nothing is asked of them. Which tokens is drawn from the stream ``noise`` of `rngs`, dropout from
        ``dropout``; None evaluates, with the same draw whenever the batch is as large.

        Returns:
            The loss, and of the masked tokens, too, ``bins_off``: how far the likeliest bin is from the right one.
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
    transformer: Transformer2DModel, context: Context, ids: Int[Array, "b n"], t: Array
) -> Float[Array, "b v n"]:
    """Log-probabilities of all classes but the masked one, for each pixel of a chunk."""
    del t  # how many tokens are masked shows how far it is
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
