"""Frames in the size a policy looks at, made as its serving program makes them."""

from functools import lru_cache

import numpy as np
from jaxtyping import UInt8


def resize_frames(frames: UInt8[np.ndarray, "n h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "n h2 w2 3"]:
    """Frames at (height, width): linear with anti-aliasing as ``jax.image.resize``, rounded to pixels.

    Training on frames resized in another way teaches a policy edges that it will not see when it is served. In NumPy,
    because several threads do this beside a device that is busy with training.
    """
    (count, height, width, _), (tall, wide) = frames.shape, size
    if (height, width) == size:
        return frames
    rows, columns = _weights(height, tall), _weights(width, wide)
    found = np.empty((count, tall, wide, 3), np.uint8)
    for frame, out in zip(frames, found, strict=True):
        narrowed = rows @ frame.reshape(height, width * 3).astype(np.float32)
        # One product with columns as rows is faster than one with three colours for each row.
        turned = narrowed.reshape(tall, width, 3).swapaxes(0, 1).reshape(width, tall * 3)
        resized = (columns @ turned).reshape(wide, tall, 3).swapaxes(0, 1)
        out[:] = np.clip(np.round(resized), 0, 255)
    return found


@lru_cache(maxsize=64)
def _weights(size: int, wanted: int) -> np.ndarray:
    """(wanted, size): how much of each pixel is in each new one; a triangle as wide as a new pixel, or else an old one.

    Source: jax/_src/image/scale.py, compute_weight_mat.
    """
    scale = size / wanted
    centres = (np.arange(wanted) + 0.5) * scale - 0.5
    distance = np.abs(centres[:, None] - np.arange(size)) / max(scale, 1.0)
    weights = np.maximum(0.0, 1.0 - distance)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
