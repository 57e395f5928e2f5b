"""Steps into a LeRobotDataset v3.0 folder, as lerobot 0.4 reads it; without lerobot and without torch."""

import json
import shutil
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from service.recording import layout
from service.recording.statistics import FRAMES, Colours, Stats, of_vectors
from service.recording.steps import Facts, Picture, RecordingError, Step
from service.recording.video import CODEC, VideoWriter

Row = dict[str, Any]


class CameraFiles:
    """One camera's frames: files of about 200 MB, each with whole episodes.

    Attributes:
        colours: of all frames that were looked at.
        size: height and width.
    """

    def __init__(self, folder: Path, key: str, rate: Fraction):
        self.colours = Colours()
        self.size = (0, 0)
        self.format = ""
        self._folder, self._key, self._rate = folder, key, rate
        self._number, self._file, self._from = -1, None, 0
        self._episode = Colours()
        self._looked_at: Picture | None = None

    def add(self, picture: Picture) -> None:
        """The next frame."""
        if self._file is None:
            self.size = self.size if any(self.size) else picture.pixels.shape[:2]
            self._number += 1
            chunk, file = divmod(self._number, layout.CHUNK_FILES)
            path = layout.VIDEO.format(video_key=self._key, chunk_index=chunk, file_index=file)
            self._file, self._from = VideoWriter(self._folder / path, self._rate, self.size), 0
            self.format = self._file.format
        if picture is not self._looked_at and self._episode.frames < FRAMES:
            self._episode.add(picture.pixels)
            self._looked_at = picture
        self._file.add(picture)

    def end_episode(self) -> tuple[Row, Stats]:
        """Where the episode's frames are, and what they look like."""
        assert self._file is not None, "an episode has frames"
        chunk, file = divmod(self._number, layout.CHUNK_FILES)
        prefix, count = f"videos/{self._key}/", self._file.count
        row = {
            f"{prefix}chunk_index": chunk,
            f"{prefix}file_index": file,
            f"{prefix}from_timestamp": float(self._from / self._rate),
            f"{prefix}to_timestamp": float(count / self._rate),
        }
        self._from = count
        stats = self._episode.stats()
        self.colours += self._episode
        self._episode, self._looked_at = Colours(), None
        if self._file.path.stat().st_size > layout.VIDEO_MEGABYTES << 20:
            self.close()
        return row, stats

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class DatasetWriter:
    """Writes episodes; the folder appears under its name only when everything was written.

    Attributes:
        episodes, frames: how many there are.
    """

    def __init__(self, folder: Path, facts: Facts):
        """Begin.

        Raises:
            RecordingError: the folder is there already, or a camera's name cannot be a folder's.
        """
        if folder.exists():
            raise RecordingError(f"{folder} is there already; choose another folder or remove it first")
        self.episodes = self.frames = 0
        self._folder, self._facts = folder, facts
        self._partial = folder.with_name(f"{folder.name}.partial")
        rate = Fraction(facts.rate).limit_denominator(1000)
        keys = [f"{layout.IMAGES}{camera}" for camera in facts.cameras]
        if wrong := [key for key in keys if not layout.FEATURE_NAME.fullmatch(key)]:
            raise RecordingError(f"{', '.join(wrong)}: no name for a feature of a dataset")
        self._cameras = {
            camera: CameraFiles(self._partial, key, rate) for camera, key in zip(facts.cameras, keys, strict=True)
        }
        self._steps: list[Step] = []
        self._data: list[pa.Table] = []
        self._rows: list[Row] = []

    def __enter__(self) -> "DatasetWriter":
        shutil.rmtree(self._partial, ignore_errors=True)  # of one that was killed
        self._partial.mkdir(parents=True)
        return self

    def add(self, step: Step) -> None:
        """The next step; another episode's ends the one before."""
        if self._steps and self._steps[-1].episode != step.episode:
            self._end_episode()
        for camera, files in self._cameras.items():
            files.add(step.pictures[camera])
        # Without its pictures: they would all stay in memory.
        self._steps.append(Step(step.episode, step.index, step.state, step.action, {}))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for files in self._cameras.values():
                files.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _end_episode(self) -> None:
        count, rate = len(self._steps), self._facts.rate
        frame = np.arange(count)
        columns: dict[str, np.ndarray] = {
            layout.STATE: np.stack([step.state for step in self._steps]),
            layout.ACTION: np.stack([step.action for step in self._steps]),
            "timestamp": (frame / rate).astype(np.float32)[:, None],
            "frame_index": frame[:, None],
            "episode_index": np.full((count, 1), self.episodes),
            "index": self.frames + frame[:, None],
            "task_index": np.zeros((count, 1), np.int64),
        }
        row: Row = {
            "episode_index": self.episodes,
            "tasks": [self._task],
            "length": count,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + count,
        }
        stats = {name: of_vectors(values) for name, values in columns.items()}
        for camera, files in self._cameras.items():
            place, stats[f"{layout.IMAGES}{camera}"] = files.end_episode()
            row |= place
        for feature, found in stats.items():
            row |= {f"stats/{feature}/{name}": value for name, value in found.items()}
        self._rows.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._data.append(_table(columns))
        self.episodes += 1
        self.frames += count
        self._steps.clear()

    @property
    def _task(self) -> str:
        return self._facts.task or "unnamed"

    def _finish(self) -> None:
        if self._steps:
            self._end_episode()
        if not self._rows:
            raise RecordingError(
                "there is nothing to make a dataset of: the robot was never sent anywhere with all cameras in sight"
            )
        for files in self._cameras.values():
            files.close()
        data = pa.concat_tables(self._data)
        episodes = pa.Table.from_pylist(self._rows)
        for place, table in ((layout.DATA, data), (layout.EPISODES, episodes)):
            self._write(place.format(chunk_index=0, file_index=0), table)
        self._write(layout.TASKS, _tasks([self._task]))
        self._write_json(layout.INFO, self._info())
        self._write_json(layout.STATS, self._stats(data))
        self._partial.rename(self._folder)

    def _write(self, place: str, table: pa.Table) -> None:
        path = self._partial / place
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path, compression="snappy")

    def _write_json(self, place: str, content: object) -> None:
        (self._partial / place).write_text(json.dumps(content, indent=4, allow_nan=False) + "\n")

    def _stats(self, data: pa.Table) -> dict[str, Stats]:
        found = {name: of_vectors(_array(data[name])) for name in data.column_names}
        return found | {f"{layout.IMAGES}{camera}": files.colours.stats() for camera, files in self._cameras.items()}

    def _info(self) -> dict[str, Any]:
        facts = self._facts
        names = list(facts.features)
        rate = int(facts.rate) if facts.rate == int(facts.rate) else facts.rate
        features: dict[str, Any] = {
            name: {"dtype": "float32", "shape": [len(names)], "names": names} for name in (layout.STATE, layout.ACTION)
        }
        for camera, files in self._cameras.items():
            height, width = files.size
            features[f"{layout.IMAGES}{camera}"] = {
                "dtype": "video",
                "shape": [height, width, 3],
                "names": ["height", "width", "channels"],
                "info": {
                    "video.height": height,
                    "video.width": width,
                    "video.codec": CODEC,
                    "video.pix_fmt": files.format,
                    "video.is_depth_map": False,
                    "video.fps": rate,
                    "video.channels": 3,
                    "has_audio": False,
                },
            }
        features |= {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in layout.INDICES.items()}
        return {
            "codebase_version": layout.VERSION,
            "robot_type": facts.robot_type,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": 1,
            "chunks_size": layout.CHUNK_FILES,
            "data_files_size_in_mb": layout.DATA_MEGABYTES,
            "video_files_size_in_mb": layout.VIDEO_MEGABYTES,
            "fps": rate,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": layout.DATA,
            "video_path": layout.VIDEO if self._cameras else None,
            "features": features,
        }


