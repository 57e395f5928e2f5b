"""Routes of a webhooks server's pages: landing page, OpenAPI document, a user's own interface."""

import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from pydantic.json_schema import models_json_schema
from sanic import Blueprint, HTTPResponse, Request
from sanic.response import file, html, json

from hooks.errors import HooksError
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import Endpoint
from hooks.receiver.receiver import Receiver
from hooks.server import landing_page as landing
from hooks.server.event_routes import HOST, is_local_request
from hooks.server.landing_page import EndpointInfo

Json = dict[str, Any]

ANSWERS = {
    "200": "Handled: what the handler returned, or null; or left alone because of its filters; or a duplicate",
    "202": "Kept, and handled in the background",
    "401": "No secret or signature",
    "403": "A wrong one",
    "413": "The body is too large",
    "422": "The body is no payload that the handler can take",
    "429": "Too many from one source",
    "500": "The handler failed; the same delivery may be sent again",
    "503": "Too many wait already; Retry-After tells when to send again",
}


def build_openapi(endpoints: Iterable[EndpointInfo], *, title: str = "Webhooks", version: str = "1") -> Json:
    """Build the OpenAPI 3.1 document of the endpoints."""
    _, schemas = models_json_schema([(WebhookPayload, "validation")], ref_template="#/components/schemas/{model}")
    paths: Json = {}
    for endpoint in endpoints:
        operation: Json = {
            "operationId": endpoint.path.strip("/").replace("/", "_"),
            "summary": endpoint.text or endpoint.path.rsplit("/", 1)[-1],
            "parameters": [
                {
                    "name": "Webhook-Id",
                    "in": "header",
                    "description": "Of the delivery, the same in every attempt; a second one with it is a duplicate.",
                    "schema": {"type": "string"},
                }
            ],
            "requestBody": {
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/WebhookPayload"},
                        "example": endpoint.build_sample(),
                    }
                }
            },
            "responses": {status: {"description": text} for status, text in ANSWERS.items()},
        }
        if endpoint.filter_text:
            operation["description"] = f"Only {endpoint.filter_text}."
        if endpoint.has_secret:
            operation["security"] = [{"secret": []}]
        paths[endpoint.path] = {"post": operation}
    secret = {"type": "apiKey", "in": "header", "name": "X-Webhook-Secret"}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": schemas["$defs"], "securitySchemes": {"secret": secret}},
    }


def render_docs(document: Json, links: dict[str, str]) -> str:
    """Render the OpenAPI document as a page to read in a browser."""
    parts = ["<h1>Endpoints</h1><nav>"]
    parts += [f'<a href="{escape(url)}">{escape(name)}</a> ' for name, url in links.items()]
    parts.append("</nav>")
    for path, operations in document["paths"].items():
        description = operations["post"]
        parts.append(f"<h2><code>POST {escape(path)}</code></h2><p>{escape(description['summary'])}</p>")
        parts.append(f"<p>{escape(description.get('description', ''))}</p>" if "description" in description else "")
        parts.append("<p>Needs <code>X-Webhook-Secret</code>.</p>" if "security" in description else "")
    parts.append("<h2>Answers</h2>" + _render_table(ANSWERS.items()))
    for name, schema in document["components"]["schemas"].items():
        rows = [(field, _get_type_name(part)) for field, part in schema.get("properties", {}).items()]
        parts.append(
            f"<h2>{escape(name)}</h2><p>{escape(_strip_markup(schema.get('description', '')))}</p>{_render_table(rows)}"
        )
    return landing.render_html("Webhooks: endpoints", parts)


def _strip_markup(text: str) -> str:
    return text.split("\n\n")[0].replace("``", "")


def _render_table(rows: Iterable[tuple[str, str]]) -> str:
    description = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>" for name, text in rows
    )
    return f'<div class="scroll"><table>{description}</table></div>'


def _get_type_name(part: Json) -> str:
    if "anyOf" in part:
        return " or ".join(_get_type_name(one) for one in part["anyOf"])
    if part.get("type") == "array":
        return f"list of {_get_type_name(part.get('items', {}))}"
    return str(part.get("$ref", part.get("type", "anything"))).rsplit("/", 1)[-1]


Interface: TypeAlias = str | Path | Blueprint

EXPECTED_UI = "a text of HTML, the path of a file or folder, or a Sanic blueprint"


class InvalidInterface(HooksError, TypeError):
    """``ui`` is nothing that can be shown."""


