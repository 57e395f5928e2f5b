"""``robojax record-demo``: demonstrations of a scripted expert, to train on."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from service.cli.demo_options import WhichTask
from service.cli.failure import Code, fail
from service.demo.tasks import TASKS, TaskName


def record_demo(
    folder: Annotated[Path, typer.Argument(help="New folder for the LeRobotDataset.")],
    episodes: Annotated[int, typer.Option(min=1, help="Successful demonstrations to record.")] = 200,
    task: WhichTask = TaskName.PICK,
    seed: Annotated[int, typer.Option(min=0, help="Of the first one; those that are evaluated begin at 5000.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one for each core.")] = None,
) -> None:
    """Record demonstrations of a scripted expert as a LeRobotDataset v3.0: joints, 240x240 video, a task for each.

    What is recorded follows from task and seed alone. The folder appears when everything was written; nothing is left
    of a recording that failed or was interrupted.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from jaxmodels.errors import JaxModelsError
    from service.demo.demonstrations import demonstrations

    # Asked to end, it takes back what it began, as it does at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    columns = (
        TextColumn("recording"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    seeds: list[int] = []
    try:
        with (
            Progress(*columns, console=Console(stderr=True, highlight=False)) as bar,
            demonstrations(folder, TASKS[task], episodes=episodes, seed=seed, workers=workers) as recorded,
        ):
            row = bar.add_task("recording", total=episodes)
            for number in recorded:
                seeds.append(number)
                bar.advance(row)
    except KeyboardInterrupt:
        fail(Code.CHECK, "nothing was recorded", f"ended after {len(seeds)} of {episodes}", "run it again")
    except JaxModelsError as error:
        fail(Code.USAGE, "nothing was recorded", str(error), "mend that, and run it again")
    except (OSError, RuntimeError) as error:
        fail(Code.USAGE, "nothing was recorded", str(error), "robojax doctor says what this machine lacks")
    left_out = sorted({*range(seed, seeds[-1] + 1)} - {*seeds})
    failed = f"; the expert failed at {left_out}, which are left out" if left_out else ""
    typer.echo(f"{folder}: {episodes} demonstrations, seeds {seeds[0]} to {seeds[-1]}{failed}")
    train = (
        "robojax train --policy.type=act --preset=small --image_size=96 --batch_size=32 "
        f"--dataset.root={folder} --output_dir=runs/{task}"
    )
    typer.echo(f"train on them: {train}  (other types, and their flags: robojax train --help)")
