"""What chunks are made from lies in the middle of the noise: slow waves are small, the rest is as usual."""

import numpy as np
import pytest

from jaxmodels.policies.diffusion2d import Diffusion2dConfig
from jaxmodels.policies.diffusion2d.model import MOST, SLOW, first_noise, slow_waves
from jaxmodels.types import Feature


def config_of(steps: int, seed: int) -> Diffusion2dConfig:
    return Diffusion2dConfig(
        input_features=(Feature("observation.state", "STATE", (6,)),),
        output_features=(Feature("action", "ACTION", (6,)),),
        chunk_size=steps,
        n_action_steps=1,
        noise_seed=seed,
    )


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_slow_waves_are_orthogonal_and_begin_with_the_constant(steps: int) -> None:
    waves = slow_waves(steps)
    assert len(waves) == min(SLOW, steps)
    np.testing.assert_allclose(waves @ waves.T, np.eye(len(waves)), atol=1e-6)
    np.testing.assert_allclose(waves[0], waves[0, 0])


def test_the_first_noise_has_small_slow_waves_and_all_others_as_they_are_drawn() -> None:
    drawn = np.stack([np.asarray(first_noise(config_of(20, seed))) for seed in range(60)])
    strength = slow_waves(20) @ drawn
    assert np.abs(strength).max() <= MOST + 1e-6
    assert np.abs(strength).mean() > MOST / 2  # and has a side all the same
    rest = drawn - slow_waves(20).T @ strength
    assert rest.std() == pytest.approx(np.sqrt((20 - SLOW) / 20), rel=0.05)
    assert abs(np.corrcoef(rest[0].ravel(), rest[1].ravel())[0, 1]) < 0.3


def test_a_single_action_has_a_first_noise_too() -> None:
    assert np.abs(first_noise(config_of(1, 0))).max() <= MOST + 1e-6
