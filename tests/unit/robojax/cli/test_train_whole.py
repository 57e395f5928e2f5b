"""``robojax train`` from end to end."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from robojax.cli.train import app
from tests.testing.compiling import compiling_quickly

# Programs are compiled here, which takes a slow machine a minute each.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def compilation() -> Iterator[None]:
    with compiling_quickly():
        yield


def test_a_policy_is_trained_and_the_same_command_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxmodels.data import DatasetWriter

    monkeypatch.setenv("ROBOJAX_COMPILE_CACHE", "off")
    with DatasetWriter(tmp_path / "demos", fps=10, joint_names=("x",), environment_state=("where",)) as writer:
        for place in np.float32((0.1, 0.5, 0.9)):
            for share in np.linspace(0, 1, 5, dtype=np.float32):
                state = {"observation.state": np.array([share * place]), "action": np.array([place])}
                writer.add({**state, "observation.environment_state": np.array([place])})
            writer.end_episode("reach")
    arguments = [
        "--policy.type=act",
        "--preset=small",
        "--policy.device=cpu",
        "--policy.dim_model=16",
        "--policy.dim_feedforward=16",
        "--policy.n_encoder_layers=1",
        "--policy.chunk_size=4",
        "--policy.n_action_steps=2",
        "--optimizer.lr=0.01",
        f"--dataset.root={tmp_path / 'demos'}",
        "--dataset.episodes=0-1",
        f"--output_dir={tmp_path / 'run'}",
        "--steps=4",
        "--batch_size=4",
        "--log_freq=2",
        "--dataset.image_transforms.noise=0.02",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 episodes, 10 frames at 10 Hz; 4 steps of 4" in result.output
    assert "step 4/4  loss" in result.output
    config = json.loads((tmp_path / "run" / "policy" / "config.json").read_text())
    assert (config["dim_model"], config["device"], config["push_to_hub"]) == (16, "cpu", False)
    setup = json.loads((tmp_path / "run" / "training.json").read_text())
    assert setup["training"]["optimizer"]["lr"] == 0.01
    assert setup["training"]["optimizer"]["lr_backbone"] == 1e-3
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 3
    assert "--resume=true" in again.output
    assert CliRunner().invoke(app, [*arguments, "--resume=true"]).exit_code == 0
