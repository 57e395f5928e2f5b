"""What tokens2d learns, and from what."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.tree_util import Partial

from jaxmodels.policies.tokens2d import Tokens2d, Tokens2dConfig, decode
from jaxmodels.policies.tokens2d.model import from_pixels, hide, predict, to_pixels
from jaxmodels.samplers import MaskSchedule, maskgit
from jaxmodels.text import TextConfig
from jaxmodels.types import Feature, Language, Observation, Prefix
from jaxmodels.weights import blueprint, flatten

CHUNK, ACTION = 4, 2
CONFIG = Tokens2dConfig(
    input_features=(Feature("observation.state", "STATE", (1,)),),
    output_features=(Feature("action", "ACTION", (ACTION,)),),
    chunk_size=CHUNK,
    n_action_steps=2,
    dim_model=32,
    n_heads=2,
    n_encoder_layers=0,
    n_layers=1,
    bins=32,
    neighbours=4,
    num_inference_steps=4,
)
CAMERA = Feature("observation.images.front", "VISUAL", (3, 32, 32))
WHOLE = dataclasses.replace(
    CONFIG,
    input_features=(*CONFIG.input_features, Feature("observation.environment_state", "ENV", (2,)), CAMERA),
    n_encoder_layers=1,
    text_encoder=dataclasses.replace(TextConfig.small(), length=6, width=8, n_heads=2, n_layers=1, hidden=16),
)
RIGHT = 0.7  # share of demonstrations that go right


def lively(config: Tokens2dConfig, seed: int = 0) -> Tokens2d:
    """A model with no weight at zero."""
    draw = np.random.default_rng(seed)
    plan = blueprint(lambda rngs: Tokens2d(config, rngs=rngs))
    return plan.assemble(
        {name: jnp.asarray(draw.normal(size=shape.shape) * 0.2, jnp.float32) for name, shape in plan.shapes.items()}
    )


def batch_of(config: Tokens2dConfig, size: int = 3, seed: int = 0) -> tuple[Observation, jax.Array, jax.Array]:
    draw = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(draw.uniform(-1.1, 1.1, (size, *shape)), jnp.float32)

    observation = Observation(
        tuple(array(*camera.shape[1:], 3) for camera in config.cameras),
        array(1),
        array(2) if config.environment_state else None,
    )
    # nothing is padded in the first chunk, and two steps are in the last
    is_pad = jnp.asarray(np.arange(CHUNK)[None] >= CHUNK - np.arange(size)[:, None])
    return observation, array(CHUNK, ACTION), is_pad


def demonstrations(key: jax.Array, size: int) -> tuple[Observation, jax.Array]:
    """Chunks that go left or right, and never between; their second joint repeats the state."""
    where, way = jax.random.split(key)
    state = jax.random.uniform(where, (size, 1), minval=-1, maxval=1)
    side = jnp.where(jax.random.bernoulli(way, RIGHT, (size, 1, 1)), 0.8, -0.8)
    first = jnp.broadcast_to(side, (size, CHUNK, 1))
    return Observation(state=state), jnp.concatenate((first, jnp.broadcast_to(state[:, None], first.shape)), -1)


@partial(jax.jit, static_argnames="config")
def trained(config: Tokens2dConfig) -> tuple[dict[str, jax.Array], jax.Array]:
    """Weights after some seconds of training, and the losses."""
    plan = blueprint(lambda rngs: Tokens2d(config, rngs=rngs))
    graph, first = nnx.split(Tokens2d(config, rngs=nnx.Rngs(0)))
    rule = optax.adam(optax.cosine_decay_schedule(8e-3, 400))

    def loss(weights, key):
        observation, actions = demonstrations(key, 64)
        rngs = nnx.Rngs(noise=jax.random.fold_in(key, 1))
        return nnx.merge(graph, weights).loss(observation, actions, jnp.zeros((64, CHUNK), bool), rngs)[0]

    def step(carry, key):
        weights, memory = carry
        value, gradient = jax.value_and_grad(loss)(weights, key)
        updates, memory = rule.update(gradient, memory, weights)
        return (optax.apply_updates(weights, updates), memory), value

    keys = jax.random.split(jax.random.key(1), 400)
    (weights, _), losses = jax.lax.scan(step, (first, rule.init(first)), keys)
    return dict(zip(plan.shapes, jax.tree.leaves(weights), strict=True)), losses


@pytest.fixture(scope="module")
def toy() -> tuple[dict[str, jax.Array], jax.Array]:
    return trained(CONFIG)


def test_the_loss_falls_to_what_there_is_to_be_known(toy) -> None:
    _, losses = toy
    assert float(losses[:3].mean()) > math.log(32) - 0.5  # next to nothing is known of 32 bins
    # the spread over bins is never known; sides are, but for the first joint of chunks of which nothing is seen
    assert losses[-50:].mean() < 2.0


def test_the_same_chunk_comes_for_the_same_state_and_follows_it(toy) -> None:
    weights, _ = toy
    state = np.linspace(-0.95, 0.95, 64, dtype=np.float32)[:, None]
    found = jax.jit(partial(decode, CONFIG))(weights, Observation(state=state))
    side, repeated = np.moveaxis(np.asarray(found.actions), -1, 0)
    np.testing.assert_allclose(side, 0.8, atol=0.05)  # where most go, and nowhere between
    off = np.abs(repeated - state)
    assert off.mean() < 0.25 * (2 / 32)  # bins alone could not do better than a quarter of their width
    confidence = np.asarray(found.confidence)
    assert ((confidence >= 0) & (confidence <= 1 + 1e-5)).all()
    assert confidence[..., 1].mean() > 0.9


def test_a_plan_is_continued_on_its_side(toy) -> None:
    weights, _ = toy
    run = jax.jit(partial(decode, CONFIG))
    side = np.array([0.8, -0.8, 0.8, -0.8], np.float32)
    actions = np.full((4, CHUNK, ACTION), 0.3, np.float32)
    actions[..., 0] = side[:, None]
    observation = Observation(state=np.full((4, 1), 0.3, np.float32))
    for delay in (1, 3):
        prefix = Prefix(actions, np.full(4, delay, np.int32), np.full(4, CHUNK, np.int32))
        found = run(weights, observation._replace(prefix=prefix))
        np.testing.assert_array_equal(found.actions[:, :delay], actions[:, :delay])
        np.testing.assert_array_equal(found.confidence[:, :delay], np.ones((4, delay, ACTION)))
        np.testing.assert_allclose(found.actions[:, delay:], actions[:, delay:], atol=0.1)


@pytest.mark.parametrize("remasking", [False, True])
def test_drawn_chunks_go_as_often_to_each_side_as_demonstrations_and_never_change_sides(toy, remasking: bool) -> None:
    weights, _ = toy
    plan = blueprint(lambda rngs: Tokens2d(CONFIG, rngs=rngs))
    schedule = MaskSchedule(CONFIG.bins + 1, "linear", (8.0, 0.0), remasking=remasking)

    @jax.jit
    def sample(weights, state):
        model = plan.assemble(weights)
        guess = Partial(predict, model.transformer, model.look(Observation(state=state)))
        ids = maskgit(guess, (len(state), CHUNK * ACTION), jax.random.key(0), schedule, steps=CHUNK * ACTION).ids
        return from_pixels(ids, CHUNK)

    side = np.asarray(sample(weights, np.linspace(-0.9, 0.9, 512, dtype=np.float32)[:, None]))[..., 0]
    is_right = side > 15
    assert (is_right == is_right[:, :1]).all(axis=1).mean() > 0.85  # drawn one by one without looking: a quarter
    assert (np.minimum(abs(side - 28), abs(side - 3)) < 4).mean() > 0.9
    assert abs(is_right[:, 0].mean() - RIGHT) < 0.1


@pytest.mark.parametrize(("masks", "smoothing"), [(False, 0.0), (True, 0.75)])
def test_the_loss_is_what_numpy_makes_of_it(masks: bool, smoothing: float) -> None:
    config = dataclasses.replace(CONFIG, label_smoothing=smoothing, do_mask_loss_for_padding=masks)
    model, (observation, actions, is_pad) = lively(config), batch_of(config)
    value, parts = jax.jit(lambda *batch: model.loss(*batch))(observation, actions, is_pad)
    assert parts["cross_entropy"] == value
    out = np.asarray(is_pad) & masks
    hidden = np.asarray(hide(config.schedule, jnp.asarray(out), ACTION, config.prefix_rate, jax.random.key(0)))
    assert not hidden[out].any()
    bins, x = config.bins, np.clip(np.asarray(actions, np.float64), -1, 1)
    ids = np.minimum((x + 1) * bins / 2, bins - 1).astype(int)
    shown = np.where(hidden | out[..., None], bins, ids)
    tokens, _ = model.observation_tokens(observation)
    pixels = shown.swapaxes(1, 2).reshape(3, -1)  # joint by joint
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


def test_padded_steps_are_neither_seen_nor_counted_when_they_are_masked() -> None:
    config = dataclasses.replace(CONFIG, do_mask_loss_for_padding=True)
    model, (observation, actions, is_pad) = lively(config), batch_of(config)
    value = jax.jit(lambda *batch: model.loss(*batch)[0])
    other = jnp.where(is_pad[..., None], -0.9, actions)
    np.testing.assert_array_equal(value(observation, other, is_pad), value(observation, actions, is_pad))
    nothing = jnp.zeros_like(is_pad)
    assert value(observation, other, nothing) != value(observation, actions, nothing)


def test_evaluation_is_always_the_same_and_training_never() -> None:
    model, batch = lively(dataclasses.replace(CONFIG, dropout=0.1)), batch_of(CONFIG)
    evaluate = jax.jit(lambda *batch: model.loss(*batch)[0])
    train = jax.jit(lambda key, *batch: model.loss(*batch, rngs=nnx.Rngs(noise=key, dropout=0))[0])
    assert evaluate(*batch) == evaluate(*batch)
    values = [float(train(jax.random.key(seed), *batch)) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_a_gradient_reaches_every_weight() -> None:
    model = lively(WHOLE)
    graph, weights = nnx.split(model)
    observation, actions, is_pad = batch_of(WHOLE)
    ids, mask = jnp.arange(18).reshape(3, 6), jnp.ones((3, 6), bool)

    @jax.jit
    def gradient(weights):
        def loss(weights):
            model = nnx.merge(graph, weights)
            return model.loss(observation._replace(language=model.read(ids, mask)), actions, is_pad)[0]

        return jax.grad(loss)(weights)

    names = flatten(model)
    untouched = [
        name
        for name, array in zip(names, jax.tree.leaves(gradient(weights)), strict=True)
        if not np.isfinite(array).all() or not np.any(np.asarray(array))
    ]
    assert untouched == []


def test_what_lies_beyond_the_end_of_an_instruction_does_not_matter() -> None:
    model = lively(WHOLE)
    observation, _, _ = batch_of(WHOLE)
    draw = np.random.default_rng(1)
    tokens = draw.normal(size=(3, 6, 8)).astype(np.float32)
    mask = np.arange(6)[None] < np.array([6, 3, 1])[:, None]
    ids = draw.integers(0, WHOLE.bins + 1, (3, CHUNK * ACTION)).astype(np.int32)

    @jax.jit
    def guess(tokens):
        context = model.look(observation._replace(language=Language(tokens, jnp.asarray(mask))))
        return predict(model.transformer, context, jnp.asarray(ids), jnp.zeros((), jnp.int32))

    other = np.where(mask[..., None], tokens, 7.0).astype(np.float32)
    np.testing.assert_array_equal(guess(other), guess(tokens))
    assert np.abs(np.asarray(guess(tokens + 1) - guess(tokens))).max() > 1e-3


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 5), (1, 4, 4)])
def test_time_and_joint_of_a_token_are_its_column_and_row_whichever_is_longer(shape: tuple[int, ...]) -> None:
    chunk = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    pixels = np.asarray(to_pixels(jnp.asarray(chunk)))
    np.testing.assert_array_equal(from_pixels(jnp.asarray(pixels), shape[1]), chunk)
    side = max(shape[1:])
    rows = chunk.swapaxes(1, 2) if shape[1] >= shape[2] else chunk
    np.testing.assert_array_equal(pixels.reshape(shape[0], -1, side), rows)
