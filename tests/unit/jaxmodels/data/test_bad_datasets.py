"""Broken and hostile datasets are refused with the reason."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from jaxmodels.data import DatasetWriter, metadata, open_dataset, table_files
from jaxmodels.errors import DatasetError
from tests.testing.models import edit_json
from tests.unit.jaxmodels.data.demonstrations import FPS, FRONT, ROWS, lines, png, write_video

VIDEO = f"videos/chunk-000/{FRONT}/episode_000001.mp4"
TIMES = [row / FPS for row in range(9)]


def refused(folder, *message, ask=lambda dataset: None):
    with pytest.raises(DatasetError) as error:
        ask(open_dataset(folder))
    assert all(text in str(error.value) for text in message), str(error.value)
    return str(error.value)


def look(dataset):
    dataset.frames(FRONT, np.arange(ROWS))


def replaced(table, name, values, kind=None):
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


def rewrite(path, change):
    """Replace the table of a file by a changed table."""
    parquet.write_table(change(parquet.read_table(path)), path)


def describe(folder, **columns):
    """Replace columns of the episode table."""

    def change(table):
        for name, values in columns.items():
            table = replaced(table, name, values, table.schema.field(name).type)
        return table

    rewrite(folder / "meta/episodes/chunk-000/file-000.parquet", change)


def features(folder):
    return json.loads((folder / "meta/info.json").read_text())["features"]


def test_other_folder_is_refused_with_the_expected_kinds(tmp_path):
    refused(tmp_path, "no meta/info.json there", "LeRobotDataset v3.0 or v2.1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed"),
        ("[]", "wanted a JSON object"),
        ('{"fps": NaN}', "NaN"),
        ("[" * 100_000, "nested too deeply"),
        ('{"codebase_version": "v3.0"}', "fps is None"),
        ('{"codebase_version": "v1.6"}', "'v1.6'; wanted v3.0 or v2.1"),
        ('{"codebase_version": ["v3.0"]}', "wanted v3.0 or v2.1"),
    ],
)
def test_malformed_description_is_refused(copy, text, message):
    folder = copy("v3.0")
    (folder / "meta/info.json").write_text(text)
    refused(folder, message)


def test_all_errors_of_a_description_are_reported_at_once(copy):
    folder = copy("v3.0")
    entries = features(folder) | {"observation.images.b": {"dtype": "video", "shape": [4, 4], "names": None}}
    entries["observation.images.c"] = {"shape": [4, 4, 3]}
    del entries["action"]
    edit_json(folder / "meta/info.json", fps=0, total_frames="many", features=entries)
    refused(folder, "fps is 0", "total_frames is 'many'", "'observation.images.b': shape is [4, 4]", "'dtype'")


BAD_NAMES = ("../../etc/passwd", "observation.images.a/b", ".hidden", "a\\b", "a" * 200, "a\nb")
HUGE = {"dtype": "video", "shape": [1 << 20, 1 << 20, 3], "names": ["height", "width", "channel"]}
WRONG_TOTAL = f"has 3 episodes and {ROWS + 1} frames; meta/episodes describes 3 and {ROWS}"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(("v3.0", {"features": {name: HUGE}}, "the name cannot be used") for name in BAD_NAMES),
        ("v3.0", {"features": {FRONT: HUGE}}, f"frames of {1 << 20}x{1 << 20} pixels"),
        ("v3.0", {"total_frames": ROWS + 1}, WRONG_TOTAL),
        ("v2.1", {"total_frames": ROWS + 1}, WRONG_TOTAL),
    ],
)
def test_invalid_description_is_refused(copy, name, change, message):
    folder = copy(name)
    entries = features(folder) | change.get("features", {})
    edit_json(folder / "meta/info.json", **{**change, "features": entries})
    refused(folder, message)


def test_paths_in_a_description_are_not_followed(copy):
    folder = copy("v3.0")
    edit_json(folder / "meta/info.json", data_path="../../../etc/passwd", video_path="/dev/zero")
    look(open_dataset(folder))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("v3.0", "meta/tasks.parquet"),
        ("v3.0", "meta/episodes/chunk-000/file-000.parquet"),
        ("v3.0", "data/chunk-000/file-000.parquet"),
        ("v3.0", f"videos/{FRONT}/chunk-000/file-000.mp4"),
        ("v2.1", "meta/tasks.jsonl"),
        ("v2.1", "meta/episodes.jsonl"),
        ("v2.1", "data/chunk-000/episode_000001.parquet"),
        ("v2.1", VIDEO),
    ],
)
@pytest.mark.parametrize("how", ["missing", "garbled", "cut off"])
def test_missing_or_malformed_file_is_named(copy, name, file, how):
    folder = copy(name)
    path = folder / file
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    else:
        path.write_bytes(b"\x00nonsense" * 99)
    message = refused(folder, ask=look)
    assert path.name in message or "meta/episodes" in message


EPISODES = [{"episode_index": 0, "length": 6}, {"episode_index": 2, "length": 14}]


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        ("episodes", [{"episode_index": 0, "length": 20}], "has 3 episodes"),
        ("episodes", EPISODES, "not numbered 0, 1, 2"),
        ("episodes", [{"episode_index": 0}], "'length'"),
        ("episodes", [{"episode_index": "../x", "length": 1}], "episode_index, which is ../x"),
        ("episodes", [{"episode_index": 0, "length": 0}], "length, which is 0"),
        ("episodes", [{"episode_index": 0, "length": 1 << 40}], "length, which is"),
        ("episodes", [{"episode_index": 0, "length": 1}] * 3, "not numbered"),
        ("episodes", [[1]], "line 1 holds a list"),
        ("tasks", [], "tasks.jsonl"),
        ("tasks", [{"task_index": 1, "task": "a"}], "tasks.jsonl"),
        ("tasks", [{"task_index": 0, "task": None}], "tasks.jsonl"),
        ("tasks", [{"task_index": 0, "task": "a"}] * 2, "tasks.jsonl"),
        ("tasks", [{"task_index": 0, "task": "pick"}], "rows have tasks 0 to 1; there are 0 to 0"),
    ],
)
def test_invalid_rows_of_episodes_and_tasks_are_refused(copy, file, rows, message):
    folder = copy("v2.1")
    lines(folder / f"meta/{file}.jsonl", rows)
    refused(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(1), "found 8 rows of episode 1, wanted 9"),
        (lambda table: pa.concat_tables([table, table.slice(8)]), "found 10 rows of episode 1"),
        (lambda table: table.take(list(reversed(range(9)))), "frame_index of episode 1 is 8 in its row 0"),
        (lambda table: replaced(table, "frame_index", [0, 1, 3, 2, *range(4, 9)]), "episode 1 is 3 in its row 2"),
        (lambda table: replaced(table, "timestamp", [*TIMES[:5], TIMES[3], *TIMES[6:]]), "timestamp of episode 1 is"),
        (lambda table: replaced(table, "timestamp", [*TIMES[:8], TIMES[7]]), "0.35 in its row 8, after 0.35"),
        (lambda table: replaced(table, "index", [6, 7, 9, 8, *range(10, 15)]), "index of episode 1 is 8 in its row 3"),
        (lambda table: replaced(table, "index", list(range(9))), "index of episode 1 is 0 in its row 0, after 5"),
        (lambda table: table.drop(["episode_index"]), "has no column episode_index"),
        (lambda table: table.drop(["action"]), "has no column action"),
        (lambda table: replaced(table, "action", [[1.0, 2.0]] * 8 + [[1.0]]), "do not have 2 numbers"),
        (lambda table: replaced(table, "action", [[1.0, None]] * 9), "rows are empty or"),
        (lambda table: replaced(table, "action", [["a", "b"]] * 9), "is not a number"),
        (lambda table: replaced(table, "action", [[1.0, float("nan")]] * 9), "wanted finite numbers"),
        (lambda table: replaced(table, "timestamp", [float("nan")] * 9), "timestamp is not finite"),
    ],
)
def test_invalid_rows_are_refused(copy, change, message):
    folder = copy("v2.1")
    rewrite(folder / "data/chunk-000/episode_000001.parquet", change)
    refused(folder, message, ask=lambda dataset: dataset.vectors("action"))


def test_rows_without_an_index_are_read(copy):
    folder = copy("v2.1")
    for path in sorted(folder.glob("data/*/*.parquet")):
        rewrite(path, lambda table: table.drop(["index"]))
    assert len(open_dataset(folder)) == ROWS


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([*range(6, 15), *range(6), *range(15, 20)], "the rows of episodes 0 and 1 are not in the order"),
        ([*range(5), 6, 5, *range(7, 20)], "the rows of episode 0 are not one after another"),
        ([*range(15), 15, 17, 16, 18, 19], "frame_index of episode 2 is 2 in its row 1"),
    ],
)
def test_rows_out_of_order_name_their_episode(copy, order, message):
    folder = copy("v3.0")
    rewrite(folder / "data/chunk-000/file-000.parquet", lambda table: table.take(order))
    refused(folder, "data/chunk-000/file-000.parquet", message)
    if "of episode 0 are" in message:
        with pytest.raises(DatasetError, match=message):
            open_dataset(folder, episodes=[0])


def test_files_out_of_the_order_of_episodes_are_refused(copy):
    folder = copy("v3.0")
    data = folder / "data/chunk-000/file-000.parquet"
    table = parquet.read_table(data)
    parquet.write_table(table.take([*range(6), *range(15, 20)]), data)
    parquet.write_table(table.slice(6, 9), data.with_name("file-001.parquet"))
    describe(folder, **{"data/file_index": [0, 1, 0]})
    refused(folder, "episode 2 is in data/chunk-000/file-000.parquet", "in the order of the episodes")


@pytest.mark.parametrize("name", ["v3.0", "v2.1", "v2.1 with pictures"])
@pytest.mark.parametrize("fps", [10, 19.98, 20.02, 25, 100])
def test_rate_that_contradicts_the_timestamps_is_refused(copy, name, fps):
    folder = copy(name)
    edit_json(folder / "meta/info.json", fps=fps)
    file = "data/chunk-000/file-000.parquet" if name == "v3.0" else "data/chunk-000/episode_000000.parquet"
    refused(folder, f"meta/info.json says fps {fps}", f"of episode 0 in {file} are 0.05 s apart, 20 per second")


@pytest.mark.parametrize("fps", [20.000001, 20.005])
def test_rate_close_to_the_timestamps_is_accepted(copy, fps):
    folder = copy("v3.0")
    edit_json(folder / "meta/info.json", fps=fps)
    assert open_dataset(folder).fps == fps


def test_episode_with_another_rate_is_refused(copy):
    folder = copy("v2.1")
    times = (np.arange(9) / 10).astype(np.float32)
    rewrite(folder / "data/chunk-000/episode_000001.parquet", lambda table: replaced(table, "timestamp", times))
    refused(folder, "says fps 20", "of episode 1 in data/chunk-000/episode_000001.parquet are 0.1 s apart")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda times: times + np.random.default_rng(0).normal(0, 0.004, len(times)),
        lambda times: np.round(times, 3),
        lambda times: np.where(times > times[700], times + 0.5, times),
        lambda times: times.astype(np.float32),
    ],
    ids=["jitter", "milliseconds", "one gap", "float32"],
)
def test_jitter_rounding_and_gaps_do_not_contradict_the_rate(tmp_path, spoil):
    count, folder = 6000, tmp_path / "long"
    with DatasetWriter(folder, fps=30, joint_names=["a"]) as writer:
        writer.add_episode({"observation.state": np.zeros((count, 1)), "action": np.zeros((count, 1))}, "hold")
    times = spoil(np.arange(count) / 30).astype(np.float32)
    rewrite(folder / "data/chunk-000/file-000.parquet", lambda table: replaced(table, "timestamp", times))
    assert len(open_dataset(folder)) == count
    edit_json(folder / "meta/info.json", fps=29.97)
    refused(folder, "says fps 29.97", "of episode 0")


FROM, TO = (f"videos/{FRONT}/{end}_timestamp" for end in ("from", "to"))


@pytest.mark.parametrize(
    ("begins", "ends", "message"),
    [
        # The written spans have 6, 9 and 5 frames at 20 per second: 0 to 0.3 s, to 0.75 s, to 1 s.
        ((0, 0.3, 0.3), (0.3, 0.75, 0.55), ("episode 2", "0.300 s to 0.550 s", "episode 1 has the frames up to 0.750")),
        ((0, 0.275, 0.75), (0.3, 0.725, 1), ("episode 1", "0.275 s to 0.725 s", "episode 0 has the frames up to 0.3")),
        ((0, 0.3, 0.3), (0.3, 0.75, 0.75), ("episode 2", "9.0 frames", "the episode has 5 rows")),
        ((0.05, 0.3, 0.75), (0.35, 0.75, 1), ("episode 1", "0.300 s to 0.750 s", "episode 0 has the frames up to")),
        ((0.45, 0, 0.75), (0.75, 0.45, 1), ("episode 1", "0.000 s to 0.450 s", "episode 0 has the frames up to")),
        ((0, 0.75, 0.75), (0.3, 0.3, 1), ("episode 1", "-9.0 frames", "the episode has 9 rows")),
        ((0, float("nan"), 0.75), (0.3, 0.75, 1), (f"{FROM}, which is nan",)),
    ],
)
@pytest.mark.parametrize("episodes", [None, [0]])
def test_overlapping_or_mismatching_video_spans_are_refused(copy, begins, ends, message, episodes):
    folder = copy("v3.0")
    describe(folder, **{FROM: begins, TO: ends})
    with pytest.raises(DatasetError) as error:
        open_dataset(folder, episodes=episodes)
    named = (f"camera {FRONT}", f"videos/{FRONT}/chunk-000/file-000.mp4") if len(message) > 1 else ()
    assert all(text in str(error.value) for text in (*message, *named)), str(error.value)


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ((0, 0.31, 0.74), (0.3, 0.76, 1.01)),  # Touching within half a frame.
        ((0, 0.35, 0.85), (0.3, 0.8, 1.1)),  # Frames between the spans, as after a dropped episode.
        ((0, 0.3, 0.75), (0.3, 0.75, 1.05)),  # A last frame without a row.
    ],
)
def test_video_spans_that_touch_or_skip_frames_are_accepted(copy, begins, ends):
    folder = copy("v3.0")
    describe(folder, **{FROM: begins, TO: ends})
    assert len(open_dataset(folder)) == ROWS


@pytest.mark.parametrize("name", ["v3.0", "v2.1"])
def test_timestamps_shifted_against_the_video_are_refused(copy, name):
    folder = copy(name)
    for path in sorted(folder.glob("data/*/*.parquet")):
        table = parquet.read_table(path)
        episode, times = table["episode_index"].to_numpy(), table["timestamp"].to_numpy()
        parquet.write_table(replaced(table, "timestamp", (times + (episode == 1)).astype(np.float32)), path)
    refused(folder, "timestamps of episode 1 are 1.000 s to 1.400 s", f"(camera {FRONT})", ".mp4")


def test_span_that_is_half_a_frame_late_is_refused(copy):
    folder = copy("v3.0")
    describe(folder, **{FROM: (0.025, 0.325, 0.775), TO: (0.325, 0.775, 1.025)})
    refused(folder, "has no frame at 0.025 s", "or its span is shifted", ask=look)


def test_file_that_claims_too_many_rows_is_not_read(copy, monkeypatch):
    monkeypatch.setattr(table_files, "MAX_ROWS", 8)
    refused(copy("v2.1"), "9 rows; a file of this size has at most 8")


@pytest.mark.parametrize(
    ("last", "options", "message"),
    [
        (12, {}, ("episode_000001.mp4 has no frame at 0.300 s", "shorter than its rows")),
        (15, {"size": (48, 32)}, ("has frames of 48x32; the dataset has 32x48",)),
    ],
)
def test_video_of_another_length_or_size_is_refused(copy, last, options, message):
    folder = copy("v2.1")
    write_video(folder / VIDEO, range(6, last), **options)
    refused(folder, *message, ask=look)


def test_unsupported_codec_is_not_decoded(copy):
    folder = copy("v2.1")
    write_video(folder / VIDEO, range(6, 15), codec="mpeg4")
    message = refused(folder, "episode_000001.mp4", ask=look)
    assert "wanted one of av1, h264" in message or "cannot be read as a video" in message


def test_playlist_is_not_read_as_a_video(copy):
    folder = copy("v2.1")
    (folder / VIDEO).write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")
    refused(folder, "cannot be read as a video", ask=look)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        (b"", "is an empty file"),
        (b"GIF89a" + bytes(50), "is a GIF file; wanted 8-bit RGB or gray, PNG or JPEG"),
        (png(np.zeros((900, 900, 3), np.uint8)), "is 900x900; wanted 32x48"),
    ],
)
def test_invalid_picture_is_refused(copy, picture, message):
    folder = copy("v2.1 with pictures")

    def change(table):
        entries = table[FRONT].to_pylist()
        entries[4] = {"bytes": picture, "path": "../../../etc/passwd"}
        return replaced(table, FRONT, entries)

    rewrite(folder / "data/chunk-000/episode_000001.parquet", change)
    refused(folder, f"{FRONT} of row 4", message, ask=look)


@pytest.mark.parametrize("values", [{"mean": [1.0]}, {"std": [None, 1]}, {"min": "no"}, {"mean": [[1.0, 2.0]]}])
def test_statistics_of_another_shape_are_refused(copy, values):
    folder = copy("v3.0")
    edit_json(folder / "meta/stats.json", action=values)
    refused(folder, "meta/stats.json", "of action", ask=lambda dataset: dataset.statistics())


def test_number_of_pixels_is_checked_before_opening_files():
    with pytest.raises(ValueError, match="at most"):
        metadata._channels_first((5000, 5000, 3), None)
