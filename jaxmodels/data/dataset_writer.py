"""Writer of LeRobotDataset v3."""

import errno
import glob
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as parquet

from jaxmodels.data import metadata
from jaxmodels.data.statistics import compute_vector_stats
from jaxmodels.data.video import CODEC, CameraFiles
from jaxmodels.errors import DatasetError
from jaxmodels.ranges import shorten_value
from jaxmodels.types import ACTION, ENVIRONMENT_STATE, IMAGES, STATE


def build_vectors_table(columns: Mapping[str, np.ndarray]) -> pa.Table:
    """Return an Arrow table of columns: vectors as lists of a fixed size, and single values."""
    arrays = {}
    for name, values in columns.items():
        flat = pa.array(values.ravel())
        is_single = name in metadata.INDICES
        arrays[name] = flat if is_single else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.table(arrays)


def make_column(values: pa.ChunkedArray) -> np.ndarray:
    """Return a column of such a table as an array (n, d)."""
    whole = values.combine_chunks()
    if isinstance(whole, pa.FixedSizeListArray):
        return whole.flatten().to_numpy().reshape(len(whole), -1)
    return whole.to_numpy()[:, None]


def build_tasks_table(tasks: Sequence[str]) -> pa.Table:
    """Return an Arrow table of tasks with pandas' metadata, in which the text is the index as in LeRobot."""
    index = "__index_level_0__"
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), index: pa.array(tasks, pa.string())})

    def described(field: str, kind: str, numpy: str, name: str | None) -> dict[str, object]:
        return {"name": name, "field_name": field, "pandas_type": kind, "numpy_type": numpy, "metadata": None}

    labels = {**described("", "unicode", "object", None), "field_name": None, "metadata": {"encoding": "UTF-8"}}
    pandas = {
        "index_columns": [index],
        "column_indexes": [labels],
        "columns": [
            described("task_index", "int64", "int64", "task_index"),
            described(index, "unicode", "object", None),
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def describe_features(
    names: Mapping[str, Sequence[str]], cameras: Mapping[str, CameraFiles], rate: int | float
) -> dict[str, dict[str, Any]]:
    """Return ``features`` of ``info.json``: dtype, shape and names of each column."""
    features: dict[str, dict[str, Any]] = {
        name: {"dtype": "float32", "shape": [len(numbers)], "names": list(numbers)} for name, numbers in names.items()
    }
    for key, files in cameras.items():
        height, width = files.size
        features[key] = {
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
    indices = {name: {"dtype": kind, "shape": [1], "names": None} for name, kind in metadata.INDICES.items()}
    return features | indices


# Suffix of unfinished folders, after the folder's name and its writer.
PARTIAL = ".partial"
_WRITER = re.compile(r"(\d{1,9})-[0-9a-f]{8}")


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished folders of killed writers; running writers on this machine keep theirs."""
    for path in folder.parent.glob(f"{glob.escape(folder.name)}.*{PARTIAL}"):
        who = _WRITER.fullmatch(path.name[len(folder.name) + 1 : -len(PARTIAL)])
        if who is not None and not path.is_symlink() and not psutil.pid_exists(int(who[1])):
            shutil.rmtree(path, ignore_errors=True)


class DatasetWriter:
    """Writer of episodes of a LeRobotDataset v3; the folder gets its name only when everything is written.

    Attributes:
        episodes, frames: numbers of written episodes and frames.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with DatasetWriter(f"{folder}/demos", fps=10, joint_names=["x"]) as writer:
        ...         for x in range(3):
        ...             pose = np.float32([x])
        ...             writer.add({"observation.state": pose, "action": pose + 1})
        ...         writer.end_episode("go right")
        >>> writer.episodes, writer.frames
        (1, 3)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        fps: int | float,
        joint_names: Sequence[str],
        cameras: Sequence[str] = (),
        robot_type: str | None = None,
        environment_state: Sequence[str] = (),
    ):
        """Check the arguments; nothing is written yet.

        Args:
            folder: path of the dataset, which must not exist.
            fps: rows per second.
            joint_names: names of the numbers of states and actions.
            cameras: names, without ``observation.images.``.
            robot_type: LeRobot's name of the robot.
            environment_state: names of the numbers of ``observation.environment_state``, if the dataset has it.

        Raises:
            DatasetError: the folder exists, the rate is not above 0, or a name cannot be used or occurs twice.
        """
        folder = Path(folder)
        if folder.exists():
            raise DatasetError(f"{folder} is there already; choose another folder or remove it first")
        if isinstance(fps, bool) or not isinstance(fps, Real) or not 0 < fps <= 10_000:
            raise DatasetError(f"a rate of {shorten_value(fps)}; wanted a number above 0, 10000 at most")
        fps = int(fps) if isinstance(fps, Integral) else float(fps)
        for what, names in (
            ("joint_names", joint_names),
            ("cameras", cameras),
            ("environment_state", environment_state),
        ):
            # A string is also a sequence, of its letters.
            if isinstance(names, str) or len(set(names or ())) < len(names or ()) or not all(names or ()):
                raise DatasetError(f"{what} are {shorten_value(names)}; wanted a list of names, each once")
        if not joint_names:
            raise DatasetError("a dataset without joints; wanted a name for each number of an action")
        keys = [f"{IMAGES}{camera}" for camera in cameras]
        if wrong := [key for key in keys if not metadata.FEATURE_NAME.fullmatch(key)]:
            raise DatasetError(f"{', '.join(wrong)}: no name for a feature of a dataset")
        self.episodes = self.frames = 0
        self._folder, self._fps, self._robot_type = folder, fps, robot_type
        # Each writer has its own folder; the first that finishes gets the name.
        self._partial = folder.with_name(f"{folder.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{PARTIAL}")
        self._names = {STATE: list(joint_names), ACTION: list(joint_names)}
        if environment_state:
            self._names[ENVIRONMENT_STATE] = list(environment_state)
        rate = Fraction(fps).limit_denominator(1000)
        self._cameras = {key: CameraFiles(self._partial, key, rate) for key in keys}
        self._steps: list[dict[str, np.ndarray]] = []
        self._tasks: dict[str, int] = {}
        self._data: list[pa.Table] = []
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> "DatasetWriter":
        remove_unfinished(self._folder)
        self._partial.mkdir(parents=True)
        return self

    def add(self, step: Mapping[str, np.ndarray]) -> None:
        """Add a step: the value of every feature, vectors (d,) and frames (h, w, 3) uint8.

        Frames are scaled to the size of the camera's first frame. The same array as in the previous step is the same
        frame, which is cheaper.

        Raises:
            DatasetError: features are missing or unknown, or have a wrong shape or dtype.
        """
        self._check(step)
        for key, files in self._cameras.items():
            files.add(step[key])
        self._steps.append({name: np.array(step[name], np.float32) for name in self._names})

    def add_episode(self, arrays: Mapping[str, np.ndarray], task: str) -> None:
        """Add a whole episode: arrays by feature, steps along the first axis; raises DatasetError as `add` does."""
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DatasetError(f"an episode's features differ in length: {lengths}")
        for number in range(next(iter(lengths.values()))):
            self.add({name: array[number] for name, array in arrays.items()})
        self.end_episode(task)

    def end_episode(self, task: str) -> None:
        """End the episode of the steps since the last episode; raises DatasetError without steps or `task`."""
        if not self._steps or not isinstance(task, str) or not task.strip():
            raise DatasetError(f"an episode of {len(self._steps)} steps and the task {task!r}; wanted both")
        count, number = len(self._steps), self._tasks.setdefault(task, len(self._tasks))
        frame = np.arange(count)
        columns: dict[str, np.ndarray] = {
            **{name: np.stack([step[name] for step in self._steps]) for name in self._names},
            "timestamp": (frame / self._fps).astype(np.float32)[:, None],
            "frame_index": frame[:, None],
            "episode_index": np.full((count, 1), self.episodes),
            "index": self.frames + frame[:, None],
            "task_index": np.full((count, 1), number),
        }
        row: dict[str, Any] = {
            "episode_index": self.episodes,
            "tasks": [task],
            "length": count,
            "data/chunk_index": 0,
            "data/file_index": 0,
            "dataset_from_index": self.frames,
            "dataset_to_index": self.frames + count,
        }
        stats = {name: compute_vector_stats(values) for name, values in columns.items()}
        for key, files in self._cameras.items():
            location, stats[key] = files.end_episode()
            row |= location
        for feature, statistics in stats.items():
            row |= {f"stats/{feature}/{name}": value for name, value in statistics.items()}
        self._rows.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
        self._data.append(build_vectors_table(columns))
        self.episodes += 1
        self.frames += count
        self._steps.clear()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # The files of a finished dataset are closed already.
            for files in self._cameras.values():
                files.discard()
            shutil.rmtree(self._partial, ignore_errors=True)

    def _check(self, step: Mapping[str, np.ndarray]) -> None:
        expected = {*self._names, *self._cameras}
        if set(step) != expected:
            raise DatasetError(f"a step has {sorted(step)}; wanted {sorted(expected)}")
        wrong = []
        for name, names in self._names.items():
            value = np.asarray(step[name])
            if value.shape != (len(names),) or value.dtype.kind not in "fiu" or not np.isfinite(value).all():
                wrong.append(f"{name} is {value.dtype} {list(value.shape)}; wanted {len(names)} finite numbers")
        for key in self._cameras:
            value = step[key]
            if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
                wrong.append(f"{key} is {value.dtype} {list(value.shape)}; wanted uint8 (h, w, 3)")
        if wrong:
            raise DatasetError("a step cannot be written: " + "; ".join(wrong))

    def _finish(self) -> None:
        if self._steps:
            raise DatasetError(
                f"the last {len(self._steps)} steps belong to no episode; call end_episode(task) after them"
            )
        if not self._rows:
            raise DatasetError("the dataset has no episodes; wanted one or more")
        for files in self._cameras.values():
            files.close()
        data = pa.concat_tables(self._data)
        self._write(metadata.DATA.format(chunk_index=0, file_index=0), data)
        self._write(metadata.EPISODES.format(chunk_index=0, file_index=0), pa.Table.from_pylist(self._rows))
        self._write(metadata.TASKS, build_tasks_table(list(self._tasks)))
        stats = {name: compute_vector_stats(make_column(data[name])) for name in data.column_names}
        stats |= {key: files.colours.stats() for key, files in self._cameras.items()}
        self._write_json(metadata.INFO, self._info())
        self._write_json(metadata.STATS, stats)
        try:
            self._partial.rename(self._folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise DatasetError(
                f"{self._folder} was created by another writer; choose another folder or remove it first"
            ) from error

    def _write(self, name: str, table: pa.Table) -> None:
        path = self._partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path, compression="snappy")

    def _write_json(self, name: str, content: object) -> None:
        (self._partial / name).write_text(json.dumps(content, indent=4, allow_nan=False) + "\n")

    def _info(self) -> dict[str, Any]:
        rate = int(self._fps) if self._fps == int(self._fps) else self._fps
        return {
            "codebase_version": metadata.VERSION,
            "robot_type": self._robot_type,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": len(self._tasks),
            "chunks_size": metadata.CHUNK_FILES,
            "data_files_size_in_mb": metadata.DATA_MEGABYTES,
            "video_files_size_in_mb": metadata.VIDEO_MEGABYTES,
            "fps": rate,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": metadata.DATA,
            "video_path": metadata.VIDEO if self._cameras else None,
            "features": describe_features(self._names, self._cameras, rate),
        }
