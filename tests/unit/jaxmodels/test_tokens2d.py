"""tokens2d as a policy: folders, continued plans, independent members of a batch, and valid actions."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jaxmodels
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.tokens2d.policy import Tokens2d, decode
from jaxmodels.types import Observation, Prefix
from tests.unit.jaxmodels.small_policies import (
    ACTION,
    CHUNK,
    CONFIGS,
    HIGH,
    LOW,
    make_checkpoint,
    observe,
    plan,
    random_weights,
)

CONFIG = CONFIGS["tokens2d"]


@pytest.fixture(scope="module")
def policy() -> jaxmodels.Policy:
    return jaxmodels.Policy(make_checkpoint(CONFIG))


def test_both_normalizations_to_a_range_share_programs(policy, tmp_path: Path) -> None:
    modes = (("STATE", "MIN_MAX"), ("ACTION", "QUANTILES"))
    lerobot_folder.write_checkpoint(tmp_path, make_checkpoint(dataclasses.replace(CONFIG, normalization_mapping=modes)))
    read = lerobot_folder.read_checkpoint(tmp_path)
    assert read.config.normalization_mapping == modes
    assert policy.fits(read)
    again = jaxmodels.load_policy(tmp_path, like=policy)
    np.testing.assert_array_equal(again.act(observe(CONFIG)), policy.act(observe(CONFIG)))


def test_plan_without_delay_has_no_effect_and_chunks_are_in_range(policy) -> None:
    observation = observe(CONFIG)
    chunk = policy.act(observation)
    planned = policy.act({**observation, **plan([0, 3, 8], [8, 6, 8])})
    np.testing.assert_array_equal(planned[0], chunk[0])
    assert (chunk >= LOW).all()
    assert (chunk <= HIGH).all()
    np.testing.assert_array_equal(chunk[..., 1], np.full((3, CHUNK), 7, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_class_is_never_sampled(temperature: float) -> None:
    config = dataclasses.replace(CONFIG, bins=7, temperature=temperature)
    run = jax.jit(partial(decode, config))
    seen_classes: set[int] = set()
    for seed in range(12):
        draw = np.random.default_rng(seed)
        weights = random_weights(config, 0.3, seed)
        weights = {name: array * np.float32(draw.choice([0.1, 1, 30])) for name, array in weights.items()}
        actions = draw.uniform(-2, 2, (4, CHUNK, ACTION)).astype(np.float32)
        prefix = Prefix(actions, draw.integers(0, CHUNK, 4, np.int32), np.full(4, CHUNK, np.int32))
        found = run(weights, Observation(state=draw.normal(size=(4, 4)).astype(np.float32), prefix=prefix))
        ids, values = np.asarray(found.ids), np.asarray(found.actions)
        assert ((ids >= 0) & (ids < 7)).all()
        is_past = np.arange(CHUNK)[None] < np.asarray(prefix.delay)[:, None]
        np.testing.assert_array_equal(values[is_past], actions[is_past])
        assert (np.abs(values[~is_past]) <= 1).all()
        assert np.abs(values - (2 * ids + 1) / 7 + 1)[~is_past].max() <= (1 + 2 * CONFIG.neighbours) / 7 + 1e-5
        seen_classes |= set(ids.ravel().tolist())
    assert seen_classes == set(range(7))


def test_equal_members_get_equal_drawn_tokens() -> None:
    config = dataclasses.replace(CONFIG, temperature=1.0)
    run = jax.jit(partial(decode, config))
    state = np.repeat(observe(CONFIG, 1)["observation.state"], 3, axis=0)
    ids = np.asarray(run(random_weights(config, 0.3), Observation(state=state)).ids)
    assert (ids == ids[:1]).all()
    other = jax.jit(partial(decode, dataclasses.replace(config, noise_seed=1)))
    assert (np.asarray(other(random_weights(config, 0.3), Observation(state=state)).ids) != ids).any()


def test_only_neighbouring_bins_have_similar_initial_embeddings() -> None:
    model = Tokens2d(dataclasses.replace(CONFIG, dim_model=64, bins=64), rngs=nnx.Rngs(0))
    table = np.asarray(model.transformer.latent_image_embedding.emb.embedding[...])
    table = table / np.linalg.norm(table, axis=1, keepdims=True)
    alike = table @ table.T
    assert table.shape == (65, 64)
    assert np.diagonal(alike, 1)[:-1].min() > 0.7
    assert np.abs(np.diagonal(alike, 32)).mean() < 0.3
    assert np.abs(alike[-1, :-1]).max() < 0.5  # The masked class is unlike all bins.
