"""Demonstrations: their content, determinism by seed, and cleanup of incomplete recordings."""

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
from tests.testing.waiting import wait_until

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
    # The arrays use the units of the wire.
    actions = recording.arrays["action"]
    assert np.abs(actions[:, :5]).max() <= 100
    assert actions[:, 5].min() >= 0
    assert actions[:, 5].max() > 50, "the jaw must open"


def test_recorded_actions_are_those_of_the_expert(recording: Demonstration):
    # A disturbance adds noise of about one wire unit per tick; the expert's own actions are smooth.
    assert np.abs(np.diff(recording.arrays["action"][:, :5], n=2, axis=0)).max() < 1.0
    assert np.abs(np.diff(recording.arrays["observation.state"][:38, :5], n=2, axis=0)).max() > 0.2


def test_dataset_has_a_task_per_episode_and_is_determined_by_seed(tmp_path: Path):
    folder = tmp_path / "two"
    with demonstrations(folder, TWO_CUBES, episodes=2, seed=11, workers=2) as recorded:
        seeds = [*recorded]
        assert not folder.exists(), "an incomplete dataset must not have the final name"
    assert seeds == [11, 12]
    dataset = open_dataset(folder)
    assert (dataset.fps, dataset.joint_names, dataset.robot_type) == (RATE, JOINTS, "so100_simulated")
    starts = [int(start) for start in dataset.starts]
    instructions = [dataset.tasks[dataset.task_index[start]] for start in starts]
    assert instructions == ["pick up the blue cube", "pick up the red cube"]
    again = demonstrate(TaskName.TWO_CUBES, 12)
    rows = slice(starts[1], None)
    np.testing.assert_array_equal(dataset.vectors("action")[rows], again.arrays["action"])
    np.testing.assert_array_equal(dataset.vectors("observation.state")[rows], again.arrays["observation.state"])
    frames = dataset.frames(PICTURES, [starts[1], starts[1] + 40])
    assert frames.shape == (2, *FRAME, 3)
    difference = np.abs(frames.astype(int) - again.arrays[PICTURES][[0, 40]])
    assert difference.mean() < 3, "video compression is lossy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two"]


def test_existing_folder_is_never_overwritten(tmp_path: Path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(DatasetError, match="remove it first"), demonstrations(tmp_path, PICK, episodes=1):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_failed_recording_leaves_no_files(tmp_path: Path):
    def fail() -> None:
        with demonstrations(tmp_path / "pick", PICK, episodes=2, workers=1) as recorded:
            next(recorded)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_recording_leaves_no_files(tmp_path: Path, number: signal.Signals):
    """Send SIGTERM while the workers record, and Ctrl-C while they start."""
    command = [sys.executable, "-m", "robojax.cli", "record-demo", str(tmp_path / "pick"), "--workers", "2"]
    # A background job of a shell ignores SIGINT, and its children inherit this.
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
        _, output = running.communicate(timeout=60)
    assert running.returncode == 1
    assert ("ended after 0 of 200" if number == signal.SIGINT else "ended after") in output
    assert "Traceback" not in output
    assert not [*tmp_path.iterdir()]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
