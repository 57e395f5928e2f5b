"""Progress of a training: metrics file, TensorBoard, loss curve, throughput."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jaxmodels.errors import ConfigError
from jaxmodels.training.run_folder import METRICS

EVENTS = "tensorboard"


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training at one line of its metrics; speed and losses are since the line before.

    Attributes:
        step: number of finished steps.
        steps: number of all steps.
        loss: mean loss of the steps.
        learning_rate: learning rate of the last step, except the backbone's.
        seconds: duration of the training, including compilation and earlier runs.
        samples_per_second: examples per second.
        waited: share of the time in which the device waited for data.
        left: seconds until the last step, at this speed.

    Example:
        >>> progress = TrainingProgress(200, 1000, 0.25, 1e-4, 10.0, 160.0, 0.05, 40.0)
        >>> f"{progress.step} of {progress.steps} steps, loss {progress.loss}"
        '200 of 1000 steps, loss 0.25'
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds: float
    samples_per_second: float
    waited: float
    left: float


class Reports:
    """Open metrics files of a run, which only the first process writes; raises ConfigError without tensorboardX."""

    def __init__(self, output: Path, *, first: int, tensorboard: bool, is_writing: bool = True):
        self._is_writing = is_writing
        self._output, self._first, self._wants_events = output, first, tensorboard
        self._events: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> "Reports":
        if self._is_writing:
            self._lines = self._stack.enter_context((self._output / METRICS).open("a"))
            if self._wants_events:
                # `purge_step` removes lines that a killed run wrote after its checkpoint.
                self._events = _writer()(logdir=str(self._output / EVENTS), purge_step=self._first or None)
                self._stack.callback(self._events.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, progress: TrainingProgress, values: Mapping[str, float]) -> None:
        """Write one line of metrics with further measured `values`."""
        if not self._is_writing:
            return
        line = {name: value for name, value in asdict(progress).items() if name not in ("steps", "left")} | dict(values)
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, value in line.items():
                if name not in ("step", "seconds"):
                    self._events.add_scalar(f"train/{name}", value, progress.step)
            self._events.flush()


def _writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard's events need the package tensorboardX: pip install -e '.[training]', or leave "
            "--tensorboard away"
        ) from error
    return SummaryWriter


WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
SMOOTHING = 20  # Lines of metrics in the running mean.
INK, FAINT, RAW, SMOOTH = "#222222", "#dddddd", "#9ec5e8", "#1f5fa8"


def draw_curve(metrics: str | os.PathLike[str], picture: str | os.PathLike[str]) -> None:
    r"""Draw the loss in ``metrics.jsonl`` as a PNG.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     metrics = Path(folder, "metrics.jsonl")
        ...     _ = metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
        ...     draw_curve(metrics, Path(folder, "loss.png"))
        ...     Path(folder, "loss.png").exists()
        True
    """
    metrics = Path(metrics)
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
    """Return round numbers between two powers of ten."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= math.log10(tick) <= high]


class Throughput:
    """Meter of time between metrics and waits for data; earlier runs took `before` seconds for `first` steps."""

    def __init__(self, steps: int, batch_size: int, first: int, before: float):
        self._steps, self._batch_size, self._before = steps, batch_size, before
        self._begun = self._last = time.monotonic()
        self._last_step, self._waited = first, 0.0

    @contextmanager
    def waiting(self, running: Any) -> Iterator[None]:
        """Measure a wait for a batch, unless the newest step (`running`, None at first) is still running."""
        began = time.monotonic()
        yield
        if running is None or running.is_ready():
            self._waited += time.monotonic() - began

    def progress(self, step: int, loss: float, rate: float) -> TrainingProgress:
        """Return the progress since the last call."""
        now = time.monotonic()
        seconds = max(now - self._last, 1e-9)
        progress = TrainingProgress(
            step=step,
            steps=self._steps,
            loss=loss,
            learning_rate=rate,
            seconds=self._before + now - self._begun,
            samples_per_second=(step - self._last_step) * self._batch_size / seconds,
            waited=min(1.0, self._waited / seconds),
            left=(self._steps - step) * seconds / max(1, step - self._last_step),
        )
        self._last, self._last_step, self._waited = now, step, 0.0
        return progress
