"""A LeRobotDataset, local or fetched from the Hub, whose frames are decoded on demand."""

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from jaxmodels import hub
from jaxmodels.checkpoints.files import read_json
from jaxmodels.data import metadata
from jaxmodels.data.metadata import check_video_spans, read_episode_locations, read_info, read_tasks, select_episodes
from jaxmodels.data.rows import Rows, StillFrames, VideoFrames
from jaxmodels.data.statistics import NAMES, Arrays, ColourStats, compute_vector_stats, read_stats
from jaxmodels.errors import CheckpointError, DatasetError
from jaxmodels.types import ACTION, Feature

# Number of frames for statistics of colours, if none are stored.
STATISTICS_FRAMES = 1000


class Dataset:
    """Chosen episodes of a LeRobotDataset (version 3.0 or 2.1) in a folder.

    Rows are counted from 0 over these episodes.

    Attributes:
        folder: folder of the dataset.
        version: ``v3.0`` or ``v2.1``.
        fps: rows per second.
        robot_type: LeRobot's name of the robot, or None.
        features: observations and actions, in the dataset's order; images are (3, h, w).
        tasks: texts of tasks, by number.
        episodes: numbers of the episodes in the folder.
        lengths, starts, ends: number of rows of each episode, its first row, and the row after its last row.
        task_index: (n,) int32, the task of each row.

    Example:
        >>> import tempfile
        >>> from jaxmodels.data import DatasetWriter, open_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with DatasetWriter(f"{folder}/demos", fps=10, joint_names=["x"]) as writer:
        ...         for x in range(3):
        ...             pose = np.float32([x])
        ...             writer.add({"observation.state": pose, "action": pose + 1})
        ...         writer.end_episode("go right")
        ...     dataset = open_dataset(f"{folder}/demos")
        >>> dataset.fps, len(dataset), dataset.tasks
        (10.0, 3, ('go right',))
    """

    def __init__(self, folder: str | os.PathLike[str], episodes: Sequence[int] | None = None):
        """Read and check the description, and the order and timestamps of the rows; no frames and no vectors.

        Raises:
            DatasetError: a file is missing, malformed or contradicts another file.
        """
        folder = Path(folder)
        info = read_info(folder)
        locations = read_episode_locations(folder, info)
        self._is_whole = episodes is None
        self._locations = select_episodes(folder, locations, episodes)
        self._rows = Rows(folder, self._locations)
        self._rows.check_rate(info.fps)  # Before the spans, which all look wrong with a wrong rate.
        check_video_spans(folder, info.fps, locations)
        self._rows.check_times_of_videos(info.fps)
        self._pictures = info.pictures
        self.folder, self.version, self.fps, self.robot_type = folder, info.version, info.fps, info.robot_type
        self.features = info.features
        self.tasks = read_tasks(folder, info)
        self.episodes = tuple(location.number for location in self._locations)
        self.lengths = np.array([location.length for location in self._locations])
        self.ends = np.cumsum(self.lengths)
        self.starts = self.ends - self.lengths
        self.task_index = self._rows.tasks
        if self.task_index.min() < 0 or self.task_index.max() >= len(self.tasks):
            raise DatasetError(
                f"{folder.name}: rows have tasks {self.task_index.min()} to {self.task_index.max()}; "
                f"there are 0 to {len(self.tasks) - 1}"
            )
        self._vectors: dict[str, np.ndarray] = {}
        self._frames: dict[str, VideoFrames | StillFrames] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.ends[-1])

    def feature(self, name: str) -> Feature:
        """Return the feature of this name; raises DatasetError if there is none."""
        for feature in self.features:
            if feature.name == name:
                return feature
        raise DatasetError(
            f"{self.folder.name} has no {name}; it has {', '.join(feature.name for feature in self.features)}"
        )

    @property
    def joint_names(self) -> tuple[str, ...] | None:
        """Names of the action's joints, or None if the dataset has none."""
        return self.feature(ACTION).names

    @property
    def cameras(self) -> tuple[Feature, ...]:
        """The features that are images."""
        return tuple(feature for feature in self.features if feature.type == "VISUAL")

    def vectors(self, name: str) -> Float[np.ndarray, "n d"]:
        """Return all rows of a feature of numbers, (n, d); read once.

        Raises:
            DatasetError: the feature is missing, a camera, or malformed, or a number is not finite.
        """
        if name not in self._vectors:
            feature = self.feature(name)
            if feature.type == "VISUAL":
                raise DatasetError(f"{self.folder.name}: {name} is a camera; call frames() for its frames")
            values = self._rows.read(name, feature.shape[0], np.float32)
            if not np.isfinite(values).all():
                row = int(np.argwhere(~np.isfinite(values))[0, 0])
                raise DatasetError(f"{self.folder.name}: {name} of row {row} is {values[row]}; wanted finite numbers")
            self._vectors[name] = values
        return self._vectors[name]

    def window(
        self, name: str, rows: Int[np.ndarray, "b"] | Sequence[int], steps: Sequence[int]
    ) -> tuple[Float[np.ndarray, "b t d"], Bool[np.ndarray, "b t"]]:
        """Return a feature at rows plus `steps` (LeRobot's ``delta_timestamps`` times `fps`), see `window_rows`."""
        inside, is_pad = self.window_rows(rows, steps)
        return self.vectors(name)[inside], is_pad

    def window_rows(
        self, rows: Int[np.ndarray, "b"] | Sequence[int], steps: Sequence[int]
    ) -> tuple[Int[np.ndarray, "b t"], Bool[np.ndarray, "b t"]]:
        """Return rows plus `steps`, clipped to the row's episode, and a mask of the clipped rows."""
        chosen = self._check_rows(rows)
        episode = np.searchsorted(self.ends, chosen, side="right")
        requested = chosen[:, None] + np.asarray(steps)
        first, last = self.starts[episode][:, None], self.ends[episode][:, None] - 1
        inside = np.clip(requested, first, last)
        return inside, inside != requested

    def rows_without_ends(self, count: int) -> Int[np.ndarray, "k"]:
        """Return all rows but the last `count` of each episode; LeRobot's ``drop_n_last_frames``.

        Raises:
            DatasetError: none are left.
        """
        kept = [np.arange(start, end - count) for start, end in zip(self.starts, self.ends, strict=True)]
        rows = np.concatenate(kept)
        if not len(rows):
            raise DatasetError(
                f"{self.folder.name}: its longest episode has {self.lengths.max()} frames, and the last {count} of "
                "each are left out; set --policy.drop_n_last_frames to less, or record longer ones"
            )
        return rows

    def frames(self, name: str, rows: Int[np.ndarray, "k"] | Sequence[int]) -> UInt8[np.ndarray, "k h w 3"]:
        """Decode frames of a camera at these rows, in their order; may be called from several threads.

        Raises:
            DatasetError: the feature is not a camera, or a file is missing, damaged, or shorter than its rows.
        """
        feature, chosen = self.feature(name), self._check_rows(rows)
        frames = np.empty((len(chosen), *feature.shape[1:], 3), np.uint8)
        self._source(feature).read(chosen, frames)
        return frames

    def statistics(self) -> dict[str, Arrays]:
        """Return LeRobot's statistics (min, max, mean, std, count, q01 to q99) of every feature, float32.

        Statistics of images are (3, 1, 1) in [0, 1]. They are read from ``meta/stats.json`` if all episodes are used,
        and computed otherwise.
        """
        written = self._read_stored()
        by_name = {}
        for feature in self.features:
            stats = written.get(feature.name, {})
            if missing := [name for name in NAMES if name not in stats]:
                computed = read_stats(feature, self._compute(feature), self.folder.name)
                stats = stats | {name: computed[name] for name in missing}
            by_name[feature.name] = stats
        return by_name

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the frames of all chosen rows, which changes with their files; raises DatasetError without a file."""
        digest = hashlib.sha256(repr((self.version, self.fps, self.episodes, self.lengths.tolist())).encode())
        for camera in self.cameras:
            for file in self._source(camera).files:
                try:
                    status = (self.folder / file).stat()
                except OSError as error:
                    raise DatasetError(
                        f"{self.folder.name}: {file} is missing ({error.strerror}); fetch or copy the dataset again"
                    ) from error
                digest.update(repr((camera.name, file, status.st_size, status.st_mtime_ns)).encode())
        for location in self._locations:
            videos = sorted((name, span[:2]) for name, span in location.videos.items())
            digest.update(repr((location.rows, videos)).encode())
        return digest.hexdigest()

    def _source(self, feature: Feature) -> VideoFrames | StillFrames:
        name = feature.name
        if feature.type != "VISUAL":
            raise DatasetError(f"{self.folder.name}: {name} is not a camera; cameras are {sorted(self._pictures)}")
        if name not in self._frames:
            height, width = feature.shape[1:]
            if self._pictures[name] == "video":
                times = self._rows.timestamps
                frames = VideoFrames(self.folder, name, (height, width), self.fps, self._locations, times)
            else:
                frames = StillFrames(self.folder, name, (height, width), self._rows)
            self._frames[name] = frames
        return self._frames[name]

    def _check_rows(self, rows: np.ndarray | Sequence[int]) -> np.ndarray:
        chosen = np.asarray(rows, np.int64).reshape(-1)
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"rows {chosen.min()} to {chosen.max()}; there are 0 to {len(self) - 1}")
        return chosen

    def _read_stored(self) -> dict[str, Arrays]:
        path = self.folder / metadata.STATS
        if not self._is_whole or self.version != metadata.VERSION or not path.is_file():
            return {}
        where = f"{self.folder.name}: {metadata.STATS}"
        try:
            written = read_json(path)
        except CheckpointError as error:
            raise DatasetError(f"{self.folder.name}: {error}") from error
        known = {name: stats for name, stats in written.items() if isinstance(stats, dict)}
        return {
            feature.name: read_stats(feature, known[feature.name], where)
            for feature in self.features
            if feature.name in known
        }

    def _compute(self, feature: Feature) -> dict[str, list]:
        if feature.type != "VISUAL":
            return compute_vector_stats(self.vectors(feature.name))
        colours = ColourStats()
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), STATISTICS_FRAMES)).astype(int))
        for part in np.array_split(rows, -(-len(rows) // 16)):
            for frame in self.frames(feature.name, part):
                colours.add(frame)
        return colours.stats()


def open_dataset(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    episodes: Sequence[int] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Dataset:
    """Open a dataset in a folder or on the Hub, from where only the files of the chosen episodes are fetched.

    Args:
        revision: branch, tag or commit of a repo.
        episodes: their numbers; all when None.
        on_progress: see `jaxmodels.hub.fetch`.

    Raises:
        DatasetError: a file is missing, malformed, or contradicts another file.
        HubError: there is no such folder, and the repo cannot be fetched.

    Example:
        >>> import tempfile
        >>> from jaxmodels.data import DatasetWriter, open_dataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with DatasetWriter(f"{folder}/demos", fps=10, joint_names=["x"]) as writer:
        ...         for x in range(3):
        ...             pose = np.float32([x])
        ...             writer.add({"observation.state": pose, "action": pose + 1})
        ...         writer.end_episode("go right")
        ...     open_dataset(f"{folder}/demos", episodes=[0]).lengths.tolist()
        [3]
    """
    folder = Path(path_or_repo)
    if not folder.is_dir():
        folder = fetch_dataset(str(path_or_repo), revision, episodes, on_progress)
    elif revision is not None:
        raise DatasetError(f"{folder} is a folder here; a revision is of a repo of the Hub")
    return Dataset(folder, episodes)


META = (
    metadata.INFO,
    metadata.STATS,
    metadata.TASKS,
    "meta/episodes/chunk-*/file-*.parquet",
    metadata.OLD_TASKS,
    metadata.OLD_EPISODES,
)
ALL = ("data/chunk-*/*.parquet", "videos/*/*.mp4")


def fetch_dataset(
    repo_id: str, revision: str | None, episodes: Sequence[int] | None, on_progress: Callable[[str], None] | None
) -> Path:
    """Fetch a dataset's files from the Hub at one commit; returns their folder.

    Raises:
        HubError: the repo cannot be fetched.
        DatasetError: the repo is not a dataset.
    """
    folder = hub.fetch(repo_id, revision, files=META, kind="dataset", on_progress=on_progress)
    locations = select_episodes(folder, read_episode_locations(folder, read_info(folder)), episodes)
    files = {location.rows for location in locations} | {
        span.file for location in locations for span in location.videos.values()
    }
    # Each name is compared with each pattern, so a whole dataset uses only two patterns.
    patterns = sorted(files) if episodes is not None else ALL
    commit = folder.name  # The folder of a snapshot has the name of its commit.
    return hub.fetch(repo_id, commit, files=(*META, *patterns), kind="dataset", on_progress=on_progress)
