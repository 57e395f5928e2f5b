"""Conversion of numbers to bins and back, and the masked tokens of a model in training."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmodels.policies.tokens2d.policy import (
    compute_expectation,
    draw_even_shares,
    get_bin_centres,
    mask_tokens,
    quantise,
    spread_targets,
)
from jaxmodels.samplers import MaskSchedule

SCHEDULE = MaskSchedule(17)


@pytest.mark.parametrize("bins", [2, 100, 256])
def test_number_is_at_most_half_a_bin_from_its_centre(bins: int) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, 10_000).astype(np.float32)
    x[:3] = -1, 1, 0
    ids = np.asarray(quantise(jnp.asarray(x), bins))
    assert set(ids.tolist()) <= set(range(bins))
    assert np.abs(get_bin_centres(bins)[ids] - x).max() <= (1 + 1e-5) / bins
    np.testing.assert_array_equal(quantise(jnp.asarray(get_bin_centres(bins)), bins), np.arange(bins))


def test_numbers_outside_the_range_use_the_outermost_bins() -> None:
    far = jnp.asarray([-1e30, -1.5, 1.0, 1.5, 1e30, jnp.inf])
    np.testing.assert_array_equal(quantise(far, 8), [0, 0, 7, 7, 7, 7])
    np.testing.assert_allclose(spread_targets(far, 8, 0.75).sum(-1), np.ones(6), atol=1e-6)
    np.testing.assert_array_equal(spread_targets(far, 8, 0.75).argmax(-1), [0, 0, 7, 7, 7, 7])


def test_target_without_smoothing_is_one_bin() -> None:
    x = jnp.asarray([[-0.99, 0.01], [0.3, 0.99]])
    np.testing.assert_array_equal(spread_targets(x, 16, 0.0), np.eye(16)[np.asarray(quantise(x, 16))])


def test_smoothed_targets_are_normally_distributed() -> None:
    x, bins, width = 0.37, 16, 0.75

    def below(edge: float) -> float:
        return 0.5 * (1 + math.erf((edge - x) / (width * 2 / bins) / math.sqrt(2)))

    edges = [2 * k / bins - 1 for k in range(bins + 1)]
    wanted = np.diff([below(edge) for edge in edges]) / (below(1) - below(-1))
    np.testing.assert_allclose(spread_targets(jnp.asarray([x]), bins, width)[0], wanted, atol=1e-6)


@pytest.mark.parametrize("width", [0.75, 2.0])
def test_expectation_of_smoothed_targets_is_finer_than_a_bin(width: float) -> None:
    x = np.linspace(-0.8, 0.8, 997).astype(np.float32)
    learned = jnp.log(spread_targets(jnp.asarray(x), 64, width)).T[None]
    ids = quantise(jnp.asarray(x), 64)[None]
    value, near = compute_expectation(learned, ids, 12)
    assert np.abs(value[0] - x).max() < 0.02 / 64
    np.testing.assert_allclose(near, np.ones_like(near), atol=1e-4)
    centre, one = compute_expectation(learned, ids, 0)
    np.testing.assert_allclose(centre[0], get_bin_centres(64)[np.asarray(ids[0])], atol=1e-6)
    assert float(one.max()) < 0.6


def test_expectation_stays_at_the_chosen_mode() -> None:
    humps = jnp.asarray([-0.5, 0.5])
    both = jnp.log(spread_targets(humps, 64, 0.75).mean(axis=0) + 1e-9)[None, :, None]
    for hump in humps:
        value, near = compute_expectation(both, quantise(hump, 64)[None, None], 8)
        np.testing.assert_allclose(value[0, 0], hump, atol=1e-3)
        np.testing.assert_allclose(near[0, 0], 0.5, atol=1e-3)


def test_shares_are_stratified_over_a_batch_and_uniform() -> None:
    shares = np.stack([draw_even_shares(jax.random.key(seed), 8) for seed in range(200)])
    assert ((shares >= 0) & (shares < 1)).all()
    np.testing.assert_allclose(np.diff(np.sort(shares, axis=1)), 1 / 8, atol=1e-6)
    assert abs(shares[:, 3].mean() - 0.5) < 0.1
    assert shares[:, 3].min() < 0.05
    assert shares[:, 3].max() > 0.95


def test_share_of_the_tokens_is_masked_without_padding() -> None:
    is_pad = np.arange(8)[None] >= np.array([8, 5, 1])[:, None]
    hidden = np.stack([mask_tokens(SCHEDULE, jnp.asarray(is_pad), 2, 0.0, jax.random.key(seed)) for seed in range(100)])
    assert not hidden[:, is_pad].any()
    counts = hidden.sum(axis=(2, 3))
    assert (counts >= 1).all()
    even = np.cos(np.linspace(0, 1, 1000)[:, None] * np.pi / 2)
    tokens = np.array([16, 10, 2])
    np.testing.assert_allclose(counts.mean(axis=0) / tokens, np.ceil(even * tokens).mean(axis=0) / tokens, atol=0.1)
    assert len({tuple(row) for row in hidden[:, 0].reshape(100, -1).tolist()}) > 60


def test_share_of_the_chunks_has_given_first_actions() -> None:
    nothing = jnp.zeros((512, 8), bool)
    shown = ~np.asarray(mask_tokens(SCHEDULE, nothing, 2, 1.0, jax.random.key(0))).any(axis=-1)
    delays = np.argmin(np.concatenate((shown, np.zeros((512, 1), bool)), axis=1), axis=1)
    assert set(range(8)) <= set(delays.tolist())
    assert (delays > 3).mean() > 0.4
    plain = ~np.asarray(mask_tokens(SCHEDULE, nothing, 2, 0.0, jax.random.key(0))).any(axis=-1)
    assert (np.argmin(plain, axis=1) > 3).mean() < 0.1
