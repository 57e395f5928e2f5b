"""Training of tokens2d."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxmodels.policies.tokens2d.policy import Tokens2d, decode, from_pixels, mask_tokens, predict, to_pixels
from jaxmodels.samplers import MaskSchedule, maskgit
from jaxmodels.types import Language, Observation, Prefix
from jaxmodels.weights import blueprint_of
from tests.unit.jaxmodels.small_policies import RIGHT, TOYS, WHOLES, random_batch, random_model, side_plan, train_toy
from tests.unit.jaxmodels.small_policies import TOY_ACTION as ACTION
from tests.unit.jaxmodels.small_policies import TOY_CHUNK as CHUNK

CONFIG, WHOLE = TOYS["tokens2d"], WHOLES["tokens2d"]
batch_of = partial(random_batch, size=3)


@pytest.fixture(scope="module")
def toy() -> tuple[dict[str, jax.Array], jax.Array]:
    return train_toy(CONFIG, 400, 8e-3)


def test_same_state_gives_the_same_chunk_which_follows_it(toy) -> None:
    weights, _ = toy
    state = np.linspace(-0.95, 0.95, 64, dtype=np.float32)[:, None]
    found = jax.jit(partial(decode, CONFIG))(weights, Observation(state=state))
    side, repeated = np.moveaxis(np.asarray(found.actions), -1, 0)
    np.testing.assert_allclose(side, 0.8, atol=0.05)  # The most frequent side, and never between the sides.
    off = np.abs(repeated - state)
    assert off.mean() < 0.25 * (2 / 32)  # Bins alone have a mean error of a quarter of their width.
    confidence = np.asarray(found.confidence)
    assert ((confidence >= 0) & (confidence <= 1 + 1e-5)).all()
    assert confidence[..., 1].mean() > 0.9


def test_plan_is_continued_on_its_side(toy) -> None:
    weights, _ = toy
    run = jax.jit(partial(decode, CONFIG))
    actions = side_plan()
    observation = Observation(state=np.full((4, 1), 0.3, np.float32))
    for delay in (1, 3):
        prefix = Prefix(actions, np.full(4, delay, np.int32), np.full(4, CHUNK, np.int32))
        found = run(weights, observation._replace(prefix=prefix))
        np.testing.assert_array_equal(found.actions[:, :delay], actions[:, :delay])
        np.testing.assert_array_equal(found.confidence[:, :delay], np.ones((4, delay, ACTION)))
        np.testing.assert_allclose(found.actions[:, delay:], actions[:, delay:], atol=0.1)


@pytest.mark.parametrize("remasking", [False, True])
def test_drawn_chunks_choose_sides_as_often_as_demonstrations(toy, remasking: bool) -> None:
    weights, _ = toy
    plan = blueprint_of(Tokens2d, CONFIG)
    schedule = MaskSchedule(CONFIG.bins + 1, "linear", (8.0, 0.0), remasking=remasking)

    @jax.jit
    def sample(weights, state):
        model = plan.assemble(weights)
        guess = Partial(predict, model.transformer, model.encode_observation(Observation(state=state)))
        ids = maskgit(guess, (len(state), CHUNK * ACTION), jax.random.key(0), schedule, steps=CHUNK * ACTION).ids
        return from_pixels(ids, CHUNK)

    side = np.asarray(sample(weights, np.linspace(-0.9, 0.9, 512, dtype=np.float32)[:, None]))[..., 0]
    is_right = side > 15
    assert (is_right == is_right[:, :1]).all(axis=1).mean() > 0.85  # Independent tokens would give a quarter.
    assert (np.minimum(abs(side - 28), abs(side - 3)) < 4).mean() > 0.9
    assert abs(is_right[:, 0].mean() - RIGHT) < 0.1


@pytest.mark.parametrize(("masks", "smoothing"), [(False, 0.0), (True, 0.75)])
def test_loss_equals_numpy(masks: bool, smoothing: float) -> None:
    config = dataclasses.replace(CONFIG, label_smoothing=smoothing, do_mask_loss_for_padding=masks)
    model, (observation, actions, is_pad) = random_model(config), batch_of(config)
    value, parts = jax.jit(lambda *batch: model.loss(*batch))(observation, actions, is_pad)
    assert parts["cross_entropy"] == value
    out = np.asarray(is_pad) & masks
    hidden = np.asarray(mask_tokens(config.schedule, jnp.asarray(out), ACTION, config.prefix_rate, jax.random.key(0)))
    assert not hidden[out].any()
    bins, x = config.bins, np.clip(np.asarray(actions, np.float64), -1, 1)
    ids = np.minimum((x + 1) * bins / 2, bins - 1).astype(int)
    shown = np.where(hidden | out[..., None], bins, ids)
    tokens, _ = model.observation_tokens(observation)
    pixels = shown.swapaxes(1, 2).reshape(3, -1)  # Joint by joint.
    answer = np.asarray(model.transformer(pixels, encoder_hidden_states=tokens)[0])
    answer = answer.reshape(3, bins, ACTION, CHUNK)
    total, off, count = 0.0, 0.0, 0
    edges = np.arange(bins + 1) * 2 / bins - 1
    for b, t, a in np.argwhere(hidden):
        wanted = np.eye(bins)[ids[b, t, a]]
        if smoothing:
            scaled = (edges - x[b, t, a]) / (smoothing * 2 / bins * math.sqrt(2))
            wanted = np.diff([math.erf(edge) for edge in scaled])
            wanted = wanted / wanted.sum()
        total -= (wanted * answer[b, :, a, t]).sum()
        off += abs(answer[b, :, a, t].argmax() - ids[b, t, a])
        count += 1
    assert count == hidden.sum() > 3
    np.testing.assert_allclose(value, total / count, rtol=1e-4)
    np.testing.assert_allclose(parts["bins_off"], off / count, rtol=1e-5)


def test_padding_of_an_instruction_has_no_effect() -> None:
    model = random_model(WHOLE)
    observation, _, _ = batch_of(WHOLE)
    draw = np.random.default_rng(1)
    tokens = draw.normal(size=(3, 6, 8)).astype(np.float32)
    mask = np.arange(6)[None] < np.array([6, 3, 1])[:, None]
    ids = draw.integers(0, WHOLE.bins + 1, (3, CHUNK * ACTION)).astype(np.int32)

    @jax.jit
    def guess(tokens):
        context = model.encode_observation(observation._replace(language=Language(tokens, jnp.asarray(mask))))
        return predict(model.transformer, context, jnp.asarray(ids), jnp.zeros((), jnp.int32))

    other = np.where(mask[..., None], tokens, 7.0).astype(np.float32)
    np.testing.assert_array_equal(guess(other), guess(tokens))
    assert np.abs(np.asarray(guess(tokens + 1) - guess(tokens))).max() > 1e-3


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 5), (1, 4, 4)])
def test_time_and_joint_of_a_token_are_its_column_and_row(shape: tuple[int, ...]) -> None:
    chunk = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    pixels = np.asarray(to_pixels(jnp.asarray(chunk)))
    np.testing.assert_array_equal(from_pixels(jnp.asarray(pixels), shape[1]), chunk)
    side = max(shape[1:])
    rows = chunk.swapaxes(1, 2) if shape[1] >= shape[2] else chunk
    np.testing.assert_array_equal(pixels.reshape(shape[0], -1, side), rows)
