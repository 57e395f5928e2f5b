import json
from pathlib import Path, PurePath

import numpy as np
import pyarrow.parquet as parquet
import pytest

from jaxmodels.data import Dataset, DatasetWriter, open_dataset
from jaxmodels.errors import DatasetError
from tests.unit.jaxmodels.data.demonstrations import ACTION, FRONT, LENGTHS, NAMES, STATE, frames


def step(**more):
    values = {"observation.state": np.zeros(2), "action": np.zeros(2), FRONT: frames(range(1))[0]}
    return values | more


def episode(rows):
    return {"observation.state": STATE[:rows], "action": ACTION[:rows], FRONT: frames(range(rows))}


def writer(folder, **more):
    return DatasetWriter(folder, **{"fps": 20, "joint_names": NAMES, "cameras": ["front"]} | more)


def test_each_episode_has_its_task(written):
    rows = parquet.read_table(written["v3.0"] / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["tasks"] for row in rows] == [["pick"], ["place"], ["pick"]]
    assert [row["length"] for row in rows] == list(LENGTHS)
    info = json.loads((written["v3.0"] / "meta/info.json").read_text())
    assert (info["total_tasks"], info["total_episodes"], info["total_frames"]) == (2, 3, 20)
    table = parquet.read_table(written["v3.0"] / "data/chunk-000/file-000.parquet")
    assert table["task_index"].to_pylist() == [0] * 6 + [1] * 9 + [0] * 5


def test_single_steps_equal_a_whole_episode(written, tmp_path):
    shown = frames(range(6))
    with writer(tmp_path / "one") as one:
        for row in range(6):
            one.add({"observation.state": STATE[row], "action": ACTION[row], FRONT: shown[row]})
        one.end_episode("pick")
    assert (one.episodes, one.frames) == (1, 6)
    both = [open_dataset(tmp_path / "one"), open_dataset(written["v3.0"], episodes=[0])]
    for name in ("observation.state", "action"):
        np.testing.assert_array_equal(*(dataset.vectors(name) for dataset in both))
    np.testing.assert_array_equal(*(dataset.frames(FRONT, np.arange(6)) for dataset in both))


@pytest.mark.parametrize("path", ["cubes", "made/cubes/", PurePath("cubes")])
def test_path_may_be_text_or_any_path_object(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with writer(path) as one:
        one.add(step())
        one.end_episode("pick")
    assert (tmp_path / path / "meta/info.json").is_file()
    assert len(open_dataset(path)) == len(Dataset(path)) == 1
    with pytest.raises(DatasetError, match="cubes is there already"):
        writer(path)


def test_environment_state_is_kept(tmp_path):
    with writer(tmp_path / "one", cameras=(), environment_state=["x", "y", "z"]) as one:
        values = {"observation.state": STATE[:3], "action": ACTION[:3], "observation.environment_state": np.eye(3)}
        one.add_episode(values, "push")
    dataset = open_dataset(tmp_path / "one")
    assert dataset.feature("observation.environment_state").type == "ENV"
    np.testing.assert_array_equal(dataset.vectors("observation.environment_state"), np.eye(3))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"action": np.zeros(3)}, "wanted 2 finite numbers"),
        ({"action": np.array([0, np.nan])}, "wanted 2 finite numbers"),
        ({"action": np.array(["a", "b"])}, "wanted 2 finite numbers"),
        ({FRONT: np.zeros((32, 48, 3), np.float32)}, "wanted uint8"),
        ({FRONT: np.zeros((3, 32, 48), np.uint8)}, "wanted uint8"),
        ({"observation.images.top": frames(range(1))[0]}, "a step has"),
    ],
)
def test_invalid_step_is_refused_and_leaves_no_files(tmp_path, more, message):
    def write():
        with writer(tmp_path / "one") as one:
            one.add(step())
            one.add(step(**more))

    with pytest.raises(DatasetError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("steps", "task", "message"),
    [
        (0, "pick", "of 0 steps"),
        (1, " ", "the task ' '"),
        (1, None, "belong to no episode"),
        (0, None, "the dataset has no episodes"),
    ],
)
def test_episode_needs_steps_and_a_task(tmp_path, steps, task, message):
    def write():
        with writer(tmp_path / "one") as one:
            for _ in range(steps):
                one.add(step())
            if task is not None:
                one.end_episode(task)

    with pytest.raises(DatasetError, match=message):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fps": 0}, "a rate of 0"),
        ({"fps": True}, "a rate of True; wanted a number above 0, 10000 at most"),
        ({"fps": 1e6}, "a rate of 1000000.0; wanted a number above 0, 10000 at most"),
        ({"joint_names": ()}, "without joints"),
        ({"joint_names": "ab"}, "joint_names are 'ab'; wanted a list of names"),
        ({"joint_names": ["a", "a"]}, "joint_names are .*; wanted a list of names, each once"),
        ({"cameras": "front"}, "cameras are 'front'; wanted a list of names"),
        ({"cameras": ["../front"]}, "no name for a feature"),
        ({"cameras": ["a/b"]}, "no name for a feature"),
    ],
)
def test_invalid_dataset_is_refused_before_writing(tmp_path, more, message):
    with pytest.raises(DatasetError, match=message):
        writer(tmp_path / "one", **more)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_reported_and_leaves_no_files(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"), writer(tmp_path / "one") as one:
        one.add_episode(episode(3), "pick")
    assert list(tmp_path.iterdir()) == []


def test_episode_may_be_one_step_of_equally_long_features(tmp_path):
    with pytest.raises(DatasetError, match="differ in length"), writer(tmp_path / "one") as one:
        one.add_episode(episode(3) | {"action": ACTION[:4]}, "pick")
    with writer(tmp_path / "one") as one:
        for _ in range(2):
            one.add_episode(episode(1), "go")
    assert open_dataset(tmp_path / "one").frames(FRONT, np.arange(2)).shape == (2, 32, 48, 3)
