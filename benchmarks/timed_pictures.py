"""Pictures that tell when they were taken, after any codec: black and white bars for the bits of a time."""

import numpy as np

BITS = 24  # Bits of a picture's time in milliseconds, each drawn as a black or white bar.


def stamp(now: float) -> int:
    """What a picture taken at this monotonic time carries: its milliseconds, in 24 bits."""
    return int(now * 1e3) % (1 << BITS)


def picture(size: tuple[int, int], now: float) -> np.ndarray:
    """Bars for the bits of ``now``, in milliseconds; uint8 (h, w, 3)."""
    bits = stamp(now)
    bars = np.array([200 if bits >> place & 1 else 50 for place in range(BITS)], np.uint8)
    row = bars[np.arange(size[1]) * BITS // size[1]]
    return np.broadcast_to(row[None, :, None], (*size, 3))


def stamp_of(image: np.ndarray) -> int:
    """What the picture (h, w, 3) carries; of another picture, any number."""
    places = ((np.arange(BITS) + 0.5) * image.shape[1] / BITS).astype(int)
    bars = image[image.shape[0] // 2, places, 1]
    return sum(1 << place for place, bar in enumerate(bars.tolist()) if bar > 125)


def taken_at(image: np.ndarray, now: float) -> float | None:
    """When it was taken, in this machine's monotonic time; None when it cannot be read."""
    age = (int(now * 1e3) - stamp_of(image)) % (1 << BITS)
    return now - age / 1e3 if age < 10_000 else None


# The same number as the pose of an arm of six joints, four bits each: near enough to each other for any limits.

_STEP = 0.05
_BITS_OF_JOINT = 4
BASE = np.array([10.0, -20.0, 30.0, -40.0, 50.0, 60.0], np.float32)


def pose_of(number: int) -> np.ndarray:
    """(6,) float32, in the units of the wire."""
    nibbles = [number >> _BITS_OF_JOINT * joint & 15 for joint in range(len(BASE))]
    return BASE + np.float32(_STEP) * np.array(nibbles, np.float32)


def number_of(pose: np.ndarray) -> int | None:
    """The number of this pose (6,); None when it is none of ``pose_of``."""
    nibbles = (np.asarray(pose, np.float64) - BASE) / _STEP
    whole = np.rint(nibbles)
    if np.abs(nibbles - whole).max() > 0.2 or whole.min() < 0 or whole.max() > 15:
        return None
    return sum(int(nibble) << _BITS_OF_JOINT * joint for joint, nibble in enumerate(whole))
