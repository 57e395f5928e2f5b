"""Training learns, resumes to the same weights, and writes usable policies."""

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import jaxmodels
from jaxmodels.data import Dataset
from jaxmodels.errors import CheckpointError, ConfigError, DatasetError, TrainingError
from jaxmodels.policies import lerobot_folder
from jaxmodels.training import (
    OptimizerConfig,
    Start,
    TrainingConfig,
    TrainingProgress,
    draw_curve,
    loop,
    new_policy,
    train,
    trained_policy,
)
from tests.testing.compiling import process_environment
from tests.unit.jaxmodels.training.conftest import CONFIG, TINY_STATES, MakeConfig, MakeStart

KILLED = """
import os, signal
from pathlib import Path
from jaxmodels.data import open_dataset
from jaxmodels.training import new_policy, train
from tests.testing.compiling import compiling_quickly
from tests.unit.jaxmodels.training.conftest import CONFIG, TINY

def kill(progress):
    if progress.step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)

dataset = open_dataset(Path({demos!r}))
with compiling_quickly():  # The cache has the programs of the whole run.
    train(dataset, new_policy(dataset, "act", values=TINY["act"]), CONFIG, Path({output!r}), on_progress=kill)
"""

Few = tuple[Dataset, Start]
# A large epsilon makes steps small for gradients that consist of rounding errors.
RULE = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.0)


@pytest.fixture(scope="module")
def progresses() -> list[TrainingProgress]:
    return []


