"""A small transformer learns sequences of a few patterns; MaskGIT and VQ-Diffusion sample each as often as it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

from jaxmodels.samplers import MaskSchedule, VQSchedule, maskgit, vq_diffusion
from jaxmodels.transformer2d import Conditioning, Transformer2DModel

pytestmark = [pytest.mark.slow, pytest.mark.fully_compiled]

TOKENS, CLASSES, WIDTH = 16, 9, 32  # eight classes and the masked one
SHARES = np.array([0.4, 0.3, 0.2, 0.1])
COUNT = 1000
STEPS = 1000
KEY = jax.random.key(1)
MASKED = MaskSchedule(CLASSES, masking="linear", temperature=(8.0, 0.0))
VQ = VQSchedule(CLASSES)
# Two of the patterns share their first half: whoever draws tokens one by one must look at the others.
PATTERNS = np.random.default_rng(0).integers(0, CLASSES - 1, (4, TOKENS)).astype(np.int32)
PATTERNS[1, : TOKENS // 2] = PATTERNS[0, : TOKENS // 2]
FREE = np.array([3, 12])  # places where any class goes, all equally likely


def draw(key: jax.Array, count: int) -> jax.Array:
    kind_key, free_key = jax.random.split(key)
    kinds = jax.random.choice(kind_key, len(SHARES), (count,), p=jnp.asarray(SHARES, jnp.float32))
    free = jax.random.randint(free_key, (count, len(FREE)), 0, CLASSES - 1, jnp.int32)
    return jnp.asarray(PATTERNS)[kinds].at[:, FREE].set(free)


def build(rngs: nnx.Rngs) -> Transformer2DModel:
    return Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=WIDTH // 2,
        num_layers=2,
        sample_size=4,
        num_vector_embeds=CLASSES,
        norm_type="ada_norm",
        num_embeds_ada_norm=VQ.num_train_timesteps,
        attention_bias=True,
        activation_fn="geglu-approximate",
        rngs=rngs,
    )


def cross_entropy(log_probabilities: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    of_tokens = jnp.take_along_axis(log_probabilities, tokens[:, None], axis=1)[:, 0]
    return -jnp.sum(jnp.where(weights, of_tokens, 0)) / jnp.sum(weights)


def denoising_loss(model: Transformer2DModel, key: jax.Array) -> jax.Array:
    """Masked tokens are to be guessed, the others to be seen for what they are."""
    token_key, time_key, noise_key = jax.random.split(key, 3)
    tokens = draw(token_key, 64)
    times = jax.random.randint(time_key, (64,), 0, VQ.num_train_timesteps, jnp.int32)
    noisy = VQ.add_noise(tokens, times, jax.random.gumbel(noise_key, (64, CLASSES, TOKENS), jnp.float32))
    prediction, is_masked = model(noisy, timestep=times).sample, noisy == VQ.mask
    return cross_entropy(prediction, tokens, is_masked) + 0.2 * cross_entropy(prediction, tokens, ~is_masked)


@pytest.fixture(scope="module")
def model(trained: Callable[..., Any]) -> Any:
    return trained(build, denoising_loss, steps=STEPS, rate=8e-3)


def prepared(model: Any, times: Any) -> tuple[Partial, Any]:
    """A predictor whose modulations are prepared, for each step."""
    whole = model.plan.assemble(model.weights)

    def predict(weights: Any, context: Any, tokens: jax.Array, t: jax.Array, modulations: Any) -> jax.Array:
        return model.plan.assemble(weights)(tokens, conditioning=Conditioning(context, modulations)).sample

    return Partial(predict, model.weights, whole.prepare_context()), jax.vmap(whole.prepare_modulations)(times)


def sample_maskgit(model: Any, known: Any = None) -> Any:
    """One token per step. After k of 16 steps as many tokens are masked as at a timestep of VQ-Diffusion."""
    times = np.arange(TOKENS, 0, -1) * VQ.num_train_timesteps // TOKENS - 1
    predict, extras = prepared(model, times)
    return maskgit(predict, (COUNT, TOKENS), KEY, MASKED, steps=TOKENS, extras=extras, known=known).ids


def sample_vq(model: Any, known: Any = None) -> Any:
    predict, extras = prepared(model, VQ.timesteps(100))
    return vq_diffusion(predict, (COUNT, TOKENS), KEY, VQ, steps=100, extras=extras, known=known).ids


def shares(ids: Any) -> np.ndarray:
    """How often each pattern comes; what is none of them is left over."""
    fixed = np.setdiff1d(np.arange(TOKENS), FREE)
    return (np.asarray(ids)[:, None, fixed] == PATTERNS[:, fixed]).all(2).mean(0)


def distance(found: np.ndarray) -> float:
    """Total variation between shares of the patterns, where everything else counts as a wrong pattern."""
    return float(np.abs(found - SHARES).sum() + (1 - found.sum())) / 2


def free_distance(ids: Any) -> float:
    """Total variation between the classes in the free places and even ones."""
    counts = np.bincount(np.asarray(ids)[:, FREE].ravel(), minlength=CLASSES)
    return float(np.abs(counts / counts.sum() - np.append(np.full(CLASSES - 1, 1 / (CLASSES - 1)), 0)).sum() / 2)


def test_the_loss_falls(model: Any) -> None:
    assert model.mean_loss(STEPS - 50, STEPS) < 0.35 * model.mean_loss(0, 10)
    assert model.mean_loss(STEPS - 50, STEPS) < model.mean_loss(STEPS // 10, STEPS // 5)


@pytest.mark.parametrize("sample", [sample_maskgit, sample_vq])
def test_patterns_come_as_often_as_they_are(model: Any, sample: Callable[..., Any]) -> None:
    ids = sample(model)
    assert distance(shares(ids)) < 0.12
    assert free_distance(ids) < 0.08
    assert (np.asarray(ids) < CLASSES - 1).all()


@pytest.mark.parametrize("sample", [sample_maskgit, sample_vq])
def test_a_known_half_is_continued_by_either_pattern_that_has_it(model: Any, sample: Callable[..., Any]) -> None:
    known = np.full((COUNT, TOKENS), CLASSES - 1, np.int32)
    known[:, : TOKENS // 2] = PATTERNS[0, : TOKENS // 2]
    ids = sample(model, known)
    assert (np.asarray(ids)[:, : TOKENS // 2] == PATTERNS[0, : TOKENS // 2]).all()
    found = shares(ids)
    wanted = np.array([SHARES[0], SHARES[1], 0, 0]) / SHARES[:2].sum()
    assert float(np.abs(found - wanted).sum() + (1 - found.sum())) / 2 < 0.12


def test_data_pass_for_samples_and_independent_tokens_do_not() -> None:
    data = np.asarray(draw(jax.random.key(5), COUNT))
    assert distance(shares(data)) < 0.05
    assert free_distance(data) < 0.05
    mixed = np.random.default_rng(0).permuted(data, axis=0)  # each place as in the data, but not the sequences
    assert distance(shares(mixed)) > 0.9
