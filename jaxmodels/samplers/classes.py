"""Log-probabilities of classes (batch, class, token): made safe, cut, and drawn from.

The last class is the masked one; models give no probability for it, and nothing here draws it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxmodels.errors import InputError
from jaxmodels.ranges import Range

CLASSES = Range(2, 1 << 20)  # with the masked one
LOWEST = -70.0  # of a log-probability: e^-70 never happens, and differences of it stay finite. VQ-Diffusion's number


class Tokens(NamedTuple):
    """What a discrete sampler gives; a pytree.

    Attributes:
        ids: classes, never the masked one.
        log_probability: what the model gave that class when it was chosen; 0 for tokens that were known.
        distribution: and what it gave every class then, zeros for tokens that were known; None unless asked for.
    """

    ids: Int[Array, "b n"]
    log_probability: Float[Array, "b n"]
    distribution: Float[Array, "b v n"] | None = None


def normalized(prediction: Float[Array, "b v n"]) -> Float[Array, "b v n"]:
    """Logits or log-probabilities as log-probabilities without infinities."""
    return jnp.maximum(jax.nn.log_softmax(prediction.astype(jnp.float32), axis=1), LOWEST)


def truncate(log_probabilities: Float[Array, "b v n"], rate: Any) -> Float[Array, "b v n"]:
    """The likeliest classes that hold a share `rate` of the probability; -inf for the others, never for the first.

    Not made to sum to 1 again: what draws from them does not need it.

    Source: diffusers' VQDiffusionPipeline.truncate.
    """
    order = jnp.argsort(-log_probabilities, axis=1)
    ordered = jnp.exp(jnp.take_along_axis(log_probabilities, order, axis=1))
    before = jnp.cumsum(ordered, axis=1)[:, :-1]  # of the likelier classes: the first one has none
    is_kept = jnp.concatenate((jnp.ones_like(before[:, :1], bool), before < rate), axis=1)
    is_kept = jnp.take_along_axis(is_kept, jnp.argsort(order, axis=1), axis=1)
    return jnp.where(is_kept, log_probabilities, -jnp.inf)


def draw(log_probabilities: Float[Array, "b v n"], gumbel: Float[Array, "b v n"]) -> Int[Array, "b n"]:
    """A class for each token; with standard Gumbel noise these are samples, with zeros the likeliest classes."""
    return jnp.argmax(log_probabilities + gumbel, axis=1).astype(jnp.int32)


def of_class(log_probabilities: Float[Array, "b v n"], ids: Int[Array, "b n"]) -> Float[Array, "b n"]:
    """The log-probability of each token's own class."""
    return jnp.take_along_axis(log_probabilities, ids[:, None], axis=1)[:, 0]


def first_tokens(known: Any, shape: tuple[int, int], mask: int) -> Int[Array, "b n"]:
    """The known tokens, or the masked class everywhere.

    Raises:
        InputError: `known` has another shape, or holds something else than integers.
    """
    if known is None:
        return jnp.full(shape, mask, jnp.int32)
    if jnp.shape(known) != shape or not jnp.issubdtype(jnp.result_type(known), jnp.integer):
        raise InputError(
            f"known is {jnp.result_type(known)} {list(jnp.shape(known))}; wanted integers {list(shape)}, "
            f"{mask} where a token is to be sampled"
        )
    return jnp.asarray(known, jnp.int32)


def check_known(known: Any, mask: int) -> None:
    """Raises:
    InputError: a known token is no class. Tracers have no values to look at: there it is left to the caller.
    """
    if known is None or isinstance(known, Tracer):
        return
    tokens = np.asarray(known)
    wrong = tokens[(tokens < 0) | (tokens > mask)]
    if wrong.size:
        raise InputError(f"known holds {wrong[0]}; wanted classes 0 to {mask - 1}, or {mask} for a token to be sampled")
