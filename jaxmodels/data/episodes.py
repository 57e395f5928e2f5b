"""A folder of demonstrations: one array per feature over all steps, and what they mean in ``meta.json``.

``observation.state.npy`` (n, s) float32, ``action.npy`` (n, a) float32 and ``observation.images.<camera>.npy``
(n, h, w, 3) uint8, each the steps of all episodes one after another. They are memory-mapped, never read whole.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from jaxmodels.checkpoints.json_file import read_json
from jaxmodels.errors import CheckpointError
from jaxmodels.features import ACTION, IMAGES, STATE

META = "meta.json"
FORMAT = "robojax-episodes-1"
STATISTICS_STRIDE = 7  # every so many frames are enough for the mean and spread of a colour


@dataclass(frozen=True)
class Meta:
    """What the arrays mean.

    Attributes:
        rate: steps per second.
        joint_names: names of the numbers of an action, and of a state.
        lengths: steps of each episode, in order.
        seeds: what each episode was made from, when it was.
        task: what is being done, in words.
    """

    rate: float
    joint_names: tuple[str, ...]
    lengths: tuple[int, ...]
    seeds: tuple[int, ...] = ()
    task: str = ""
    format: str = FORMAT


class EpisodeWriter:
    """Appends episodes; the folder appears under its name only when everything was written."""

    def __init__(self, folder: Path, *, rate: float, joint_names: Sequence[str], task: str = ""):
        if folder.exists():
            raise FileExistsError(f"{folder} is there already; choose another folder or remove it first")
        self._folder = folder
        self._partial = folder.with_name(folder.name + ".partial")
        self._rate, self._joint_names, self._task = rate, tuple(joint_names), task
        self._lengths: list[int] = []
        self._seeds: list[int] = []
        self._files: dict[str, BinaryIO] = {}
        self._layout: dict[str, tuple[tuple[int, ...], str]] = {}

    def __enter__(self) -> "EpisodeWriter":
        shutil.rmtree(self._partial, ignore_errors=True)  # of a run that was killed
        self._partial.mkdir(parents=True)
        return self

    def add(self, arrays: Mapping[str, np.ndarray], seed: int) -> None:
        """One episode: feature name to array, the first axis being its steps.

        Raises:
            ValueError: features, shapes or lengths differ from those of the episode before or from each other.
        """
        layout = {name: (array.shape[1:], array.dtype.str) for name, array in arrays.items()}
        lengths = {len(array) for array in arrays.values()}
        if len(lengths) != 1 or not {STATE, ACTION} <= set(arrays):
            raise ValueError(f"an episode needs {STATE} and {ACTION} of one length; found {layout} x {lengths}")
        if self._layout and layout != self._layout:
            raise ValueError(f"this episode has {layout}; the ones before had {self._layout}")
        self._layout = layout
        for name, array in arrays.items():
            if name not in self._files:
                self._files[name] = (self._partial / f"{name}.raw").open("wb")
            self._files[name].write(np.ascontiguousarray(array).tobytes())
        self._lengths.append(lengths.pop())
        self._seeds.append(seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for file in self._files.values():
                # Closing writes what is left; when the disk is full that fails too, and must not hide the first error.
                with suppress(OSError) if kind is not None else nullcontext():
                    file.close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)  # whatever was not finished

    def _finish(self) -> None:
        steps = sum(self._lengths)
        for name, (shape, dtype) in self._layout.items():
            raw = self._partial / f"{name}.raw"
            with (self._partial / f"{name}.npy").open("wb") as file:
                np.lib.format.write_array_header_2_0(
                    file, {"shape": (steps, *shape), "fortran_order": False, "descr": dtype}
                )
                with raw.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
            raw.unlink()
        meta = Meta(self._rate, self._joint_names, tuple(self._lengths), tuple(self._seeds), self._task)
        (self._partial / META).write_text(json.dumps(asdict(meta)) + "\n")
        self._partial.rename(self._folder)


class Episodes:
    """Demonstrations read from a folder.

    Raises:
        CheckpointError: the folder holds no episodes, or its arrays do not match ``meta.json``.
    """

    def __init__(self, folder: Path):
        if not (folder / META).is_file():
            raise CheckpointError(
                f"{folder}: no {META} there; wanted a folder of demonstrations, as `robojax demo collect` writes it"
            )
        values = read_json(folder / META)
        if values.get("format") != FORMAT:
            raise CheckpointError(f"{folder.name}: format is {values.get('format')!r}; wanted {FORMAT!r}")
        try:
            self.meta = Meta(
                rate=float(values["rate"]),
                joint_names=tuple(values["joint_names"]),
                lengths=tuple(int(length) for length in values["lengths"]),
                seeds=tuple(values.get("seeds", ())),
                task=str(values.get("task", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder.name}: {META} lacks or garbles {error}; record the folder anew") from error
        # allow_pickle is False by default: an array of objects is refused.
        arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
        wrong = [f"{name} has {len(array)}" for name, array in arrays.items() if len(array) != sum(self.meta.lengths)]
        missing = [name for name in (STATE, ACTION) if name not in arrays]
        if wrong or missing:
            raise CheckpointError(
                f"{folder.name}: {META} speaks of {sum(self.meta.lengths)} steps; {', '.join(wrong) or 'fits'}; "
                f"missing: {', '.join(missing) or 'nothing'}"
            )
        self.state, self.action = arrays[STATE], arrays[ACTION]
        self.images = {name: array for name, array in arrays.items() if name.startswith(IMAGES)}
        self.starts = np.concatenate(([0], np.cumsum(self.meta.lengths)[:-1]))
        self.ends = self.starts + self.meta.lengths

    def __len__(self) -> int:
        return len(self.meta.lengths)

    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """mean, std, min and max of every feature as LeRobot keeps them: float32; images' are (3, 1, 1) in [0, 1]."""
        stats = {STATE: _statistics(self.state, (0,)), ACTION: _statistics(self.action, (0,))}
        for name, frames in self.images.items():
            pixels = np.asarray(frames[::STATISTICS_STRIDE], np.float32) / np.float32(255)
            stats[name] = {key: value.reshape(3, 1, 1) for key, value in _statistics(pixels, (0, 1, 2)).items()}
        return stats


def _statistics(values: np.ndarray, axes: tuple[int, ...]) -> dict[str, np.ndarray]:
    wide = np.asarray(values, np.float64)
    return {
        "mean": wide.mean(axes).astype(np.float32),
        # A joint that never moved would divide by zero; the floor is far below any real spread.
        "std": np.maximum(wide.std(axes), 1e-3).astype(np.float32),
        "min": wide.min(axes).astype(np.float32),
        "max": wide.max(axes).astype(np.float32),
    }
