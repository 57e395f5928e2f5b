"""How a command fails: what happened, why, what to do; and an exit code."""

from enum import IntEnum
from typing import NoReturn

import typer


class Code(IntEnum):
    """Exit codes."""

    CHECK = 1
    USAGE = 2
    POLICY = 3
    TRANSPORT = 4


def fail(code: Code, what: str, why: str, then: str) -> NoReturn:
    """Say it on standard error and end."""
    for style, label, text in (("bold red", "Error", what), ("bold", "Why", why), ("bold green", "Do", then)):
        lines = text.splitlines() or [""]
        typer.secho(f"{label:>5}: ", nl=False, err=True, fg=style.split()[-1] if " " in style else None, bold=True)
        typer.echo(f"\n{'':7}".join(lines), err=True)
    raise typer.Exit(code)
