"""Statistics of features as LeRobotDataset v3 keeps them: of vectors, of pictures, and out of its files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmodels.errors import DatasetError
from jaxmodels.types import Feature

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
# So many frames of an episode are looked at, and so many pixels of a row and a column: colours need no more.
FRAMES, SIDE = 100, 160

NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)

Stats = dict[str, list]
Arrays = dict[str, np.ndarray]


def of_vectors(values: np.ndarray) -> Stats:
    """min, max, mean, std, count and quantiles of (n, d) over n; integers keep integer bounds."""
    wide = values.astype(np.float64)
    found: Stats = {"min": values.min(0).tolist(), "max": values.max(0).tolist()}
    found |= {"mean": wide.mean(0).tolist(), "std": wide.std(0).tolist(), "count": [len(values)]}
    return found | {name: np.quantile(wide, share, axis=0).tolist() for name, share in QUANTILES.items()}


class Colours:
    """The same of frames, from a histogram of each channel: values in [0, 1], shaped (3, 1, 1)."""

    def __init__(self) -> None:
        self.frames = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, pixels: np.ndarray) -> None:
        """Look at one frame: uint8 (h, w, 3)."""
        step_h, step_w = (max(side // SIDE, 1) for side in pixels.shape[:2])
        seen = pixels[::step_h, ::step_w]
        self._counts += np.stack([np.bincount(seen[..., channel].ravel(), minlength=256) for channel in range(3)])
        self.frames += 1

    def __iadd__(self, other: "Colours") -> "Colours":
        self.frames += other.frames
        self._counts += other._counts
        return self

    def stats(self) -> Stats:
        """What was seen."""
        levels = np.arange(256) / 255
        count = np.maximum(self._counts.sum(1), 1)
        mean = self._counts @ levels / count
        spread = np.sqrt(np.maximum(self._counts @ levels**2 / count - mean**2, 0))
        seen = self._counts > 0
        found: Mapping[str, np.ndarray] = {
            "min": seen.argmax(1) / 255,
            "max": (255 - seen[:, ::-1].argmax(1)) / 255,
            "mean": mean,
            "std": spread,
            **{name: self._quantile(share) for name, share in QUANTILES.items()},
        }
        return {name: value.reshape(3, 1, 1).tolist() for name, value in found.items()} | {"count": [self.frames]}

    def _quantile(self, share: float) -> np.ndarray:
        reached = self._counts.cumsum(1) >= share * self._counts.sum(1, keepdims=True)
        return reached.argmax(1) / 255


def as_arrays(feature: Feature, stats: Mapping[str, Any], where: str) -> Arrays:
    """What a file says of a feature: float32 of its shape, pictures' (3, 1, 1); names that are not known are left out.

    Raises:
        DatasetError: an array has another shape, or a number is none or not finite.
    """
    wanted = (3, 1, 1) if feature.type == "VISUAL" else feature.shape
    found = {}
    for name in NAMES:
        if name not in stats:
            continue
        try:
            array = np.asarray(stats[name], np.float32)
        except (TypeError, ValueError) as error:
            raise DatasetError(f"{where}: {name} of {feature.name} holds something else than numbers") from error
        shape = (1,) if name == "count" else wanted
        if array.shape not in (shape, ()) or not np.isfinite(array).all():
            raise DatasetError(
                f"{where}: {name} of {feature.name} has shape {list(array.shape)} or is not finite; "
                f"wanted {list(shape)} finite numbers"
            )
        found[name] = np.broadcast_to(array, shape).copy()
    return found
