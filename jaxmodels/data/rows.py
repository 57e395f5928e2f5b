"""Readers of the rows and frames of chosen episodes."""

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxmodels.data.metadata import EpisodeLocation
from jaxmodels.data.table_files import open_table, read_table, read_vectors
from jaxmodels.data.video import VideoFile
from jaxmodels.errors import DatasetError

# Files that are read at once: version 2.1 has one for each episode.
READERS = 8


class Rows:
    """Columns of numbers of the chosen episodes, read from their Parquet files.

    Attributes:
        files: each data file once, in the order of the rows.
        chosen: the rows of each file that belong to the episodes.
        timestamps: (n,) seconds since the row's episode began.
        tasks: (n,) int32 ``task_index``.
    """

    def __init__(self, folder: Path, locations: Sequence[EpisodeLocation]):
        """Looks at which rows there are.

        Raises:
            DatasetError: a file is missing or garbled, or holds other rows than the dataset speaks of.
        """
        self._folder = folder
        by_file: dict[str, list[EpisodeLocation]] = {}
        for location in locations:
            by_file.setdefault(location.rows, []).append(location)
        self.files = tuple(by_file)
        selections = self._map_files(lambda number: self._select_rows(self.files[number], by_file[self.files[number]]))
        self.chosen = tuple(chosen for chosen, _, _ in selections)
        # As float32, because that is what LeRobot writes and looks frames up by.
        self.timestamps = np.concatenate([times for _, times, _ in selections]).astype(np.float64)
        self.tasks = np.concatenate([tasks for _, _, tasks in selections])
        if len(self.tasks) != sum(location.length for location in locations):
            raise DatasetError(f"{folder.name}: its episodes' rows are not one after another in its files")

    def read(self, name: str, width: int, dtype: Any) -> np.ndarray:
        """A column as an array (n, width).

        Raises:
            DatasetError: it is missing or garbled.
        """

        def part(number: int) -> np.ndarray:
            file, where = self._folder / self.files[number], self._describe_file(self.files[number])
            column = read_table(file, [name], where)[name]
            return read_vectors(column, width, dtype, f"{where}: {name}")[self.chosen[number]]

        return np.concatenate(self._map_files(part))

    def _map_files(self, read: Callable[[int], Any]) -> list[Any]:
        """Call a function for the number of every file, several at a time."""
        with ThreadPoolExecutor(READERS, "rows") as pool:
            return list(pool.map(read, range(len(self.files))))

    def _select_rows(
        self, file: str, locations: Sequence[EpisodeLocation]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of a file that belong to these episodes, with their timestamps and tasks."""
        where = self._describe_file(file)
        kinds = {"episode_index": np.int64, "frame_index": np.int64, "timestamp": np.float32, "task_index": np.int32}
        table = read_table(self._folder / file, list(kinds), where)
        episode, frame, times, tasks = (
            read_vectors(table[name], 1, kind, f"{where}: {name}")[:, 0] for name, kind in kinds.items()
        )
        numbers, lengths = ([getattr(location, name) for location in locations] for name in ("number", "length"))
        chosen = np.flatnonzero(np.isin(episode, numbers))
        expected = np.repeat(numbers, lengths), np.concatenate([np.arange(length) for length in lengths])
        if not (np.array_equal(episode[chosen], expected[0]) and np.array_equal(frame[chosen], expected[1])):
            raise DatasetError(
                f"{where}: has not the rows of episodes {numbers[0]} to {numbers[-1]} that the dataset speaks of, "
                f"one after another; found {len(chosen)} rows of them, wanted {sum(lengths)}"
            )
        if not np.isfinite(times[chosen]).all():
            raise DatasetError(f"{where}: timestamp is not finite everywhere")
        return chosen, times[chosen], tasks[chosen]

    def _describe_file(self, file: str) -> str:
        return f"{self._folder.name}: {file}"


def decode_still(data: bytes | None, size: tuple[int, int], where: str) -> np.ndarray:
    """Decode one PNG or JPEG into uint8 (h, w, 3).

    Raises:
        DatasetError: it is empty, no PNG or JPEG, or of another height and width.
    """
    try:
        with Image.open(io.BytesIO(data or b""), formats=("PNG", "JPEG")) as image:
            # Before anything is decoded: a few bytes can claim any size.
            if (image.height, image.width) != size:
                raise DatasetError(f"{where} is {image.height}x{image.width}; wanted {size[0]}x{size[1]}")
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{where} cannot be decoded as PNG or JPEG ({type(error).__name__})") from error


# An open decoder holds the frames it may still refer to: some ten megabytes.
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
        files = dict.fromkeys(location.videos[name][0] for location in locations)
        self.files = tuple(files)
        number = {file: index for index, file in enumerate(self.files)}
        lengths = [location.length for location in locations]
        self._file = np.repeat([number[location.videos[name][0]] for location in locations], lengths)
        self._seconds = np.repeat([location.videos[name][1] for location in locations], lengths) + timestamps
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
        """An open file that nobody else uses meanwhile."""
        with self._lock:
            key = next((key for key in reversed(self._idle) if key[0] == file), None)
            video = self._idle.pop(key) if key is not None else None
            self._lent += 1
            key = (file, self._lent)
        if video is None:
            name = self.files[file]
            video = VideoFile(self._folder / name, self._size, self._fps, f"{self._folder.name}: {name}")
        # Not given back after an error: where its decoder stands is unknown then.
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
            with self._lock:  # the decoding itself is outside of it
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
