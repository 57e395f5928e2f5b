"""Where each episode's rows and frames are. Files are found by rule, never by a path that a dataset names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmodels.data import layout
from jaxmodels.data.info import Info
from jaxmodels.data.json_lines import read_lines
from jaxmodels.data.parquet_file import read_table
from jaxmodels.errors import DatasetError

MOST_TASKS = 1_000_000


@dataclass(frozen=True)
class Place:
    """One episode.

    Attributes:
        number: its ``episode_index``.
        length: rows.
        rows: file of its rows, relative to the dataset.
        videos: video feature to the file of its frames, and when in it they begin, in seconds.
    """

    number: int
    length: int
    rows: str
    videos: Mapping[str, tuple[str, float]]


def read_places(folder: Path, info: Info) -> tuple[Place, ...]:
    """All episodes in their order.

    Raises:
        DatasetError: files of the description are missing or garbled, or it contradicts itself.
    """
    try:
        places = _new(folder, info) if info.version == layout.VERSION else _old(folder, info)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{folder.name}: the description of its episodes lacks or garbles {error}") from error
    numbers = [place.number for place in places]
    if numbers != list(range(len(places))):
        raise DatasetError(f"{folder.name}: its episodes are not numbered 0, 1, 2...; found {_shown(numbers)}")
    rows = sum(place.length for place in places)
    if (len(places), rows) != (info.episodes, info.frames):
        raise DatasetError(
            f"{folder.name}: {layout.INFO} speaks of {info.episodes} episodes and {info.frames} frames; "
            f"meta/episodes describes {len(places)} and {rows}"
        )
    return places


def choose(folder: Path, places: Sequence[Place], episodes: Sequence[int] | None) -> tuple[Place, ...]:
    """Those that are asked for, in the dataset's order; all of them for None.

    Raises:
        DatasetError: one is not there, or none is wanted.
    """
    if episodes is None:
        return tuple(places)
    if wrong := sorted({number for number in episodes if not 0 <= number < len(places)}):
        raise DatasetError(f"{folder.name}: no episodes {_shown(wrong)}; it has 0 to {len(places) - 1}")
    if not episodes:
        raise DatasetError(f"{folder.name}: no episodes are asked for; wanted some of 0 to {len(places) - 1}")
    wanted = set(episodes)
    return tuple(place for place in places if place.number in wanted)


def _new(folder: Path, info: Info) -> tuple[Place, ...]:
    files = sorted((folder / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        raise DatasetError(f"{folder.name}: no files in meta/episodes; fetch or copy the dataset anew")
    videos = [name for name, kind in info.pictures.items() if kind == "video"]
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for name in videos:
        columns += [f"videos/{name}/{what}" for what in ("chunk_index", "file_index", "from_timestamp")]
    found = []
    for path in files:
        table = read_table(path, columns, f"{folder.name}: {path.relative_to(folder)}")
        found += [_new_place(row, videos) for row in table.to_pylist()]
    return tuple(sorted(found, key=lambda place: place.number))


def _new_place(row: Mapping[str, Any], videos: Sequence[str]) -> Place:
    def place(prefix: str) -> dict[str, int]:
        return {name: _count(row[f"{prefix}/{name}"], f"{prefix}/{name}") for name in ("chunk_index", "file_index")}

    return Place(
        number=_count(row["episode_index"], "episode_index"),
        length=_length(row["length"]),
        rows=layout.DATA.format(**place("data")),
        videos={
            name: (
                layout.VIDEO.format(video_key=name, **place(f"videos/{name}")),
                _seconds(row[f"videos/{name}/from_timestamp"]),
            )
            for name in videos
        },
    )


def _old(folder: Path, info: Info) -> tuple[Place, ...]:
    videos = [name for name, kind in info.pictures.items() if kind == "video"]
    found = []
    for row in read_lines(folder / layout.OLD_EPISODES, f"{folder.name}: {layout.OLD_EPISODES}"):
        number = _count(row["episode_index"], "episode_index")
        where = {"chunk": number // info.chunk_files, "episode": number}
        found.append(
            Place(
                number,
                _length(row["length"]),
                layout.OLD_DATA.format(**where),
                {name: (layout.OLD_VIDEO.format(video_key=name, **where), 0.0) for name in videos},
            )
        )
    return tuple(sorted(found, key=lambda place: place.number))


def read_tasks(folder: Path, info: Info) -> tuple[str, ...]:
    """What is done, in words, by ``task_index``.

    Raises:
        DatasetError: the list is missing or garbled.
    """
    if info.version == layout.VERSION:
        where = f"{folder.name}: {layout.TASKS}"
        table = read_table(folder / layout.TASKS, None, where)
        names = [name for name in table.column_names if name != "task_index"]
        if len(names) != 1 or "task_index" not in table.column_names:
            raise DatasetError(f"{where} has columns {table.column_names}; wanted task_index and the tasks")
        pairs = list(zip(table["task_index"].to_pylist(), table[names[0]].to_pylist(), strict=True))
    else:
        where = f"{folder.name}: {layout.OLD_TASKS}"
        pairs = [(row.get("task_index"), row.get("task")) for row in read_lines(folder / layout.OLD_TASKS, where)]
    found: dict[int, str] = {}
    for number, task in pairs:
        if isinstance(number, bool) or not isinstance(number, int) or not isinstance(task, str) or number in found:
            raise DatasetError(f"{where}: {number!r} is {str(task)[:80]!r}; wanted each number once, with a text")
        found[number] = task
    if sorted(found) != list(range(len(found))) or not 0 < len(found) <= MOST_TASKS:
        raise DatasetError(f"{where}: tasks are not numbered 0, 1, 2...; found {_shown(sorted(found))}")
    return tuple(found[number] for number in range(len(found)))


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError(f"{name}, which is {str(value)[:20]}")
    return value


def _length(value: Any) -> int:
    if _count(value, "length") < 1:
        raise ValueError("length, which is 0")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"from_timestamp, which is {str(value)[:20]}")
    return float(value)


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
