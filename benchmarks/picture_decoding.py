"""What does libjpeg's decoding at half the size save, and how far does it change what a policy sees?

    python -m benchmarks.picture_decoding

JPEG pictures of 480x640 for a policy of 224x224. "exact" is what the server does: decode all pixels, and let the
policy's program resize them. "half" lets libjpeg drop frequencies and return 240x320. The difference is that of the
resized input, in units of 255, for both ways in which policies resize. It is compared with the difference that JPEG
itself makes. Sides take turns. Also measured: exact pictures a second by number of threads.
"""

import io
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.fleet_gpu import FRAME, make_picture
from benchmarks.measured import RESULTS, quietness, result, write
from service.streaming.observation import decode_image

INPUT = (224, 224)
PICTURES, ROUNDS = 8, 25
THREADS = (1, 2, 4, 8, 16)


def decode_exactly(file: bytes) -> np.ndarray:
    return decode_image("camera", file, FRAME[0] * FRAME[1])


def decode_half(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as picture:
        picture.draft("RGB", (FRAME[1] // 2, FRAME[0] // 2))
        return np.asarray(picture)


def resizers() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    import jax.numpy as jnp

    from jaxmodels.layers.images import resize_as_pillow, resize_with_padding

    def resize(how: Callable[..., Any], frame: np.ndarray) -> np.ndarray:
        height = FRAME[0] * INPUT[1] // FRAME[1]  # The rest is a border.
        first = (INPUT[0] - height) // 2
        resized = np.asarray(how(jnp.asarray(frame[None], jnp.float32) / 255, INPUT))
        return resized[0, first : first + height] * 255

    return {
        "linear, as LeRobot": partial(resize, partial(resize_with_padding, place="center")),
        "antialiased, as openpi": partial(resize, resize_as_pillow),
    }


def differences(files: list[bytes], originals: list[np.ndarray]) -> dict[str, Any]:
    """Return differences of the policy's input to half pictures and to the originals, for each way to resize."""
    found: dict[str, Any] = {}
    for name, resize in resizers().items():
        exact = [resize(decode_exactly(file)) for file in files]
        for what, others in (
            ("half", [resize(decode_half(file)) for file in files]),
            ("the picture before JPEG", [resize(original) for original in originals]),
        ):
            away = np.abs(np.stack(exact) - np.stack(others))
            found[f"{name}, exact and {what}"] = {
                "mean": round(float(away.mean()), 2),
                "p99": round(float(np.percentile(away, 99)), 1),
                "max": round(float(away.max()), 1),
            }
    return found


def main() -> None:
    quiet = quietness()
    pictures = [make_picture(seed) for seed in range(PICTURES)]
    files, originals = [file for file, _ in pictures], [original for _, original in pictures]
    taken: dict[str, list[float]] = {"exact": [], "half": []}
    for _ in range(ROUNDS):
        for name, decode in (("exact", decode_exactly), ("half", decode_half)):
            began = time.perf_counter()
            for file in files:
                decode(file)
            taken[name].append((time.perf_counter() - began) / PICTURES)
    ratios = [exact / half for exact, half in zip(taken["exact"], taken["half"], strict=True)]
    per_second = {}
    for threads in THREADS:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            list(pool.map(decode_exactly, files * ROUNDS))
            per_second[str(threads)] = round(PICTURES * ROUNDS / (time.perf_counter() - began))
    figures = {
        "decode_ms": {name: round(statistics.median(seconds) * 1e3, 3) for name, seconds in taken.items()},
        "exact_over_half": round(statistics.median(ratios), 2),
        "exact_pictures_per_s_by_threads": per_second,
        "difference_of_255": differences(files, originals),
    }
    print(figures, flush=True)
    question = "What does libjpeg's decoding at half the size save, and how far does it change what a policy sees?"
    bytes_each = statistics.median(map(len, files))
    found = result(question, "python -m benchmarks.picture_decoding", quiet, "pillow", bytes_each=bytes_each, **figures)
    write(RESULTS / "picture_decoding.json", found)


if __name__ == "__main__":
    main()
