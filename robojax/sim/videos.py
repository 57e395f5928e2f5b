"""Videos of simulated episodes."""

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from robojax.sim.arm import RATE
from robojax.sim.tasks import Outcome

STRIP = 40  # pixels below the picture
GREEN, RED = (30, 120, 50), (150, 40, 30)


def film_name(outcome: Outcome) -> str:
    """File name of an episode's video, with how the episode ended."""
    end = "lifted" if outcome.lifted else "missed" if outcome.wrong is None else "wrong"
    return f"{outcome.number:04d}-seed-{outcome.seed}-{end}.mp4"


def save_film(folder: Path, frames: Sequence[np.ndarray], outcome: Outcome) -> Path:
    """Write an episode's frames, uint8 (h, w, 3), one per tick, as H.264; the file appears only when whole.

    Raises:
        OSError: the disk does not take it.
    """
    path = folder / film_name(outcome)
    partial = path.with_suffix(".partial")
    strip = _strip(frames[0].shape[1], outcome)
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            # Between two episodes: the robot's clock waits for it.
            quick = {"preset": "veryfast", "crf": "22"}
            stream: Any = container.add_stream("libx264", rate=Fraction(RATE), options=quick)
            stream.codec_context.thread_count = 1
            stream.height, stream.width, stream.pix_fmt = frames[0].shape[0] + STRIP, frames[0].shape[1], "yuv420p"
            for picture in frames:
                frame = av.VideoFrame.from_ndarray(np.concatenate((picture, strip)), "rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _strip(width: int, outcome: Outcome) -> np.ndarray:
    strip = Image.new("RGB", (width, STRIP), GREEN if outcome.lifted else RED)
    text = f"{outcome.instruction}\nseed {outcome.seed}: {outcome.verdict}"
    ImageDraw.Draw(strip).multiline_text((6, 4), text, font=ImageFont.load_default(12), spacing=3)
    return np.asarray(strip)
