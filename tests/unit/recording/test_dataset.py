import io
import json
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from service.recording.dataset import write_dataset
from service.recording.library import open_source
from service.recording.steps import RecordingError, decode_frame
from tests.testing.lerobots_python import LEROBOT, WITHOUT, lerobot
from tests.testing.recordings import level, subject


@pytest.fixture
def dataset(record, tmp_path):
    source = open_source(record(episodes=2, skipped=(4,)))
    write_dataset(tmp_path / "dataset", source.info, source.steps())
    return tmp_path / "dataset"


def test_a_dataset_has_the_files_and_info_of_version_3(dataset):
    files = {str(path.relative_to(dataset)) for path in dataset.rglob("*") if path.is_file()}
    assert files == {
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "data/chunk-000/file-000.parquet",
        "videos/observation.images.front/chunk-000/file-000.mp4",
        "videos/observation.images.top/chunk-000/file-000.mp4",
    }
    info = json.loads((dataset / "meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0"
    assert (info["robot_type"], info["fps"]) == ("so100_follower", 20)
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (2, 24, 1)
    assert info["splits"] == {"train": "0:2"}
    assert info["data_path"] == "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    assert info["video_path"] == "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    names = [f"{name}.pos" for name in ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")]
    assert info["features"]["action"] == {"dtype": "float32", "shape": [6], "names": [*names, "gripper.pos"]}
    image = info["features"]["observation.images.front"]
    assert (image["dtype"], image["shape"], image["info"]["video.codec"]) == ("video", [48, 64, 3], "h264")
    assert set(info["features"]) == {
        *("observation.state", "action", "observation.images.front", "observation.images.top"),
        *("timestamp", "frame_index", "episode_index", "index", "task_index"),
    }


def test_each_episode_has_its_recorded_task(record, tmp_path):
    source = open_source(record(episodes=2))
    steps = (replace(step, task="" if step.episode else "wave") for step in source.steps())
    write_dataset(tmp_path / "dataset", source.info, steps)
    read = open_source(tmp_path / "dataset")
    assert {(step.episode, step.task) for step in read.steps()} == {(0, "wave"), (1, "unnamed")}


def test_rows_have_indices_of_frames_episodes_and_tasks(dataset):
    table = parquet.read_table(dataset / "data/chunk-000/file-000.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert kinds["action"] == kinds["observation.state"] == "fixed_size_list<element: float>[6]"
    assert (kinds["timestamp"], kinds["index"], kinds["task_index"]) == ("float", "int64", "int64")
    rows = table.to_pylist()
    assert [row["index"] for row in rows] == list(range(24))
    assert [row["frame_index"] for row in rows] == [*range(12), *range(12)]
    assert [row["episode_index"] for row in rows] == [0] * 12 + [1] * 12
    assert rows[15]["timestamp"] == pytest.approx(3 / 20)
    assert rows[4]["action"] == rows[3]["action"]
    table = parquet.read_table(dataset / "meta/tasks.parquet")
    assert table.to_pylist() == [{"task_index": 0, "__index_level_0__": "pick up the cube"}]
    assert json.loads(table.schema.metadata[b"pandas"])["index_columns"] == ["__index_level_0__"]


def test_episodes_locate_their_rows_and_frames(dataset):
    one, two = parquet.read_table(dataset / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert (one["dataset_from_index"], one["dataset_to_index"], one["length"]) == (0, 12, 12)
    assert (two["dataset_from_index"], two["dataset_to_index"], two["tasks"]) == (12, 24, ["pick up the cube"])
    assert two["videos/observation.images.front/from_timestamp"] == pytest.approx(0.6)
    assert two["videos/observation.images.front/to_timestamp"] == pytest.approx(1.2)
    for group in ("data", "meta/episodes", "videos/observation.images.top"):
        assert (two[f"{group}/chunk_index"], two[f"{group}/file_index"]) == (0, 0)
    assert np.shape(two["stats/observation.images.front/mean"]) == (3, 1, 1)
    assert len(two["stats/action/q99"]) == 6


def test_statistics_cover_rows_and_frames(dataset):
    stats = json.loads((dataset / "meta/stats.json").read_text())
    assert set(stats["action"]) == {"min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"}
    actions = [number + 0.5 for number in (0, 1, 2, 3, 3, *range(5, 12))]
    assert stats["action"]["mean"] == pytest.approx([np.mean(actions)] * 6)
    assert stats["action"]["std"] == pytest.approx([np.std(actions)] * 6)
    assert stats["action"]["count"] == stats["index"]["count"] == [24]
    front = stats["observation.images.front"]
    assert front["min"][0][0][0] == pytest.approx(level(0) / 255, abs=0.01)
    assert front["max"][2][0][0] == pytest.approx(level(11) / 255, abs=0.01)


@pytest.mark.parametrize(("rate", "size"), [(20.0, (48, 64)), (12.5, (49, 65))])
def test_every_video_frame_has_the_time_of_its_row(record, tmp_path, rate, size):
    source = open_source(record(about=subject(rate=rate), episodes=1, size=size))
    writer = write_dataset(tmp_path / "dataset", source.info, source.steps())
    with av.open(str(tmp_path / "dataset/videos/observation.images.front/chunk-000/file-000.mp4")) as video:
        frames = list(video.decode(video=0))
    assert len(frames) == writer.frames
    assert (frames[0].height, frames[0].width) == size
    for number, shown in enumerate(frames):
        assert shown.pts * shown.time_base == pytest.approx(number / Fraction(rate), abs=1e-4)


def test_a_dataset_read_back_equals_the_recording(record, dataset):
    recorded, read = (list(open_source(path).steps()) for path in (record("again", skipped=(4,)), dataset))
    assert [(step.episode, step.index) for step in read] == [(step.episode, step.index) for step in recorded]
    for expected, actual in zip(recorded, read, strict=True):
        np.testing.assert_array_equal(expected.action, actual.action)
        np.testing.assert_array_equal(expected.state, actual.state)
        for camera in ("front", "top"):
            pixels = [step.pictures[camera].pixels.astype(int) for step in (expected, actual)]
            assert np.abs(pixels[0] - pixels[1]).max() <= 4


def test_an_empty_recording_leaves_no_files(record, tmp_path):
    source = open_source(record(ticks=0))
    with pytest.raises(RecordingError, match="no step for a dataset"):
        write_dataset(tmp_path / "empty", source.info, source.steps())
    assert not list(tmp_path.glob("empty*"))


def test_a_path_without_a_recording_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "a.mcap").write_bytes(b"not a recording")
    (tmp_path / "folder").mkdir()
    for name, message in (("a.mcap", "robojax serve"), ("folder", "LeRobotDataset v3"), ("nothing", "is not there")):
        with pytest.raises(RecordingError, match=message):
            open_source(tmp_path / name)


READ = """
import sys, warnings
warnings.simplefilter("ignore")
from lerobot.datasets.lerobot_dataset import LeRobotDataset
found = LeRobotDataset("robojax/arm", root=sys.argv[1], video_backend="pyav")
for number in range(len(found)):
    row = found[number]
    assert row["index"].item() == number and row["task"] == "pick up the cube"
    assert abs(row["observation.images.front"].mean().item() * 255 - (20 + 5 * row["frame_index"].item())) < 8
assert found.meta.stats["observation.images.front"]["mean"].shape == (3, 1, 1)
part = LeRobotDataset("robojax/arm", root=sys.argv[1], video_backend="pyav", episodes=[1],
                      delta_timestamps={"action": [0, 1 / found.fps]})
assert part[11]["action_is_pad"].tolist() == [False, True]
print(len(found), found.num_episodes, found.meta.robot_type)
"""


@pytest.mark.skipif(LEROBOT is None, reason=WITHOUT)
def test_lerobot_reads_the_dataset(dataset):
    assert lerobot("-c", READ, dataset, timeout=100).strip() == "24 2 so100_follower"


def test_a_frame_that_is_not_a_colour_image_is_refused():
    file = io.BytesIO()
    Image.fromarray(np.full((4, 6), 900, np.uint16)).save(file, "PNG")
    with pytest.raises(RecordingError, match="a frame is a 16-bit gray picture"):
        decode_frame(file.getvalue())
