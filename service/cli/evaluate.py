"""``robojax eval``: how often a policy lifts the cube it was asked for, in closed loop."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.demo_options import FIRST_SEED, Seed, WhichTask, policy_of
from service.cli.failure import Code, fail
from service.demo.tasks import TASKS, TaskName

if TYPE_CHECKING:
    from service.demo.episodes import Outcome, Score
    from service.demo.report import Evaluation


def evaluate(
    policy: Annotated[
        str | None,
        typer.Option("--policy.path", help="A folder, or a Hub repo id; the one shipped for the task by default."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 40,
    task: WhichTask = TaskName.PICK,
    seed: Seed = FIRST_SEED,
    whole_stack: Annotated[
        bool, typer.Option("--whole-stack", help="Through server, rooms and video, in real time: 6 s an episode.")
    ] = False,
    delay: Annotated[int, typer.Option(min=0, help="In-process: ticks between seeing and acting.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for eval.json and a video of each episode; nothing is kept without.")
    ] = None,
    require: Annotated[int, typer.Option(min=0, help="Cubes that must be lifted, else exit 1.")] = 0,
) -> None:
    """Let a policy pick up cubes it never saw, and count: a table, Wilson's 95 % interval, videos, JSON.

    In-process as fast as it goes, or with --whole-stack as a robot meets it. A policy that reads language is told which
    cube to lift; lifting another one is a failure. Exit code 1 when fewer than --require were lifted or the evaluation
    was interrupted, 3 when the policy cannot be used, 4 when server or arm failed.
    """
    from service.demo.report import REPORT, Evaluation

    if whole_stack and delay:
        fail(Code.USAGE, "--delay and --whole-stack exclude each other", "a real loop has its own delay", "give one")
    if output is not None and (output / REPORT).exists():
        fail(Code.USAGE, f"{output} has an evaluation already", "it is not written over", "choose another folder")
    chosen = TASKS[task]
    run = Evaluation(policy_of(chosen, policy), revision, chosen, range(seed, seed + episodes), output is not None)
    # Asked to end, it reports what there is, as it does at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        is_whole = _play(run, whole_stack, delay, output)
    finally:  # also what was found until something failed
        _show(run.score)
        if output is not None and run.score.done:
            _save(run, output)
    if not is_whole:
        fail(
            Code.CHECK,
            f"ended after {run.score.done} of {episodes} episodes",
            "it was interrupted",
            "run it again for a whole one",
        )
    if run.score.lifted < require:
        fail(Code.CHECK, f"{run.score}", f"at least {require} were wanted", "train longer, or on more demonstrations")


def _play(run: "Evaluation", whole_stack: bool, delay: int, output: Path | None) -> bool:
    """Plays the episodes; False when a person ended it before."""
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
    from service.demo.children import ChildDied
    from service.demo.show import ShowFailed

    films = None if output is None else output / "films"
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    try:
        if films is not None:
            films.mkdir(parents=True, exist_ok=True)
        with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
            row = bar.add_task("loading", total=len(run.seeds), score="")

            def count(outcome: "Outcome") -> None:
                run.score.outcomes.append(outcome)
                bar.update(row, advance=1, description="playing", score=str(run.score))
                if not outcome.lifted:
                    where = f"episode {outcome.number} (seed {outcome.seed}, {outcome.instruction})"
                    bar.console.print(f"{where}: {outcome.verdict}", soft_wrap=True)

            if whole_stack:
                asyncio.run(_through_the_stack(run, films, count))
            else:
                _in_process(run, delay, films, count)
    except KeyboardInterrupt:
        return False
    except JaxModelsError as error:
        fail(
            Code.POLICY,
            f"policy {run.policy!r} cannot be used",
            str(error),
            f"robojax check {run.policy} says what it needs",
        )
    except (ShowFailed, ChildDied) as error:
        fail(Code.TRANSPORT, "the evaluation stopped", str(error), "robojax doctor says what this machine lacks")
    except (OSError, RuntimeError, ValueError) as error:
        fail(Code.USAGE, "nothing can be evaluated", str(error), "robojax doctor says what this machine lacks")
    return True


def _in_process(run: "Evaluation", delay: int, films: Path | None, count: Callable[["Outcome"], None]) -> None:
    import jaxmodels
    from service.demo.evaluate import evaluate as play

    policy = jaxmodels.load_policy(run.policy, run.revision)
    run.found |= {
        "through": "the policy alone",
        "policy_type": policy.requirements.policy_type,
        "commit": policy.commit,
        "reads_language": policy.requirements.language,
        "action_steps": policy.requirements.action_steps,
        "delay": delay,
        "device": policy.device,
        "dtype": policy.dtype,
    }
    for outcome in play(policy, run.seeds, task=run.task, delay=delay, films=films):
        count(outcome)


async def _through_the_stack(run: "Evaluation", films: Path | None, count: Callable[["Outcome"], None]) -> None:
    from service.demo.show import show

    first, episodes = run.seeds[0], len(run.seeds)
    async with show() as running:
        request = await running.create_session(run.policy, run.task, first, revision=run.revision)
        run.found |= {
            "through": "server, rooms and video",
            "policy_type": request.policy_type,
            "reads_language": request.instruction is not None,
        }
        async for view in running.views(request, seed=first, episodes=episodes, task=run.task, films=films):
            run.found |= {"commit": view.status["stats"].get("policy_commit"), "session": view.status["stats"]}
            run.found |= {"inference": view.status.get("inference_stats")}
            for outcome in view.news:
                count(outcome)


def _save(run: "Evaluation", output: Path) -> None:
    try:
        typer.echo(f"report: {run.save(output)}")
    except OSError as error:
        fail(Code.USAGE, f"nothing was written into {output}", str(error), "choose another folder")


def _show(score: "Score") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("instruction", no_wrap=True)
    for column in ("episodes", "lifted", "wrong", "missed", "share", "Wilson's 95 %"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = score.by_instruction()
    if not rows:
        return
    for name, each in rows.items():
        table.add_row(name, *_cells(each))
    if len(rows) > 1:
        table.add_row("all", *_cells(score))
    Console(highlight=False).print(table)


def _cells(score: "Score") -> tuple[str, ...]:
    low, high = score.interval
    counts = (score.done, score.lifted, score.wrong, score.done - score.lifted - score.wrong)
    share = score.lifted / score.done
    return *(str(count) for count in counts), f"{100 * share:.1f} %", f"{100 * low:.1f}-{100 * high:.1f} %"
