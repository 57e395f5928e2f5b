"""Resized video frames in a memory-mapped cache on the disk."""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock
from jaxtyping import UInt8

from jaxmodels.data.dataset import Dataset


def resize_frames(frames: UInt8[np.ndarray, "n h w 3"], size: tuple[int, int]) -> UInt8[np.ndarray, "n h2 w2 3"]:
    """Resize frames to (height, width): linear with anti-aliasing as ``jax.image.resize``, rounded to uint8.

    Training must resize as serving does, but in NumPy, because threads resize while the device trains.

    Example:
        >>> resize_frames(np.zeros((2, 48, 64, 3), np.uint8), (24, 32)).shape
        (2, 24, 32, 3)
    """
    (count, height, width, _), (tall, wide) = frames.shape, size
    if (height, width) == size:
        return frames
    rows, columns = _weights(height, tall), _weights(width, wide)
    scaled = np.empty((count, tall, wide, 3), np.uint8)
    for frame, out in zip(frames, scaled, strict=True):
        narrowed = rows @ frame.reshape(height, width * 3).astype(np.float32)
        # One product over transposed rows is faster than a product for each row.
        turned = narrowed.reshape(tall, width, 3).swapaxes(0, 1).reshape(width, tall * 3)
        resized = (columns @ turned).reshape(wide, tall, 3).swapaxes(0, 1)
        out[:] = np.clip(np.round(resized), 0, 255)
    return scaled


@lru_cache(maxsize=64)
def _weights(size: int, new_size: int) -> np.ndarray:
    """Return weights (new_size, size) of pixels in new pixels (jax/_src/image/scale.py, compute_weight_mat)."""
    scale = size / new_size
    centres = (np.arange(new_size) + 0.5) * scale - 0.5
    distance = np.abs(centres[:, None] - np.arange(size)) / max(scale, 1.0)
    weights = np.maximum(0.0, 1.0 - distance)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


VARIABLE = "ROBOJAX_FRAME_CACHE"
# Bytes of all datasets together. A 96x96 frame has 28 kB, a 480x640 frame 0.9 MB.
LIMIT = 32 << 30
# Bytes that stay free on the disk.
SPARE = 2 << 30
PART = 32  # Frames that are decoded together.
SUFFIX, UNFINISHED = ".frames", ".partial"

logger = logging.getLogger(__name__)


def cache_frames(
    folder: Path,
    dataset: Dataset,
    camera: str,
    size: tuple[int, int],
    *,
    workers: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> np.ndarray | None:
    """Return all frames of a camera (n, h, w, 3) uint8, memory-mapped read-only; None when they cannot be stored.

    Frames of the least recently used datasets make room. `on_progress` receives counts of decoded and of all frames.

    Raises:
        DatasetError: a frame cannot be read.
    """
    key = hashlib.sha256(repr((dataset.fingerprint, camera, size)).encode()).hexdigest()[:32]
    path, shape = folder / f"{key}{SUFFIX}", (len(dataset), *size, 3)
    needed = int(np.prod(shape))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), fallback_to_soft=False):
            if not (path.is_file() and path.stat().st_size == needed):
                if not _make_room(folder, needed):
                    logger.info("%s: %s is decoded for each batch: its frames have %d bytes and the cache's limit "
                                "is %d", dataset.folder.name, camera, needed, LIMIT)  # fmt: skip
                    return None
                _fill_file(path, dataset, camera, size, workers, on_progress)
            os.utime(path)  # The time of the last use.
        return np.memmap(path, np.uint8, "r", shape=shape)
    except OSError as error:
        logger.warning("%s: %s is decoded for each batch: %s cannot be used (%s); set %s to a folder that can be "
                       "written", dataset.folder.name, camera, folder, error, VARIABLE)  # fmt: skip
        return None


def _fill_file(
    path: Path,
    dataset: Dataset,
    camera: str,
    size: tuple[int, int],
    workers: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    partial = path.with_suffix(UNFINISHED)
    frame, rows, done, counting = int(np.prod((*size, 3))), len(dataset), 0, threading.Lock()
    # Each thread decodes neighbouring frames, which needs no seek.
    stretches = [part for part in np.array_split(np.arange(rows), workers) if len(part)]

    def decode(stretch: np.ndarray) -> None:
        nonlocal done
        for start in range(0, len(stretch), PART):
            part = stretch[start : start + PART]
            pixels = resize_frames(dataset.frames(camera, part), size)
            # Written without a mapping, because a full disk would kill a process that writes to a mapping.
            _write_whole(file.fileno(), pixels.tobytes(), int(part[0]) * frame)
            with counting:
                done += len(part)
                if on_progress is not None:
                    on_progress(done, rows)

    try:
        with partial.open("wb") as file, ThreadPoolExecutor(workers, "decode") as pool:
            running = [pool.submit(decode, stretch) for stretch in stretches]
            try:
                for future in running:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_whole(descriptor: int, data: bytes, offset: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def _make_room(folder: Path, needed: int) -> bool:
    """Remove the least recently used frames; returns whether `needed` bytes fit."""
    existing = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    sizes = {path: path.stat().st_size for path in existing}
    free = shutil.disk_usage(folder).free
    if needed > LIMIT or needed + SPARE > free + sum(sizes.values()):
        return False
    while sum(sizes.values()) + needed > LIMIT or needed + SPARE > free:
        oldest = next(iter(sizes))
        oldest.unlink(missing_ok=True)  # Readers keep their mapping.
        free += sizes.pop(oldest)
    return True
