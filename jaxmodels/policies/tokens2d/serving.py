"""tokens2d for serving: decodes masked tokens in a few passes of one program; a plan's tokens are known."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from jaxmodels.policies.tokens2d.config import Tokens2dConfig
from jaxmodels.policies.tokens2d.model import Tokens2d, compute_expectation, from_pixels, predict, quantise, to_pixels
from jaxmodels.policies.transformer2d_policy import build_model
from jaxmodels.samplers import begin_with, maskgit
from jaxmodels.types import Observation


class Decoded(NamedTuple):
    """A decoded chunk and its confidence.

    Attributes:
        actions: normalised, in [-1, 1] but where a plan was begun with.
        confidence: the probability that the model gave to each number and its neighbours when it chose it; 1 for what
            was planned.
        ids: the tokens, never the masked one.
    """

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
    confidence = jnp.minimum(confidence, 1)  # of known tokens there is no distribution: all its logarithms are 0
    values, confidence, ids = (from_pixels(array, shape[1]) for array in (values, confidence, decoded.ids))
    return Decoded(values if prefix is None else begin_with(prefix, values), confidence, ids)
