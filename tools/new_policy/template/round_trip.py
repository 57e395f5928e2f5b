"""example_policy: training, saving and loading."""

from pathlib import Path
from typing import Any

import numpy as np

import jaxmodels
from jaxmodels.data import Dataset
from jaxmodels.training import new_policy, train


def test_example_policy_acts_the_same_after_saving(dataset: Dataset, config: Any, tmp_path: Path) -> None:
    start = new_policy(dataset, "example_policy", values={"chunk_size": 8, "dim_model": 8})
    train(dataset, start, config(steps=1, log_freq=1), tmp_path / "run")
    policy = jaxmodels.load_policy(tmp_path / "run" / "policy")
    observation = {
        "observation.state": np.ones((1, 2), np.float32),
        "observation.images.front": np.full((1, 16, 16, 3), 99, np.uint8),
    }
    chunk = policy.act(observation)
    assert chunk.shape == (1, 8, 2)
    assert np.isfinite(chunk).all()
    policy.save(tmp_path / "copy")
    np.testing.assert_array_equal(jaxmodels.load_policy(tmp_path / "copy").act(observation), chunk)
