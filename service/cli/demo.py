"""``robojax demo``: server, rooms and a simulated arm on this machine; and what belongs to it."""

import asyncio
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.demo_options import FIRST_SEED, Seed, WhichTask, policy_of
from service.demo.tasks import TASKS, Task, TaskName

if TYPE_CHECKING:
    from service.demo.episodes import Outcome

PASS_SHARE = 0.8

app = typer.Typer(help="Watch a simulated arm pick up cubes, driven by the real server.", invoke_without_command=True)


@app.callback()
def demo(
    context: typer.Context,
    episodes: Annotated[int, typer.Option(min=0, help="Cubes to pick up; 0 goes on until Ctrl-C.")] = 20,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines instead of a live table.")] = False,
    task: WhichTask = TaskName.PICK,
    policy: Annotated[
        str | None, typer.Option(help="Policy folder or Hub repo id; the one shipped for the task by default.")
    ] = None,
    seed: Seed = FIRST_SEED,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the server; 0 takes a free one.")] = 0,
    require: Annotated[
        int | None, typer.Option(min=0, help="Cubes that must be lifted, else exit 1; default: 80 % of the episodes.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Folder to record into: an MCAP file, and a LeRobotDataset made of it.")
    ] = None,
) -> None:
    """Start the server, its rooms and a simulated SO-100 arm, and watch it pick up cubes.

    Everything on the way is the real one: camera frames as WebRTC video, joints over WebSocket, the session made
    through the HTTP API, the policy compiled. A policy that reads language is told before each episode which cube to
    lift, through PATCH /sessions/{id}.
    """
    if context.invoked_subcommand is not None:
        return
    from service.demo.show import ChildDied, ShowFailed

    wanted = math.ceil(PASS_SHARE * episodes) if require is None else require
    chosen = TASKS[task]
    given = policy_of(chosen, policy)
    try:
        is_plain = headless or not sys.stdout.isatty()
        lifted = asyncio.run(_watch(given, chosen, episodes, seed, port, is_plain, record))
    except KeyboardInterrupt:
        typer.echo("ended; server and arm are stopped")
        return
    except (ShowFailed, ChildDied) as error:
        typer.echo(f"the demo stopped: {error}\nrobojax doctor says what this machine lacks", err=True)
        raise typer.Exit(4) from error
    if lifted < wanted:
        typer.echo(f"fewer than the {wanted} cubes wanted", err=True)
        raise typer.Exit(1)


async def _watch(
    policy: str, task: Task, episodes: int, seed: int, port: int, is_plain: bool, record: Path | None
) -> int:
    from rich.console import Console
    from rich.live import Live

    from service.cli.demo_table import facts, table
    from service.demo.show import show

    console = Console()
    console.print("starting the server ...")
    async with show(port=port, recordings=record) as running:
        console.print(f"server: {running.url}   making the session: loading and compiling ...")
        console.print(f"watch it, and stop it: [bold]{running.page}[/bold]", soft_wrap=True, highlight=False)
        request = await running.create_session(policy, task, seed)
        console.print("the session, by hand:")
        for line in request.curl():
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
        view = None
        with Live(console=console, auto_refresh=False, transient=False) as live:
            async for view in running.views(request, seed=seed, episodes=episodes, task=task):
                for outcome in view.news:
                    end = f"of {episodes}" if episodes else "so far"
                    console.print(f"{_line(outcome, task)}   {view.score.lifted} lifted {end}", highlight=False)
                if not is_plain:
                    live.update(table(view, episodes), refresh=True)
        assert view is not None, "there is at least one view"
        if is_plain:
            for name, value in facts(view):
                console.print(f"{name}: {value}", highlight=False)
        for instruction, score in view.score.by_instruction().items():
            if len(task.cubes) > 1:
                console.print(f"{instruction}: {score}", highlight=False)
        console.print(f"[bold]{view.score}[/bold]", highlight=False)
        if record is not None:
            console.print("finishing the recording ...")
            made = await running.recorded()
            file = record / f"{made['name']}.mcap"
            dataset = (
                f"; dataset: {file.with_suffix('')}" if made["dataset"] == "ready" else "; no dataset could be made"
            )
            console.print(f"recording: {file}{dataset}", soft_wrap=True, highlight=False, markup=False)
        return view.score.lifted


def _line(outcome: "Outcome", task: Task) -> str:
    asked = f", {outcome.instruction}" if len(task.cubes) > 1 else ""
    return f"cube {outcome.number:>3} (seed {outcome.seed}{asked}): {outcome.verdict}"


@app.command()
def picture(file: Annotated[Path, typer.Argument(help="PNG to write.")], seed: Seed = 3) -> None:
    """Draw the arm at work."""
    from service.demo.picture import save_picture

    try:
        save_picture(file, seed=seed)
    except RuntimeError as error:
        typer.echo(f"nothing drawn: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(str(file))
