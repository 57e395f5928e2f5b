"""How webhooks are shown: a table or lines for people, JSON for programs; never a secret."""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import typer

from service.cli.table import print_table


class Format(StrEnum):
    """Of what is printed; the names of ``hf``'s ``--format``."""

    AUTO = "auto"
    HUMAN = "human"
    AGENT = "agent"
    JSON = "json"
    QUIET = "quiet"


def print_list(shapes: Sequence[Mapping[str, Any]], form: Format, endpoint: str) -> None:
    """All of them."""
    if form is Format.JSON:
        rows = [{**one, "watched": _watched(one)} for one in shapes]
        typer.echo(json.dumps(rows, indent=2))
    elif form is Format.QUIET:
        for one in shapes:
            typer.echo(one["id"])
    elif not shapes:
        typer.echo(f"No results found: no webhooks at {endpoint}")
    else:
        columns = ("id", "sends to", "status", "secret", "domains", "watched")
        # An id that is cut or folded cannot be copied.
        print_table(columns, map(_row, shapes), never_folded=("id",))


def print_one(one: Mapping[str, Any], form: Format, *, is_terminal: bool) -> None:
    """All of one: lines on a terminal, else JSON, as ``hf webhooks info``."""
    if form is Format.QUIET:
        typer.echo(one["id"])
    elif form in (Format.JSON, Format.AGENT) or (form is Format.AUTO and not is_terminal):
        typer.echo(json.dumps(one, indent=2))
    else:
        _print_lines({name: value for name, value in _lines(one).items()})


def print_done(done: str, one: Mapping[str, Any], form: Format, **more: Any) -> None:
    """What was done, and to which; ``more`` is for programs too."""
    if form is Format.JSON:
        typer.echo(json.dumps({**one, "did": done, **more}, indent=2))
    elif form is Format.QUIET:
        typer.echo(one["id"])
    else:
        typer.echo(f"Webhook {done}")
        _print_lines(_lines(one) | more)


def warn(text: str) -> None:
    """A warning on standard error, where no program reads its JSON."""
    typer.secho(f"Warning: {text}", fg="yellow", err=True)


def _lines(one: Mapping[str, Any]) -> dict[str, str]:
    if "status" not in one:
        return {name: str(value) for name, value in one.items()}
    return {
        "id": one["id"],
        **({"job": _job(one)} if one.get("job") else {"url": one["url"] or ""}),
        "status": one["status"],
        "secret": _secret(one),
        "domains": " ".join(one["domains"]),
        "watched": " ".join(_watched(one)),
    }


def _print_lines(lines: Mapping[str, Any]) -> None:
    for name, value in lines.items():
        typer.echo(f"  {name + ':':<9}{_printable(str(value))}")


def _row(one: Mapping[str, Any]) -> Iterator[str]:
    target = one["url"] or f"(job) {_job(one)}"
    row = (one["id"], target, one["status"], _secret(one), " ".join(one["domains"]), "\n".join(_watched(one)))
    return map(_printable, row)


def _watched(one: Mapping[str, Any]) -> list[str]:
    return [f"{item['type']}:{item['name']}" for item in one["watched"]]


def _secret(one: Mapping[str, Any]) -> str:
    return "set" if one["has_secret"] else "none"


def _job(one: Mapping[str, Any]) -> str:
    job = one.get("job") or {}
    labels = job.get("labels") or {}  # a robojax server's jobs have no image, but a name
    return str(job.get("docker_image") or job.get("space_id") or labels.get("id") or "")


def _printable(text: str) -> str:
    """Without what would change the terminal: it comes from a server."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