@pytest.fixture(scope="module")
def finished(dataset: Dataset, tiny: MakeStart, progresses: list[TrainingProgress], tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "whole"
    train(dataset, tiny(), CONFIG, str(output), on_progress=progresses.append)
    return output


class StopRun(Exception):
    """Stops a run."""


def stop(progress: TrainingProgress) -> None:
    raise StopRun


@pytest.fixture(scope="module")
def few(places: Dataset) -> Few:
    """Return demonstrations without a camera, and a policy with a small program."""
    return places, new_policy(places, "act", values={**TINY_STATES, "pretrained_backbone_weights": None})


@pytest.fixture(scope="module")
def begun(few: Few, config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the first four steps, with a checkpoint of three, and return the folder."""
    output = tmp_path_factory.mktemp("runs") / "begun"
    with pytest.raises(StopRun):
        train(*few, config(save_freq=1, optimizer=RULE), output, on_progress=stop)
    return output


def weights_at(run: Path, step: int) -> dict[str, np.ndarray]:
    return lerobot_folder.read_checkpoint(run / "checkpoints" / f"{step:06}" / "pretrained_model").weights


def lines(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    return [line["loss"] for line in lines(output)]


def test_loss_falls_by_more_than_half(finished: Path) -> None:
    seen = losses(finished)
    assert [line["step"] for line in lines(finished)] == [4, 8, 12, 16, 20, 24]
    assert seen[-1] < 0.5 * seen[0], seen
    last = lines(finished)[-1]
    assert last["loss"] == pytest.approx(last["l1"] + 10 * last["kl"], rel=1e-4)
    assert last["gradient_norm"] > 0
    assert last["learning_rate"] == pytest.approx(3e-3 * 0.5 * (1 + np.cos(np.pi * 19 / 20)), rel=1e-4)
    assert last["samples_per_second"] > 0
    assert 0 <= last["waited"] <= 1


def test_progress_has_the_remaining_time(finished: Path, progresses: list[TrainingProgress]) -> None:
    assert [(progress.step, progress.steps) for progress in progresses[-2:]] == [(20, 24), (24, 24)]
    assert progresses[-1].left == 0
    assert progresses[-2].left == pytest.approx(4 * CONFIG.batch_size / progresses[-2].samples_per_second)


def test_policy_is_written_in_a_layout_that_loads(finished: Path, dataset: Dataset) -> None:
    policy = jaxmodels.load_policy(finished / "policy")
    assert policy.requirements.joint_names == ("x", "y")
    assert policy.requirements.rate == 10
    assert policy.requirements.cameras == {"front": (16, 16)}
    stats = policy.checkpoint.normalization.inputs.stats["observation.images.front"]
    np.testing.assert_allclose(stats["mean"][:, 0, 0], (0.485, 0.456, 0.406))  # LeRobot's default.
    assert not policy.requirements.language
    rows = np.arange(2)
    names = ("observation.images.front", "observation.state")
    seen = dict(zip(names, (dataset.frames(names[0], rows), dataset.vectors(names[1])[rows]), strict=True))
    chunk, other = (policy.act({**seen, "task": [task] * 2}) for task in ("go there", "go the other way"))
    assert chunk.shape == (2, 4, 2)
    assert np.isfinite(chunk).all()
    np.testing.assert_array_equal(other, chunk, "ACT reads no instructions")


def same_run(one: Path, other: Path) -> bool:
    """Return whether two runs wrote the same policy and losses."""
    weights = [(output / "policy" / "model.safetensors").read_bytes() for output in (one, other)]
    return weights[0] == weights[1] and losses(one) == losses(other)


def test_killed_run_resumes_to_the_same_weights(demos, dataset, tiny, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "killed"
    # The first checkpoint may be incomplete, because steps continue while it is written.
    script = KILLED.format(step=12, demos=str(demos), output=str(output))
    options = {"env": process_environment(), "capture_output": True, "text": True, "timeout": 500, "check": False}
    killed = subprocess.run([sys.executable, "-c", script], **options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (output / "policy").exists()
    train(dataset, tiny(), CONFIG, output, resume=True)
    assert same_run(output, finished)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files to imitate a full disk, with EFBIG in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Orbax's threads report failures to an event loop that is closed by then.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_run_resumes_after_a_full_disk(dataset, tiny, finished: Path, tmp_path, monkeypatch) -> None:
    output = tmp_path / "full"

    def stop_at_12(progress: TrainingProgress) -> None:
        if progress.step == 12:
            raise StopRun

    with pytest.raises(StopRun):
        train(dataset, tiny(), CONFIG, output, on_progress=stop_at_12)
    whole = {path.relative_to(output) for path in (output / "checkpoints").rglob("*")}
    expected = rf"{output}: cannot be written \(.+\); free space .*--resume=true"
    # The list of Orbax's arrays alone has 47 kB. The policy would fail first, so its write is skipped at first.
    monkeypatch.setattr(loop, "write_policy", lambda *args: None)
    for limit in (32 * 1024, (finished / "policy" / "model.safetensors").stat().st_size // 2):
        with files_of_at_most(limit), pytest.raises(OSError, match=expected):
            train(dataset, tiny(), CONFIG, output, resume=True)
        monkeypatch.undo()
        assert not (output / "policy" / "model.safetensors").exists()
        left = {path.relative_to(output) for path in (output / "checkpoints").rglob("*")}
        assert left >= whole, "complete checkpoints stay"
    train(dataset, tiny(), CONFIG, output, resume=True)
    assert same_run(output, finished)
    assert not [path for path in output.rglob("*") if ".orbax-checkpoint-tmp" in path.name]
    assert not [path for path in output.rglob(".*") if path.is_dir()]


def test_finished_run_resumes_unchanged(dataset: Dataset, tiny: MakeStart, finished: Path) -> None:
    before = (finished / "policy" / "model.safetensors").read_bytes()
    train(dataset, tiny(), CONFIG, finished, resume=True)
    assert (finished / "policy" / "model.safetensors").read_bytes() == before
    assert len(losses(finished)) == 6


def test_checkpoints_keep_their_policy_and_last_is_the_newest(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["000008", "000016", "000024", "last"]
    last = finished / "checkpoints" / "last"
    assert last.resolve().name == "000024"
    weights, policy = (
        lerobot_folder.read_checkpoint(folder).weights for folder in (last / "pretrained_model", finished / "policy")
    )
    early = lerobot_folder.read_checkpoint(finished / "checkpoints" / "000008" / "pretrained_model").weights
    assert all((array == policy[name]).all() for name, array in weights.items())
    assert any((array != weights[name]).any() for name, array in early.items())


def test_other_features_and_other_folders_are_refused(finished: Path, dataset, tiny, tmp_path) -> None:
    start = tiny(input_features={"observation.images.wrist": {"type": "VISUAL", "shape": [3, 16, 16]}})
    with pytest.raises(DatasetError, match=r"observation\.images\.wrist"):
        train(dataset, start, CONFIG, tmp_path / "run")
    with pytest.raises(TrainingError, match=r"holds a training; add --resume=true"):
        train(dataset, tiny(), CONFIG, finished)
    other = replace(CONFIG, batch_size=16, log_freq=1)
    with pytest.raises(TrainingError, match=r"\(policy\.dropout: was 0\.1, now 0\.2; training\.batch_size: was 8"):
        train(dataset, tiny(dropout=0.2), other, finished, resume=True)
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(TrainingError, match=r"exists and holds no training"):
        train(dataset, tiny(), CONFIG, tmp_path)


def test_loss_curve_is_a_picture_with_a_falling_line(finished: Path, tmp_path: Path) -> None:
    draw_curve(str(finished / "metrics.jsonl"), str(tmp_path / "again.png"))
    assert (tmp_path / "again.png").read_bytes() == (finished / "loss.png").read_bytes()
    picture = np.asarray(Image.open(finished / "loss.png").convert("RGB")).astype(int)
    blue = (picture[..., 2] > 140) & (picture[..., 0] < 60)
    columns = np.nonzero(blue.any(axis=0))[0]
    first, last = (np.nonzero(blue[:, column])[0].mean() for column in (columns[2], columns[-3]))
    assert last > first + 20, "the curve must fall; rows are counted from the top"


def test_training_starts_from_a_trained_policy(finished: Path, dataset, tmp_path: Path, config: MakeConfig) -> None:
    base = Path(shutil.copytree(finished / "policy", tmp_path / "base"))
    for path in base.glob("policy_*processor.json"):  # Base models have no statistics.
        values = json.loads(path.read_text())
        for step in values["steps"]:
            step.pop("state_file", None)
        path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="has no statistics"):
        lerobot_folder.read_checkpoint(base)
    # The learning rate of the first step is 0, because it warms up.
    with pytest.raises(StopRun):
        train(dataset, trained_policy(base), config(save_freq=1), tmp_path / "more", on_progress=stop)
    fine = lerobot_folder.read_checkpoint(tmp_path / "more" / "checkpoints" / "000001" / "pretrained_model").weights
    for name, array in lerobot_folder.read_checkpoint(finished / "policy").weights.items():
        np.testing.assert_allclose(fine[name], array, atol=1e-8, err_msg=name)


def test_non_finite_loss_ends_the_training(few: Few, tmp_path: Path, config: MakeConfig) -> None:
    mad = config(optimizer=OptimizerConfig(lr=1e30, grad_clip_norm=0.0), scheduler=None, save_freq=2)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf) within the \d steps before step \d.*learning rate"):
        train(*few, mad, tmp_path / "mad")
    assert not (tmp_path / "mad" / "policy").exists()


def test_policy_is_the_moving_average(few: Few, begun: Path, tmp_path: Path, config: MakeConfig) -> None:
    with pytest.raises(StopRun):
        train(*few, config(save_freq=1, ema_decay=0.5, optimizer=RULE), tmp_path / "average", on_progress=stop)
    runs = (begun, tmp_path / "average")
    plain, found = ([weights_at(run, step)["action_out.kernel"] for step in (1, 2, 3)] for run in runs)
    for step in (1, 2):  # The decay of an early step is (1 + step) / (10 + step).
        decay = min(0.5, (1 + step) / (10 + step))
        np.testing.assert_allclose(found[step], decay * found[step - 1] + (1 - decay) * plain[step], rtol=1e-5)


def test_tensorboard_reads_the_events(few: Few, tmp_path: Path, config: MakeConfig) -> None:
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    train(*few, config(tensorboard=True, optimizer=RULE), tmp_path / "run")
    (file,) = (tmp_path / "run" / "tensorboard").iterdir()
    data, found, at = file.read_bytes(), {}, 0
    while at < len(data):  # Length (8 bytes), its checksum (4), an event, its checksum (4).
        size = int.from_bytes(data[at : at + 8], "little")
        event = events.Event.FromString(data[at + 12 : at + 12 + size])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += size + 16
    assert found["train/loss", 24] == pytest.approx(losses(tmp_path / "run")[-1])
    assert ("train/learning_rate", 4) in found


def test_gradient_accumulation_equals_the_whole_batch(few: Few, begun: Path, tmp_path: Path, config) -> None:
    parts = config(save_freq=1, optimizer=RULE, gradient_accumulation_steps=4)
    with pytest.raises(StopRun):
        train(*few, parts, tmp_path / "parts", on_progress=stop)
    found, first = weights_at(tmp_path / "parts", 3), weights_at(begun, 1)
    for name, array in weights_at(begun, 3).items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)
    assert np.abs(found["action_out.kernel"] - first["action_out.kernel"]).max() > 1e-3


def test_bfloat16_keeps_float32_weights(few: Few, begun: Path, tmp_path: Path, config: MakeConfig) -> None:
    train(*few, config(dtype="bfloat16", steps=8, optimizer=RULE), tmp_path / "low")
    assert losses(tmp_path / "low")[0] == pytest.approx(losses(begun)[0], rel=0.05)
    assert losses(tmp_path / "low")[0] != losses(begun)[0]
    state = lerobot_folder.read_checkpoint(tmp_path / "low" / "policy").weights["action_out.kernel"]
    assert state.dtype == np.float32
    assert (state != state.astype("bfloat16").astype(np.float32)).any()


def test_invalid_settings_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"steps is 0.*ema_decay is 1\.0"):
        TrainingConfig(steps=0, ema_decay=1.0)
    with pytest.raises(ConfigError, match=r"lr is -1\.0.*betas is"):
        OptimizerConfig(lr=-1.0, betas=(0.9, 1.0))
