"""What a dataset says it is: the checked content of its ``meta/info.json``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmodels.checkpoints.json_file import read_json
from jaxmodels.data import layout
from jaxmodels.errors import CheckpointError, ConfigError, DatasetError
from jaxmodels.features import Feature, parse_names
from jaxmodels.ranges import shown

PICTURES = ("video", "image")


@dataclass(frozen=True)
class Info:
    """What there is, before any row was read.

    Attributes:
        version: `layout.VERSION` or `layout.OLD_VERSION`.
        fps: rows per second.
        features: what policies see and do; other columns (rewards, ends of episodes) are left out.
        pictures: image feature to ``video`` or ``image`` (PNG or JPEG bytes beside the numbers).
        chunk_files: episodes in one folder of version 2.1.
        episodes, frames: how many there are of both.
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
    """Reads and checks it.

    Raises:
        DatasetError: it is missing, of another version, or garbled; all complaints together.
    """
    if not (folder / layout.INFO).is_file():
        raise DatasetError(f"{folder}: no {layout.INFO} there; wanted a LeRobotDataset v3.0 or v2.1 folder")
    try:
        found = read_json(folder / layout.INFO)
    except CheckpointError as error:
        raise DatasetError(f"{folder.name}: {error}") from error
    version = found.get("codebase_version")
    if version not in (layout.VERSION, layout.OLD_VERSION):
        raise DatasetError(
            f"{folder.name}: codebase_version is {str(version)[:20]!r}; wanted {layout.VERSION} or "
            f"{layout.OLD_VERSION}, to which lerobot converts others"
        )
    wrong: list[str] = []
    fps = found.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 10_000 or not math.isfinite(fps):
        wrong.append(f"fps is {str(fps)[:20]}; wanted a number above 0")
    counts = {}
    for name, usual in (("total_episodes", None), ("total_frames", None), ("chunks_size", layout.CHUNK_FILES)):
        counts[name] = found.get(name, usual)
        if isinstance(counts[name], bool) or not isinstance(counts[name], int) or counts[name] < 1:
            wrong.append(f"{name} is {str(counts[name])[:20]}; wanted an integer of 1 or more")
    entries = found.get("features")
    features, pictures = [], {}
    if not isinstance(entries, dict):
        wrong.append("features is no object")
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
    if not wrong and not any(feature.name == layout.ACTION for feature in features):
        wrong.append(f"there is no feature {layout.ACTION!r}")
    if wrong:
        raise DatasetError(f"{folder.name}: {layout.INFO}: {'; '.join(wrong)}")
    robot_type = found.get("robot_type")
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
    """As LeRobot sorts a dataset's columns for policies (lerobot/datasets/utils.py, dataset_to_policy_features)."""
    if not layout.FEATURE_NAME.fullmatch(name):
        raise ValueError("the name cannot be used; wanted letters, digits and _.-")
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"shape is {shown(shape)}; wanted a list of integers")
    shape = tuple(shape)
    if dtype in PICTURES:
        return Feature(name, "VISUAL", _channels_first(shape, entry.get("names")))
    kind = (
        "ENV"
        if name == layout.ENVIRONMENT_STATE
        else "STATE"
        if name.startswith("observation")
        else "ACTION"
        if name.startswith(layout.ACTION)
        else None
    )
    is_needed = name in (layout.ACTION, layout.STATE, layout.ENVIRONMENT_STATE)
    if kind is None or (len(shape) != 1 and not is_needed) or not _is_number(dtype):
        if is_needed:
            raise ValueError(f"dtype is {str(dtype)[:20]!r}; wanted numbers")
        return None
    try:
        names = parse_names(name, entry.get("names"))
    except ConfigError:
        names = None  # of some other form: they are only for people
    return Feature(name, kind, shape, names if names is not None and len(names) == shape[0] else None)


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype.startswith(("float", "int", "uint", "bool"))


def _channels_first(shape: tuple[int, ...], names: Any) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape is {list(shape)}; wanted [height, width, 3]")
    is_last = shape[2] == 3 and not (isinstance(names, list) and names[:1] in (["channel"], ["channels"]))
    channels, height, width = (shape[2], *shape[:2]) if is_last else shape
    if height * width > layout.MOST_PIXELS:
        raise ValueError(f"frames of {height}x{width} pixels; wanted {layout.MOST_PIXELS} at most")
    return channels, height, width
