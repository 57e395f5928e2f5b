"""The OpenAPI documents, and a page of ours that shows them."""

import base64
import hashlib
import re
from importlib.resources import files

from sanic import HTTPResponse

from service.routes.context import Request
from service.routes.route import Route


def page() -> tuple[bytes, str]:
    """The page, and the Content-Security-Policy that lets exactly its own script and style run."""
    text = files("service.routes").joinpath("docs.html").read_text()
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


ROUTES = (
    Route("GET", "/openapi.json", get_openapi, "Documents", {"type": "object"}, role=None),
    Route("GET", "/openapi-full.json", get_full_openapi, "Documents", {"type": "object"}, role=None),
    Route("GET", "/docs", get_docs, "Documents", {"type": "string"}, content_type="text/html", role=None),
)
