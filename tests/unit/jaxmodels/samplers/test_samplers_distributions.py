"""Samplers with an exact predictor draw from the distribution that it describes."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.samplers import FlowSchedule, MaskSchedule, NoiseSchedule, ddim, ddpm, flow_euler, flow_heun, maskgit

MEAN, STD = 0.4, 0.3
SHAPE = (4000, 3)
key_of = partial(jax.random.key, impl="unsafe_rbg")  # The default generator compiles slowly.


def best_split(x: jax.Array, signal: Any, noise: Any) -> tuple[jax.Array, jax.Array]:
    """Return the expected clean sample and noise of `x = signal sample + noise noise` for normal samples."""
    off = (x - signal * MEAN) / (signal**2 * STD**2 + noise**2)
    return MEAN + signal * STD**2 * off, noise * off


def diffusion_predictor(schedule: NoiseSchedule) -> Callable[..., jax.Array]:
    def predict(x: jax.Array, t: jax.Array) -> jax.Array:
        alpha = jnp.asarray(schedule.alphas)[t]
        sample, noise = best_split(x, jnp.sqrt(alpha), jnp.sqrt(1 - alpha))
        velocity = jnp.sqrt(alpha) * noise - jnp.sqrt(1 - alpha) * sample
        return {"epsilon": noise, "sample": sample, "v_prediction": velocity}[schedule.prediction_type]

    return predict


def velocity(x: jax.Array, t: jax.Array) -> jax.Array:
    sample, noise = best_split(x, 1 - t / 1000, t / 1000)
    return noise - sample


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("method", ["ddim", "ddim with noise", "ddpm"])
def test_diffusion_reproduces_a_normal_distribution(prediction_type: Any, method: str) -> None:
    schedule = NoiseSchedule(prediction_type=prediction_type, clip_sample=False, beta_schedule="squaredcos_cap_v2")
    predict, key = diffusion_predictor(schedule), key_of(0)
    if method == "ddpm":
        x = ddpm(predict, SHAPE, key, schedule, steps=200)
    else:
        x = ddim(predict, SHAPE, key, schedule, steps=200, eta=1.0 if "noise" in method else 0.0)
    assert abs(float(x.mean()) - MEAN) < 0.01
    assert abs(float(x.std()) / STD - 1) < 0.03


@pytest.mark.parametrize(("sample", "steps"), [(flow_euler, 250), (flow_heun, 50)])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_reproduces_a_normal_distribution(sample: Any, steps: int, shift: float) -> None:
    x = sample(velocity, SHAPE, jax.random.key(1), FlowSchedule(shift=shift, spacing="uniform"), steps=steps)
    assert abs(float(x.mean()) - MEAN) < 0.01
    assert abs(float(x.std()) / STD - 1) < 0.03


def test_heun_has_order_two_and_euler_order_one() -> None:
    start = np.linspace(-2, 2, 9, dtype=np.float32)[None]
    exact = MEAN + STD * start  # The image of the noise under this flow.

    def error(sample: Any, steps: int) -> float:
        schedule = FlowSchedule(spacing="uniform")
        x = sample(velocity, start.shape, jax.random.key(0), schedule, steps=steps, start=start)
        return float(np.abs(np.asarray(x) - exact).max())

    assert 1.7 < error(flow_euler, 40) / error(flow_euler, 80) < 2.3
    assert error(flow_heun, 40) / error(flow_heun, 80) > 3
    assert error(flow_heun, 20) < error(flow_euler, 40) / 3  # The same number of model calls.


TOKENS, CLASSES = 4, 3  # Two classes and the masked class.
SEQUENCES = np.array(list(itertools.product(range(CLASSES - 1), repeat=TOKENS)), np.int32)


def joint() -> np.ndarray:
    """Return probabilities of all sequences, with strong dependence between tokens."""
    likes = np.random.default_rng(0).normal(size=len(SEQUENCES)) - 2.0 * np.abs(np.diff(SEQUENCES, axis=1)).sum(1)
    weights = np.exp(likes)
    return weights / weights.sum()


def conditional(likelihood: jax.Array) -> jax.Array:
    """Return log-probabilities (b v n) of each token, given the likelihood (b sequence) of visible tokens."""
    weights = likelihood * jnp.asarray(joint(), jnp.float32)
    is_class = jnp.asarray(SEQUENCES[:, None] == np.arange(CLASSES - 1)[:, None], jnp.float32)
    probabilities = jnp.einsum("bs,svn->bvn", weights, is_class)
    return jnp.log(probabilities / probabilities.sum(1, keepdims=True))


def from_masked(tokens: jax.Array, t: jax.Array) -> jax.Array:
    agrees = (tokens[:, None] == SEQUENCES) | (tokens[:, None] == CLASSES - 1)
    return conditional(jnp.prod(agrees.astype(jnp.float32), axis=2))


def frequencies(ids: Any) -> np.ndarray:
    numbers = np.asarray(ids) @ (2 ** np.arange(TOKENS)[::-1])
    return np.bincount(numbers, minlength=len(SEQUENCES)) / len(numbers)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation distance."""
    return float(np.abs(one - other).sum() / 2)


def independent() -> np.ndarray:
    ones = joint() @ SEQUENCES
    return np.prod(np.where(SEQUENCES, ones, 1 - ones), axis=1)


RANDOM_ORDER = (1e6, 1e6)
ONE_AT_A_TIME = MaskSchedule(CLASSES, masking="linear", temperature=RANDOM_ORDER)


def test_maskgit_one_token_at_a_time_in_random_order_is_exact() -> None:
    count = 20000
    ids = maskgit(from_masked, (count, TOKENS), jax.random.key(3), ONE_AT_A_TIME, steps=TOKENS).ids
    chi_square = count * float(((frequencies(ids) - joint()) ** 2 / joint()).sum())
    assert chi_square < 37.7  # Exceeded by 1 in 1000 exact samples, with 15 degrees of freedom.
    assert distance(independent(), joint()) > 0.2  # The result of drawing all tokens at once.


def test_maskgit_all_at_once_draws_tokens_independently() -> None:
    ids = maskgit(from_masked, (20000, TOKENS), jax.random.key(4), ONE_AT_A_TIME, steps=1).ids
    assert distance(frequencies(ids), independent()) < 0.02


def test_maskgit_around_known_tokens_is_the_exact_conditional() -> None:
    known = np.full((20000, TOKENS), CLASSES - 1)
    known[:, 1] = 1
    ids = maskgit(from_masked, known.shape, jax.random.key(5), ONE_AT_A_TIME, steps=TOKENS, known=known).ids
    given = joint() * (SEQUENCES[:, 1] == 1)
    assert (np.asarray(ids)[:, 1] == 1).all()
    assert distance(frequencies(ids), given / given.sum()) < 0.02
