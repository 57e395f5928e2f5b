"""Pictures that tell when they were taken, after any codec: black and white bars for the bits of a time."""

import numpy as np

BITS = 24  # of a picture's time in milliseconds, one black or white bar each


def picture(size: tuple[int, int], now: float) -> np.ndarray:
    """Bars for the bits of ``now``, in milliseconds."""
    bits = int(now * 1e3) % (1 << BITS)
    bars = np.array([200 if bits >> place & 1 else 50 for place in range(BITS)], np.uint8)
    row = bars[np.arange(size[1]) * BITS // size[1]]
    return np.broadcast_to(row[None, :, None], (*size, 3))


def taken_at(image: np.ndarray, now: float) -> float | None:
    """When it was taken, in this machine's monotonic time; None when it cannot be read."""
    places = ((np.arange(BITS) + 0.5) * image.shape[1] / BITS).astype(int)
    bars = image[image.shape[0] // 2, places, 1].astype(int)
    bits = sum(1 << place for place, bar in enumerate(bars) if bar > 125)
    age = (int(now * 1e3) - bits) % (1 << BITS)
    return now - age / 1e3 if age < 10_000 else None
