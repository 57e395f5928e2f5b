"""Dashboard and API documentation pages."""

import base64
import hashlib
import re
from importlib.resources import files

from sanic import Blueprint, HTTPResponse
from sanic.exceptions import NotFound
from sanic.response import redirect
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.api.context import Request, Route
from service.auth.caller import Role, caller_of
from service.dashboard.live import CONTENT_SECURITY_POLICY, StaticFile, read_static_files
from service.http.origins import Origins

PAGE = "page.html"
FILES = read_static_files()


async def get_page(request: Request) -> HTTPResponse:
    """The page that shows what happens and stops it."""
    if request.path.endswith("/"):
        # Its links are relative: with a trailing slash they would point one level too deep.
        return redirect("../ui")
    return _answer(FILES[PAGE])


async def get_page_file(request: Request, name: str) -> HTTPResponse:
    """One of the page's files."""
    if name not in FILES or name == PAGE:
        raise NotFound()
    return _answer(FILES[name])


def _answer(file: StaticFile) -> HTTPResponse:
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }
    return HTTPResponse(file.content, content_type=file.type, headers=headers)


def build_live_blueprint(origins: Origins) -> Blueprint:
    """Build the route of ``/ui/live``. The guard checks the caller's ticket or key before the handler runs."""
    blueprint = Blueprint("live")

    async def live(request: Request, websocket: WebsocketImplProtocol) -> None:
        await request.app.ctx.live.serve(websocket, caller_of(request), request.ctx.is_still_authorized)

    blueprint.add_websocket_route(live, "/ui/live", name="live", error_format="json", ctx_role=Role.VIEWER)

    # A function, because Sanic's blueprints silently ignore a bound method as middleware.
    @blueprint.on_request
    async def refuse(request: Request) -> HTTPResponse | None:
        return origins.refuse_request(request)

    return blueprint


# The page asks for a key itself, so it is served without one; its socket is not.
DASHBOARD_ROUTES = (
    Route("GET", "/ui", get_page, "Documents", {"type": "string"}, content_type="text/html", role=None),
    Route(
        "GET",
        "/ui/{name}",
        get_page_file,
        "Documents",
        {"type": "string"},
        content_type="text/plain",
        errors=(404,),
        role=None,
    ),
)


def build_docs_page() -> tuple[bytes, str]:
    """Build the documentation page, and the Content-Security-Policy that lets exactly its own script and style run."""
    text = files("service.api").joinpath("docs.html").read_text()
    hashes = {
        kind: " ".join(_hash(part) for part in re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL))
        for kind in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


async def get_openapi(request: Request) -> HTTPResponse:
    """The specification's document."""
    return _document(request, "openapi.json")


async def get_full_openapi(request: Request) -> HTTPResponse:
    """This document: every route and every answer."""
    return _document(request, "openapi-full.json")


async def get_docs(request: Request) -> HTTPResponse:
    """The full document to read in a browser."""
    text, policy = request.app.ctx.page
    return HTTPResponse(text, content_type="text/html; charset=utf-8", headers={"content-security-policy": policy})


def _document(request: Request, name: str) -> HTTPResponse:
    return HTTPResponse(request.app.ctx.documents[name], content_type="application/json")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


DOCUMENT_ROUTES = (
    Route("GET", "/openapi.json", get_openapi, "Documents", {"type": "object"}, role=None),
    Route("GET", "/openapi-full.json", get_full_openapi, "Documents", {"type": "object"}, role=None),
    Route("GET", "/docs", get_docs, "Documents", {"type": "string"}, content_type="text/html", role=None),
)
