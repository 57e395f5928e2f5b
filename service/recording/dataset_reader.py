"""Steps out of a LeRobotDataset v3.0 folder, whoever wrote it. Its files are found by rule, never by what it says."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from service.motion.joints import SO100
from service.recording import layout
from service.recording.steps import Encoded, Facts, Picture, RecordingError, Step
from service.recording.video import VideoReader

_SO100 = {f"{joint.alias}.pos": joint for joint in SO100}


class DatasetSource:
    """The steps of a dataset: state and action as vectors, cameras as video or pictures."""

    def __init__(self, folder: Path):
        """Read what it is about.

        Raises:
            RecordingError: something of it is missing or cannot be read, or it is of another version.
        """
        self._folder = folder
        info = self._info()
        features = info["features"]
        self._features = features
        try:
            width = int(features[layout.ACTION]["shape"][0])
            names = _names(features[layout.ACTION], width)
            cameras = tuple(
                name.removeprefix(layout.IMAGES)
                for name, feature in features.items()
                if name.startswith(layout.IMAGES) and feature["dtype"] in ("video", "image")
            )
            rate, length = float(info["fps"]), int(info["total_frames"])
            if features[layout.STATE]["shape"] != [width] or not rate > 0:
                raise RecordingError(f"{folder.name}: its state and action differ in width, or it has no rate")
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RecordingError(f"{folder.name}: {layout.INFO} lacks or garbles {error}") from error
        if wrong := [name for name in cameras if not layout.FEATURE_NAME.fullmatch(f"{layout.IMAGES}{name}")]:
            raise RecordingError(f"{folder.name}: camera names {wrong} cannot be used")
        joints = [_SO100.get(name) for name in names]
        self.facts = Facts(
            rate=rate,
            joints=names,
            features=names,
            low=np.array([joint.low if joint else -np.inf for joint in joints], np.float32),
            high=np.array([joint.high if joint else np.inf for joint in joints], np.float32),
            cameras=cameras,
            robot_type=info.get("robot_type") if isinstance(info.get("robot_type"), str) else None,
            task=self._task(),
            length=length,
        )

    def steps(self) -> Iterator[Step]:
        """All steps, episode after episode.

        Raises:
            RecordingError: a file of it is missing or cannot be read.
        """
        videos = Videos(self._folder, self.facts.rate)
        stills = [name for name in self.facts.cameras if self._features[f"{layout.IMAGES}{name}"]["dtype"] == "image"]
        moving = [name for name in self.facts.cameras if name not in stills]
        try:
            for number, (place, rows) in enumerate(self._episodes()):
                states, actions = (_vectors(rows, name) for name in (layout.STATE, layout.ACTION))
                still = {name: rows[f"{layout.IMAGES}{name}"].to_pylist() for name in stills}
                for index in range(len(rows)):
                    pictures: dict[str, Picture] = {
                        name: videos.frame(f"{layout.IMAGES}{name}", place, index) for name in moving
                    }
                    pictures |= {name: Encoded(bytes(found[index]["bytes"] or b"")) for name, found in still.items()}
                    yield Step(number, index, states[index], actions[index], pictures)
        except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{self._folder.name} cannot be read ({type(error).__name__}: {error})") from error
        finally:
            videos.close()

    def _info(self) -> dict[str, Any]:
        path = self._folder / layout.INFO
        try:
            info = json.loads(path.read_text())
            version, features = info["codebase_version"], info["features"]
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror}; wanted a LeRobotDataset v3.0 folder") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RecordingError(f"{path} cannot be read ({type(error).__name__})") from error
        if str(version).split(".")[0] != "v3" or not isinstance(features, dict):
            raise RecordingError(
                f"{self._folder.name} is a dataset of version {str(version)[:20]!r}, wanted {layout.VERSION}; "
                "lerobot converts older ones"
            )
        return info

    def _task(self) -> str:
        path = self._folder / layout.TASKS
        try:
            table = parquet.read_table(path)
            texts = [name for name in table.column_names if name != "task_index"]
            return str(table[texts[0]][0].as_py()) if texts and len(table) else ""
        except (OSError, pa.ArrowException):
            return ""

    def _episodes(self) -> Iterator[tuple[Mapping[str, Any], pa.Table]]:
        """Each episode's place and rows, one data file in memory at a time."""
        files = sorted((self._folder / "meta/episodes").glob("*/*.parquet"))
        if not files:
            raise RecordingError(f"{self._folder.name}: no episodes in meta/episodes")
        held: tuple[tuple[int, int], pa.Table] | None = None
        for path in files:
            listed = parquet.read_table(path)
            plain = [name for name in listed.column_names if not name.startswith("stats/")]
            for episode in listed.select(plain).to_pylist():
                where = (int(episode["data/chunk_index"]), int(episode["data/file_index"]))
                if held is None or held[0] != where:
                    file = self._folder / layout.DATA.format(chunk_index=where[0], file_index=where[1])
                    try:
                        held = (where, parquet.read_table(file))
                    except OSError as error:
                        raise RecordingError(f"{file.name} of {self._folder.name} cannot be read") from error
                mask = pa.compute.equal(held[1]["episode_index"], int(episode["episode_index"]))  # type: ignore[attr-defined]
                yield episode, held[1].filter(mask)


class Videos:
    """The open videos of a dataset, one per camera."""

    def __init__(self, folder: Path, rate: float):
        self._folder, self._rate = folder, rate
        self._open: dict[str, VideoReader] = {}

    def frame(self, key: str, place: Mapping[str, Any], index: int) -> Picture:
        """Frame ``index`` of the episode at this place."""
        chunk, file = int(place[f"videos/{key}/chunk_index"]), int(place[f"videos/{key}/file_index"])
        path = self._folder / layout.VIDEO.format(video_key=key, chunk_index=chunk, file_index=file)
        seconds, half = float(place[f"videos/{key}/from_timestamp"]) + index / self._rate, 0.5 / self._rate
        reader = self._open.get(key)
        if reader is None or reader.path != path or reader.is_past(seconds, half):
            if reader is not None:
                reader.close()
            reader = self._open[key] = VideoReader(path)
        return reader.at(seconds, half)

    def close(self) -> None:
        """Let go of all files."""
        for reader in self._open.values():
            reader.close()


def _names(feature: Mapping[str, Any], width: int) -> tuple[str, ...]:
    names = feature.get("names")
    if isinstance(names, Mapping):  # of an older form: {"motors": [...]}
        names = next(iter(names.values()), None)
    if not isinstance(names, list) or len(names) != width:
        names = [f"joint_{number + 1}" for number in range(width)]
    return tuple(str(name)[:80] for name in names)


def _vectors(rows: pa.Table, name: str) -> np.ndarray:
    return np.array(rows[name].to_pylist(), np.float32)
