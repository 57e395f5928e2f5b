"""Training of diffusion2d."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxmodels.policies.diffusion2d.policy import (
    Diffusion2d,
    Diffusion2dConfig,
    act,
    add_training_noise,
    predict,
    prepare_modulations,
)
from jaxmodels.samplers import Example, FlowSchedule, flow_euler
from jaxmodels.types import Observation, Prefix
from jaxmodels.weights import blueprint_of
from tests.unit.jaxmodels.small_policies import RIGHT, TOYS, WHOLES, random_batch, random_model, side_plan, train_toy
from tests.unit.jaxmodels.small_policies import TOY_ACTION as ACTION
from tests.unit.jaxmodels.small_policies import TOY_CHUNK as CHUNK

CONFIG, WHOLE = TOYS["diffusion2d"], WHOLES["diffusion2d"]
batch_of = partial(random_batch, size=32)


@pytest.fixture(scope="module")
def toy() -> tuple[dict[str, jax.Array], jax.Array]:
    with jax.default_prng_impl("rbg"):  # The default generator compiles for 10 s.
        return train_toy(CONFIG, 600, 4e-3)


def test_samples_are_distributed_like_the_demonstrations(toy) -> None:
    weights, _ = toy
    plan, schedule = blueprint_of(Diffusion2d, CONFIG), CONFIG.schedule
    assert isinstance(schedule, FlowSchedule)

    @jax.jit
    def sample(weights, state):
        model = plan.assemble(weights)
        tokens, mask = model.observation_tokens(Observation(state=state))
        denoise = Partial(predict, model.transformer, model.transformer.prepare_context(tokens), mask)
        times = jnp.asarray(schedule.euler_rows(10).timestep)
        extras = jax.vmap(model.transformer.prepare_modulations)(times)
        shape = (len(state), CHUNK, ACTION)
        return flow_euler(denoise, shape, jax.random.key(0), schedule, steps=10, extras=extras)

    state = np.repeat(np.array([-0.5, 0.5], np.float32), 256)[:, None]
    with jax.default_prng_impl("rbg"):  # The default generator compiles for seconds.
        side, repeated = np.moveaxis(np.asarray(sample(weights, state)), -1, 0)
    assert (np.abs(np.abs(side) - 0.8) < 0.25).mean() > 0.9
    assert (np.abs(side[:, :1] - side) < 0.4).mean() > 0.95  # Chunks stay on their side.
    for half in np.split(side, 2):
        assert abs((half > 0).mean() - RIGHT) < 0.12
    assert np.abs(repeated - state).mean() < 0.1


def test_policy_with_trained_prefix_continues_plans_on_their_side(toy) -> None:
    weights, _ = toy
    run = jax.jit(partial(act, CONFIG))
    actions = side_plan()
    observation = Observation(state=np.full((4, 1), 0.3, np.float32))
    alone = run(weights, observation)
    for delay in (2, 3):  # Guidance handles a delay beyond the trained delays.
        prefix = Prefix(actions, np.full(4, delay, np.int32), np.full(4, CHUNK, np.int32))
        chunk = run(weights, observation._replace(prefix=prefix))
        np.testing.assert_array_equal(chunk[:, :delay], actions[:, :delay])
        np.testing.assert_allclose(chunk[:, delay:], actions[:, delay:], atol=0.3)
    assert np.ptp(alone[..., 0], axis=0).max() < 1e-5  # The same noise without a plan gives the same side.
    mixed = Prefix(actions, np.array([0, 2, 0, 3], np.int32), np.array([0, 4, 0, 4], np.int32))
    chunk = run(weights, observation._replace(prefix=mixed))
    np.testing.assert_allclose(chunk[::2], alone[::2], atol=1e-5)
    np.testing.assert_allclose(chunk[1::2, :, 0], -0.8, atol=0.3)


@partial(jax.jit, static_argnums=0)
def drawn_from(config: Diffusion2dConfig, actions: jax.Array) -> Example:
    return add_training_noise(config, actions, None)


@jax.jit
def answer_once(model: Diffusion2d, observation: Observation, x: jax.Array, timestep: jax.Array, counts: jax.Array):
    """Return the model's prediction from one call of the transformer; masked steps count 0."""
    tokens, mask = model.observation_tokens(observation)
    options = {"timestep": timestep, "attention_mask": counts, "encoder_attention_mask": mask}
    (sample,) = model.transformer(x.swapaxes(1, 2)[..., None], tokens, return_dict=False, **options)
    return sample[..., 0].swapaxes(1, 2)


