"""Where the time of a training goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxmodels.training.reports import Progress


class Watch:
    """Counts seconds between lines of metrics, and those in which the device waited for data.

    Args:
        steps, batch_size: of the training.
        first: steps that were done before this run.
        before: seconds that they took.
    """

    def __init__(self, steps: int, batch_size: int, first: int, before: float):
        self._steps, self._batch_size, self._before = steps, batch_size, before
        self._begun = self._last = time.monotonic()
        self._last_step, self._waited = first, 0.0

    @contextmanager
    def waiting(self, running: Any) -> Iterator[None]:
        """While a batch is waited for.

        Args:
            running: of the newest step, None before the first. If it is not there when the batch is, the device had
                something to do all the time, and did not wait.
        """
        asked = time.monotonic()
        yield
        if running is None or running.is_ready():
            self._waited += time.monotonic() - asked

    def progress(self, step: int, loss: float, rate: float) -> Progress:
        """Since the last time this was asked."""
        now = time.monotonic()
        seconds = max(now - self._last, 1e-9)
        progress = Progress(
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