def check_ui(ui: object) -> Interface:
    """Return the ``ui`` if it can be shown.

    Raises:
        InvalidInterface: it cannot.
    """
    if isinstance(ui, Blueprint):
        return ui
    if isinstance(ui, str) and "<" in ui:
        return ui
    if isinstance(ui, str | Path):
        path = Path(ui).absolute()
        if path.is_file() or path.is_dir():
            return path
        raise InvalidInterface(
            f"ui {str(ui)!r}: found neither HTML nor a file or folder of this name; wanted {EXPECTED_UI}"
        )
    kind = type(ui)
    hint = (
        "; a gradio interface runs in a server of its own: launch it beside this one and link to it"
        if kind.__module__.split(".")[0] == "gradio"
        else ""
    )
    raise InvalidInterface(f"ui: found {kind.__module__}.{kind.__qualname__}, wanted {EXPECTED_UI}{hint}")


def build_ui_blueprint(ui: Interface) -> Blueprint:
    """Build the routes of a user's own interface."""
    if isinstance(ui, Blueprint):
        return ui
    blueprint = Blueprint(f"ui-{secrets.token_hex(4)}")
    if isinstance(ui, Path) and ui.is_dir():
        # Sanic serves nothing from outside the folder, by ".." or by a link.
        blueprint.static("/", ui, name="ui", index="index.html")
        return blueprint

    async def show(request: Request) -> HTTPResponse:
        # Read anew, so that an edited file is shown without a new start.
        return await file(ui) if isinstance(ui, Path) else html(ui)

    blueprint.add_route(show, "/", methods=["GET", "HEAD"], name="ui")
    return blueprint


def describe_endpoints(receiver: Receiver) -> list[EndpointInfo]:
    """Describe the endpoints of a receiver for pages."""
    return [_describe_endpoint(endpoint) for endpoint in receiver.endpoints.values()]


def _describe_endpoint(endpoint: Endpoint) -> EndpointInfo:
    text = inspect.getdoc(endpoint.handler.function) if inspect.isroutine(endpoint.handler.function) else None
    return EndpointInfo(
        endpoint.path, (text or "").split("\n\n")[0], endpoint.filter, not endpoint.accepted_secrets.is_open
    )


async def render_landing_page(
    receiver: Receiver,
    base: str,
    *,
    links: dict[str, str],
    with_events: bool,
    when_open: str = landing.WHEN_OPEN,
) -> str:
    """Render the landing page's HTML.

    Args:
        base: URL of the app, without a path.
        links: other pages, by their name.
        with_events: whether this visitor may see what came.
        when_open: what an endpoint without a secret means in this app.
    """
    return landing.render_page(
        base,
        describe_endpoints(receiver),
        events=await receiver.list_recent() if with_events else None,
        links=links,
        when_open=when_open,
        is_space=bool(os.environ.get("SPACE_ID")),
    )


@dataclass(frozen=True)
class PagePaths:
    """Paths of the pages; an empty one is not served."""

    landing: str = "/webhooks"
    docs: str = "/webhooks/_docs"
    document: str = "/webhooks/_openapi.json"


def build_blueprint(
    receiver: Receiver,
    paths: PagePaths = PagePaths(),
    *,
    base: Callable[[], str | None] = lambda: None,
    links: dict[str, str] | None = None,
    when_open: str = landing.WHEN_OPEN,
) -> Blueprint:
    """Build the routes of the landing page and the documents.

    Args:
        base: public URL of the app, if it is known; else that of the request.
        links: of other pages of the app to show.
        when_open: what an endpoint without a secret means in this app.
    """
    pages = Blueprint(f"pages-{secrets.token_hex(4)}")
    named = {"Endpoints": paths.docs, "OpenAPI": paths.document, **(links or {})}
    page_links = {name: path for name, path in named.items() if path} | {"Webhooks on the Hub": landing.SETTINGS_PAGE}

    async def show_landing(request: Request) -> HTTPResponse:
        text = await render_landing_page(
            receiver,
            base() or _get_base_url(request),
            links=page_links,
            with_events=is_local_request(request),
            when_open=when_open,
        )
        return html(text, headers=landing.HEADERS)

    async def show_docs(request: Request) -> HTTPResponse:
        back = {"Back": paths.landing} if paths.landing else {}
        text = render_docs(build_openapi(describe_endpoints(receiver)), {**back, "OpenAPI": paths.document})
        return html(text, headers=landing.HEADERS)

    async def show_document(request: Request) -> HTTPResponse:
        return json(build_openapi(describe_endpoints(receiver)))

    routes: Sequence[tuple[str, Any]] = (
        (paths.landing, show_landing),
        (paths.docs, show_docs),
        (paths.document, show_document),
    )
    for path, handler in routes:
        if path:
            pages.add_route(handler, path, methods=["GET", "HEAD"], name=handler.__name__)
    return pages


def _get_base_url(request: Request) -> str:
    host = request.headers.get("host", "")
    return f"{request.scheme}://{host}" if HOST.fullmatch(host) else "http://127.0.0.1"
