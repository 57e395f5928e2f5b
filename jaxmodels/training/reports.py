"""What a training tells while it runs: lines in a file, TensorBoard's events, and progress for whoever watches."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxmodels.errors import ConfigError
from jaxmodels.training.run_folder import METRICS

EVENTS = "tensorboard"


@dataclass(frozen=True)
class Progress:
    """Where a training is; all but the first two since the line before.

    Attributes:
        step: how many are done.
        steps: how many there will be.
        loss: mean of the steps.
        learning_rate: of the last step, before the backbone's own.
        seconds: that the training has taken until now, compilation included, runs before this one too.
        samples_per_second: examples trained on.
        waited: share of the time in which the device had nothing to do because data was not there yet.
        left: seconds until the last step, at this speed.
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
    """Open files of one run; nothing is written by a process that is not the first.

    Raises:
        ConfigError: TensorBoard's events are wanted and tensorboardX is not installed.
    """

    def __init__(self, output: Path, *, first: int, tensorboard: bool, is_writing: bool = True):
        self._is_writing = is_writing
        self._output, self._first, self._wants_events = output, first, tensorboard
        self._events: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> "Reports":
        if self._is_writing:
            self._lines = self._stack.enter_context((self._output / METRICS).open("a"))
            if self._wants_events:
                # Lines after the checkpoint that a killed run wrote are struck out by `purge_step`.
                self._events = _writer()(logdir=str(self._output / EVENTS), purge_step=self._first or None)
                self._stack.callback(self._events.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, progress: Progress, values: Mapping[str, float]) -> None:
        """One line.

        Args:
            values: what was measured beside the loss.
        """
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
            "TensorBoard's events need the package tensorboardX: pip install 'robojax[training]', or leave "
            "--tensorboard away"
        ) from error
    return SummaryWriter
