"""Demonstrations: what is recorded, that a seed decides it, and that nothing half-written is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from jaxmodels.data import open_dataset
from jaxmodels.errors import DatasetError
from robojax.sim.arm import CAMERA, FRAME, JOINTS, RATE, SimulatedArm
from robojax.sim.expert import Demonstration, demonstrate, demonstrations
from robojax.sim.tasks import PICK, TWO_CUBES, TaskName
from tests.unit.robojax.conftest import wait_until

pytestmark = pytest.mark.usefixtures("can_draw")
PICTURES = f"observation.images.{CAMERA}"


@pytest.fixture(scope="module")
def recording() -> Demonstration | None:
    return demonstrate(TaskName.PICK, 0)


def test_contents_of_a_demonstration(arm: SimulatedArm, recording: Demonstration):
    steps = len(recording.arrays["action"])
    assert {name: (array.shape, array.dtype.str) for name, array in recording.arrays.items()} == {
        "observation.state": ((steps, 6), "<f4"),
        "action": ((steps, 6), "<f4"),
        PICTURES: ((steps, *FRAME, 3), "|u1"),
    }
    arm.reset(0)
    np.testing.assert_array_equal(recording.arrays[PICTURES][0], arm.picture(CAMERA, *FRAME))
    assert recording.instruction == "pick up the red cube"
    # The units are those of the wire.
    actions = recording.arrays["action"]
    assert np.abs(actions[:, :5]).max() <= 100
    assert actions[:, 5].min() >= 0
    assert actions[:, 5].max() > 50, "the jaw opens"


def test_actions_are_the_experts_and_not_the_pushed_ones(recording: Demonstration):
    # A push is noise of about one wire unit per tick; the expert's own actions are smooth.
    assert np.abs(np.diff(recording.arrays["action"][:, :5], n=2, axis=0)).max() < 1.0
    assert np.abs(np.diff(recording.arrays["observation.state"][:38, :5], n=2, axis=0)).max() > 0.2


def test_a_dataset_has_a_task_for_each_episode_and_follows_from_its_seed(tmp_path: Path):
    folder = tmp_path / "two"
    with demonstrations(folder, TWO_CUBES, episodes=2, seed=11, workers=2) as recorded:
        seeds = [*recorded]
        assert not folder.exists(), "half a dataset must not look like one"
    assert seeds == [11, 12]
    dataset = open_dataset(folder)
    assert (dataset.fps, dataset.joint_names, dataset.robot_type) == (RATE, JOINTS, "so100_simulated")
    starts = [int(start) for start in dataset.starts]
    told = [dataset.tasks[dataset.task_index[start]] for start in starts]
    assert told == ["pick up the blue cube", "pick up the red cube"]
    again = demonstrate(TaskName.TWO_CUBES, 12)
    rows = slice(starts[1], None)
    np.testing.assert_array_equal(dataset.vectors("action")[rows], again.arrays["action"])
    np.testing.assert_array_equal(dataset.vectors("observation.state")[rows], again.arrays["observation.state"])
    frames = dataset.frames(PICTURES, [starts[1], starts[1] + 40])
    assert frames.shape == (2, *FRAME, 3)
    difference = np.abs(frames.astype(int) - again.arrays[PICTURES][[0, 40]])
    assert difference.mean() < 3, "a video is not exact"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two"]


def test_an_existing_folder_is_never_written_over(tmp_path: Path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(DatasetError, match="remove it first"), demonstrations(tmp_path, PICK, episodes=1):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_recording_that_fails_leaves_nothing(tmp_path: Path):
    def fail() -> None:
        with demonstrations(tmp_path / "pick", PICK, episodes=2, workers=1) as recorded:
            next(recorded)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_recording_leaves_nothing(tmp_path: Path, number: signal.Signals):
    """SIGTERM while the workers record, and Ctrl-C while they begin."""
    command = [sys.executable, "-m", "robojax.cli", "record-demo", str(tmp_path / "pick"), "--workers", "2"]
    # A background job of a shell ignores SIGINT, and its children inherit that.
    here = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, here)

    def is_time() -> bool:
        if number == signal.SIGTERM:
            return bool([*tmp_path.glob("pick.*.partial/**/*.mp4")])
        return "spawn_main" in "".join(map(_command_line, psutil.Process(running.pid).children()))

    with running:
        wait_until(lambda: is_time() or running.poll() is not None)
        assert running.poll() is None
        if number == signal.SIGTERM:
            running.send_signal(number)
        else:
            os.killpg(running.pid, number)
        _, told = running.communicate(timeout=60)
    assert running.returncode == 1
    assert ("ended after 0 of 200" if number == signal.SIGINT else "ended after") in told
    assert "Traceback" not in told
    assert not [*tmp_path.iterdir()]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
