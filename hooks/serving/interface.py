"""What stands at ``/`` in place of the landing page: HTML, a file, a folder, or a Sanic blueprint."""

import secrets
from pathlib import Path
from typing import TypeAlias

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import file, html

from hooks.errors import HooksError

Interface: TypeAlias = str | Path | Blueprint

WANTED = "a text of HTML, the path of a file or folder, or a Sanic blueprint"


class UnusableInterface(HooksError, TypeError):
    """``ui`` is nothing that can be shown."""


def checked(ui: object) -> Interface:
    """The ``ui``, if it can be shown.

    Raises:
        UnusableInterface: it cannot.
    """
    if isinstance(ui, Blueprint):
        return ui
    if isinstance(ui, str) and "<" in ui:
        return ui
    if isinstance(ui, str | Path):
        path = Path(ui).absolute()
        if path.is_file() or path.is_dir():
            return path
        raise UnusableInterface(
            f"ui {str(ui)!r}: found neither HTML nor a file or folder of this name; wanted {WANTED}"
        )
    kind = type(ui)
    hint = (
        "; a gradio interface runs in a server of its own: launch it beside this one and link to it"
        if kind.__module__.split(".")[0] == "gradio"
        else ""
    )
    raise UnusableInterface(f"ui: found {kind.__module__}.{kind.__qualname__}, wanted {WANTED}{hint}")


def blueprint(ui: Interface) -> Blueprint:
    """Its routes."""
    if isinstance(ui, Blueprint):
        return ui
    made = Blueprint(f"ui-{secrets.token_hex(4)}")
    if isinstance(ui, Path) and ui.is_dir():
        # Sanic serves nothing from outside the folder, by ".." or by a link.
        made.static("/", ui, name="ui", index="index.html")
        return made

    async def show(request: Request) -> HTTPResponse:
        # Read anew, so that an edited file is shown without a new start.
        return await file(ui) if isinstance(ui, Path) else html(ui)

    made.add_route(show, "/", methods=["GET", "HEAD"], name="ui")
    return made
