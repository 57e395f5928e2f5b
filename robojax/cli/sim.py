"""Commands of the simulated arm: `demo`, `eval`, `record-demo`."""

import asyncio
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from robojax.cli.app import Code, fail, print_table
from robojax.sim.tasks import TASKS, Task, TaskName

if TYPE_CHECKING:
    from robojax.sim.demo import View
    from robojax.sim.evaluation import Evaluation
    from robojax.sim.tasks import Outcome, Score

FIRST_SEED = 5000  # Demonstrations begin at 0, so policies have never seen these cubes.
DEMO = Path(__file__).parent.parent / "sim"

WhichTask = Annotated[
    TaskName, typer.Option("--task", help="Task: pick (a red cube) or two-cubes (a red and a blue cube, in turn)")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the first episode; each further episode adds 1")]


def select_policy(task: Task, policy: str | None) -> str:
    """Return the path or repository of the policy, by default the included policy; ends the process without one."""
    if policy is not None:
        return str(Path(policy).resolve()) if Path(policy).exists() else policy
    if task.policy is None:
        fail(
            Code.POLICY,
            "there is no policy for the arm",
            f"no policy was given, and robojax has none for the task {task.name}",
            f"train a policy on a dataset of robojax record-demo data/{task.name} --task {task.name}",
        )
    return str(DEMO / task.policy)


def evaluate(
    policy: Annotated[
        str | None, typer.Option("--policy.path", help="Folder or Hub repo id; default: the included policy")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes")] = 40,
    task: WhichTask = TaskName.PICK,
    seed: Seed = FIRST_SEED,
    whole_stack: Annotated[
        bool, typer.Option("--whole-stack", help="Use server, rooms and video, in real time")
    ] = False,
    delay: Annotated[int, typer.Option(min=0, help="Ticks between observation and action, without --whole-stack")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder for eval.json and a video of each episode")] = None,
    require: Annotated[int, typer.Option(min=0, help="Number of cubes that must be lifted; exit code 1 below it")] = 0,
) -> None:
    """Measure how often a policy lifts unseen cubes: a table, Wilson's 95 % interval, videos, JSON.

    Runs in-process as fast as possible, or with --whole-stack as on a robot. A policy that reads language gets the cube
    to lift; lifting another cube is a failure. Exit code 1 if fewer than --require were lifted or the evaluation was
    interrupted, 3 if the policy cannot be used, 4 if server or arm failed.
    """
    from robojax.sim.evaluation import REPORT, Evaluation

    if whole_stack and delay:
        fail(Code.USAGE, "--delay and --whole-stack exclude each other", "a real loop has its own delay", "omit one")
    if output is not None and (output / REPORT).exists():
        fail(Code.USAGE, f"{output} has an evaluation already", "it is not overwritten", "choose another folder")
    chosen = TASKS[task]
    run = Evaluation(select_policy(chosen, policy), revision, chosen, range(seed, seed + episodes), output is not None)
    # SIGTERM reports the results so far, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        is_whole = _play(run, whole_stack, delay, output)
    finally:  # Also report the results before a failure.
        _show(run.score)
        if output is not None and run.score.done:
            _save(run, output)
    if not is_whole:
        what = f"ended after {run.score.done} of {episodes} episodes"
        fail(Code.CHECK, what, "it was interrupted", "run it again for all episodes")
    if run.score.lifted < require:
        fail(Code.CHECK, f"{run.score}", f"at least {require} were required", "train longer, or on more demonstrations")


def _progress(*facts: ProgressColumn) -> Progress:
    """Return a progress bar of episodes on standard error; ``facts`` are more columns after the count."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *facts, TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)


def _play(run: "Evaluation", whole_stack: bool, delay: int, output: Path | None) -> bool:
    """Play the episodes; return False after Ctrl-C."""
    from jaxmodels.errors import JaxModelsError
    from robojax.sim.demo import DemoFailed
    from service.processes import ChildDied

    films = None if output is None else output / "films"
    try:
        if films is not None:
            films.mkdir(parents=True, exist_ok=True)
        with _progress(TextColumn("{task.fields[score]}")) as bar:
            row = bar.add_task("loading", total=len(run.seeds), score="")

            def count(outcome: "Outcome") -> None:
                run.score.outcomes.append(outcome)
                bar.update(row, advance=1, description="playing", score=str(run.score))
                if not outcome.lifted:
                    where = f"episode {outcome.number} (seed {outcome.seed}, {outcome.instruction})"
                    bar.console.print(f"{where}: {outcome.verdict}", soft_wrap=True)

            if whole_stack:
                asyncio.run(
                    _through_the_stack(run, films, count, lambda note: bar.console.print(escape(note), soft_wrap=True))
                )
            else:
                _in_process(run, delay, films, count)
    except KeyboardInterrupt:
        return False
    except JaxModelsError as error:
        then = f"robojax check {run.policy} shows its requirements"
        fail(Code.POLICY, f"policy {run.policy!r} cannot be used", str(error), then)
    except (DemoFailed, ChildDied) as error:
        fail(Code.TRANSPORT, "the evaluation stopped", str(error), "robojax doctor checks this machine")
    except (OSError, RuntimeError, ValueError) as error:
        fail(Code.USAGE, "nothing can be evaluated", str(error), "robojax doctor checks this machine")
    return True


def _in_process(run: "Evaluation", delay: int, films: Path | None, count: Callable[["Outcome"], None]) -> None:
    import jaxmodels
    from robojax.sim.evaluation import evaluate as play

    policy = jaxmodels.load_policy(run.policy, run.revision)
    run.results |= {
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


async def _through_the_stack(
    run: "Evaluation", films: Path | None, count: Callable[["Outcome"], None], say: Callable[[str], None]
) -> None:
    from robojax.sim.demo import serve_demo

    first, episodes = run.seeds[0], len(run.seeds)
    async with serve_demo() as running:
        say(f"server: {running.url}   watch it, and stop it: {running.page}")
        request = await running.create_session(run.policy, run.task, first, revision=run.revision)
        run.results |= {
            "through": "server, rooms and video",
            "policy_type": request.policy_type,
            "reads_language": request.instruction is not None,
        }
        async for view in running.views(request, seed=first, episodes=episodes, task=run.task, films=films):
            run.results |= {"commit": view.status["stats"].get("policy_commit"), "session": view.status["stats"]}
            run.results |= {"inference": view.status.get("inference_stats")}
            for outcome in view.news:
                count(outcome)
            for note in view.notes:
                say(note)


def _save(run: "Evaluation", output: Path) -> None:
    try:
        typer.echo(f"report: {run.save(output)}")
    except OSError as error:
        fail(Code.USAGE, f"nothing was written into {output}", str(error), "choose another folder")


def _show(score: "Score") -> None:
    scores = score.by_instruction()
    if not scores:
        return
    rows = [(name, *_cells(each)) for name, each in scores.items()]
    if len(rows) > 1:
        rows.append(("all", *_cells(score)))
    numbers = ("episodes", "lifted", "wrong", "missed", "share", "Wilson's 95 %")
    print_table(("instruction", *numbers), rows, never_folded=("instruction", *numbers), numbers=numbers)


def _cells(score: "Score") -> tuple[str, ...]:
    low, high = score.interval
    counts = (score.done, score.lifted, score.wrong, score.done - score.lifted - score.wrong)
    share = score.lifted / score.done
    return *(str(count) for count in counts), f"{100 * share:.1f} %", f"{100 * low:.1f}-{100 * high:.1f} %"


PASS_SHARE = 0.8
LATE_ACTIONS = (
    "late actions: actions that are late because the policy still computed are dropped. Some are normal, and more on a "
    "slow machine. If cubes are missed, end other programs or use a GPU."
)


def demo(
    episodes: Annotated[int, typer.Option(min=0, help="Number of episodes; 0 for no limit")] = 20,
    headless: Annotated[bool, typer.Option("--headless", help="Print lines instead of a live table")] = False,
    task: WhichTask = TaskName.PICK,
    policy: Annotated[str | None, typer.Option(help="Folder or Hub repo id; default: the included policy")] = None,
    seed: Seed = FIRST_SEED,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 for any; default: ROBOJAX_PORT, else 8001 if free")
    ] = None,
    require: Annotated[
        int | None, typer.Option(min=0, help="Number of cubes that must be lifted; exit code 1 below it; default: 80 %")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Folder for a recording (MCAP) and its LeRobotDataset")] = None,
) -> None:
    """Start the server, its rooms and a simulated SO-100 arm, and watch it pick up cubes.

    The demo uses the real stack: camera frames as WebRTC video, joints over WebSocket, a session over the HTTP API,
    a compiled policy. A policy that reads language gets the cube to lift before each episode, with PATCH
    /sessions/{id}.
    """
    from robojax.sim.demo import DemoFailed
    from service.processes import ChildDied

    required = math.ceil(PASS_SHARE * episodes) if require is None else require
    chosen = TASKS[task]
    chosen_policy = select_policy(chosen, policy)
    try:
        is_plain = headless or not sys.stdout.isatty()
        lifted = asyncio.run(_run_demo(chosen_policy, chosen, episodes, seed, choose_port(port), is_plain, record))
    except KeyboardInterrupt:
        typer.echo("ended; server and arm are stopped")
        return
    except (DemoFailed, ChildDied) as error:
        advice = f"robojax check {chosen_policy} checks the policy, robojax doctor this machine"
        typer.echo(f"the demo stopped: {error}\n{advice}", err=True)
        raise typer.Exit(4) from error
    if lifted < required:
        typer.echo(f"fewer than the {required} required cubes", err=True)
        raise typer.Exit(1)


def choose_port(asked: int | None) -> int:
    """Return the port of the demo's server from the flag or the settings; ends the process if that port is taken.

    Returns:
        The port, or 0 for a free port if the default port is taken and no port was given.
    """
    from robojax.cli.serve import settings_or_end
    from service.http.server import CannotListen, listen

    server = settings_or_end({"port": asked}).server
    try:
        listen("127.0.0.1", server.port).close()
    except CannotListen as error:
        if "port" not in server.model_fields_set:
            return 0
        fail(Code.USAGE, "the demo cannot start", str(error), "robojax demo --port 0 takes a free port")
    return server.port


async def _run_demo(
    policy: str, task: Task, episodes: int, seed: int, port: int, is_plain: bool, record: Path | None
) -> int:
    from rich.live import Live

    from robojax.sim.demo import serve_demo

    console = Console()
    console.print("starting the server ...")
    async with serve_demo(port=port, recordings=record) as running:
        console.print(f"server: {running.url}   creating the session: loading and compiling ...")
        console.print(f"watch it, and stop it: [bold]{running.page}[/bold]", soft_wrap=True, highlight=False)
        request = await running.create_session(policy, task, seed)
        console.print("the same session with curl:")
        for line in request.curl():
            console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
        view = None
        with Live(console=console, auto_refresh=False, transient=False) as live:
            async for view in running.views(request, seed=seed, episodes=episodes, task=task):
                for outcome in view.news:
                    end = f"of {episodes}" if episodes else "so far"
                    console.print(
                        f"{_format_outcome(outcome, task)}   {view.score.lifted} lifted {end}", highlight=False
                    )
                for note in view.notes:
                    console.print(note, soft_wrap=True, highlight=False, markup=False)
                if not is_plain:
                    live.update(build_table(view, episodes), refresh=True)
        assert view is not None, "the demo yields at least one view"
        if is_plain:
            for name, value in list_facts(view):
                console.print(f"{name}: {value}", highlight=False)
        for instruction, score in view.score.by_instruction().items():
            if len(task.cubes) > 1:
                console.print(f"{instruction}: {score}", highlight=False)
        if view.status["stats"].get("late_actions_dropped"):
            console.print(LATE_ACTIONS, soft_wrap=True, highlight=False)
        console.print(f"[bold]{view.score}[/bold]", highlight=False)
        if record is not None:
            console.print("finishing the recording ...")
            finished = await running.finish_recording()
            file = record / f"{finished['name']}.mcap"
            dataset = (
                f"; dataset: {file.with_suffix('')}" if finished["dataset"] == "ready" else "; no dataset could be made"
            )
            console.print(f"recording: {file}{dataset}", soft_wrap=True, highlight=False, markup=False)
        return view.score.lifted


def _format_outcome(outcome: "Outcome", task: Task) -> str:
    instruction = f", {outcome.instruction}" if len(task.cubes) > 1 else ""
    return f"cube {outcome.number:>3} (seed {outcome.seed}{instruction}): {outcome.verdict}"


def record_demo(
    folder: Annotated[Path, typer.Argument(help="New folder for the LeRobotDataset")],
    episodes: Annotated[int, typer.Option(min=1, help="Number of successful demonstrations to record")] = 200,
    task: WhichTask = TaskName.PICK,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first demonstration; evaluations begin at 5000")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of processes; default: number of cores")] = None,
) -> None:
    """Record demonstrations of a scripted expert as a LeRobotDataset v3.0: joints, 240x240 video and tasks.

    Task and seed determine the recording. The folder appears when the dataset is complete; after a failure or an
    interruption nothing remains.
    """
    from jaxmodels.errors import JaxModelsError
    from robojax.sim.expert import demonstrations

    # SIGTERM removes the incomplete dataset, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    seeds: list[int] = []
    try:
        with (
            _progress() as bar,
            demonstrations(folder, TASKS[task], episodes=episodes, seed=seed, workers=workers) as recorded,
        ):
            row = bar.add_task("recording", total=episodes)
            for number in recorded:
                seeds.append(number)
                bar.advance(row)
    except KeyboardInterrupt:
        fail(Code.CHECK, "nothing was recorded", f"ended after {len(seeds)} of {episodes}", "run it again")
    except JaxModelsError as error:
        fail(Code.USAGE, "nothing was recorded", str(error), "correct this, and run it again")
    except (OSError, RuntimeError) as error:
        fail(Code.USAGE, "nothing was recorded", str(error), "robojax doctor checks this machine")
    left_out = sorted({*range(seed, seeds[-1] + 1)} - {*seeds})
    failed = f"; without {left_out}, where the expert failed" if left_out else ""
    typer.echo(f"{folder}: {episodes} demonstrations, seeds {seeds[0]} to {seeds[-1]}{failed}")
    train = (
        "robojax train --policy.type=act --preset=small --image_size=96 --batch_size=32 "
        f"--dataset.root={folder} --output_dir=runs/{task}"
    )
    typer.echo(f"train on them: {train}  (other types and flags: robojax train --help)")


def list_facts(view: "View") -> list[tuple[str, str]]:
    """Return names and texts of all figures of the demo, in order."""
    status = view.status
    stats: dict[str, Any] = status["stats"]
    inference: dict[str, Any] = status.get("inference_stats") or {}
    stages = inference.get("stages_ms", {})
    lateness = stats.get("tick_lateness_ms", {})
    why = f" ({stats['hold']})" if stats.get("hold") else ""
    sent, late = stats.get("commands_sent", 0), stats.get("late_actions_dropped", 0)
    rows = [
        ("session", f"{status['session_id']}: {status['status']}{why}"),
        ("camera fps", ", ".join(f"{name} {_format(fps)}" for name, fps in stats.get("camera_fps", {}).items())),
        (
            "inference ms",
            f"{_format_percentiles(stages.get('total', {}))}, {inference.get('inference_count', 0)} chunks",
        ),
        ("tick late ms", f"{_format_percentiles(lateness)} at {_format(stats.get('rate'))} Hz"),
        ("commands", f"{sent} sent, {late} late actions dropped"),
    ]
    if status.get("error_message"):
        rows.append(("error", str(status["error_message"])))
    return rows


def build_table(view: "View", episodes: int) -> Table:
    """Return the demo's live table."""
    title = f"robojax demo: a policy of type {view.status['policy_type']} picks up cubes"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(min_width=64)
    ahead = f"{episodes - view.score.done} to go" if episodes else "Ctrl-C ends it"
    table.add_row("cubes", f"{view.score}, {ahead}")
    if view.instruction:
        table.add_row("asked", view.instruction)
    for name, value in list_facts(view):
        table.add_row(name, value)
    joints: dict[str, Any] = view.status["stats"].get("measured_joints") or {}
    targets: dict[str, Any] = view.status["stats"].get("last_command") or {}
    for name, value in joints.items():
        table.add_row(name, f"{_format(value):>7} -> {_format(targets.get(name)):>7}  {_draw_bar(name, value)}")
    return table


def _format_percentiles(figures: dict[str, Any]) -> str:
    return f"p50 {_format(figures.get('p50'))}, p99 {_format(figures.get('p99'))}"


def _format(value: Any) -> str:
    return "-" if value is None else f"{value:.1f}"


def _draw_bar(name: str, value: Any, width: int = 30) -> str:
    """Draw a joint's position within its range as text."""
    if value is None:
        return ""
    low = 0.0 if name == "Jaw" else -100.0
    column = round((min(max(value, low), 100.0) - low) / (100.0 - low) * (width - 1))
    return "·" * column + "●" + "·" * (width - 1 - column)
