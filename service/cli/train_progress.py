"""How far a training is, on a terminal or as lines in a log."""

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from jaxmodels.data import Dataset
    from jaxmodels.training import Progress as Step
    from jaxmodels.training import Start, TrainingConfig

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"))
BETWEEN_LINES = 10.0  # seconds, of decoding and downloading in a log


class Shown:
    """A bar where there is a terminal, a line for every report where there is none.

    Args:
        is_shown: False for all but the first of several processes.
    """

    def __init__(self, *, is_shown: bool):
        self._console = Console(quiet=not is_shown, highlight=False)
        self._stack = ExitStack()
        self._bar = Progress(*COLUMNS, TimeElapsedColumn(), console=self._console)
        self._tasks: dict[str, TaskID] = {}
        self._told_at: dict[str, float] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def downloading(self, stage: str) -> None:
        """`jaxmodels.hub.fetch` tells how much there is."""
        total = getattr(stage, "total", 0)
        if total:
            self._advance(f"{stage}", getattr(stage, "done", 0), total)

    def decoding(self, done: int, total: int) -> None:
        self._advance("decoding", done, total)

    def begin(self, dataset: "Dataset", start: "Start", config: "TrainingConfig") -> None:
        """What is going to be trained on what."""
        frames = int(dataset.lengths.sum())
        self._console.print(
            f"{start.policy.type} on {dataset.folder.name}: {len(dataset.lengths)} episodes, {frames} frames at "
            f"{dataset.fps:g} Hz; {config.steps} steps of {config.batch_size}, "
            f"{config.steps * config.batch_size / frames:.1f} times through",
            soft_wrap=True,
        )

    def step(self, step: "Step") -> None:
        told = (
            f"loss {step.loss:.4f}  rate {step.learning_rate:.2g}  {step.samples_per_second:.0f} samples/s  "
            f"waited for data {step.waited:.0%}  {_span(step.left)} left"
        )
        if self._console.is_terminal:
            self._advance("training", step.step, step.steps, told)
        else:
            self._console.print(f"step {step.step}/{step.steps}  {told}", soft_wrap=True)

    def end(self, folder: Path, output: Path) -> None:
        self._stack.close()
        self._console.print(
            f"policy: {folder}\nloss curve: {output / 'loss.png'}\nlook at it: robojax check {folder}", soft_wrap=True
        )

    def _advance(self, name: str, done: int, total: int, told: str = "") -> None:
        if not self._console.is_terminal:
            now = time.monotonic()
            if now - self._told_at.setdefault(name, now) >= BETWEEN_LINES:
                self._told_at[name] = now
                self._console.print(f"{name} {done}/{total} ({done / total:.0%})", soft_wrap=True)
            return
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(name, total=total, told="")
        self._bar.update(self._tasks[name], completed=done, total=total, told=told)


def _span(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
