"""``robojax train``: a policy from demonstrations."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    dataset: Annotated[Path, typer.Argument(help="Folder of demonstrations, as `robojax demo collect` writes it.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; an unfinished run there goes on.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 6000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="Peak, after the warm-up and before the cosine decay.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.")] = 1e-4,
    chunk: Annotated[int, typer.Option(min=1, help="Actions the policy predicts at a time.")] = 20,
    action_steps: Annotated[int, typer.Option(min=1, help="Of those, meant to be executed before the next look.")] = 5,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and augmentation.")] = 0,
) -> None:
    """Train a small ACT policy on demonstrations; a killed run goes on where its last checkpoint was.

    The run's folder gets the policy in LeRobot's layout (policy/), checkpoints, metrics.jsonl and the loss curve as a
    picture (loss.png).
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

    from jaxmodels.data import Episodes
    from jaxmodels.errors import JaxModelsError
    from jaxmodels.training import Progress as Step
    from jaxmodels.training import TrainingConfig, small_act
    from jaxmodels.training import train as run

    console = Console()
    try:
        episodes = Episodes(dataset)
        policy = small_act(episodes, chunk=chunk, action_steps=action_steps)
        config = TrainingConfig(
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            save_every=save_every,
            seed=seed,
        )
        total = sum(episodes.meta.lengths)
        console.print(f"{len(episodes)} demonstrations, {total} steps at {episodes.meta.rate:g} Hz; compiling ...")
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("training", total=steps, loss="-")

            def show(step: Step) -> None:
                bar.update(task, completed=step.step, loss=f"{step.loss:.4f}")

            folder = run(episodes, policy, config, output, on_progress=show)
    except OSError as error:
        text = f"{error}; the same command goes on from the last checkpoint"
        Console(stderr=True).print(f"[red]training stopped:[/red] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from error
    except (JaxModelsError, FloatingPointError) as error:
        Console(stderr=True).print(f"[red]not trained:[/red] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(3) from error
    console.print(f"policy: {folder}\nloss curve: {output / 'loss.png'}\nlook at it: robojax check {folder}")
