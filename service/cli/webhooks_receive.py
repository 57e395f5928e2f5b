"""Receiving from the command line: ``serve``, ``events``, ``send``."""

import typer


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
