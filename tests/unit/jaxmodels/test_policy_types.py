"""Properties of each trained policy type: folder, chunks, continued plans, config, and loss."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmodels
from jaxmodels.errors import ConfigError
from jaxmodels.policies import get_policy_type, lerobot_folder
from jaxmodels.text import TextConfig
from jaxmodels.types import PREFIX_ACTIONS
from jaxmodels.weights import blueprint_of, flatten
from tests.unit.jaxmodels.small_policies import (
    ACTION,
    CAMERA,
    CHUNK,
    CONFIGS,
    WHOLES,
    WITH_PREFIX,
    WITH_TEXT,
    make_checkpoint,
    observe,
    plan,
    random_batch,
    random_model,
)

key_of = partial(jax.random.key, impl="unsafe_rbg")  # The default generator compiles slowly.
every_type = pytest.mark.parametrize("kind", tuple(CONFIGS), scope="module")
with_prefix = pytest.mark.parametrize("kind", WITH_PREFIX, scope="module")
with_text = pytest.mark.parametrize("kind", WITH_TEXT)


@pytest.fixture(scope="module")
def policy(kind: str) -> jaxmodels.Policy:
    return jaxmodels.Policy(make_checkpoint(CONFIGS[kind]))


@every_type
def test_folder_survives_a_round_trip(kind: str, policy: jaxmodels.Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy")
    needs = jaxmodels.read_requirements(tmp_path / "policy")
    assert (needs.policy_type, needs.chunk, needs.action_steps, needs.action) == (kind, CHUNK, 4, ACTION)
    assert needs.takes_prefix == (kind in WITH_PREFIX)
    assert not needs.language
    read = lerobot_folder.read_checkpoint(tmp_path / "policy")
    assert read.config == CONFIGS[kind]
    for name, array in make_checkpoint(CONFIGS[kind]).weights.items():
        np.testing.assert_array_equal(read.weights[name], array)
    again = jaxmodels.load_policy(tmp_path / "policy", like=policy)
    observation = observe(CONFIGS[kind])
    np.testing.assert_array_equal(again.act(observation), policy.act(observation))


@every_type
def test_chunks_do_not_depend_on_the_rest_of_the_batch(kind: str, policy: jaxmodels.Policy) -> None:
    plans = (plan([0, 3, 2], [0, 8, 5]), plan([1, 1, 1], [8, 8, 8], seed=8)) if kind in WITH_PREFIX else ({}, {})
    observation = {**observe(CONFIGS[kind]), **plans[0]}
    answer = policy.act(observation)
    np.testing.assert_array_equal(policy.act(observation), answer)
    for member in range(3):
        others = {name: array.copy() for name, array in {**observe(CONFIGS[kind], seed=7), **plans[1]}.items()}
        for name, array in others.items():
            array[(member + 1) % 3] = observation[name][member]
        np.testing.assert_allclose(policy.act(others)[(member + 1) % 3], answer[member], atol=1e-3)  # Out of 100.


@with_prefix
def test_empty_plan_has_no_effect(kind: str, policy: jaxmodels.Policy) -> None:
    observation = observe(CONFIGS[kind])
    plain = policy.act(observation)
    np.testing.assert_array_equal(policy.act({**observation, **plan([0, 0, 0], [0, 0, 0])}), plain)
    mixed = policy.act({**observation, **plan([0, 4, 0], [0, 8, 0])})
    np.testing.assert_allclose(mixed[::2], plain[::2], atol=1e-4)
    assert np.abs(mixed[1, 4:] - plain[1, 4:]).max() > 1  # The rest of the chunk depends on the plan.


@with_prefix
def test_chunk_begins_with_the_executed_actions(kind: str, policy: jaxmodels.Policy) -> None:
    given = plan([0, 3, 8], [8, 6, 8])
    chunk, planned = policy.act({**observe(CONFIGS[kind]), **given}), given[PREFIX_ACTIONS]
    tolerance = {"tokens2d": 1e-5}.get(kind, 1e-4)
    np.testing.assert_allclose(chunk[1, :3], planned[1, :3], atol=tolerance)
    np.testing.assert_allclose(chunk[2], planned[2], atol=tolerance)


@with_prefix
def test_all_delays_run_in_one_program(policy: jaxmodels.Policy, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.compile(3)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(jaxmodels.program.Programs, "_compile", refuse)
    for delay in range(CHUNK):
        answer = policy.act({**observe(CONFIGS[kind]), **plan([delay] * 3, [CHUNK] * 3)})
        assert np.isfinite(answer).all()


@with_text
def test_saved_policy_follows_the_same_instructions(kind: str, tmp_path: Path) -> None:
    text = dataclasses.replace(TextConfig(), length=24, width=8, n_heads=2, n_layers=1, hidden=16)
    inputs = (*CONFIGS[kind].input_features, CAMERA)
    config = dataclasses.replace(CONFIGS[kind], input_features=inputs, text_encoder=text, n_encoder_layers=1)
    policy = jaxmodels.Policy(make_checkpoint(config))
    assert policy.requirements.language
    pictures = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    observation = {**observe(config, 1), CAMERA.name: pictures, **plan([0], [0])}
    red, blue = (policy.act({**observation, "task": [f"lift the {colour} cube"]}) for colour in ("red", "blue"))
    least = {"tokens2d": 1e-4}.get(kind, 1e-3)  # In a range of 100.
    assert np.abs(red - blue).max() > 2 * least
    both = {name: np.repeat(array, 2, axis=0) for name, array in observation.items()}
    together = policy.act({**both, "task": np.array(["lift the blue cube", "lift the red cube"])})
    np.testing.assert_allclose(together, np.concatenate((blue, red)), atol=least)
    policy.save(tmp_path / "policy")
    assert jaxmodels.read_requirements(tmp_path / "policy").language
    again = jaxmodels.load_policy(tmp_path / "policy", like=policy)
    np.testing.assert_array_equal(again.act({**observation, "task": np.array(["lift the red cube"])}), red)


@every_type
def test_training_settings_do_not_change_the_program(kind: str) -> None:
    config = CONFIGS[kind]
    trained = {
        "act": {"kl_weight": 1.0, "optimizer_lr_backbone": 1.0},
        "diffusion2d": {"timestep_sampling_strategy": "uniform", "scheduler_name": "constant"},
        "tokens2d": {"label_smoothing": 2.0, "prefix_rate": 0.0},
    }[kind]
    other = dataclasses.replace(config, optimizer_lr=1.0, dropout=0.2, n_action_steps=2, **trained)
    assert other.architecture() == config.architecture()
    built = {"act": {"latent_dim": 8}, "diffusion2d": {"trained_prefix": 2}, "tokens2d": {"bins": 16}}[kind]
    assert dataclasses.replace(config, **built).architecture() != config.architecture()


@every_type
def test_config_for_a_cpu_is_valid(kind: str) -> None:
    small = dataclasses.replace(CONFIGS[kind], **get_policy_type(kind).small)
    assert get_policy_type(kind).config(small.to_json()) == small
    shapes = blueprint_of(get_policy_type(kind).model, small).shapes
    assert sum(np.prod(shape.shape) for shape in shapes.values()) < 2.5e6


UNBOUNDED = (("ACTION", "MEAN_STD"),)
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "diffusion2d": [
        ({"n_action_steps": 9}, "n_action_steps is 9, more than chunk_size 8"),
        ({"dim_model": 20}, "dim_model 20 is not a multiple of 4 n_heads"),
        ({"objective": "score"}, "objective is 'score'; known: flow, diffusion"),
        ({"input_features": ()}, "nothing to look at"),
        ({"prediction_type": "noise"}, "prediction_type is 'noise'; known: epsilon, sample, v_prediction"),
        ({"timestep_sampling_strategy": "normal"}, "known: uniform, beta"),
        ({"trained_prefix": 8}, "trained_prefix is 8; wanted 0 \\(none\\) to 7"),
        ({"trained_prefix": 2, "objective": "diffusion"}, "trained_prefix is for objective 'flow'"),
        ({"objective": "diffusion", "normalization_mapping": UNBOUNDED}, r"epsilon wants actions in \[-1, 1\]"),
        ({"scheduler_name": "linear"}, "scheduler_name is 'linear'; known: constant, cosine"),
    ],
    "tokens2d": [
        ({"bins": 1}, "bins is 1; wanted an integer of 2 or more"),
        ({"neighbours": 32}, "neighbours is 32; wanted 0 to 31, less than bins"),
        ({"normalization_mapping": UNBOUNDED}, "ACTION: MEAN_STD; bins are in .* MIN_MAX, QUANTILES"),
        ({"n_action_steps": 9, "temperature": -1.0}, "n_action_steps is 9, more than chunk_size 8; temperature is -1"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "changes", "words"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_invalid_config_is_refused_with_the_reason(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(CONFIGS[kind], **changes)


def language_of(model: Any) -> Any:
    """Return three instructions, if the policy reads instructions."""
    if not hasattr(model, "read"):
        return None
    return model.read(jnp.arange(18).reshape(3, 6), jnp.ones((3, 6), bool))


# The bias of a key changes no probability, and ACT's decoder begins with equal zeros.
NO_INFLUENCE = r"\.key\.bias$|^decoder\.layers\.0\.self_attention\.(query|key|value\.kernel)"


@every_type
def test_training_draws_ignores_padding_and_reaches_each_weight(kind: str) -> None:
    masks = {} if kind == "act" else {"do_mask_loss_for_padding": True}  # ACT always masks.
    config = dataclasses.replace(WHOLES[kind], dropout=0.1, **masks)
    model = random_model(config)
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    observation, actions, is_pad = random_batch(config, 3)
    seen = observation._replace(language=jax.jit(language_of)(model))
    evaluate = jax.jit(lambda *batch: model.loss(seen, *batch)[0])
    value = float(evaluate(actions, is_pad))
    other, nothing = jnp.where(is_pad[..., None], -0.9, actions), jnp.zeros_like(is_pad)
    assert float(evaluate(other, is_pad)) == value
    assert evaluate(other, nothing) != evaluate(actions, nothing)

    @jax.jit
    @jax.value_and_grad
    def loss(weights: Any, noise: jax.Array, dropout: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights, rest)
        seen = observation._replace(language=language_of(model))
        return model.loss(seen, actions, is_pad, nnx.Rngs(noise=noise, latent=noise, dropout=dropout))[0]

    one, two = key_of(0), key_of(1)
    drawn, gradient = loss(weights, one, one)
    draws = [float(loss(weights, *keys)[0]) for keys in ((one, one), (one, two), (two, one))]
    assert draws[0] == drawn
    assert len({value, *draws}) == 4
    plan = blueprint_of(get_policy_type(kind).model, config)
    parts = dict(zip(plan.learned, jax.tree.leaves(gradient), strict=True))
    assert all(np.isfinite(part).all() for part in parts.values())
    assert [n for n, part in parts.items() if not np.abs(part).max() > 1e-9 and not re.search(NO_INFLUENCE, n)] == []
    assert any("backbone" in name for name in parts)
    assert any(name.startswith("text.") for name in parts) == (kind in WITH_TEXT)
    assert set(parts) <= set(flatten(model))
