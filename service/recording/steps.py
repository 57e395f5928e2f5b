"""Steps of a recording: observation and action per tick."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxmodels.data import decode_picture
from jaxmodels.errors import PictureError

# Larger ones are not read: whoever made the file may want to fill the memory.
MAX_PIXELS = 1920 * 1200


class RecordingError(Exception):
    """A recording or dataset that cannot be used; the text says which, what is wrong and what to do."""


class LazyImage(Protocol):
    """A frame that is decoded when it is read; the same object in two steps is the same frame."""

    @property
    def pixels(self) -> np.ndarray:
        """uint8 (h, w, 3), RGB."""
        ...


class EncodedImage:
    """JPEG or PNG of a file, decoded when it is read.

    Raises:
        RecordingError: when it is looked at and is none, or too large.
    """

    def __init__(self, data: bytes):
        self._data = data
        self._pixels: np.ndarray | None = None

    @property
    def pixels(self) -> np.ndarray:
        """uint8 (h, w, 3), RGB."""
        if self._pixels is None:
            self._pixels = self._decode()
        return self._pixels

    def _decode(self) -> np.ndarray:
        try:
            return decode_picture(self._data, _check_size)
        except PictureError as error:
            raise RecordingError(f"a frame is {error}") from error


def _check_size(height: int, width: int) -> None:
    if width * height > MAX_PIXELS:
        raise RecordingError(f"a frame has {width}x{height} pixels; wanted {MAX_PIXELS} at most")


@dataclass(frozen=True)
class Step:
    """Observation and action of one tick.

    Attributes:
        episode, index: counted from 0; the index starts anew in each episode.
        state: (a,) float32, where the joints were.
        action: (a,) float32, where they were sent.
        pictures: camera to its newest frame.
        task: what was to be done, in words; the same throughout an episode.
    """

    episode: int
    index: int
    state: np.ndarray
    action: np.ndarray
    pictures: Mapping[str, LazyImage]
    task: str = ""


@dataclass(frozen=True)
class SourceInfo:
    """Description that all steps of a source share.

    Attributes:
        rate: steps per second.
        joints: names, in the order of states and actions.
        features: the same as LeRobot calls them.
        low, high: (a,) ranges, infinite where nobody knows.
        robot_type: LeRobot's name of the robot, or None.
        task: in words, that of the beginning.
        policy: what moved the robot, where that was recorded.
        length: how many steps there are, about; None when nobody has counted.
        is_whole: False when the file was cut off: whoever wrote it was killed.
    """

    rate: float
    joints: tuple[str, ...]
    features: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray
    cameras: tuple[str, ...]
    robot_type: str | None = None
    task: str = ""
    policy: str | None = None
    length: int | None = None
    is_whole: bool = True


class StepSource(Protocol):
    """Source of recorded steps: a recording or a dataset.

    Attributes:
        damage: where and why reading ended before the end of a damaged file; known when all was read.
    """

    info: SourceInfo
    damage: str | None

    def steps(self) -> Iterator[Step]:
        """Yield all steps, episode after episode."""
        ...
