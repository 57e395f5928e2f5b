"""What was looked at, one finding a row, as ``robojax doctor`` and ``robojax robot --check`` show it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from service.cli.failure import Code
from service.cli.table import print_table

if TYPE_CHECKING:
    from robojax.robot.findings import Finding as OfRobot
    from service.diagnosis import Finding as OfServer

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def show_findings(findings: Sequence["OfServer | OfRobot"], *, as_json: bool) -> None:
    """Print them; ends the command with exit code 1 when one says that something has to be mended."""
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        print_table(
            ("", "what", "found", "fix"),
            ((Text(one.level, _COLOURS[one.level]), one.name, one.found, one.fix) for one in findings),
        )
        told = f"{len(failed)} of {len(findings)} need repair" if failed else "fit"
        Console(highlight=False).print(told, style="bold")
    if failed:
        raise typer.Exit(Code.CHECK)
