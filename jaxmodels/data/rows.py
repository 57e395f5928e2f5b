"""Readers of the rows and frames of chosen episodes."""

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmodels.data.metadata import INFO, EpisodeLocation
from jaxmodels.data.pictures import decode_picture
from jaxmodels.data.table_files import open_table, read_table, read_vectors
from jaxmodels.data.video import VideoFile
from jaxmodels.errors import DatasetError, PictureError

# Number of files that are read at once; version 2.1 has one file per episode.
READERS = 8
# A rate of 29.97 differs from 30 by 0.1 %.
_RATE_TOLERANCE = 5e-4
_TIME_TOLERANCE = 1e-4  # Seconds.


class Rows:
    """Columns of numbers of the chosen episodes, read from their Parquet files.

    Attributes:
        files: each data file once, in the order of the rows.
        chosen: the rows of each file that belong to the episodes.
        timestamps: (n,) seconds since the row's episode began.
        tasks: (n,) int32 ``task_index``.
    """

    def __init__(self, folder: Path, locations: Sequence[EpisodeLocation]):
        """Read which rows there are and check their order; raises DatasetError for missing or wrong files."""
        self._folder, self._locations = folder, locations
        by_file: dict[str, list[EpisodeLocation]] = {}
        for location in locations:
            by_file.setdefault(location.rows, []).append(location)
        self.files = tuple(by_file)
        in_files = [location for group in by_file.values() for location in group]
        for location, expected in zip(in_files, locations, strict=True):
            if location is not expected:
                raise DatasetError(
                    f"{folder.name}: episode {location.number} is in {location.rows}, and episodes before it are in a "
                    "later file; wanted the files in the order of the episodes: correct meta/episodes"
                )
        self._ends = np.cumsum([location.length for location in locations])
        selections = self._map_files(lambda number: self._select_rows(self.files[number], by_file[self.files[number]]))
        self.chosen = tuple(selection.chosen for selection in selections)
        # In float32, as LeRobot writes and compares timestamps.
        times = np.concatenate([selection.times for selection in selections])
        self._check_ascending("timestamp", times, is_continued=False)
        self.timestamps = times.astype(np.float64)
        self.tasks = np.concatenate([selection.tasks for selection in selections])
        indices = [selection.indices for selection in selections if selection.indices is not None]
        if len(indices) == len(selections):
            self._check_ascending("index", np.concatenate(indices))

    def _check_ascending(self, name: str, values: np.ndarray, *, is_continued: bool = True) -> None:
        """Raise DatasetError unless a column increases; if `is_continued`, also from one episode to the next."""
        is_wrong = np.diff(values) <= 0
        if not is_continued:
            is_wrong[self._ends[:-1] - 1] = False
        if is_wrong.any():
            row = int(np.argmax(is_wrong)) + 1
            number = int(np.searchsorted(self._ends, row, side="right"))
            location = self._locations[number]
            first = int(self._ends[number]) - location.length
            raise DatasetError(
                f"{self._describe_file(location.rows)}: {name} of episode {location.number} is {values[row]!s} in "
                f"its row {row - first}, after {values[row - 1]!s} in the row before; wanted ascending values"
            )

    def check_rate(self, fps: float) -> None:
        """Check that the timestamps of each episode follow the dataset's rate.

        An episode is refused if three quarters of its stretches, each a quarter of the episode and at least a second
        long, deviate in the same direction by more than 0.05 % and more than 0.1 ms, LeRobot's ``tolerance_s``. This
        distinguishes 29.97 from 30 per second, and accepts rounded timestamps, jitter and single gaps.

        Raises:
            DatasetError: names both rates, the episode, and the file of each.
        """
        lengths = np.array([location.length for location in self._locations])
        starts, steps = self._ends - lengths, lengths - 1
        # Compare whole episodes first, because reading every row of each episode is slow for large datasets.
        deviation = np.abs(self.timestamps[self._ends - 1] - self.timestamps[starts] - steps / fps)
        for number in np.flatnonzero(deviation > _tolerance(steps / fps)):
            times = self.timestamps[starts[number] : self._ends[number]]
            stretch = min(max(round(fps), len(times) // 4, 1), len(times) - 1)
            seconds, expected = times[stretch:] - times[:-stretch], stretch / fps
            low, high = np.quantile(seconds, (0.25, 0.75)) - expected
            if low <= _tolerance(expected) and high >= -_tolerance(expected):
                continue
            step, location = float(np.median(seconds)) / stretch, self._locations[int(number)]
            raise DatasetError(
                f"{self._folder.name}: {INFO} says fps {fps:g}, but the timestamps of episode {location.number} in "
                f"{location.rows} are {step:.6g} s apart, {1 / step:.6g} per second. A policy would be trained for the "
                f"wrong speed; correct fps in {INFO}, or the timestamps"
            )

    def check_times_of_videos(self, fps: float) -> None:
        """Raise DatasetError unless each episode's timestamps begin at 0 and end within the spans of its videos."""
        for location, end in zip(self._locations, self._ends, strict=True):
            first, last = self.timestamps[end - location.length], self.timestamps[end - 1]
            for camera, span in location.videos.items():
                length = math.inf if span.end is None else span.end - span.start
                if abs(first) * fps > 0.5 or (last - length) * fps > -0.5:
                    raise DatasetError(
                        f"{self._describe_file(location.rows)}: timestamps of episode {location.number} are "
                        f"{first:.3f} s to {last:.3f} s; wanted 0 at its first row, and all within its span of "
                        f"{length:.3f} s in {span.file} (camera {camera})"
                    )

    def read(self, name: str, width: int, dtype: Any) -> np.ndarray:
        """Return a column as an array (n, width); raises DatasetError if it is missing or malformed."""

        def part(number: int) -> np.ndarray:
            file, where = self._folder / self.files[number], self._describe_file(self.files[number])
            column = read_table(file, [name], where)[name]
            return read_vectors(column, width, dtype, f"{where}: {name}")[self.chosen[number]]

        return np.concatenate(self._map_files(part))

    def _map_files(self, read: Callable[[int], Any]) -> list[Any]:
        """Call a function for the number of every file, several at a time."""
        with ThreadPoolExecutor(READERS, "rows") as pool:
            return list(pool.map(read, range(len(self.files))))

    def _select_rows(self, file: str, locations: Sequence[EpisodeLocation]) -> "_Selection":
        """Return which rows of a file belong to these episodes; raises DatasetError if they do not fit."""
        where = self._describe_file(file)
        kinds = {"episode_index": np.int64, "frame_index": np.int64, "timestamp": np.float32, "task_index": np.int32}
        table = read_table(self._folder / file, list(kinds), where, optional=("index",))
        episode, frame, times, tasks = (
            read_vectors(table[name], 1, kind, f"{where}: {name}")[:, 0] for name, kind in kinds.items()
        )
        numbers, lengths = ([getattr(location, name) for location in locations] for name in ("number", "length"))
        chosen = np.flatnonzero(np.isin(episode, numbers))
        expected = np.repeat(numbers, lengths)
        frames = np.concatenate([np.arange(length) for length in lengths])
        count = min(len(chosen), len(expected))
        is_wrong = (episode[chosen][:count] != expected[:count]) | (frame[chosen][:count] != frames[:count])
        # Rows of other episodes must not lie between rows of an episode.
        is_wrong[1:] |= (np.diff(chosen[:count]) != 1) & (np.diff(expected[:count]) == 0)
        if is_wrong.any() or len(chosen) != len(expected):
            row = int(np.argmax(is_wrong)) if is_wrong.any() else count
            suspects = {int(numbers[row]) for numbers in (expected, episode[chosen]) if row < len(numbers)}
            described = [location for location in locations if location.number in suspects]
            raise DatasetError(f"{where}: {_explain_disorder(described, episode, frame)}")
        if not np.isfinite(times[chosen]).all():
            raise DatasetError(f"{where}: timestamp is not finite everywhere")
        indices = None
        if "index" in table.column_names:
            indices = read_vectors(table["index"], 1, np.int64, f"{where}: index")[chosen, 0]
        return _Selection(chosen, times[chosen], tasks[chosen], indices)

    def _describe_file(self, file: str) -> str:
        return f"{self._folder.name}: {file}"


class _Selection(NamedTuple):
    """Rows of one file that belong to the chosen episodes, as arrays (n,).

    `chosen` are their places in the file; `indices` is None if the file has no column ``index``.
    """

    chosen: np.ndarray
    times: np.ndarray
    tasks: np.ndarray
    indices: np.ndarray | None


def _explain_disorder(suspects: Sequence[EpisodeLocation], episode: np.ndarray, frame: np.ndarray) -> str:
    """Return what is wrong with a file's rows; `suspects` are the episodes at the first wrong row, arrays are (n,)."""
    for location in suspects:
        number, found = location.number, np.flatnonzero(episode == location.number)
        if len(found) != location.length:
            return f"found {len(found)} rows of episode {number}, wanted {location.length} as the dataset describes it"
        if found[-1] - found[0] != location.length - 1:
            return f"the rows of episode {number} are not one after another: rows of other episodes lie between them"
        is_wrong = frame[found] != np.arange(location.length)
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            return (
                f"frame_index of episode {number} is {frame[found][row]} in its row {row}; wanted its rows one after "
                "another, counted from 0"
            )
    numbers = " and ".join(str(location.number) for location in suspects)
    return f"the rows of episodes {numbers} are not in the order of the episodes"


def _tolerance(seconds: Any) -> Any:
    """Return the deviation, in seconds, that is allowed over a time."""
    return np.maximum(_RATE_TOLERANCE * seconds, _TIME_TOLERANCE)


def decode_still(data: bytes | None, size: tuple[int, int], where: str) -> np.ndarray:
    """Decode one PNG or JPEG into uint8 (h, w, 3).

    Raises:
        DatasetError: it is empty, malformed, not in colour, or of another size.
    """

    def check_size(height: int, width: int) -> None:
        # Checked before decoding, because a few bytes can claim any size. A picture may be stored rotated.
        if sorted((height, width)) != sorted(size):
            raise DatasetError(f"{where} is {height}x{width}; wanted {size[0]}x{size[1]}")

    try:
        picture = decode_picture(data or b"", check_size)
    except PictureError as error:
        raise DatasetError(f"{where} is {error}") from error
    if picture.shape[:2] != size:
        raise DatasetError(f"{where} is {picture.shape[0]}x{picture.shape[1]}; wanted {size[0]}x{size[1]}")
    return picture


# An open decoder keeps some ten megabytes of frames.
OPEN_VIDEOS = 32
# Groups of rows whose encoded pictures are kept, per camera; LeRobot's have about a thousand rows.
HELD_GROUPS = 4


class VideoFrames:
    """Frames of a camera that is stored as videos."""

    def __init__(
        self,
        folder: Path,
        name: str,
        size: tuple[int, int],
        fps: float,
        locations: Sequence[EpisodeLocation],
        timestamps: np.ndarray,
    ):
        self._folder, self._size, self._fps = folder, size, fps
        self.files = tuple(dict.fromkeys(location.videos[name].file for location in locations))
        number = {file: index for index, file in enumerate(self.files)}
        lengths = [location.length for location in locations]
        self._file = np.repeat([number[location.videos[name].file] for location in locations], lengths)
        self._seconds = np.repeat([location.videos[name].start for location in locations], lengths) + timestamps
        self._idle: OrderedDict[tuple[int, int], VideoFile] = OrderedDict()
        self._lock, self._lent = threading.Lock(), 0

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decode the frames of these rows, (k, h, w, 3), in the order of the rows."""
        order = np.lexsort((self._seconds[rows], self._file[rows]))
        files = self._file[rows][order]
        for part in np.split(order, np.flatnonzero(np.diff(files)) + 1):
            with self._video(int(self._file[rows[part[0]]])) as video:
                for position in part:
                    out[position] = video.at(float(self._seconds[rows[position]]))

    @contextmanager
    def _video(self, file: int) -> Iterator[VideoFile]:
        """Lend an open file for exclusive use."""
        with self._lock:
            key = next((key for key in reversed(self._idle) if key[0] == file), None)
            video = self._idle.pop(key) if key is not None else None
            self._lent += 1
            key = (file, self._lent)
        if video is None:
            name = self.files[file]
            video = VideoFile(self._folder / name, self._size, self._fps, f"{self._folder.name}: {name}")
        # After an error the position of the decoder is unknown, so the file is closed.
        try:
            yield video
        except BaseException:
            video.close()
            raise
        with self._lock:
            self._idle[key] = video
            oldest = self._idle.popitem(last=False)[1] if len(self._idle) > OPEN_VIDEOS else None
        if oldest is not None:
            oldest.close()


class StillFrames:
    """Frames of a camera that is stored as PNG or JPEG in the rows."""

    def __init__(self, folder: Path, name: str, size: tuple[int, int], rows: Rows):
        self._folder, self._name, self._size = folder, name, size
        self.files = rows.files
        self._file = np.repeat(np.arange(len(rows.files)), [len(chosen) for chosen in rows.chosen])
        self._row = np.concatenate(rows.chosen)
        self._held: OrderedDict[tuple[int, int], tuple[int, list[bytes | None]]] = OrderedDict()
        self._group_ends: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decode the frames of these rows, (k, h, w, 3), in the order of the rows."""
        for position in np.argsort(rows, kind="stable"):
            row = rows[position]
            file, number = int(self._file[row]), int(self._row[row])
            where = f"{self._folder.name}: {self.files[file]}: {self._name} of row {number}"
            with self._lock:  # Decoding does not need the lock.
                data = self._encoded(file, number)
            out[position] = decode_still(data, self._size, where)

    def _encoded(self, file: int, number: int) -> bytes | None:
        path, where = self._folder / self.files[file], f"{self._folder.name}: {self.files[file]}"
        if file not in self._group_ends:
            with open_table(path, where) as table:
                groups = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
            self._group_ends[file] = np.cumsum(groups)
        group = int(np.searchsorted(self._group_ends[file], number, side="right"))
        held = self._held.pop((file, group), None)
        if held is None:
            held = (int(self._group_ends[file][group - 1]) if group else 0, self._read(path, group, where))
        self._held[(file, group)] = held
        if len(self._held) > HELD_GROUPS:
            self._held.popitem(last=False)
        return held[1][number - held[0]]

    def _read(self, path: Path, group: int, where: str) -> list[bytes | None]:
        with open_table(path, where) as table:
            try:
                cells = table.read_row_group(group, columns=[self._name])[self._name].to_pylist()
                return [entry["bytes"] if entry is not None else None for entry in cells]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DatasetError(f"{where} holds no pictures as {self._name} ({type(error).__name__})") from error
