"""The landing page, the description of the endpoints and their events as routes, for any app that has a receiver."""

import inspect
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import file, html, json

from hooks.errors import HooksError
from hooks.receiving.endpoint import Endpoint
from hooks.receiving.receiver import Receiver
from hooks.serving import documents, landing
from hooks.serving.event_routes import HOST, is_here
from hooks.serving.landing import EndpointInfo

Interface: TypeAlias = str | Path | Blueprint

UI_WANTED = "a text of HTML, the path of a file or folder, or a Sanic ui_blueprint"


class UnusableInterface(HooksError, TypeError):
    """``ui`` is nothing that can be shown."""


def checked_ui(ui: object) -> Interface:
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
            f"ui {str(ui)!r}: found neither HTML nor a file or folder of this name; wanted {UI_WANTED}"
        )
    kind = type(ui)
    hint = (
        "; a gradio interface runs in a server of its own: launch it beside this one and link to it"
        if kind.__module__.split(".")[0] == "gradio"
        else ""
    )
    raise UnusableInterface(f"ui: found {kind.__module__}.{kind.__qualname__}, wanted {UI_WANTED}{hint}")


def ui_blueprint(ui: Interface) -> Blueprint:
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


def endpoints_of(receiver: Receiver) -> list[EndpointInfo]:
    """The endpoints of a receiver."""
    return [_info(endpoint) for endpoint in receiver.endpoints.values()]


def _info(endpoint: Endpoint) -> EndpointInfo:
    text = inspect.getdoc(endpoint.handler.function) if inspect.isroutine(endpoint.handler.function) else None
    return EndpointInfo(endpoint.path, (text or "").split("\n\n")[0], endpoint.filter, not endpoint.proofs.is_open)


async def landing_page(
    receiver: Receiver,
    base: str,
    *,
    links: dict[str, str],
    with_events: bool,
    when_open: str = landing.WHEN_OPEN,
) -> str:
    """The landing page's HTML.

    Args:
        base: URL of the app, without a path.
        links: other pages, by their name.
        with_events: whether this visitor may see what came.
        when_open: what an endpoint without a secret means in this app.
    """
    return landing.page(
        base,
        endpoints_of(receiver),
        events=await receiver.recent() if with_events else None,
        links=links,
        when_open=when_open,
        is_space=bool(os.environ.get("SPACE_ID")),
    )


@dataclass(frozen=True)
class Places:
    """Paths; an empty one is not served."""

    landing: str = "/webhooks"
    docs: str = "/webhooks/_docs"
    document: str = "/webhooks/_openapi.json"


def blueprint(
    receiver: Receiver,
    places: Places = Places(),
    *,
    base: Callable[[], str | None] = lambda: None,
    links: dict[str, str] | None = None,
    when_open: str = landing.WHEN_OPEN,
) -> Blueprint:
    """Routes for people: the landing page and the documents.

    Args:
        base: public URL of the app, if it is known; else that of the request.
        links: of other pages of the app to show.
        when_open: what an endpoint without a secret means in this app.
    """
    made = Blueprint(f"pages-{secrets.token_hex(4)}")
    named = {"Endpoints": places.docs, "OpenAPI": places.document, **(links or {})}
    shown_links = {name: path for name, path in named.items() if path} | {"Webhooks on the Hub": landing.SETTINGS_PAGE}

    async def show_landing(request: Request) -> HTTPResponse:
        text = await landing_page(
            receiver,
            base() or _base_of(request),
            links=shown_links,
            with_events=is_here(request),
            when_open=when_open,
        )
        return html(text, headers=landing.HEADERS)

    async def show_docs(request: Request) -> HTTPResponse:
        back = {"Back": places.landing} if places.landing else {}
        text = documents.page(documents.openapi(endpoints_of(receiver)), {**back, "OpenAPI": places.document})
        return html(text, headers=landing.HEADERS)

    async def show_document(request: Request) -> HTTPResponse:
        return json(documents.openapi(endpoints_of(receiver)))

    routes: Sequence[tuple[str, Any]] = (
        (places.landing, show_landing),
        (places.docs, show_docs),
        (places.document, show_document),
    )
    for path, handler in routes:
        if path:
            made.add_route(handler, path, methods=["GET", "HEAD"], name=handler.__name__)
    return made


def _base_of(request: Request) -> str:
    host = request.headers.get("host", "")
    return f"{request.scheme}://{host}" if HOST.fullmatch(host) else "http://127.0.0.1"
