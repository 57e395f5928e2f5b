"""diffusion2d as a policy: its fixed noise and continued plans."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import jaxmodels
from jaxmodels.errors import ObservationError
from jaxmodels.policies.diffusion2d.policy import MAX_SLOW, SLOW, Diffusion2dConfig, make_first_noise, make_slow_waves
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH, Feature
from tests.unit.jaxmodels.small_policies import CONFIGS, make_checkpoint, observe, plan

CONFIG = CONFIGS["diffusion2d"]


@pytest.fixture(scope="module")
def policy() -> jaxmodels.Policy:
    return jaxmodels.Policy(make_checkpoint(CONFIG))


def test_chunk_stays_near_the_plan(policy) -> None:
    observation, going_on = observe(CONFIG), plan([0, 3, 8], [8, 6, 8])
    plain, chunk = policy.act(observation), policy.act({**observation, **going_on})
    away, before = (np.abs(answer - going_on[PREFIX_ACTIONS])[0, :3, ::2].mean() for answer in (chunk, plain))
    assert away < before


def test_bfloat16_with_heun_is_near_float32() -> None:
    made = make_checkpoint(dataclasses.replace(CONFIG, flow_solver="heun"))
    wanted, found = (jaxmodels.Policy(made, dtype=dtype).act(observe(CONFIG)) for dtype in ("float32", "bfloat16"))
    assert found.dtype == np.float32
    assert not np.array_equal(found, wanted)
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()


def test_cameras_are_used_and_a_diffusion_continues_a_plan() -> None:
    cameras = tuple(Feature(f"observation.images.{name}", "VISUAL", (3, 32, 32)) for name in ("front", "wrist"))
    config = dataclasses.replace(CONFIG, input_features=cameras, objective="diffusion", prefix_through_model=False)
    policy = jaxmodels.Policy(make_checkpoint(config))
    pictures = np.random.default_rng(0).integers(0, 256, (2, 1, 32, 32, 3), np.uint8)
    front, wrist = (feature.name for feature in cameras)
    going_on = plan([2], [6])
    answer = policy.act({front: pictures[0], wrist: pictures[1], **going_on})
    np.testing.assert_allclose(answer[0, :2], going_on[PREFIX_ACTIONS][0, :2], atol=1e-4)
    assert np.isfinite(answer).all()
    assert np.abs(policy.act({front: pictures[1], wrist: pictures[0], **going_on}) - answer).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({PREFIX_DELAY: None}, "prefix.delay missing, but prefix.actions, prefix.length given"),
        ({PREFIX_LENGTH: np.array([9], np.int32)}, "prefix.length is 9; wanted 0 to 8, the actions of a chunk"),
        ({PREFIX_DELAY: np.array([-1], np.int32)}, "prefix.delay is -1; wanted 0 to 8"),
        ({PREFIX_DELAY: np.array([7], np.int32)}, "prefix.delay is 7 for member 0, and prefix.length 6"),
        ({PREFIX_DELAY: np.array([2.0])}, "prefix.delay is float64; wanted int32"),
        ({PREFIX_DELAY: np.array([1, 2])}, r"prefix.delay has shape \(2,\); wanted \(1,\)"),
        ({PREFIX_ACTIONS: np.zeros((1, 7, 3), np.float32)}, r"shape \(1, 7, 3\); wanted \(1, 8, 3\), filled up"),
        ({PREFIX_ACTIONS: np.zeros((1, 8, 3), np.int32)}, "prefix.actions is int32; wanted float32"),
        ({PREFIX_ACTIONS: np.full((1, 8, 3), np.nan, np.float32)}, r"prefix.actions holds nan at \[0, 0, 0\]"),
    ],
)
def test_invalid_plan_is_refused_with_the_reason(policy, change: dict[str, Any], words: str) -> None:
    observation = {**observe(CONFIG, 1), **plan([2], [6]), **change}
    with pytest.raises(ObservationError, match=words):
        policy.act({name: array for name, array in observation.items() if array is not None})


def test_policy_without_continuation_refuses_a_plan(small, checkpoint_of, observation_of) -> None:
    config = small(cameras=("front",))
    policy = jaxmodels.Policy(checkpoint_of(config))
    assert not policy.requirements.takes_prefix
    with pytest.raises(ObservationError, match=r"prefix\.length in the observation of a policy"):
        policy.act({**observation_of(config), **plan([2], [6])})


def config_of(steps: int, seed: int) -> Diffusion2dConfig:
    return dataclasses.replace(CONFIG, chunk_size=steps, n_action_steps=1, noise_seed=seed)


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_slow_waves_are_orthogonal_and_begin_with_the_constant(steps: int) -> None:
    waves = make_slow_waves(steps)
    assert len(waves) == min(SLOW, steps)
    np.testing.assert_allclose(waves @ waves.T, np.eye(len(waves)), atol=1e-6)
    np.testing.assert_allclose(waves[0], waves[0, 0])
    assert np.abs(waves @ np.asarray(make_first_noise(config_of(steps, 0)))).max() <= MAX_SLOW + 1e-6


def test_only_slow_waves_of_the_first_noise_are_small() -> None:
    drawn = np.stack([np.asarray(make_first_noise(config_of(20, seed))) for seed in range(60)])
    strength = make_slow_waves(20) @ drawn
    assert np.abs(strength).max() <= MAX_SLOW + 1e-6
    assert np.abs(strength).mean() > MAX_SLOW / 2  # Small, but not zero.
    rest = drawn - make_slow_waves(20).T @ strength
    assert rest.std() == pytest.approx(np.sqrt((20 - SLOW) / 20), rel=0.05)
    assert abs(np.corrcoef(rest[0].ravel(), rest[1].ravel())[0, 1]) < 0.3
