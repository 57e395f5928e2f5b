"""Numbers in [-1, 1] as classes of equal width, and the way back.

Classes that are neighbours are numbers that are neighbours. Training says so (`spread_over`), and a distribution over
classes tells a number more finely than its class does (`expectation`).
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float, Int


def centres(bins: int) -> Float[np.ndarray, " {bins}"]:
    """The middle of each bin."""
    return ((2 * np.arange(bins) + 1) / bins - 1).astype(np.float32)


def quantise(x: Float[Array, "*n"], bins: int) -> Int[Array, "*n"]:
    """The bin of each number; what lies outside of [-1, 1] goes to the first or the last one."""
    return jnp.clip(jnp.floor((x + 1) * (bins / 2)), 0, bins - 1).astype(jnp.int32)


def spread_over(x: Float[Array, "*n"], bins: int, width: float) -> Float[Array, "*n {bins}"]:
    """The distribution over bins that a model is to learn for each number; its expectation is the number.

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


def expectation(
    log_probabilities: Float[Array, "b v n"], ids: Int[Array, "b n"], neighbours: int
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """The mean of each token's distribution near the class that was chosen, and how much of it lies there.

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
    weighted = jnp.sum(shares * jnp.asarray(centres(len(classes)))[:, None], axis=1)
    return weighted / total, total
