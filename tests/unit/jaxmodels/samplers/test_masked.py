"""MaskGIT beyond diffusers: remasked tokens, sampling without randomness, independent batch members."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxmodels.samplers import MaskedTokens, MaskSchedule, maskgit

CLASSES, SHAPE = 5, (3, 6)
KEY = jax.random.key(0)
GREEDY = MaskSchedule(CLASSES, temperature=(0.0, 0.0), class_temperature=0.0)


def changes_its_mind(tokens: jax.Array, t: jax.Array) -> jax.Array:
    """Predict class 1 for token 0 first, and class 0 as soon as another token is visible."""
    alone = jnp.asarray([0.6, 0.55, 0.55, 0.55])
    seen = jnp.any(tokens[0, 1:] != 2)
    beside = jnp.where(tokens[0, 0] == 2, alone, jnp.asarray([0.6, 0.1, 0.1, 0.1]))
    share = jnp.where(seen, 0.01, beside)
    return jnp.log(jnp.stack([1 - share, share]))[None]


@pytest.mark.parametrize(("remasking", "expected"), [(False, [1, 0, 0, 0]), (True, [0, 0, 0, 0])])
def test_token_that_was_chosen_too_early_is_remasked(remasking: bool, expected: list[int]) -> None:
    schedule = MaskSchedule(3, "linear", (0.0, 0.0), class_temperature=0.0, remasking=remasking)
    found = maskgit(changes_its_mind, (1, 4), KEY, schedule, steps=4, distributions=True)
    assert found.ids[0].tolist() == expected
    # The probabilities belong to the last choice.
    np.testing.assert_allclose(np.exp(found.log_probability[0, 0]), 0.99 if remasking else 0.6, rtol=1e-5)
    assert found.distribution is not None
    np.testing.assert_allclose(np.exp(found.distribution[0, 1, 0]), 0.01 if remasking else 0.6, rtol=1e-5)


def drawn(seed: jax.Array, tokens: jax.Array, t: jax.Array) -> jax.Array:
    """Return random logits that depend on all visible tokens; some classes are impossible (-inf)."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, seed), jnp.sum(tokens * jnp.arange(1, 7)) + t)
    shape = (tokens.shape[0], CLASSES - 1, tokens.shape[1])
    likes = 5 * jax.random.normal(key, shape, jnp.float32)
    return jax.nn.log_softmax(jnp.where((likes < -4).at[:, 0].set(False), -jnp.inf, likes), axis=1)


@pytest.mark.parametrize("remasking", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_known_tokens_are_kept_and_all_others_are_filled(temperature: float, remasking: bool) -> None:
    schedule = MaskSchedule(CLASSES, temperature=(temperature, 0.0), class_temperature=temperature, remasking=remasking)
    given = np.full(SHAPE, CLASSES - 1)
    given[0] = [0, 1, 2, 3, 2, 1]
    given[1, :4] = [3, 3, 0, 0]
    is_given = given != CLASSES - 1
    seen: set[int] = set()
    for seed in range(20):
        found = maskgit(Partial(drawn, jnp.asarray(seed)), SHAPE, jax.random.key(seed), schedule, steps=7, known=given)
        ids = np.asarray(found.ids)
        assert (ids[is_given] == given[is_given]).all()
        assert (np.asarray(found.log_probability)[is_given] == 0).all()
        assert np.isfinite(found.log_probability).all()
        seen |= set(ids.ravel().tolist())
    assert seen == set(range(CLASSES - 1))


@pytest.mark.parametrize(("steps", "expected"), [(5, [20, 19, 18, 14, 7]), (1, [20])])
def test_first_step_keeps_one_token_on_request(steps: int, expected: list[int]) -> None:
    masked: list[int] = []

    def even(tokens: jax.Array, t: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: masked.append(int((x == 4).sum())), tokens, ordered=True)
        return jnp.zeros((1, CLASSES - 1, 20))

    schedule = MaskSchedule(CLASSES, temperature=(0.0, 0.0), class_temperature=0.0, begins_with_one=True)
    found = maskgit(even, (1, 20), KEY, schedule, steps=steps)
    jax.effects_barrier()
    assert masked == expected
    assert (np.asarray(found.ids) < CLASSES - 1).all()


def test_sampling_without_temperature_is_deterministic() -> None:
    predict = Partial(drawn, jnp.asarray(1))
    assert GREEDY.is_greedy
    assert not MaskSchedule(CLASSES, temperature=(0.0, 0.0)).is_greedy
    one, other = (maskgit(predict, SHAPE, jax.random.key(seed), GREEDY, steps=4).ids for seed in (0, 1))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("alike", [False, True])
def test_equal_members_get_equal_samples_on_request(alike: bool) -> None:
    even = jnp.zeros((4, CLASSES - 1, 6))
    ids = np.asarray(maskgit(lambda *_: even, (4, 6), KEY, MaskSchedule(CLASSES), steps=3, alike=alike).ids)
    assert (ids == ids[:1]).all() == alike
    assert len(set(ids[0].tolist())) > 1


def test_distributions_cover_chosen_tokens_and_not_known_tokens() -> None:
    table = jax.nn.log_softmax(jax.random.normal(KEY, (3, CLASSES - 1, 6), jnp.float32), axis=1)
    given = np.full(SHAPE, CLASSES - 1)
    given[:, 2] = 1
    found = maskgit(lambda x, t: table, SHAPE, KEY, GREEDY, steps=3, known=given, distributions=True)
    expected = np.where((given != CLASSES - 1)[:, None], 0, table)
    np.testing.assert_allclose(np.asarray(found.distribution), expected, rtol=1e-5)
    plain = maskgit(lambda x, t: table, SHAPE, KEY, GREEDY, steps=3, known=given)
    assert isinstance(plain, MaskedTokens)
    assert plain.distribution is None
    np.testing.assert_array_equal(plain.ids, found.ids)
