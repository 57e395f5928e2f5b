"""``robojax replay``: a recording held against a policy, without a robot."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.failure import Code, fail
from service.words import printable

if TYPE_CHECKING:
    from service.recording.open_loop import Report


def replay(
    recording: Annotated[Path, typer.Argument(help="A recording (.mcap), or a LeRobotDataset v3 folder.")],
    policy: Annotated[str, typer.Option(help="A folder, or a Hub repo id (owner/name).")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo.")] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Ticks from one question to the next; default: the policy's own.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw recorded and predicted actions into this file.")] = None,
    limit: Annotated[
        float | None, typer.Option(min=0, help="Largest mean error in % of the range, else exit 1.")
    ] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Show it in a Rerun viewer.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="With --rerun: write this .rrd instead of opening a viewer.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, cuda:1, tpu:0; default: JAX's choice.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Play a recording against a policy: how far what it would do is from what was done (open loop).

    The policy sees what the robot saw, and its answers move nothing. Exit code 1 when the error is above --limit, 2
    when the recording cannot be used, 3 when the policy cannot.
    """
    import json

    from rich.console import Console
    from rich.progress import Progress

    import jaxmodels
    from jaxmodels.errors import JaxModelsError
    from service.cli.recordings import source_or_end, warn_of_damage
    from service.recording.open_loop import Misfit, play
    from service.recording.steps import RecordingError

    errors = Console(stderr=True, highlight=False)
    source = source_or_end(recording)
    if plot is not None:
        _need_matplotlib()
    viewer = _viewer(source.facts, save) if rerun else None
    try:
        with errors.status("importing JAX ...") as status:
            load = jaxmodels.load_policy
            loaded = load(
                policy, revision, device=device, on_progress=lambda stage: status.update(f"{stage} {policy} ...")
            )
        with Progress(console=errors, transient=True) as bar:
            task = bar.add_task("playing", total=source.facts.length)

            def on_step(step: Any, chunk: Any) -> None:
                if viewer is not None:
                    viewer.show(step, chunk)
                bar.advance(task)

            report = play(source, loaded, every=every, on_step=on_step)
    except Misfit as error:
        then = f"robojax check {policy} says what it needs, robojax recordings info {recording} what there is"
        fail(Code.POLICY, f"policy {policy!r} does not fit the recording", str(error), then)
    except JaxModelsError as error:
        fail(Code.POLICY, f"policy {policy!r} cannot be used", str(error), f"robojax check {policy} says more")
    except RecordingError as error:
        fail(
            Code.USAGE,
            "the recording cannot be played",
            printable(str(error), 2000),
            "robojax recordings info FILE says what is in it",
        )
    warn_of_damage(source)
    commit = loaded.commit
    if as_json:
        typer.echo(json.dumps(_facts(report, str(recording), policy, commit), indent=2))
    else:
        _show(report, policy, commit)
    if plot is not None:
        _plot(plot, report, f"{recording.name} against {policy}")
        typer.echo(f"plot: {plot}", err=as_json)
    if limit is not None and (report.mean_percent is None or report.mean_percent > limit):
        raise typer.Exit(Code.CHECK)


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    from service.recording.recordings import INSTALL

    if find_spec("matplotlib") is None:
        fail(Code.USAGE, "nothing can be drawn", "matplotlib is not installed", INSTALL)


def _viewer(facts: Any, save: Path | None) -> Any:
    from service.recording.viewer import INSTALL, Viewer

    try:
        return Viewer(facts, save)
    except ImportError:
        fail(Code.USAGE, "nothing can be shown", "Rerun is not installed", INSTALL)
    except (RuntimeError, OSError) as error:
        fail(Code.USAGE, "the viewer does not start", str(error), "give --save FILE.rrd and open it elsewhere")


def _plot(path: Path, report: "Report", title: str) -> None:
    from service.recording.plot import save_plot

    try:
        save_plot(path, report, title)
    except (OSError, ValueError) as error:
        fail(
            Code.USAGE,
            f"nothing was drawn into {path}",
            str(error),
            "give a .png, .svg or .pdf in a folder that is there",
        )


def _facts(report: "Report", recording: str, policy: str, commit: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    milliseconds = sorted(seconds * 1e3 for seconds in report.seconds)
    return {
        "recording": recording,
        "policy": policy,
        "commit": commit,
        "rate": report.facts.rate,
        "episodes": len(report.episodes),
        "steps": report.steps,
        "inferences": len(milliseconds),
        "inference_ms": {"p50": milliseconds[len(milliseconds) // 2], "largest": milliseconds[-1]},
        "mean_percent": report.mean_percent,
        "joints": [asdict(joint) for joint in report.joints()],
    }


def _show(report: "Report", policy: str, commit: str | None) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("joint")
    for column in ("mean error", "largest", "mean % of range", "largest %"):
        table.add_column(column, justify="right")
    for joint in report.joints():
        percents = (joint.mean_percent, joint.largest_percent)
        shown = ["-" if percent is None else f"{percent:.2f}" for percent in percents]
        table.add_row(escape(printable(joint.name)), f"{joint.mean:.3f}", f"{joint.largest:.3f}", *shown)
    console = Console(highlight=False)
    console.print(table)
    facts = report.facts
    overall = "" if report.mean_percent is None else f"; mean error {report.mean_percent:.2f} % of the range"
    whole = "" if facts.is_whole else "; the file was cut off and is read as far as it goes"
    name = escape(policy) + (f" at {commit[:12]}" if commit else "")
    console.print(
        f"{name}: {report.steps} steps of {len(report.episodes)} episodes at {facts.rate:g} Hz, "
        f"asked {len(report.seconds)} times{overall}{whole}"
    )
