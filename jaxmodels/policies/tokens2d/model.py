"""The predictor of tokens: what is seen, a chunk of which some tokens are masked, and a 2D transformer between them.

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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmodels.policies.tokens2d.bins import quantise, spread_over
from jaxmodels.policies.tokens2d.config import Tokens2dConfig
from jaxmodels.policies.tokens2d.masking import hide
from jaxmodels.policies.transformer2d_policy import Transformer2dPolicy
from jaxmodels.transformer2d import Conditioning, Transformer2DModel
from jaxmodels.transformer2d.block import Seen
from jaxmodels.types import Observation


class Context(NamedTuple):
    """What all passes over a chunk look at: a tree of arrays.

    Attributes:
        seen: keys and values of the observation's tokens.
        mask: (b, n), which tokens there are; None for all.
    """

    seen: Seen
    mask: Bool[Array, "b n"] | None


def bin_embeddings(bins: int, width: int, seed: Array) -> Float[Array, "{bins} {width}"]:
    """First embeddings of the bins: waves from two of the range to four bins long, so that neighbours are alike.

    A table of independent numbers would have to learn which bins are neighbours, from as many examples of each.
    """
    phase_key, length_key = jax.random.split(seed)
    cycles = 0.5 * jnp.exp(jax.random.uniform(length_key, (width,), jnp.float32) * np.log(bins / 2))
    phase = jax.random.uniform(phase_key, (width,), jnp.float32)
    place = jnp.arange(bins, dtype=jnp.float32)[:, None] / bins
    return np.float32(np.sqrt(2)) * jnp.sin(2 * np.pi * (cycles * place + phase))


class Tokens2d(Transformer2dPolicy):
    """Log-probabilities of the tokens of a normalised chunk, for a normalised observation."""

    def __init__(self, config: Tokens2dConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.config = config
        self.transformer = Transformer2DModel(**config.transformer.to_json(), dtype=dtype, rngs=rngs)
        table = self.transformer.latent_image_embedding.emb.embedding
        waves = bin_embeddings(config.bins, config.dim_model, rngs.params())
        table[...] = table[...].at[:-1].set(waves.astype(table.dtype))

    def look(self, observation: Observation) -> Context:
        """What does not change from pass to pass."""
        tokens, mask = self.observation_tokens(observation)
        return Context(self.transformer.prepare_context(tokens), mask)

    def loss(
        self,
        observation: Observation,
        actions: Float[Array, "b t a"],
        is_pad: Bool[Array, "b t"],
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
        """Cross-entropy of masked tokens: the mean over all of them in the batch.

        A random share of each chunk is masked (`masking.hide`). With `do_mask_loss_for_padding` padded steps are masked
        too, but nothing is asked of them. Which tokens is drawn from the stream ``noise`` of `rngs`, dropout from
        ``dropout``; None evaluates, with the same draw whenever the batch is as large.

        Returns:
            The loss, and of the masked tokens, too, ``bins_off``: how far the likeliest bin is from the right one.
        """
        config = self.config
        key = jax.random.key(config.noise_seed) if rngs is None else rngs.noise()
        is_out = is_pad if config.do_mask_loss_for_padding else jnp.zeros_like(is_pad)
        is_hidden = hide(config.schedule, is_out, actions.shape[2], config.prefix_rate, key)
        ids = quantise(actions, config.bins)
        shown = jnp.where(is_hidden | is_out[..., None], config.schedule.mask, ids)
        rngs = rngs if config.dropout else None
        tokens, mask = self.observation_tokens(observation, rngs)
        (answer,) = self.transformer(
            to_pixels(shown), tokens, encoder_attention_mask=mask, return_dict=False, rngs=rngs
        )
        log_probabilities = rearrange(answer, "b v n -> b n v")
        wanted = spread_over(to_pixels(actions), config.bins, config.label_smoothing)
        entropies = -jnp.sum(wanted * log_probabilities, axis=-1)
        off = jnp.abs(jnp.argmax(log_probabilities, axis=-1).astype(jnp.int32) - to_pixels(ids))
        counts = to_pixels(is_hidden)
        total = jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
        loss, off = (jnp.sum(jnp.where(counts, x, 0)) / total for x in (entropies, off.astype(jnp.float32)))
        return loss, {"cross_entropy": loss, "bins_off": off}


def predict(
    transformer: Transformer2DModel, context: Context, ids: Int[Array, "b n"], t: Array
) -> Float[Array, "b v n"]:
    """Log-probabilities of every class but the masked one, for the pixels of a chunk."""
    del t  # how many tokens are masked shows how far it is
    conditioning = Conditioning(context.seen, transformer.prepare_modulations())
    (answer,) = transformer(ids, encoder_attention_mask=context.mask, conditioning=conditioning, return_dict=False)
    return answer


def to_pixels(chunk: Array) -> Array:
    """Numbers of a chunk (b, t, a) as latent pixels (b, n), the longer axis along the rows."""
    return rearrange(chunk, "b t a -> b (a t)" if chunk.shape[1] >= chunk.shape[2] else "b t a -> b (t a)")


def from_pixels(pixels: Array, steps: int) -> Array:
    """The way back, to (b, t, a)."""
    width = pixels.shape[1] // steps
    return rearrange(pixels, "b (a t) -> b t a" if steps >= width else "b (t a) -> b t a", t=steps)
