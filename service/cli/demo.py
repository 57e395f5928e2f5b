"""``robojax demo``: server, rooms and a simulated arm on this machine; and what belongs to it."""

import asyncio
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass

POLICY = Path(__file__).parent.parent / "demo" / "policy"
FIRST_SEED = 5000  # demonstrations begin at 0: these cubes were never seen
PASS_SHARE = 0.8

app = typer.Typer(help="Watch a simulated arm pick up cubes, driven by the real server.", invoke_without_command=True)

Policy = Annotated[Path, typer.Option(help="Policy folder; the shipped one by default.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the first cube; the next cubes follow it.")]


@app.callback()
def demo(
    context: typer.Context,
    episodes: Annotated[int, typer.Option(min=0, help="Cubes to pick up; 0 goes on until Ctrl-C.")] = 20,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines instead of a live table.")] = False,
    policy: Policy = POLICY,
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
    through the HTTP API, the policy compiled.
    """
    if context.invoked_subcommand is not None:
        return
    from service.demo.show import ChildDied, ShowFailed

    wanted = math.ceil(PASS_SHARE * episodes) if require is None else require
    try:
        is_plain = headless or not sys.stdout.isatty()
        lifted = asyncio.run(_watch(str(policy.resolve()), episodes, seed, port, is_plain, record))
    except KeyboardInterrupt:
        typer.echo("ended; server and arm are stopped")
        return
    except (ShowFailed, ChildDied) as error:
        typer.echo(f"the demo stopped: {error}\nrobojax doctor says what this machine lacks", err=True)
        raise typer.Exit(4) from error
    if lifted < wanted:
        typer.echo(f"fewer than the {wanted} cubes wanted", err=True)
        raise typer.Exit(1)


async def _watch(policy: str, episodes: int, seed: int, port: int, is_plain: bool, record: Path | None) -> int:
    from rich.console import Console
    from rich.live import Live

    from service.cli.demo_table import facts, table
    from service.demo.show import show

    console = Console()
    console.print("starting the server ...")
    async with show(policy, port=port, recordings=record) as running:
        console.print(f"server: {running.request.url}   making the session: loading and compiling ...")
        console.print(f"watch it, and stop it: [bold]{running.request.page}[/bold]", soft_wrap=True, highlight=False)
        await running.create_session()
        console.print("the session, by hand:")
        for line in running.request.curl():
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
        view = None
        with Live(console=console, auto_refresh=False, transient=False) as live:
            async for view in running.views(seed=seed, episodes=episodes):
                for outcome in view.news:
                    end = f"of {episodes}" if episodes else "so far"
                    word = "lifted" if outcome.lifted else "missed"
                    score = f"{view.score.lifted} lifted {end}"
                    console.print(f"cube {outcome.number:>3} (seed {outcome.seed}): {word}   {score}", highlight=False)
                if not is_plain:
                    live.update(table(view, episodes), refresh=True)
        assert view is not None, "there is at least one view"
        if is_plain:
            for name, value in facts(view):
                console.print(f"{name}: {value}", highlight=False)
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


@app.command()
def collect(
    folder: Annotated[Path, typer.Argument(help="New folder for the demonstrations.")],
    episodes: Annotated[int, typer.Option(min=1, help="Successful demonstrations to record.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the first cube.")] = 0,
) -> None:
    """Record demonstrations of a scripted expert, for `robojax train`."""
    from rich.console import Console
    from rich.progress import track

    from service.demo.collect import demonstrations

    console = Console()
    try:
        with demonstrations(folder, episodes=episodes, seed=seed) as recorded:
            for _ in track(recorded, "recording", total=episodes, console=console):
                pass
    except (OSError, RuntimeError) as error:
        Console(stderr=True).print(f"[red]nothing recorded:[/red] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error
    console.print(f"{episodes} demonstrations in {folder}\ntrain on them: robojax train {folder} --output runs/pick")


@app.command()
def evaluate(
    policy: Policy = POLICY,
    episodes: Annotated[int, typer.Option(min=1, help="Cubes to pick up.")] = 20,
    seed: Seed = FIRST_SEED,
    delay: Annotated[int, typer.Option(min=0, help="Ticks between seeing and acting.")] = 0,
) -> None:
    """Run the same policy and cubes in-process: no server, no rooms, no video."""
    from rich.console import Console
    from rich.progress import Progress

    from jaxmodels.errors import JaxModelsError
    from service.demo.evaluate import evaluate as run

    console = Console()
    try:
        with Progress(console=console) as bar:
            task = bar.add_task("cubes", total=episodes)
            seeds = range(seed, seed + episodes)
            score = run(policy, seeds, delay=delay, on_outcome=lambda outcome, score: bar.advance(task))
    except (JaxModelsError, RuntimeError) as error:
        Console(stderr=True).print(f"[red]not evaluated:[/red] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(3) from error
    missed = [outcome.seed for outcome in score.outcomes if not outcome.lifted]
    console.print(f"{score}" + (f"; missed seeds {missed}" if missed else ""), highlight=False)


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
