"""Checked metadata of a dataset: info.json, tasks, and the location of each episode."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxmodels.checkpoints.files import read_json
from jaxmodels.data.table_files import read_lines, read_table
from jaxmodels.errors import CheckpointError, ConfigError, DatasetError
from jaxmodels.ranges import COUNT, Range, is_number, shorten_value
from jaxmodels.types import ACTION, ENVIRONMENT_STATE, STATE, Feature, parse_names

INFO, STATS = "meta/info.json", "meta/stats.json"

# Version 3.0: many episodes in one file.
VERSION = "v3.0"
CHUNK_FILES = 1000
DATA_MEGABYTES, VIDEO_MEGABYTES = 100, 200
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
TASKS = "meta/tasks.parquet"
EPISODES = f"meta/episodes/{_FILE}.parquet"
DATA = f"data/{_FILE}.parquet"
VIDEO = f"videos/{{video_key}}/{_FILE}.mp4"

# Version 2.1: a file for each episode.
OLD_VERSION = "v2.1"
OLD_TASKS, OLD_EPISODES = "meta/tasks.jsonl", "meta/episodes.jsonl"
OLD_DATA = "data/chunk-{chunk:03d}/episode_{episode:06d}.parquet"
OLD_VIDEO = "videos/chunk-{chunk:03d}/{video_key}/episode_{episode:06d}.mp4"

# Features of every dataset with one value, and its type.
INDICES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
RATE = Range(0, 10_000, above=True)  # Rows per second.
_COUNT = Range(0, 1 << 31, below=True)
_SECONDS = Range(0, 1e9, below=True)
# Names of features become names of folders.
FEATURE_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,128}")

# Larger frames are refused, because a hostile file could fill the memory.
MAX_PIXELS = 3840 * 2160
# Codecs of datasets, so that an untrusted file cannot choose any of FFmpeg's decoders.
CODECS = ("av1", "h264", "hevc", "libdav1d", "vp9")


PICTURES = ("video", "image")  # Dtypes of image features.


@dataclass(frozen=True)
class Info:
    """Contents of a dataset's ``info.json``.

    Attributes:
        version: `VERSION` or `OLD_VERSION`.
        fps: rows per second.
        features: observations and actions, without other columns such as rewards.
        pictures: image feature to ``video`` or ``image`` (PNG or JPEG bytes in the rows).
        chunk_files: episodes in one folder of version 2.1.
        episodes, frames: numbers of episodes and frames.
    """

    version: str
    fps: float
    robot_type: str | None
    features: tuple[Feature, ...]
    pictures: Mapping[str, str]
    chunk_files: int
    episodes: int
    frames: int


def read_info(folder: Path) -> Info:
    """Read a dataset's ``info.json``; raises DatasetError with all errors if it is missing or malformed."""
    if not (folder / INFO).is_file():
        raise DatasetError(f"{folder}: no {INFO} there; wanted a LeRobotDataset v3.0 or v2.1 folder")
    try:
        values = read_json(folder / INFO)
    except CheckpointError as error:
        raise DatasetError(f"{folder.name}: {error}") from error
    version = values.get("codebase_version")
    if version not in (VERSION, OLD_VERSION):
        raise DatasetError(
            f"{folder.name}: codebase_version is {str(version)[:20]!r}; wanted {VERSION} or "
            f"{OLD_VERSION}, to which lerobot converts others"
        )
    wrong: list[str] = []
    fps = values.get("fps")
    if not is_number(fps, RATE):
        wrong.append(f"fps is {shorten_value(fps)}; wanted a number above 0, 10000 at most")
    counts = {}
    for name, usual in (("total_episodes", None), ("total_frames", None), ("chunks_size", CHUNK_FILES)):
        counts[name] = values.get(name, usual)
        if not is_number(counts[name], COUNT, integer=True):
            wrong.append(f"{name} is {shorten_value(counts[name])}; wanted an integer of 1 or more")
    entries = values.get("features")
    features, pictures = [], {}
    if not isinstance(entries, dict):
        wrong.append("features is not an object")
        entries = {}
    for name, entry in entries.items():
        try:
            feature = _feature(name, entry)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            wrong.append(f"feature {name[:80]!r}: {error}")
            continue
        if feature is not None:
            features.append(feature)
            if feature.type == "VISUAL":
                pictures[name] = entry["dtype"]
    if not wrong and not any(feature.name == ACTION for feature in features):
        wrong.append(f"there is no feature {ACTION!r}")
    if wrong:
        raise DatasetError(f"{folder.name}: {INFO}: {'; '.join(wrong)}")
    robot_type = values.get("robot_type")
    return Info(
        version=str(version),
        fps=float(fps),  # pyright: ignore[reportArgumentType] - checked above
        robot_type=robot_type if isinstance(robot_type, str) else None,
        features=tuple(features),
        pictures=pictures,
        chunk_files=counts["chunks_size"],
        episodes=counts["total_episodes"],
        frames=counts["total_frames"],
    )


