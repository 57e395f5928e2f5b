"""Webhooks of the Hub from the command line: ``list``, ``info``, ``create`` and so on."""

import typer


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
