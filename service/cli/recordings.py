"""``robojax recordings``: what a server recorded, looked at and made into datasets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.failure import Code, fail
from service.cli.sessions import AsJson, Key, Url, base_url, call
from service.cli.table import print_table
from service.words import printable

if TYPE_CHECKING:
    from service.recording.steps import Source

app = typer.Typer(
    help="Recordings of sessions: list, info, export to a LeRobotDataset.", no_args_is_help=True, add_completion=False
)
# Letters of one value in the table, and events in it.
LONGEST, MOST_EVENTS = 2000, 10_000
# Bytes that looking at a file, and making a dataset of it, may have of memory: the limits of what reads them hold long
# before, but the libraries for videos and tables believe what a file claims.
MEMORY = 6 << 30
File = Annotated[Path, typer.Argument(help="A recording (.mcap), or a LeRobotDataset v3 folder.")]


@app.command("list")
def list_recordings(url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """List the recordings of a running server."""
    import json

    base = base_url(url)
    found = call(base, "GET", "/recordings", key=key)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    if not found:
        typer.echo(f"no recordings at {base}; POST /sessions/ID/record begins one")
        return
    print_table(("recording", "session", "state", "seconds", "MB", "starts", "dataset"), map(_row, found))


def _row(recording: Any) -> Sequence[str]:
    return (
        printable(str(recording["name"])),
        printable(str(recording["session_id"] or "")),
        printable(str(recording["state"])),
        "" if recording["seconds"] is None else f"{recording['seconds']:.1f}",
        f"{recording['bytes'] / 1e6:.1f}",
        "" if recording["episodes"] is None else str(recording["episodes"]),
        printable(str(recording["dataset"])),
    )


@app.command()
def info(file: File, as_json: AsJson = False) -> None:
    """What is in a recording, or in a dataset."""
    import json

    from service.recording.steps import RecordingError

    try:
        with limited_memory():
            found = _facts(source_or_end(file))
    except (RecordingError, MemoryError) as error:
        fail(Code.USAGE, f"{file} cannot be used", _why(error), "give an .mcap as `robojax serve` wrote it")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, show_edge=False, pad_edge=False)
    for name, value in found.items():
        if value not in (None, "", []) and name != "events":
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            # A name may hold what moves the cursor or sets the title of a terminal.
            table.add_row(f"[bold]{name}[/bold]", escape(printable(shown, LONGEST)))
    for at, code, text in found.get("events", []):
        table.add_row("", escape(f"{at:9.3f} s  {printable(code)}: {printable(text, LONGEST)}"))
    Console(highlight=False).print(table)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A recording (.mcap).")],
    to: Annotated[Path | None, typer.Option(help="New folder; default: the recording's name beside it.")] = None,
) -> None:
    """Make a LeRobotDataset v3 folder of a recording: one episode per start."""
    from rich.console import Console
    from rich.progress import Progress

    from service.recording.steps import RecordingError

    source = source_or_end(file)
    from service.recording.dataset_writer import write_dataset

    folder = to or file.with_suffix("")
    try:
        with limited_memory(), Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("writing", total=source.facts.length)
            writer = write_dataset(folder, source.facts, source.steps(), lambda: bar.advance(task))
    except (RecordingError, OSError, MemoryError) as error:
        fail(
            Code.USAGE, f"no dataset was made of {file}", _why(error), "robojax recordings info FILE says what is in it"
        )
    warn_of_damage(source)
    typer.echo(f"{folder}: {writer.episodes} episodes, {writer.frames} frames")


def source_or_end(path: Path) -> "Source":
    """The steps behind a path of the command line, or the end of this command."""
    try:
        from service.recording.sources import open_source
    except ImportError as error:
        from service.recording.recordings import INSTALL

        fail(Code.USAGE, "recordings cannot be read", f"{error.name or 'a package'} is not installed", INSTALL)
    from service.recording.steps import RecordingError

    try:
        return open_source(path)
    except (RecordingError, MemoryError) as error:
        fail(
            Code.USAGE, f"{path} cannot be used", _why(error), "give an .mcap of `robojax serve`, or a dataset's folder"
        )


def warn_of_damage(source: "Source") -> None:
    """Say on standard error that not all of a damaged file was read."""
    if source.damage is not None:
        typer.secho(printable(source.damage, LONGEST), err=True, fg="yellow")


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process have so much meanwhile: what claims to be larger ends the command, not the machine."""
    try:
        import resource
    except ImportError:  # not on Windows
        yield
        return
    # Private memory alone: what is mapped from files counts for nothing.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    is_wider = soft == resource.RLIM_INFINITY or soft > MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY if is_wider else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _why(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than the {MEMORY >> 30} GiB of memory that this command takes"
    return printable(str(error), LONGEST)


def _facts(source: "Source") -> dict[str, Any]:
    from dataclasses import asdict

    from service.recording.mcap_reader import McapSource

    facts = source.facts
    found: dict[str, Any] = {
        "rate": facts.rate,
        "joints": list(facts.joints),
        "features": list(facts.features),
        "cameras": list(facts.cameras),
        "robot_type": facts.robot_type,
        "task": facts.task,
        "steps": facts.length,
    }
    if isinstance(source, McapSource):
        subject, outcome = source.subject, source.outcome
        found |= {"session": subject.session_id, "policy": subject.policy_path, "commit": subject.commit}
        found |= {"version": subject.version, "dry_run": subject.is_dry_run, **asdict(outcome)}
        events, left_out = [], 0
        for at, code, text in source.events():
            if len(events) < MOST_EVENTS:
                events.append([round((at - subject.wall_ns) / 1e9, 3), code[:LONGEST], text[:LONGEST]])
            else:
                left_out += 1
        found |= {"events": events, "events_left_out": left_out or None, "damage": source.damage}
    return found
