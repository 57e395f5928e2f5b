"""Training: it learns, it resumes to the same weights, and what it writes can be used."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import jaxmodels
from jaxmodels.checkpoints import lerobot
from jaxmodels.data import Episodes, EpisodeWriter
from jaxmodels.errors import CheckpointError, ConfigError
from jaxmodels.training import TrainingConfig, small_act, train

STEPS = 60
CONFIG = TrainingConfig(steps=STEPS, batch_size=8, warmup=10, save_every=20, learning_rate=3e-3)


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actions that can be read off the picture: its brightness says where to go."""
    folder = tmp_path_factory.mktemp("data") / "demos"
    random = np.random.default_rng(0)
    with EpisodeWriter(folder, rate=10.0, joint_names=("x", "y")) as writer:
        for seed in range(8):
            goal = random.uniform(0.2, 0.8)
            steps = np.linspace(0, goal, 12, dtype=np.float32)
            actions = np.stack((100 * steps, -100 * steps), axis=1)
            frames = np.full((12, 32, 32, 3), int(255 * goal), np.uint8)
            writer.add(
                {"observation.state": actions * 0.9, "action": actions, "observation.images.front": frames}, seed
            )
    return folder


@pytest.fixture(scope="module")
def finished(demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "whole"
    episodes = Episodes(demos)
    train(episodes, small_act(episodes, chunk=4, action_steps=2), CONFIG, output)
    return output


def losses(output: Path) -> list[float]:
    return [json.loads(line)["mean_loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_by_more_than_half(finished: Path) -> None:
    seen = losses(finished)
    assert len(seen) == STEPS // 10
    assert seen[-1] < 0.5 * seen[0], seen


def test_the_policy_is_written_in_a_layout_that_loads(finished: Path, demos: Path) -> None:
    policy = jaxmodels.load_policy(finished / "policy")
    assert policy.requirements.joint_names == ("x", "y")
    assert policy.requirements.rate == 10
    assert policy.requirements.cameras == {"front": (32, 32)}
    episodes = Episodes(demos)
    chunk = policy.act(
        {
            "observation.state": np.asarray(episodes.state[:1]),
            "observation.images.front": np.asarray(episodes.images["observation.images.front"][:1]),
        }
    )
    error = np.abs(chunk[0] - episodes.action[:4]).mean()
    assert error < np.abs(episodes.action[:4] - episodes.action.mean(0)).mean(), "no better than the mean action"


def test_a_killed_run_goes_on_to_the_weights_it_would_have_had(demos: Path, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "killed"
    script = (
        "from pathlib import Path; from jaxmodels.data import Episodes; from jaxmodels.training import *;"
        f"e = Episodes(Path({str(demos)!r}));"
        f"train(e, small_act(e, chunk=4, action_steps=2), {CONFIG!r}, Path({str(output)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 90
    try:
        while not (output / "checkpoints" / "00000020").is_dir() and process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint in 90 s"
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
    assert not (output / "policy").exists(), errors
    episodes = Episodes(demos)
    train(episodes, small_act(episodes, chunk=4, action_steps=2), CONFIG, output)
    resumed, whole = (lerobot.read(folder / "policy").weights for folder in (output, finished))
    assert set(resumed) == set(whole)
    for name, array in whole.items():
        np.testing.assert_allclose(resumed[name], array, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(losses(output), losses(finished), rtol=1e-4)


def test_another_runs_folder_is_refused_and_the_differences_are_named(finished: Path, demos: Path) -> None:
    episodes = Episodes(demos)
    other = TrainingConfig(steps=STEPS, batch_size=16, warmup=10, save_every=20, learning_rate=3e-3)
    with pytest.raises(CheckpointError, match=r"training\.batch_size: was 8, now 16"):
        train(episodes, small_act(episodes, chunk=4, action_steps=2), other, finished)


def test_the_loss_curve_is_a_picture_with_a_falling_line(finished: Path) -> None:
    picture = np.asarray(Image.open(finished / "loss.png").convert("RGB")).astype(int)
    blue = (picture[..., 2] > 140) & (picture[..., 0] < 60)
    columns = np.nonzero(blue.any(axis=0))[0]
    first, last = (np.nonzero(blue[:, column])[0].mean() for column in (columns[2], columns[-3]))
    assert last > first + 20, "the curve does not fall (rows are counted from the top)"


def test_settings_that_make_no_sense_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"steps is 0.*learning_rate is -1"):
        TrainingConfig(steps=0, learning_rate=-1.0)
