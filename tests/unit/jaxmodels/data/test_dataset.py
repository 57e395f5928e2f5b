import subprocess
import sys

import numpy as np
import pytest

from jaxmodels.data import open_dataset
from jaxmodels.errors import DatasetError
from tests.testing.models import edit_json
from tests.unit.jaxmodels.data.demonstrations import (
    ACTION,
    FRONT,
    LENGTHS,
    NAMES,
    ROWS,
    SIZE,
    STATE,
    TASKS,
    frames,
    level,
    write_video,
)

CODEC = 3  # Largest error of a grey level after h264.


def test_written_dataset_is_read(folder):
    dataset = open_dataset(folder)
    assert (dataset.fps, dataset.robot_type, dataset.joint_names) == (20, "arm", NAMES)
    assert len(dataset) == ROWS
    assert dataset.lengths.tolist() == list(LENGTHS)
    assert (dataset.starts.tolist(), dataset.ends.tolist()) == ([0, 6, 15], [6, 15, 20])
    assert {(one.name, one.type, one.shape) for one in dataset.features} == {
        ("observation.state", "STATE", (2,)),
        ("action", "ACTION", (2,)),
        (FRONT, "VISUAL", (3, *SIZE)),
    }
    np.testing.assert_array_equal(dataset.vectors("observation.state"), STATE)
    np.testing.assert_array_equal(dataset.vectors("action"), ACTION)
    assert dataset.tasks == ("pick", "place")
    assert [dataset.tasks[number] for number in dataset.task_index] == [
        task for task, length in zip(TASKS, LENGTHS, strict=True) for _ in range(length)
    ]


def has_frames(dataset, positions, rows=None):
    """Return whether the frames at some positions have the levels of their rows."""
    found = dataset.frames(FRONT, np.asarray(positions)).astype(int)
    levels = np.array([level(row) for row in (positions if rows is None else rows)])
    return found.shape == (len(levels), *SIZE, 3) and np.abs(found - levels[:, None, None, None]).max() <= CODEC


def test_frames_have_the_requested_order(folder):
    assert has_frames(open_dataset(folder), [19, 0, 7, 8, 8, 5, 6, 14, 3, 15])


def test_selected_episodes_are_renumbered_from_zero(folder):
    dataset = open_dataset(folder, episodes=[2, 0])
    assert dataset.episodes == (0, 2)
    rows = [*range(6), *range(15, 20)]
    np.testing.assert_array_equal(dataset.vectors("action"), ACTION[rows])
    assert has_frames(dataset, np.arange(11), rows)


def test_window_repeats_the_ends_of_its_episode_and_marks_them(folder):
    values, is_pad = open_dataset(folder).window("action", [4, 6], [-1, 0, 1, 2])
    np.testing.assert_array_equal(values, ACTION[[[3, 4, 5, 5], [6, 6, 7, 8]]])
    assert is_pad.tolist() == [[False, False, False, True], [True, False, False, False]]


def test_statistics_of_numbers_equal_numpy(folder):
    found = open_dataset(folder).statistics()["action"]
    expected = {"mean": ACTION.mean(0), "std": ACTION.std(0), "min": ACTION.min(0), "max": ACTION.max(0)}
    expected |= {f"q{percent:02d}": np.quantile(ACTION, percent / 100, axis=0) for percent in (1, 10, 50, 90, 99)}
    assert {*expected, "count"} == set(found)
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert found["count"] == [ROWS]


def test_statistics_of_pictures_are_computed_from_pixels(folder):
    found = open_dataset(folder).statistics()[FRONT]
    pixels = frames(range(ROWS)) / 255
    for name, value in (("mean", pixels.mean()), ("std", pixels.std()), ("min", pixels.min()), ("max", pixels.max())):
        assert found[name].shape == (3, 1, 1)
        np.testing.assert_allclose(found[name], value, atol=CODEC / 255, err_msg=name)


def test_statistics_are_read_or_computed_for_selected_episodes(copy):
    folder = copy("v3.0")
    chosen = open_dataset(folder, episodes=[1]).statistics()
    np.testing.assert_allclose(chosen["action"]["mean"], ACTION[6:15].mean(0), rtol=1e-5)
    assert chosen[FRONT]["count"] == [9]
    wrong = {"mean": [7.0, 8.0], "std": [1.0, 1.0], "min": [0, 0], "max": [9, 9], "count": [20]}
    edit_json(folder / "meta/stats.json", action=wrong)
    found = open_dataset(folder).statistics()["action"]
    assert found["mean"].tolist() == [7, 8]
    np.testing.assert_allclose(found["q50"], np.quantile(ACTION, 0.5, axis=0), rtol=1e-5)  # Not in the file.


@pytest.mark.parametrize("options", [{"g": "250"}, {"g": "250", "bf": "3"}, {"g": "1"}], ids=str)
def test_frame_is_found_for_any_position_of_its_key_frame(copy, options):
    folder = copy("v2.1")
    write_video(folder / f"videos/chunk-000/{FRONT}/episode_000001.mp4", range(6, 15), **options)
    dataset = open_dataset(folder)
    for rows in ([14, 6, 10], [12], [7, 13], [6]):
        assert has_frames(dataset, rows)


def test_fingerprint_depends_on_files_and_episodes(copy):
    folder = copy("v2.1")
    first = open_dataset(folder).fingerprint
    assert open_dataset(folder).fingerprint == first
    assert open_dataset(folder, episodes=[0, 1]).fingerprint != first
    write_video(folder / f"videos/chunk-000/{FRONT}/episode_000001.mp4", range(6, 15), crf="40")
    assert open_dataset(folder).fingerprint != first


def test_invalid_requests_are_refused(folder):
    dataset = open_dataset(folder)
    for ask, message in (
        (lambda: dataset.vectors("reward"), "it has observation.state"),
        (lambda: dataset.vectors(FRONT), "is a camera; call frames"),
        (lambda: dataset.frames("action", np.array([0])), "is not a camera"),
        (lambda: open_dataset(folder, episodes=[3]), "it has 0 to 2"),
        (lambda: open_dataset(folder, episodes=[]), "wanted some of 0 to 2"),
        (lambda: open_dataset(folder, revision="main"), "a revision is of a repo"),
    ):
        with pytest.raises(DatasetError, match=message):
            ask()
    with pytest.raises(IndexError, match="there are 0 to 19"):
        dataset.frames(FRONT, np.array([20]))


def test_missing_pyarrow_names_the_package_to_install():
    code = "import sys; sys.modules['pyarrow'] = None; from jaxmodels.data import open_dataset"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "pyarrow: pip install -e '.[training]'" in run.stderr