@jax.jit
def answer_each(model: Diffusion2d, observation: Observation, x: jax.Array, timestep: jax.Array) -> jax.Array:
    tokens, mask = model.observation_tokens(observation)
    context = model.transformer.prepare_context(tokens)
    return predict(model.transformer, context, mask, x, timestep, prepare_modulations(model.transformer, timestep))


@jax.jit
def evaluated(model: Diffusion2d, observation: Observation, actions: jax.Array, is_pad: jax.Array) -> jax.Array:
    value, parts = model.loss(observation, actions, is_pad)
    return value + 0 * parts["mse"]


@pytest.mark.parametrize("masks", [False, True])
def test_loss_of_a_flow_equals_numpy(masks: bool) -> None:
    config = dataclasses.replace(CONFIG, trained_prefix=0, do_mask_loss_for_padding=masks)
    model, (observation, actions, is_pad) = random_model(config), batch_of(config)
    sigma = 0.001 + 0.999 * ((np.arange(32) + 0.5) / 32) ** (2 / 3)
    _, key, _ = jax.random.split(jax.random.key(0), 3)
    noise, clean = np.asarray(jax.random.normal(key, actions.shape), np.float64), np.asarray(actions, np.float64)
    x = sigma[:, None, None] * noise + (1 - sigma[:, None, None]) * clean
    counts = np.where(np.asarray(is_pad) & masks, 0, 1).astype(np.float32)
    answer = answer_once(random_model(CONFIG), observation, np.float32(x), np.float32(1000 * sigma), counts)
    error = (np.asarray(answer) - (noise - clean)) ** 2 * counts[..., None]
    np.testing.assert_allclose(evaluated(model, observation, actions, is_pad), error.mean(), rtol=1e-4)


@pytest.mark.parametrize("predicts", ["epsilon", "sample", "v_prediction"])
def test_example_of_a_diffusion_equals_numpy(predicts: str) -> None:
    config = dataclasses.replace(CONFIG, trained_prefix=0, objective="diffusion", prediction_type=predicts)
    actions = np.asarray(batch_of(config, size=5)[1], np.float64)
    made = drawn_from(config, np.float32(actions))
    _, key, _ = jax.random.split(jax.random.key(0), 3)
    noise = np.asarray(jax.random.normal(key, actions.shape), np.float64)
    times = np.array([100, 300, 500, 700, 900])
    np.testing.assert_array_equal(made.timestep, times)

    def bar(t):
        return np.cos((t / 1000 + 0.008) / 1.008 * np.pi / 2) ** 2

    steps = np.arange(1000)
    alphas = np.cumprod(1 - np.minimum(1 - bar(steps + 1) / bar(steps), 0.999))[times][:, None, None]
    signal, sigma = np.sqrt(alphas), np.sqrt(1 - alphas)
    np.testing.assert_allclose(made.x, signal * actions + sigma * noise, atol=1e-5)
    wanted = {"epsilon": noise, "sample": actions, "v_prediction": signal * noise - sigma * actions}[predicts]
    np.testing.assert_allclose(made.target, wanted, atol=1e-5)


def test_trained_prefix_has_no_noise_time_0_and_no_loss() -> None:
    model, (observation, actions, is_pad) = random_model(CONFIG), batch_of(CONFIG)
    made = drawn_from(CONFIG, actions)
    delays = (~np.asarray(made.counts)).sum(axis=1)
    assert set(delays) == {0, 1, 2}
    known = ~np.asarray(made.counts)
    np.testing.assert_array_equal(made.x[known], actions[known])
    assert (np.asarray(made.timestep)[known] == 0).all()
    assert (np.asarray(made.timestep)[~known] > 0).all()
    answer = answer_each(model, observation, made.x, made.timestep)
    error = np.square(np.asarray(answer) - np.asarray(made.target))[~known].mean()
    np.testing.assert_allclose(evaluated(model, observation, actions, is_pad), error, rtol=1e-5)


def test_members_of_a_batch_learn_independently() -> None:
    model, (observation, actions, _) = random_model(WHOLE), batch_of(WHOLE, size=3)
    ids, mask = jnp.arange(18).reshape(3, 6), jnp.ones((3, 6), bool)
    language = jax.jit(lambda model: model.read(ids, mask))(model)
    others = batch_of(WHOLE, size=3, seed=5)[:2]
    mixed = jax.tree.map(lambda mine, other: jnp.concatenate((mine[:1], other[1:])), (observation, actions), others)
    answer, other = (
        answer_each(model, seen._replace(language=language), x, jnp.full((3, CHUNK), 300.0))
        for seen, x in ((observation, actions), mixed)
    )
    np.testing.assert_allclose(other[0], answer[0], atol=1e-5)
    assert np.abs(other[1:] - answer[1:]).max() > 1e-3
