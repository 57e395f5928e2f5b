"""tokens2d as a policy: folders, plans that it continues, members of a batch on their own, nothing but actions."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxmodels
from jaxmodels.errors import ConfigError
from jaxmodels.normalization import from_stats
from jaxmodels.policies import lerobot_folder
from jaxmodels.policies.lerobot_folder import Checkpoint, Sidecar
from jaxmodels.policies.tokens2d import POLICY, Tokens2d, Tokens2dConfig, decode
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, Feature, Observation, Prefix
from jaxmodels.weights import blueprint

CHUNK, ACTION = 8, 3
CONFIG = Tokens2dConfig(
    input_features=(Feature("observation.state", "STATE", (4,)),),
    output_features=(Feature("action", "ACTION", (ACTION,)),),
    chunk_size=CHUNK,
    n_action_steps=4,
    dim_model=16,
    n_heads=2,
    n_encoder_layers=0,
    n_layers=1,
    bins=32,
    neighbours=2,
    num_inference_steps=5,
)
# the second joint never moved in the data
LOW, HIGH = np.array([-50, 7, 0], np.float32), np.array([50, 7, 100], np.float32)


def weights_of(config: Tokens2dConfig, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = blueprint(lambda rngs: Tokens2d(config, rngs=rngs)).shapes
    return {name: (draw.normal(size=wanted.shape) * 0.3).astype(np.float32) for name, wanted in shapes.items()}


def checkpoint(config: Tokens2dConfig = CONFIG, mode: str = "MIN_MAX") -> Checkpoint:
    names = ("min", "max") if mode == "MIN_MAX" else ("q01", "q99")
    stats = {
        "observation.state": {"min": np.full(4, -2, np.float32), "max": np.full(4, 2, np.float32)},
        "action": {"min": LOW, "max": HIGH} | dict(zip(names, (LOW, HIGH), strict=True)),
    }
    modes = (("STATE", "MIN_MAX"), ("ACTION", mode))
    config = dataclasses.replace(config, normalization_mapping=modes)
    normalization = from_stats(config.input_features, config.output_features, modes, stats)
    return Checkpoint(config, weights_of(config), normalization, Sidecar(rate=20.0))


@pytest.fixture(scope="module")
def policy() -> jaxmodels.Policy:
    return jaxmodels.Policy(checkpoint())


def seen(batch: int = 3, seed: int = 1) -> dict[str, np.ndarray]:
    return {"observation.state": np.random.default_rng(seed).uniform(-2, 2, (batch, 4)).astype(np.float32)}


def plan(delay: list[int], length: list[int], seed: int = 2) -> dict[str, np.ndarray]:
    """A plan as sessions send it: in units of the robot, filled up with zeros."""
    actions = np.random.default_rng(seed).uniform(LOW, HIGH, (len(delay), CHUNK, ACTION))
    actions[np.arange(CHUNK)[None] >= np.array(length)[:, None]] = 0
    return {
        PREFIX_ACTIONS: actions.astype(np.float32),
        PREFIX_DELAY: np.array(delay, np.int32),
        PREFIX_LENGTH: np.array(length, np.int32),
    }


@pytest.mark.parametrize("mode", ["MIN_MAX", "QUANTILES"])
def test_a_folder_is_read_as_it_was_written_and_says_that_it_takes_a_plan(policy, mode: str, tmp_path: Path) -> None:
    written = checkpoint(mode=mode)
    lerobot_folder.write(tmp_path / "policy", written)
    needs = jaxmodels.read_requirements(tmp_path / "policy")
    assert (needs.policy_type, needs.chunk, needs.action_steps, needs.action) == ("tokens2d", CHUNK, 4, ACTION)
    assert needs.takes_prefix
    assert not needs.language
    read = lerobot_folder.read(tmp_path / "policy")
    assert read.config == written.config
    for name, array in written.weights.items():
        np.testing.assert_array_equal(read.weights[name], array)
    # both modes bring the actions to the same range, so that they share programs
    assert policy.fits(read)
    again = jaxmodels.load_policy(tmp_path / "policy", like=policy)
    np.testing.assert_array_equal(again.act(seen()), policy.act(seen()))


def test_the_same_observation_has_the_same_answer_at_any_place_and_in_any_company(policy) -> None:
    observation = {**seen(), **plan([0, 3, 2], [0, 8, 5])}
    answer = policy.act(observation)
    np.testing.assert_array_equal(policy.act(observation), answer)
    for member in range(3):
        others = {**seen(seed=7), **plan([1, 1, 1], [8, 8, 8], seed=8)}
        for name, array in others.items():
            array[(member + 1) % 3] = observation[name][member]
        np.testing.assert_allclose(policy.act(others)[(member + 1) % 3], answer[member], atol=1e-3)  # of 100


def test_without_a_plan_the_answer_is_that_of_a_policy_that_was_never_given_one(policy) -> None:
    observation = seen()
    plain = policy.act(observation)
    np.testing.assert_array_equal(policy.act({**observation, **plan([0, 0, 0], [0, 0, 0])}), plain)
    mixed = policy.act({**observation, **plan([0, 4, 0], [0, 8, 0])})
    np.testing.assert_allclose(mixed[::2], plain[::2], atol=1e-4)
    assert np.abs(mixed[1, 4:] - plain[1, 4:]).max() > 1  # the rest looks at what it goes on from


def test_a_chunk_begins_with_exactly_what_will_have_been_executed(policy) -> None:
    going_on = plan([0, 3, 8], [8, 6, 8])
    chunk, planned = policy.act({**seen(), **going_on}), going_on[PREFIX_ACTIONS]
    np.testing.assert_allclose(chunk[1, :3], planned[1, :3], atol=1e-5)
    np.testing.assert_allclose(chunk[2], planned[2], atol=1e-5)
    # what is still to be decided is decided by what is seen now
    np.testing.assert_array_equal(chunk[0], policy.act(seen())[0])


def test_what_comes_out_is_within_the_range_of_the_data_and_still_joints_stay(policy) -> None:
    chunk = policy.act(seen())
    assert (chunk >= LOW).all()
    assert (chunk <= HIGH).all()
    np.testing.assert_array_equal(chunk[..., 1], np.full((3, CHUNK), 7, np.float32))


def test_every_delay_runs_in_one_program(policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.compile(3)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jaxmodels.program.Programs, "_compile", refuse)
    for delay in range(CHUNK):
        assert np.isfinite(policy.act({**seen(), **plan([delay] * 3, [CHUNK] * 3)})).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_masked_class_never_comes_out(temperature: float) -> None:
    config = dataclasses.replace(CONFIG, bins=7, temperature=temperature)
    run = jax.jit(partial(decode, config))
    seen_classes: set[int] = set()
    for seed in range(12):
        draw = np.random.default_rng(seed)
        # as if the masked class were the likeliest there is, if it had a place
        weights = {
            name: array * np.float32(draw.choice([0.1, 1, 30])) for name, array in weights_of(config, seed).items()
        }
        actions = draw.uniform(-2, 2, (4, CHUNK, ACTION)).astype(np.float32)
        prefix = Prefix(actions, draw.integers(0, CHUNK, 4, np.int32), np.full(4, CHUNK, np.int32))
        found = run(weights, Observation(state=draw.normal(size=(4, 4)).astype(np.float32), prefix=prefix))
        ids, values = np.asarray(found.ids), np.asarray(found.actions)
        assert ((ids >= 0) & (ids < 7)).all()
        is_past = np.arange(CHUNK)[None] < np.asarray(prefix.delay)[:, None]
        np.testing.assert_array_equal(values[is_past], actions[is_past])
        assert (np.abs(values[~is_past]) <= 1).all()
        # what comes out is no further from its token than its neighbours are
        assert np.abs(values - (2 * ids + 1) / 7 + 1)[~is_past].max() <= (1 + 2 * CONFIG.neighbours) / 7 + 1e-5
        seen_classes |= set(ids.ravel().tolist())
    assert seen_classes == set(range(7))


def test_members_that_see_the_same_get_the_same_even_when_tokens_are_drawn() -> None:
    config = dataclasses.replace(CONFIG, temperature=1.0)
    run = jax.jit(partial(decode, config))
    state = np.repeat(seen(1)["observation.state"], 3, axis=0)
    ids = np.asarray(run(weights_of(config), Observation(state=state)).ids)
    assert (ids == ids[:1]).all()
    other = jax.jit(partial(decode, dataclasses.replace(config, noise_seed=1)))
    assert (np.asarray(other(weights_of(config), Observation(state=state)).ids) != ids).any()


def test_a_program_does_not_depend_on_how_a_policy_was_trained() -> None:
    trained_otherwise = dataclasses.replace(
        CONFIG, label_smoothing=2.0, prefix_rate=0.0, optimizer_lr=1.0, dropout=0.5, n_action_steps=2
    )
    assert POLICY.architecture(trained_otherwise) == POLICY.architecture(CONFIG)
    assert POLICY.architecture(dataclasses.replace(CONFIG, bins=16)) != POLICY.architecture(CONFIG)


def test_the_config_for_a_cpu_is_one() -> None:
    small = dataclasses.replace(CONFIG, **POLICY.small)
    assert Tokens2dConfig.from_json(small.to_json()) == small
    shapes = blueprint(lambda rngs: Tokens2d(small, rngs=rngs)).shapes
    assert sum(np.prod(shape.shape) for shape in shapes.values()) < 2.5e6


def test_neighbouring_bins_begin_alike_and_far_ones_do_not() -> None:
    model = Tokens2d(dataclasses.replace(CONFIG, dim_model=64, bins=64), rngs=nnx.Rngs(0))
    table = np.asarray(model.transformer.latent_image_embedding.emb.embedding[...])
    table = table / np.linalg.norm(table, axis=1, keepdims=True)
    alike = table @ table.T
    assert table.shape == (65, 64)
    assert np.diagonal(alike, 1)[:-1].min() > 0.7
    assert np.abs(np.diagonal(alike, 32)).mean() < 0.3
    assert np.abs(alike[-1, :-1]).max() < 0.5  # the masked class is like none


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bins": 1}, "bins is 1; wanted 2 or more"),
        ({"bins": 0}, "bins is 0; wanted an integer of 1 or more"),
        ({"neighbours": 32}, "neighbours is 32; wanted 0 to 31, less than bins"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0; wanted an integer of 1 or more"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1; wanted a number of 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"prefix_rate": 1.5}, "prefix_rate is 1.5; wanted a share, 0 to 1"),
        ({"noise_seed": -1}, "noise_seed is -1"),
        ({"normalization_mapping": (("ACTION", "MEAN_STD"),)}, "ACTION: MEAN_STD; bins lie in .* MIN_MAX, QUANTILES"),
        ({"n_action_steps": 9, "temperature": -1.0}, "n_action_steps is 9, more than chunk_size 8; temperature is -1"),
    ],
)
def test_a_config_that_makes_no_sense_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(CONFIG, **changes)