def _feature(name: str, entry: Mapping[str, Any]) -> Feature | None:
    """Return the feature of a column, with types as in LeRobot's `dataset_to_policy_features`."""
    if not FEATURE_NAME.fullmatch(name):
        raise ValueError("the name cannot be used; wanted letters, digits and _.-")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"shape is {shorten_value(shape)}; wanted a list of integers")
    shape = tuple(shape)
    if dtype in PICTURES:
        return Feature(name, "VISUAL", _channels_first(shape, entry.get("names")))
    kinds = {"observation": "STATE", ACTION: "ACTION"}
    kind = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
    kind = "ENV" if name == ENVIRONMENT_STATE else kind
    is_needed = name in (ACTION, STATE, ENVIRONMENT_STATE)
    is_numeric = isinstance(dtype, str) and dtype.startswith(("float", "int", "uint", "bool"))
    if kind is None or (len(shape) != 1 and not is_needed) or not is_numeric:
        if is_needed:
            raise ValueError(f"dtype is {str(dtype)[:20]!r}; wanted numbers")
        return None
    try:
        names = parse_names(name, entry.get("names"))
    except ConfigError:
        names = None  # Other formats are ignored, because names are only for display.
    return Feature(name, kind, shape, names if names is not None and len(names) == shape[0] else None)


def _channels_first(shape: tuple[int, ...], names: Any) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape is {list(shape)}; wanted [height, width, 3]")
    is_last = shape[2] == 3 and not (isinstance(names, list) and names[:1] in (["channel"], ["channels"]))
    channels, height, width = (shape[2], *shape[:2]) if is_last else shape
    if height * width > MAX_PIXELS:
        raise ValueError(f"frames of {height}x{width} pixels; wanted {MAX_PIXELS} at most")
    return channels, height, width


MAX_TASKS = 1_000_000
# Largest distance of a time from its frame, in frames; at half a frame, rounding decides which frame is nearest.
NEAREST_FRAME = 0.45
_SPAN = ("from_timestamp", "to_timestamp")


class VideoSpan(NamedTuple):
    """Seconds of a video file, relative to the dataset, that hold one episode; `end` is None in version 2.1."""

    file: str
    start: float
    end: float | None


@dataclass(frozen=True)
class EpisodeLocation:
    """Number (``episode_index``) and length in rows of an episode, the file of its rows, and the span of each video."""

    number: int
    length: int
    rows: str
    videos: Mapping[str, VideoSpan]


def read_episode_locations(folder: Path, info: Info) -> tuple[EpisodeLocation, ...]:
    """Return the locations of all episodes in order; raises DatasetError for missing, malformed or wrong files."""
    try:
        locations = _read_new_episodes(folder, info) if info.version == VERSION else _read_old_episodes(folder, info)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{folder.name}: meta/episodes lacks or has a wrong {error}") from error
    numbers = [location.number for location in locations]
    if numbers != list(range(len(locations))):
        raise DatasetError(f"{folder.name}: its episodes are not numbered 0, 1, 2...; found {_join_first(numbers)}")
    rows = sum(location.length for location in locations)
    if (len(locations), rows) != (info.episodes, info.frames):
        raise DatasetError(
            f"{folder.name}: {INFO} has {info.episodes} episodes and {info.frames} frames; "
            f"meta/episodes describes {len(locations)} and {rows}"
        )
    return locations


def check_video_spans(folder: Path, fps: float, locations: Sequence[EpisodeLocation]) -> None:
    """Check that episodes do not share frames, and that each span has the length of the episode's rows.

    A span may be one frame too long, because some recorders keep a last frame without a row. `fps` is rows per second.

    Raises:
        DatasetError: names the episode, the camera and the file.
    """
    previous: dict[tuple[str, str], tuple[int, float]] = {}
    for location in locations:
        for camera, (file, start, end) in location.videos.items():
            if end is None:
                continue
            where = f"{folder.name}: episode {location.number}, camera {camera}: its span in {file} is"
            span = f"{start:.3f} s to {end:.3f} s"
            frames = (end - start) * fps - location.length
            if not -0.5 <= frames <= 1.5:
                raise DatasetError(
                    f"{where} {span}, {(end - start) * fps:.1f} frames at {fps:g} per second, but the episode has "
                    f"{location.length} rows; correct from_timestamp and to_timestamp in meta/episodes"
                )
            number, previous_end = previous.get((camera, file), (-1, 0.0))
            if start < previous_end - NEAREST_FRAME / fps:
                raise DatasetError(
                    f"{where} {span}, but episode {number} has the frames up to {previous_end:.3f} s; episodes must "
                    "not share frames: correct from_timestamp and to_timestamp in meta/episodes"
                )
            previous[camera, file] = location.number, end


