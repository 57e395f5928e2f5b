"""MaskGIT beyond diffusers: tokens that are taken back, no chance at all, members of a batch on their own."""

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


@pytest.mark.parametrize(("remasking", "wanted"), [(False, [1, 0, 0, 0]), (True, [0, 0, 0, 0])])
def test_a_token_that_was_chosen_too_early_is_taken_back(remasking: bool, wanted: list[int]) -> None:
    schedule = MaskSchedule(3, "linear", (0.0, 0.0), class_temperature=0.0, remasking=remasking)
    found = maskgit(changes_its_mind, (1, 4), KEY, schedule, steps=4, distributions=True)
    assert found.ids[0].tolist() == wanted
    # Probabilities are those of the last choice.
    np.testing.assert_allclose(np.exp(found.log_probability[0, 0]), 0.99 if remasking else 0.6, rtol=1e-5)
    assert found.distribution is not None
    np.testing.assert_allclose(np.exp(found.distribution[0, 1, 0]), 0.01 if remasking else 0.6, rtol=1e-5)


def drawn(seed: jax.Array, tokens: jax.Array, t: jax.Array) -> jax.Array:
    """Opinions that hang on everything that is seen; also (-inf) that classes are impossible."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, seed), jnp.sum(tokens * jnp.arange(1, 7)) + t)
    shape = (tokens.shape[0], CLASSES - 1, tokens.shape[1])
    likes = 5 * jax.random.normal(key, shape, jnp.float32)
    return jax.nn.log_softmax(jnp.where((likes < -4).at[:, 0].set(False), -jnp.inf, likes), axis=1)


@pytest.mark.parametrize("remasking", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_known_tokens_stay_and_no_token_stays_masked(temperature: float, remasking: bool) -> None:
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


@pytest.mark.parametrize(("steps", "wanted"), [(5, [20, 19, 18, 14, 7]), (1, [20])])
def test_the_first_step_keeps_one_token_if_that_is_wanted(steps: int, wanted: list[int]) -> None:
    masked: list[int] = []

    def even(tokens: jax.Array, t: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: masked.append(int((x == 4).sum())), tokens, ordered=True)
        return jnp.zeros((1, CLASSES - 1, 20))

    schedule = MaskSchedule(CLASSES, temperature=(0.0, 0.0), class_temperature=0.0, begins_with_one=True)
    found = maskgit(even, (1, 20), KEY, schedule, steps=steps)
    jax.effects_barrier()
    assert masked == wanted
    assert (np.asarray(found.ids) < CLASSES - 1).all()


def test_without_any_temperature_nothing_is_left_to_chance() -> None:
    predict = Partial(drawn, jnp.asarray(1))
    assert GREEDY.is_greedy
    assert not MaskSchedule(CLASSES, temperature=(0.0, 0.0)).is_greedy
    one, other = (maskgit(predict, SHAPE, jax.random.key(seed), GREEDY, steps=4).ids for seed in (0, 1))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("alike", [False, True])
def test_members_that_see_the_same_get_the_same_on_request(alike: bool) -> None:
    even = jnp.zeros((4, CLASSES - 1, 6))
    ids = np.asarray(maskgit(lambda *_: even, (4, 6), KEY, MaskSchedule(CLASSES), steps=3, alike=alike).ids)
    assert (ids == ids[:1]).all() == alike
    assert len(set(ids[0].tolist())) > 1


def test_distributions_are_those_of_the_choice_and_none_of_given_tokens() -> None:
    table = jax.nn.log_softmax(jax.random.normal(KEY, (3, CLASSES - 1, 6), jnp.float32), axis=1)
    given = np.full(SHAPE, CLASSES - 1)
    given[:, 2] = 1
    found = maskgit(lambda x, t: table, SHAPE, KEY, GREEDY, steps=3, known=given, distributions=True)
    wanted = np.where((given != CLASSES - 1)[:, None], 0, table)
    np.testing.assert_allclose(np.asarray(found.distribution), wanted, rtol=1e-5)
    plain = maskgit(lambda x, t: table, SHAPE, KEY, GREEDY, steps=3, known=given)
    assert isinstance(plain, MaskedTokens)
    assert plain.distribution is None
    np.testing.assert_array_equal(plain.ids, found.ids)
