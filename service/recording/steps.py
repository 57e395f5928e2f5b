"""Steps of a recording: observation and action per tick."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from jaxmodels.data import decode_picture
from jaxmodels.errors import PictureError

MAX_PIXELS = 1920 * 1200  # Larger frames are not decoded, because a hostile file could fill the memory.


NO_STEPS = (
    "no command was recorded together with frames of all cameras; a client that runs the control loop does not report "
    "its commands"
)


class RecordingError(Exception):
    """A recording or dataset cannot be used; the text names it, the problem and a remedy."""


class LazyImage:
    """A frame that is decoded at its first use; several steps may share it."""

    def __init__(self, decode: Callable[[], np.ndarray]):
        """Create a frame; ``decode`` returns uint8 (h, w, 3), RGB, or raises `RecordingError`."""
        self._decode = decode

    @cached_property
    def pixels(self) -> np.ndarray:
        """uint8 (h, w, 3), RGB."""
        return self._decode()


def decode_frame(data: bytes) -> np.ndarray:
    """Decode a JPEG or PNG.

    Raises:
        RecordingError: the data is not a picture, or the picture is too large.
    """
    try:
        return decode_picture(data, _check_size)
    except PictureError as error:
        raise RecordingError(f"a frame is {error}") from error


def _check_size(height: int, width: int) -> None:
    if width * height > MAX_PIXELS:
        raise RecordingError(f"a frame has {width}x{height} pixels; wanted {MAX_PIXELS} at most")


@dataclass(frozen=True)
class Step:
    """Observation and action of one tick.

    Attributes:
        episode, index: number of the episode, and of the step in the episode, from 0.
        state: measured joints (a,) float32.
        action: commanded joints (a,) float32.
        pictures: camera to its newest frame.
        task: instruction of the episode.
    """

    episode: int
    index: int
    state: np.ndarray
    action: np.ndarray
    pictures: Mapping[str, LazyImage]
    task: str = ""


@dataclass(frozen=True)
class SourceInfo:
    """Description of a source of steps.

    Attributes:
        rate: steps per second.
        joints: names in the order of states and actions.
        features: LeRobot's names of the joints.
        low, high: ranges (a,), infinite if unknown.
        robot_type: LeRobot's name of the robot, or None.
        task: instruction at the beginning.
        length: approximate number of steps, or None.
        is_whole: False if the file is incomplete.
    """

    rate: float
    joints: tuple[str, ...]
    features: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray
    cameras: tuple[str, ...]
    robot_type: str | None = None
    task: str = ""
    length: int | None = None
    is_whole: bool = True


class StepSource(Protocol):
    """Source of recorded steps: a recording or a dataset.

    Attributes:
        damage: where and why reading of a damaged file stopped; valid after reading.
    """

    info: SourceInfo
    damage: str | None

    def steps(self) -> Iterator[Step]:
        """Yield all steps, episode after episode."""
        ...
