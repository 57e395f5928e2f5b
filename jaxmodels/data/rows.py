"""Rows of the chosen episodes, in their order, one column at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxmodels.data.parquet_file import read_table, vectors
from jaxmodels.data.places import Place
from jaxmodels.errors import DatasetError

# Files that are read at once: version 2.1 has one for each episode.
READERS = 8


class Rows:
    """Columns of numbers of these episodes.

    Attributes:
        files: each data file once, in the order of the rows.
        chosen: the rows of each file that belong to the episodes.
        timestamps: (n,) seconds since the row's episode began.
        tasks: (n,) int32 ``task_index``.
    """

    def __init__(self, folder: Path, places: Sequence[Place]):
        """Looks at which rows there are.

        Raises:
            DatasetError: a file is missing or garbled, or holds other rows than the dataset speaks of.
        """
        self._folder = folder
        by_file: dict[str, list[Place]] = {}
        for place in places:
            by_file.setdefault(place.rows, []).append(place)
        self.files = tuple(by_file)
        found = self._each(lambda number: self._choose(self.files[number], by_file[self.files[number]]))
        self.chosen = tuple(chosen for chosen, _, _ in found)
        # As float32, because that is what LeRobot writes and looks frames up by.
        self.timestamps = np.concatenate([times for _, times, _ in found]).astype(np.float64)
        self.tasks = np.concatenate([tasks for _, _, tasks in found])
        if len(self.tasks) != sum(place.length for place in places):
            raise DatasetError(f"{folder.name}: its episodes' rows are not one after another in its files")

    def read(self, name: str, width: int, dtype: Any) -> np.ndarray:
        """(n, width) of a column.

        Raises:
            DatasetError: it is missing or garbled.
        """

        def part(number: int) -> np.ndarray:
            file, where = self._folder / self.files[number], self._where(self.files[number])
            column = read_table(file, [name], where)[name]
            return vectors(column, width, dtype, f"{where}: {name}")[self.chosen[number]]

        return np.concatenate(self._each(part))

    def _each(self, what: Callable[[int], Any]) -> list[Any]:
        """Of every file, several at a time."""
        with ThreadPoolExecutor(READERS, "rows") as pool:
            return list(pool.map(what, range(len(self.files))))

    def _choose(self, file: str, places: Sequence[Place]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which rows of a file, when each is, and what is done in it."""
        where = self._where(file)
        kinds = {"episode_index": np.int64, "frame_index": np.int64, "timestamp": np.float32, "task_index": np.int32}
        table = read_table(self._folder / file, list(kinds), where)
        episode, frame, times, tasks = (
            vectors(table[name], 1, kind, f"{where}: {name}")[:, 0] for name, kind in kinds.items()
        )
        numbers, lengths = ([getattr(place, name) for place in places] for name in ("number", "length"))
        chosen = np.flatnonzero(np.isin(episode, numbers))
        wanted = np.repeat(numbers, lengths), np.concatenate([np.arange(length) for length in lengths])
        if not (np.array_equal(episode[chosen], wanted[0]) and np.array_equal(frame[chosen], wanted[1])):
            raise DatasetError(
                f"{where}: has not the rows of episodes {numbers[0]} to {numbers[-1]} that the dataset speaks of, "
                f"one after another; found {len(chosen)} rows of them, wanted {sum(lengths)}"
            )
        if not np.isfinite(times[chosen]).all():
            raise DatasetError(f"{where}: timestamp is not finite everywhere")
        return chosen, times[chosen], tasks[chosen]

    def _where(self, file: str) -> str:
        return f"{self._folder.name}: {file}"
