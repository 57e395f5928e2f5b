"""The loss curve of a training as a picture: logarithmic, with a running mean."""

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
SMOOTHING = 20  # lines of metrics in the running mean
INK, FAINT, RAW, SMOOTH = "#222222", "#dddddd", "#9ec5e8", "#1f5fa8"


def draw_curve(metrics: Path, picture: Path) -> None:
    """Reads ``metrics.jsonl`` and writes a PNG."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    if not lines:
        raise ValueError(f"{metrics.name} is empty; nothing to draw")
    steps = np.array([line["step"] for line in lines], float)
    losses = np.maximum([line["loss"] for line in lines], 1e-8)
    window = min(SMOOTHING, max(1, len(losses) // 4))
    smooth = np.convolve(losses, np.ones(window) / window, "valid")
    low, high = math.log10(losses.min()), math.log10(losses.max())
    low, high = low - 0.05, max(high, low + 0.1) + 0.05
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    font, title = ImageFont.load_default(14), ImageFont.load_default(18)

    def across(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps[-1]

    def up(loss: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(loss) - low) / (high - low)

    for loss in _ticks(low, high):
        draw.line([(LEFT, up(loss)), (WIDTH - RIGHT, up(loss))], fill=FAINT)
        draw.text((LEFT - 8, up(loss)), f"{loss:g}", fill=INK, font=font, anchor="rm")
    for share in (0, 0.25, 0.5, 0.75, 1):
        step = share * steps[-1]
        draw.text((across(step), HEIGHT - BOTTOM + 8), f"{step:.0f}", fill=INK, font=font, anchor="mt")
    draw.line([(across(s), up(v)) for s, v in zip(steps, losses, strict=True)], fill=RAW)
    draw.line([(across(s), up(v)) for s, v in zip(steps[window - 1 :], smooth, strict=True)], fill=SMOOTH, width=3)
    draw.text((LEFT, 10), f"training loss, last {smooth[-1]:.4f}", fill=INK, font=title)
    draw.text((WIDTH - RIGHT, HEIGHT - 8), "step", fill=INK, font=font, anchor="rb")
    image.save(picture)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]
