"""``robojax doctor``: is this machine fit?"""

from typing import Annotated

import typer

from service.cli.failure import Code

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Look at this port, not at the settings'.")] = None,
) -> None:
    """Look at Python, JAX's devices, rendering, video, the port, keys, disk and caches; each finding has its fix.

    Exit code 1 when something is missing that the server needs.
    """
    import json
    from dataclasses import asdict

    from service.cli.serve import settings_or_end
    from service.diagnosis import diagnose
    from service.state import usual_state

    settings = settings_or_end({"port": port})
    if settings.state is None:
        settings = settings.model_copy(update={"state": usual_state(settings.port)})
    findings = diagnose(settings)
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
        for column in ("", "what", "found", "fix"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            colour = _COLOURS[finding.level]
            table.add_row(f"[{colour}]{finding.level}[/{colour}]", finding.name, finding.found, finding.fix)
        console = Console(highlight=False)
        console.print(table)
        console.print(f"{len(failed)} of {len(findings)} need repair" if failed else "fit", style="bold")
    if failed:
        raise typer.Exit(Code.CHECK)
