"""The landing page, the description of the endpoints and their events as routes, for any app that has a receiver."""

import inspect
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sanic import Blueprint, HTTPResponse, Request
from sanic.response import html, json

from hooks.receiving.endpoint import Endpoint
from hooks.receiving.receiver import Receiver
from hooks.serving import documents, landing
from hooks.serving.landing import EndpointInfo
from hooks.serving.visitor import HOST, is_here


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
