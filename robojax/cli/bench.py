"""Command `bench`: runs benchmarks and writes their report."""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from robojax.cli.app import Code, fail

if TYPE_CHECKING:
    from benchmarks.catalogue import Benchmark

ROOT = Path(__file__).parents[2]


def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Which; all of them when none is named.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A brief run of each: it shows that it works, no more.")
    ] = False,
    into: Annotated[Path, typer.Option(help="A folder for results and the page.")] = Path("robojax-bench"),
    lerobot_python: Annotated[
        str | None, typer.Option(help="A Python with lerobot 0.4.4 and grpcio, to compare with.")
    ] = None,
    openpi_python: Annotated[
        str | None, typer.Option(help="A Python with openpi-client 0.1.2, to compare with.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Their questions and how long they take; run nothing.")
    ] = False,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Only write the page, of results that are there.")
    ] = False,
) -> None:
    """Measure this machine, and write a page about it.

    Every benchmark answers one question in a process of its own; they run one at a time, as two would measure each
    other. The page (INTO/index.html) needs nothing else. What was not run shows the results that the checkout came
    with. Benchmarks are part of a checkout, not of the installed package.

    Exit code 1 when a benchmark failed or missed its target.
    """
    chosen = _select_benchmarks(names or [], quick)
    if listed:
        for benchmark in chosen:
            typer.echo(f"{benchmark.name:22} {benchmark.minutes[quick]:4.1f} min  {benchmark.question}")
        return
    into.mkdir(parents=True, exist_ok=True)
    peers = {"--lerobot-python": lerobot_python, "--openpi-python": openpi_python}
    failed = {} if page_only else _run_all(_filter_possible(chosen, peers), quick, into.resolve(), peers)
    from benchmarks.catalogue import wanted
    from benchmarks.measured import RESULTS
    from benchmarks.report import collect, page

    path = into / "index.html"
    path.write_text(page(collect(wanted(()), [into, RESULTS])))
    typer.echo(f"The page: {path.resolve().as_uri()}")
    for name, last_lines in failed.items():
        typer.secho(f"{name} failed or missed its target:", err=True, bold=True)
        typer.echo("\n".join(f"    {line}" for line in last_lines), err=True)
    if failed:
        raise typer.Exit(Code.CHECK)


def _select_benchmarks(names: Sequence[str], quick: bool) -> "list[Benchmark]":
    """The catalogue of this checkout."""
    if not (ROOT / "benchmarks" / "catalogue.py").is_file():
        fail(
            Code.USAGE,
            "there are no benchmarks here",
            "they are part of a checkout, and this robojax was installed without one",
            "git clone the repository, then: pip install -e '.[sim,dev]' and robojax bench",
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from benchmarks.catalogue import wanted

    try:
        benchmarks = wanted(names)
    except KeyError as error:
        fail(Code.USAGE, f"no such benchmark: {error.args[0]}", "names are those of the files", "robojax bench --list")
    return [benchmark for benchmark in benchmarks if names or not quick or benchmark.quick is not None]


def _filter_possible(chosen: "Sequence[Benchmark]", peers: Mapping[str, str | None]) -> "list[Benchmark]":
    """Benchmarks that have all they need; prints what the others lack."""
    possible = [
        benchmark for benchmark in chosen if benchmark.is_peerless or benchmark.takes is None or peers[benchmark.takes]
    ]
    for benchmark in chosen:
        if benchmark not in possible:
            typer.echo(f"{benchmark.name}: left out; it only compares: give {benchmark.takes}", err=True)
    return possible


def _run_all(
    chosen: "Sequence[Benchmark]", quick: bool, into: Path, peers: Mapping[str, str | None]
) -> dict[str, list[str]]:
    """The last lines of those that did not end well."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    failed: dict[str, list[str]] = {}
    expected = [60 * benchmark.minutes[quick] for benchmark in chosen]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=sum(expected), left="")
        for number, one in enumerate(chosen):
            before, after = sum(expected[:number]), sum(expected[number + 1 :])
            began = time.monotonic()

            def show(line: str) -> None:
                spent = time.monotonic() - began  # noqa: B023 - called while this one runs
                left = max(expected[number] - spent, 0) + after  # noqa: B023
                progress.update(
                    bar,
                    completed=before + min(spent, expected[number]),  # noqa: B023
                    description=f"[bold]{one.name}[/] ({number + 1}/{len(chosen)}) {line[:60]}",  # noqa: B023
                    left=f"about {left / 60:.0f} min left" if left >= 60 else "less than a minute left",
                )

            arguments = [*((one.quick or ()) if quick else one.full), "--output", str(into / f"{one.name}.json")]
            peer = None if one.takes is None else peers[one.takes]
            if one.takes is not None and peer is not None:
                arguments += [one.takes, peer]
            code, last_lines = _run(one, arguments, show)
            if code:
                failed[one.name] = last_lines
            progress.console.print(
                f"{one.name}: {'[red]see below[/]' if code else 'done'} in {time.monotonic() - began:.0f} s"
            )
    return failed


def _run(benchmark: "Benchmark", arguments: Sequence[str], show: Any) -> tuple[int, list[str]]:
    """Run it; its exit code and last lines."""
    from rich.markup import escape

    last_lines: deque[str] = deque(maxlen=12)
    paths = os.environ.get("PYTHONPATH", "")
    process = subprocess.Popen(
        [sys.executable, str(benchmark.script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), paths]))},
    )
    assert process.stdout is not None
    lines = process.stdout
    reading = threading.Thread(target=lambda: last_lines.extend(line.rstrip() for line in lines), daemon=True)
    reading.start()
    try:
        while process.poll() is None:
            show(escape(last_lines[-1]) if last_lines else "")
            time.sleep(0.25)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    reading.join(5)
    lines.close()
    return process.returncode, list(last_lines)
