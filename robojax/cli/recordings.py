"""Commands `recordings` and `replay`: list, export and replay recordings."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from robojax.cli.app import LEROBOT_HELP, RENAME_HELP, Code, fail, flatten, print_facts, print_table, read_rename
from robojax.cli.sessions import AsJson, ServerOptions
from service.logging import sanitize_text

if TYPE_CHECKING:
    from service.recording.replay import ReplayReport
    from service.recording.steps import StepSource

app = typer.Typer(help="List, show and export recordings of sessions", no_args_is_help=True, add_completion=False)
LONGEST, MAX_EVENTS = 2000, 10_000  # characters of a value in the table, and number of events
MEMORY = 6 << 30  # bytes for reading a file and writing a dataset, because libraries trust the sizes in files
LOOK_INSIDE = "robojax recordings info FILE shows its content"
File = Annotated[Path, typer.Argument(help="Recording (.mcap), or LeRobotDataset v3 folder")]


@app.command("list")
@flatten
def list_recordings(*, at: ServerOptions) -> None:
    """List the recordings of a running server."""
    columns = ("recording", "session", "state", "seconds", "MB", "starts", "dataset")
    empty = f"no recordings at {at.base}; POST /sessions/ID/record starts a recording"
    at.show_list(at.call_pages("/recordings", "name"), empty, columns, _row)


def _row(recording: Any) -> Sequence[str]:
    return (
        sanitize_text(str(recording["name"])),
        sanitize_text(str(recording["session_id"] or "")),
        sanitize_text(str(recording["state"])),
        "" if recording["seconds"] is None else f"{recording['seconds']:.1f}",
        f"{recording['bytes'] / 1e6:.1f}",
        "" if recording["episodes"] is None else str(recording["episodes"]),
        sanitize_text(str(recording["dataset"])),
    )


@app.command()
def info(file: File, as_json: AsJson = False) -> None:
    """Show the content of a recording or dataset."""
    with _end_on_errors(f"{file} cannot be used", "give an .mcap of `robojax serve`"), limited_memory():
        description = _describe_recording(source_or_end(file))
    if as_json:
        typer.echo(json.dumps(description, indent=2))
        return
    facts = []
    for name, value in description.items():
        if value not in (None, "", []) and name != "events":
            line = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            # A name may contain control characters for the terminal.
            facts.append((name, sanitize_text(line, LONGEST)))
    for at, code, text in description.get("events", []):
        facts.append(("", f"{at:9.3f} s  {sanitize_text(code)}: {sanitize_text(text, LONGEST)}"))
    print_facts(facts)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="Recording (.mcap)")],
    to: Annotated[
        Path | None, typer.Option(help="New folder; default: the recording's path without its suffix")
    ] = None,
) -> None:
    """Convert a recording to a LeRobotDataset v3 folder with an episode per start."""
    from rich.console import Console
    from rich.progress import Progress

    source = source_or_end(file)
    from service.recording.dataset import write_dataset

    folder = to or file.with_suffix("")
    with (
        _end_on_errors(f"no dataset was made of {file}", LOOK_INSIDE, OSError),
        limited_memory(),
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("writing", total=source.info.length)
        writer = write_dataset(folder, source.info, source.steps(), lambda: bar.advance(task))
    warn_of_damage(source)
    typer.echo(f"{folder}: {writer.episodes} episodes, {writer.frames} frames")


def source_or_end(path: Path) -> "StepSource":
    """Open a recording or dataset; ends the process if that fails."""
    try:
        from service.recording.library import open_source
    except ImportError as error:
        from service.recording.recordings import INSTALL

        fail(Code.USAGE, "recordings cannot be read", f"{error.name or 'a package'} is not installed", INSTALL)
    with _end_on_errors(f"{path} cannot be used", "give an .mcap of `robojax serve`, or a dataset's folder"):
        return open_source(path)


def warn_of_damage(source: "StepSource") -> None:
    """Warn on standard error about a damaged file that was read only in part."""
    if source.damage is not None:
        typer.secho(sanitize_text(source.damage, LONGEST), err=True, fg="yellow")


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the memory of this process in the context, so that a bad file fails without exhausting the machine."""
    try:
        import resource
    except ImportError:  # Windows has no such module.
        yield
        return
    # The limit includes the present private memory of the process, but not mapped files.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _private_memory() + MEMORY
    is_wider = soft == resource.RLIM_INFINITY or soft > most
    resource.setrlimit(resource.RLIMIT_DATA, (most if is_wider else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _private_memory() -> int:
    """Return the private memory of this process in bytes; 0 if it is unknown."""
    try:
        fields = Path("/proc/self/status").read_text().split()
        return int(fields[fields.index("VmData:") + 1]) << 10
    except (OSError, ValueError):
        return 0


@contextmanager
def _end_on_errors(what: str, then: str, *more: type[Exception]) -> Iterator[None]:
    """End the command with an error message if a recording cannot be read, memory is exhausted, or for ``more``."""
    from service.recording.steps import RecordingError

    try:
        yield
    except MemoryError:
        fail(Code.USAGE, what, f"it needs more than this command's limit of {MEMORY >> 30} GiB of memory", then)
    except (RecordingError, *more) as error:
        fail(Code.USAGE, what, sanitize_text(str(error), LONGEST), then)


def _describe_recording(source: "StepSource") -> dict[str, Any]:
    from dataclasses import asdict

    from service.recording.mcap_files import McapSource

    facts = source.info
    description: dict[str, Any] = {
        "rate": facts.rate,
        "joints": list(facts.joints),
        "features": list(facts.features),
        "cameras": list(facts.cameras),
        "robot_type": facts.robot_type,
        "task": facts.task,
        "steps": facts.length,
    }
    if isinstance(source, McapSource):
        subject, outcome = source.header, source.outcome
        description |= {"session": subject.session_id, "protocol": subject.protocol}
        description |= {"policy": subject.policy_path, "commit": subject.commit}
        description |= {"version": subject.version, "dry_run": subject.is_dry_run, **asdict(outcome)}
        events, left_out = [], 0
        for at, code, text in source.events():
            if len(events) < MAX_EVENTS:
                events.append([round((at - subject.wall_ns) / 1e9, 3), code[:LONGEST], text[:LONGEST]])
            else:
                left_out += 1
        description |= {"events": events, "events_left_out": left_out or None, "damage": source.damage}
    return description


def replay(
    recording: Annotated[Path, typer.Argument(help="Recording (.mcap), or LeRobotDataset v3 folder")],
    policy: Annotated[str, typer.Option(help="Policy folder, or Hub repo id (owner/name)")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a repo")] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Number of ticks between inferences; default: the policy's own")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of recorded and predicted actions")] = None,
    limit: Annotated[float | None, typer.Option(min=0, help="Largest mean error in %; exit code 1 above it")] = None,
    rerun: Annotated[bool, typer.Option("--rerun", help="Show the comparison in a Rerun viewer")] = False,
    save: Annotated[Path | None, typer.Option(help="File (.rrd) for --rerun, instead of a viewer")] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu, gpu, cuda:1, tpu:0; default: JAX's choice")] = None,
    rename: Annotated[list[str] | None, typer.Option(help=RENAME_HELP)] = None,
    lerobot_version: Annotated[Literal["0.4", "0.6"] | None, typer.Option(help=LEROBOT_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Compare the actions of a policy with a recording's (open loop).

    The policy gets the recorded observations, and nothing moves. Exit code 1 if the error is above --limit, 2 if the
    recording cannot be used, 3 if the policy cannot.
    """
    from rich.console import Console
    from rich.progress import Progress

    import jaxmodels
    from jaxmodels.errors import JaxModelsError
    from service.recording.replay import PolicyMismatch, replay_recording
    from service.recording.steps import RecordingError

    errors = Console(stderr=True, highlight=False)
    source = source_or_end(recording)
    if plot is not None:
        from importlib.util import find_spec

        from service.recording.recordings import INSTALL

        if find_spec("matplotlib") is None:
            fail(Code.USAGE, "no plot is possible", "matplotlib is not installed", INSTALL)
    viewer = _viewer(source.info, save) if rerun else None
    try:
        with errors.status("importing JAX ...") as status:
            loaded = jaxmodels.load_policy(
                policy,
                revision,
                device=device,
                on_progress=lambda stage: status.update(f"{stage} {policy} ..."),
                rename=read_rename(rename),
                lerobot=lerobot_version,
            )
        with Progress(console=errors, transient=True) as bar:
            task = bar.add_task("playing", total=source.info.length)

            def on_step(step: Any, chunk: Any) -> None:
                if viewer is not None:
                    viewer.show(step, chunk)
                bar.advance(task)

            report = replay_recording(source, loaded, every=every, on_step=on_step)
    except PolicyMismatch as error:
        then = f"compare robojax check {policy} and robojax recordings info {recording}"
        fail(Code.POLICY, f"policy {policy!r} does not fit the recording", str(error), then)
    except JaxModelsError as error:
        fail(Code.POLICY, f"policy {policy!r} cannot be used", str(error), f"robojax check {policy} shows details")
    except RecordingError as error:
        fail(Code.USAGE, "the recording cannot be played", sanitize_text(str(error), LONGEST), LOOK_INSIDE)
    warn_of_damage(source)
    commit = loaded.commit
    if as_json:
        typer.echo(json.dumps(_describe_replay(report, str(recording), policy, commit), indent=2))
    else:
        _show(report, policy, commit)
    if plot is not None:
        _plot(plot, report, f"{recording.name} against {policy}")
        typer.echo(f"plot: {plot}", err=as_json)
    if limit is not None and (report.mean_percent is None or report.mean_percent > limit):
        raise typer.Exit(Code.CHECK)


def _viewer(facts: Any, save: Path | None) -> Any:
    from service.recording.replay import INSTALL, RerunViewer

    try:
        return RerunViewer(facts, save)
    except ImportError:
        fail(Code.USAGE, "nothing can be shown", "Rerun is not installed", INSTALL)
    except (RuntimeError, OSError) as error:
        fail(Code.USAGE, "the viewer does not start", str(error), "give --save FILE.rrd and open it elsewhere")


def _plot(path: Path, report: "ReplayReport", title: str) -> None:
    from service.recording.replay import save_plot

    try:
        save_plot(path, report, title)
    except (OSError, ValueError) as error:
        fail(Code.USAGE, f"no plot in {path}", str(error), "give a .png, .svg or .pdf in an existing folder")


def _describe_replay(report: "ReplayReport", recording: str, policy: str, commit: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    milliseconds = sorted(seconds * 1e3 for seconds in report.seconds)
    return {
        "recording": recording,
        "policy": policy,
        "commit": commit,
        "rate": report.info.rate,
        "episodes": len(report.episodes),
        "steps": report.steps,
        "inferences": len(milliseconds),
        "inference_ms": {"p50": milliseconds[len(milliseconds) // 2], "largest": milliseconds[-1]},
        "mean_percent": report.mean_percent,
        "joints": [asdict(joint) for joint in report.joint_errors()],
    }


def _show(report: "ReplayReport", policy: str, commit: str | None) -> None:
    from rich.console import Console
    from rich.markup import escape

    rows = []
    for joint in report.joint_errors():
        percents = (joint.mean_percent, joint.largest_percent)
        texts = ["-" if percent is None else f"{percent:.2f}" for percent in percents]
        rows.append((sanitize_text(joint.name), f"{joint.mean:.3f}", f"{joint.largest:.3f}", *texts))
    numbers = ("mean error", "largest", "mean % of range", "largest %")
    print_table(("joint", *numbers), rows, numbers=numbers)
    facts = report.info
    overall = "" if report.mean_percent is None else f"; mean error {report.mean_percent:.2f} % of the range"
    whole = "" if facts.is_whole else "; the file is truncated and was read up to its end"
    name = escape(policy) + (f" at {commit[:12]}" if commit else "")
    Console(highlight=False).print(
        f"{name}: {report.steps} steps of {len(report.episodes)} episodes at {facts.rate:g} Hz, "
        f"{len(report.seconds)} inferences{overall}{whole}"
    )