def select_episodes(
    folder: Path, locations: Sequence[EpisodeLocation], episodes: Sequence[int] | None
) -> tuple[EpisodeLocation, ...]:
    """Return the locations of `episodes`, in order; of all for None. Raises DatasetError for missing or no episodes."""
    if episodes is None:
        return tuple(locations)
    if wrong := sorted({number for number in episodes if not 0 <= number < len(locations)}):
        raise DatasetError(f"{folder.name}: no episodes {_join_first(wrong)}; it has 0 to {len(locations) - 1}")
    if not episodes:
        raise DatasetError(f"{folder.name}: the list of episodes is empty; wanted some of 0 to {len(locations) - 1}")
    selected = set(episodes)
    return tuple(location for location in locations if location.number in selected)


def _read_new_episodes(folder: Path, info: Info) -> tuple[EpisodeLocation, ...]:
    files = sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise DatasetError(f"{folder.name}: no files in meta/episodes; fetch or copy the dataset again")
    videos = [name for name, kind in info.pictures.items() if kind == "video"]
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for name in videos:
        columns += [f"videos/{name}/{column}" for column in ("chunk_index", "file_index", *_SPAN)]
    locations = []
    for path in files:
        table = read_table(path, columns, f"{folder.name}: {path.relative_to(folder)}")
        locations += [_read_new_location(row, videos) for row in table.to_pylist()]
    return tuple(sorted(locations, key=lambda location: location.number))


def _read_new_location(row: Mapping[str, Any], videos: Sequence[str]) -> EpisodeLocation:
    def read_location(prefix: str) -> dict[str, int]:
        return {name: _count(row[f"{prefix}/{name}"], f"{prefix}/{name}") for name in ("chunk_index", "file_index")}

    return EpisodeLocation(
        number=_count(row["episode_index"], "episode_index"),
        length=_length(row["length"]),
        rows=DATA.format(**read_location("data")),
        videos={
            name: VideoSpan(
                VIDEO.format(video_key=name, **read_location(f"videos/{name}")),
                *(_seconds(row[f"videos/{name}/{column}"], f"videos/{name}/{column}") for column in _SPAN),
            )
            for name in videos
        },
    )


def _read_old_episodes(folder: Path, info: Info) -> tuple[EpisodeLocation, ...]:
    videos = [name for name, kind in info.pictures.items() if kind == "video"]
    locations = []
    for row in read_lines(folder / OLD_EPISODES, f"{folder.name}: {OLD_EPISODES}"):
        number = _count(row["episode_index"], "episode_index")
        where = {"chunk": number // info.chunk_files, "episode": number}
        locations.append(
            EpisodeLocation(
                number,
                _length(row["length"]),
                OLD_DATA.format(**where),
                {name: VideoSpan(OLD_VIDEO.format(video_key=name, **where), 0.0, None) for name in videos},
            )
        )
    return tuple(sorted(locations, key=lambda location: location.number))


def read_tasks(folder: Path, info: Info) -> tuple[str, ...]:
    """Return texts of tasks in the order of ``task_index``; raises DatasetError if the list is missing or malformed."""
    if info.version == VERSION:
        where = f"{folder.name}: {TASKS}"
        table = read_table(folder / TASKS, None, where)
        names = [name for name in table.column_names if name != "task_index"]
        if len(names) != 1 or "task_index" not in table.column_names:
            raise DatasetError(f"{where} has columns {table.column_names}; wanted task_index and the tasks")
        pairs = list(zip(table["task_index"].to_pylist(), table[names[0]].to_pylist(), strict=True))
    else:
        where = f"{folder.name}: {OLD_TASKS}"
        pairs = [(row.get("task_index"), row.get("task")) for row in read_lines(folder / OLD_TASKS, where)]
    tasks_by_index: dict[int, str] = {}
    for number, task in pairs:
        if type(number) is not int or not isinstance(task, str) or number in tasks_by_index:
            raise DatasetError(f"{where}: {number!r} is {str(task)[:80]!r}; wanted each number once, with a text")
        tasks_by_index[number] = task
    if sorted(tasks_by_index) != list(range(len(tasks_by_index))) or not 0 < len(tasks_by_index) <= MAX_TASKS:
        raise DatasetError(f"{where}: tasks are not numbered 0, 1, 2...; found {_join_first(sorted(tasks_by_index))}")
    return tuple(tasks_by_index[number] for number in range(len(tasks_by_index)))


def _count(value: Any, name: str) -> int:
    if not is_number(value, _COUNT, integer=True):
        raise ValueError(f"{name}, which is {str(value)[:20]}")
    return value


def _length(value: Any) -> int:
    if _count(value, "length") < 1:
        raise ValueError("length, which is 0")
    return value


def _seconds(value: Any, name: str) -> float:
    if not is_number(value, _SECONDS):
        raise ValueError(f"{name}, which is {str(value)[:20]}")
    return float(value)


def _join_first(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
