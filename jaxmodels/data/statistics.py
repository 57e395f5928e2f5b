"""Statistics of features as LeRobotDataset v3 stores them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmodels.errors import DatasetError
from jaxmodels.types import Feature

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
# Maximum number of frames of an episode, and of pixels of a row or column, for statistics of colours.
FRAMES, SIDE = 100, 160

NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)

Stats = dict[str, list]
Arrays = dict[str, np.ndarray]


def compute_vector_stats(values: np.ndarray) -> Stats:
    """Return min, max, mean, std, count and quantiles of an array (n, d) over n; integers keep integer bounds."""
    wide = values.astype(np.float64)
    stats: Stats = {"min": values.min(0).tolist(), "max": values.max(0).tolist()}
    stats |= {"mean": wide.mean(0).tolist(), "std": wide.std(0).tolist(), "count": [len(values)]}
    return stats | {name: np.quantile(wide, share, axis=0).tolist() for name, share in QUANTILES.items()}


class ColourStats:
    """Statistics of a camera's frames from a histogram of each channel: values in [0, 1], shaped (3, 1, 1)."""

    def __init__(self) -> None:
        self.frames = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, pixels: np.ndarray) -> None:
        """Count the pixels of a frame, uint8 (h, w, 3)."""
        step_h, step_w = (max(side // SIDE, 1) for side in pixels.shape[:2])
        sampled = pixels[::step_h, ::step_w]
        self._counts += np.stack([np.bincount(sampled[..., channel].ravel(), minlength=256) for channel in range(3)])
        self.frames += 1

    def __iadd__(self, other: "ColourStats") -> "ColourStats":
        self.frames += other.frames
        self._counts += other._counts
        return self

    def stats(self) -> Stats:
        """Return statistics of all frames so far."""
        levels = np.arange(256) / 255
        count, below = np.maximum(self._counts.sum(1), 1), self._counts.cumsum(1)
        mean = self._counts @ levels / count
        spread = np.sqrt(np.maximum(self._counts @ levels**2 / count - mean**2, 0))
        is_present = self._counts > 0
        stats: Mapping[str, np.ndarray] = {
            "min": is_present.argmax(1) / 255,
            "max": (255 - is_present[:, ::-1].argmax(1)) / 255,
            "mean": mean,
            "std": spread,
            **{name: (below >= share * below[:, -1:]).argmax(1) / 255 for name, share in QUANTILES.items()},
        }
        return {name: value.reshape(3, 1, 1).tolist() for name, value in stats.items()} | {"count": [self.frames]}


def read_stats(feature: Feature, stats: Mapping[str, Any], where: str) -> Arrays:
    """Check statistics from a file: float32 of the feature's shape ((3, 1, 1) for images); drops unknown names.

    Raises:
        DatasetError: an array has another shape or a number that is not finite.
    """
    expected = (3, 1, 1) if feature.type == "VISUAL" else feature.shape
    arrays = {}
    for name in NAMES:
        if name not in stats:
            continue
        try:
            array = np.asarray(stats[name], np.float32)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{where}: {name} of {feature.name} does not contain numbers") from error
        shape = (1,) if name == "count" else expected
        if array.shape not in (shape, ()) or not np.isfinite(array).all():
            raise DatasetError(
                f"{where}: {name} of {feature.name} has shape {list(array.shape)} or is not finite; "
                f"wanted {list(shape)} finite numbers"
            )
        arrays[name] = np.broadcast_to(array, shape).copy()
    return arrays
