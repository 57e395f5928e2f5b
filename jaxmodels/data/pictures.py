"""Frames of one camera by row, out of videos or out of pictures between the numbers; from several threads."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from jaxmodels.data.parquet_file import open_table
from jaxmodels.data.places import Place
from jaxmodels.data.rows import Rows
from jaxmodels.data.stills import decode_still
from jaxmodels.data.video_file import VideoFile
from jaxmodels.errors import DatasetError

# An open decoder holds the frames it may still refer to: some ten megabytes.
OPEN_VIDEOS = 32
# Groups of rows whose encoded pictures are kept, per camera; LeRobot's have about a thousand rows.
HELD_GROUPS = 4


class VideoFrames:
    """Frames of a camera whose episodes are videos."""

    def __init__(
        self,
        folder: Path,
        name: str,
        size: tuple[int, int],
        fps: float,
        places: Sequence[Place],
        timestamps: np.ndarray,
    ):
        self._folder, self._size, self._fps = folder, size, fps
        files = dict.fromkeys(place.videos[name][0] for place in places)
        self.files = tuple(files)
        number = {file: index for index, file in enumerate(self.files)}
        lengths = [place.length for place in places]
        self._file = np.repeat([number[place.videos[name][0]] for place in places], lengths)
        self._seconds = np.repeat([place.videos[name][1] for place in places], lengths) + timestamps
        self._idle: OrderedDict[tuple[int, int], VideoFile] = OrderedDict()
        self._lock, self._lent = threading.Lock(), 0

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decodes these rows' frames into (k, h, w, 3), in the order of the rows."""
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
    """Frames of a camera that are PNG or JPEG bytes in the rows."""

    def __init__(self, folder: Path, name: str, size: tuple[int, int], rows: Rows):
        self._folder, self._name, self._size = folder, name, size
        self.files = rows.files
        self._file = np.repeat(np.arange(len(rows.files)), [len(chosen) for chosen in rows.chosen])
        self._row = np.concatenate(rows.chosen)
        self._held: OrderedDict[tuple[int, int], tuple[int, list[bytes | None]]] = OrderedDict()
        self._ends: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decodes these rows' frames into (k, h, w, 3), in the order of the rows."""
        for position in np.argsort(rows, kind="stable"):
            row = rows[position]
            file, number = int(self._file[row]), int(self._row[row])
            where = f"{self._folder.name}: {self.files[file]}: {self._name} of row {number}"
            with self._lock:  # the decoding itself is outside of it
                data = self._encoded(file, number)
            out[position] = decode_still(data, self._size, where)

    def _encoded(self, file: int, number: int) -> bytes | None:
        path, where = self._folder / self.files[file], f"{self._folder.name}: {self.files[file]}"
        if file not in self._ends:
            with open_table(path, where) as table:
                groups = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
            self._ends[file] = np.cumsum(groups)
        group = int(np.searchsorted(self._ends[file], number, side="right"))
        held = self._held.pop((file, group), None)
        if held is None:
            held = (int(self._ends[file][group - 1]) if group else 0, self._read(path, group, where))
        self._held[(file, group)] = held
        if len(self._held) > HELD_GROUPS:
            self._held.popitem(last=False)
        return held[1][number - held[0]]

    def _read(self, path: Path, group: int, where: str) -> list[bytes | None]:
        with open_table(path, where) as table:
            try:
                found = table.read_row_group(group, columns=[self._name])[self._name].to_pylist()
                return [entry["bytes"] if entry is not None else None for entry in found]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise DatasetError(f"{where} holds no pictures as {self._name} ({type(error).__name__})") from error