def write_dataset(folder: Path, facts: Facts, steps: Iterable[Step]) -> DatasetWriter:
    """A new dataset folder of all these steps.

    Raises:
        RecordingError: it cannot be made; nothing is left behind.
        OSError: the disk does not take it.
    """
    with DatasetWriter(folder, facts) as writer:
        for step in steps:
            writer.add(step)
    return writer


def _table(columns: dict[str, np.ndarray]) -> pa.Table:
    """Vectors as lists of a fixed size, single values plain."""
    found = {}
    for name, values in columns.items():
        flat = pa.array(values.ravel())
        is_single = name in layout.INDICES
        found[name] = flat if is_single else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.table(found)


def _array(column: pa.ChunkedArray) -> np.ndarray:
    """(n, d) of a column."""
    whole = column.combine_chunks()
    if isinstance(whole, pa.FixedSizeListArray):
        return whole.flatten().to_numpy().reshape(len(whole), -1)
    return whole.to_numpy()[:, None]


def _tasks(tasks: list[str]) -> pa.Table:
    """Tasks with their number. LeRobot reads them with pandas, which wants the text as the index of its frame."""
    index = "__index_level_0__"
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})

    def column(field: str, kind: str, numpy: str, name: str | None) -> dict[str, object]:
        return {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy, "metadata": None}

    labels = {**column("", "unicode", "object", None), "field_name": None, "metadata": {"encoding": "UTF-8"}}
    pandas = {
        "index_columns": [index],
        "column_indexes": [labels],
        "columns": [
            column("task_index", "int64", "int64", "task_index"),
            column(index, "unicode", "object", None),
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
