"""Pages of the server: the dashboard, the OpenAPI documents and the documentation."""

import base64
import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from sanic import Blueprint, HTTPResponse
from sanic.exceptions import NotFound
from sanic.helpers import STATUS_CODES
from sanic.response import redirect
from sanic.server.websockets.impl import WebsocketImplProtocol

from service.api.context import Request, Route, Routes
from service.api.schemas import (
    CreateSessionRequest,
    CreateSessionResponse,
    Deployment,
    ErrorResponse,
    FastApiSchema,
    HTTPValidationError,
    NewSessionRequest,
    PolicyCheck,
    PolicyCheckRequest,
    PolicyRequest,
    Recording,
    RecordRequest,
    ValidationError,
)
from service.auth.caller import Role, caller_of
from service.dashboard.live import CONTENT_SECURITY_POLICY, StaticFile, read_static_files
from service.http.origins import Origins
from service.rollout.records import DeploymentStage, Quarantined
from service.sessions.base_session import SessionStatusResponse

PAGE = "page.html"
FILES = read_static_files()


# The page is served without a key, and asks for the key of its socket.
DASHBOARD_ROUTES = Routes("Documents")
DOCUMENT_ROUTES = Routes("Documents")


@DASHBOARD_ROUTES.add("GET", "/ui", answer={"type": "string"}, content_type="text/html", role=None)
async def get_page(request: Request) -> HTTPResponse:
    """The page that shows what happens and stops it."""
    if request.path.endswith("/"):
        return redirect("../ui")  # relative links of the page need a path without a trailing slash
    return _answer(FILES[PAGE])


@DASHBOARD_ROUTES.add(
    "GET", "/ui/{name}", answer={"type": "string"}, content_type="text/plain", errors=(404,), role=None
)
async def get_page_file(request: Request, name: str) -> HTTPResponse:
    """A file of the page."""
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
    origins.install(blueprint)
    return blueprint


Json = dict[str, Any]

VERSION = "1.0.0"
TITLE = "robojax Inference Server"
SUMMARY = "ACT Model Inference Server for Real-time Robot Control"
SPECIFIED_MODELS: tuple[type[BaseModel], ...] = (
    CreateSessionRequest,
    CreateSessionResponse,
    HTTPValidationError,
    SessionStatusResponse,
    ValidationError,
)
FULL_MODELS = (
    *(*SPECIFIED_MODELS, NewSessionRequest, PolicyRequest, PolicyCheckRequest, PolicyCheck),
    *(Deployment, DeploymentStage, Quarantined, RecordRequest, Recording, ErrorResponse),
)
SECURITY = {
    "BearerAuth": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
    "ApiKeyAuth": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
TAGS = {
    "Health": "Whether the server runs, and what runs on it",
    "Sessions": "Sessions are made, listed and deleted",
    "Control": "A session's inference is started, stopped and restarted",
    "Debug": "Diagnostics, monitoring and the emergency stop",
}
FULL_TAGS = {
    **TAGS,
    "Policies": "A running session gets another policy, by a push or by hand",
    "Models": "Models that were loaded when the server started, run forward over arrays",
    "Recordings": "What robots saw and did, kept in files",
    "Access": "Keys, tokens and tickets",
    "Documents": "The API described",
}
DESCRIPTION = """Frames and joints come in from rooms, a policy turns them into actions, one is sent per tick.

The routes of the specified document and emergency stops answer under `/api` too. Every answer carries `X-Request-Id`,
which the server's log has as well.
Where the server has keys, each route names the role that it wants: a viewer looks, an operator makes and moves
sessions of its own, an admin does all; sessions of others are 404. Emergency stops are allowed to every key.
When the embedded transport is on, this server also has the rooms themselves (`/robotics/...` and `/video/...`,
REST, WebSocket and signalling of the RobotHub wire)."""

# Statuses of any route.
_EVERY_ROUTE = (400, 403, 408, 413, 500, 503)
_MEANINGS = {
    400: "The request is not valid HTTP",
    401: "The request has no valid key",
    403: "The role of the key does not allow this, or the settings do not allow web pages of this origin",
    404: "No such session, model, deployment, commit or recording",
    406: "No content type of Accept is supported; the text lists the supported types",
    408: "The request did not arrive in time",
    409: "Not allowed in the present state; the text lists what is allowed",
    413: "The headers, body, response or computation are too large",
    415: "The content type of the body is not supported; the text lists the supported types",
    429: "Too many sessions or attempts; see Retry-After",
    500: "Error of the server; its log has details under the request id",
    502: "The transport server or the Hub refused, did not answer, or broke the protocol",
    503: "The response took too long, or too many requests wait",
}


def specified_document(routes: Iterable[Route]) -> Json:
    """Build the specified document, which never changes, because clients are generated from it."""
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "summary": SUMMARY, "version": VERSION},
        "paths": _paths((route, _specified(route)) for route in routes if route.is_specified),
        "components": {"schemas": _schemas(SPECIFIED_MODELS), "securitySchemes": SECURITY},
        "tags": _tags(TAGS),
    }


def full_document(routes: Iterable[Route], limits: Mapping[str, Mapping[str, Any]] | None = None) -> Json:
    """Build the document of all routes and responses.

    Args:
        limits: additions to the schemas of a new session's fields, e.g. ``{"rate": {"maximum": 200}}``.
    """
    schemas = _schemas(FULL_MODELS)
    for name, more in (limits or {}).items():
        field = schemas[NewSessionRequest.__name__]["properties"][name]
        field.get("anyOf", [field])[0].update(more)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "summary": SUMMARY, "description": DESCRIPTION, "version": VERSION},
        "servers": [{"url": "/", "description": "This server"}],
        "paths": _paths((route, _full(route)) for route in routes),
        "components": {
            "schemas": schemas,
            "securitySchemes": SECURITY,
            "responses": {_response_name(status): _error(status) for status in sorted(_MEANINGS)},
        },
        "tags": _tags(FULL_TAGS),
    }


def _specified(route: Route) -> Json:
    operation: Json = {
        "tags": [route.tag],
        "summary": route.name.replace("_", " ").title(),
        "description": inspect.getdoc(route.handler) or "",
        # As FastAPI makes it.
        "operationId": re.sub(r"\W", "_", f"{route.name}{route.path}") + f"_{route.method.lower()}",
    }
    path_parameters = re.findall(r"{(\w+)}", route.path)
    if path_parameters:
        operation["parameters"] = [_parameter(name) for name in path_parameters]
    if route.specified_body:
        operation["requestBody"] = {"content": _content(_reference(route.specified_body)), "required": True}
    answer = _reference(route.answer) if isinstance(route.answer, type) else route.answer
    operation["responses"] = {
        "200": {"description": "Successful Response", "content": _content(answer, route.content_type)}
    }
    if path_parameters or route.specified_body:
        operation["responses"]["422"] = {
            "description": "Validation Error",
            "content": _content(_reference(HTTPValidationError)),
        }
    return operation


def _full(route: Route) -> Json:
    operation = _specified(route)
    if route.body:
        operation["requestBody"] = {"content": _content(_reference(route.body)), "required": True}
    elif route.optional_body is not None:
        operation["requestBody"] = {"content": _content(route.optional_body), "required": False}
    elif route.forms:
        content: Json = {}
        for kind, schema in route.forms.items():
            content |= _content(schema, kind)
        operation["requestBody"] = {"content": content, "required": True}
        for kind, schema in route.answer_forms.items():
            operation["responses"]["200"]["content"] |= _content(schema, kind)
    operation.setdefault("parameters", []).extend(
        {"name": query.name, "in": "query", "required": False, "schema": query.schema, "description": query.description}
        for query in route.query
    )
    if not operation["parameters"]:
        del operation["parameters"]
    responses: Json = operation["responses"]
    if route.query or route.body or route.forms:
        responses["422"] = {"description": "Validation Error", "content": _content(_reference(HTTPValidationError))}
    statuses = {*_EVERY_ROUTE, *route.errors}
    operation["security"] = []
    if route.role is not None:
        statuses |= {401, 429}
        operation["security"] = [{"ApiKeyAuth": []}, {"BearerAuth": []}]
        operation["description"] = f"{operation['description']}\n\nRole: {route.role}."
    for status in sorted(statuses):
        responses[str(status)] = {"$ref": f"#/components/responses/{_response_name(status)}"}
    return operation


def _paths(operations: Iterable[tuple[Route, Json]]) -> Json:
    paths: Json = {}
    for route, operation in operations:
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return paths


def _parameter(name: str) -> Json:
    title = name.replace("_", " ").title()
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "title": title}}


def _schemas(models: Sequence[type[BaseModel]]) -> Json:
    _, found = models_json_schema(
        [(model, "validation") for model in models],
        schema_generator=FastApiSchema,
        ref_template="#/components/schemas/{model}",
    )
    return found["$defs"]


def _reference(model: type[BaseModel]) -> Json:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _content(schema: Mapping[str, Any], content_type: str = "application/json") -> Json:
    return {content_type: {"schema": dict(schema)}}


def _error(status: int) -> Json:
    headers = {"X-Request-Id": {"description": "The request's name in the log", "schema": {"type": "string"}}}
    return {"description": _MEANINGS[status], "headers": headers, "content": _content(_reference(ErrorResponse))}


def _response_name(status: int) -> str:
    return STATUS_CODES[status].decode().title().replace(" ", "")


def _tags(tags: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "description": description} for name, description in tags.items()]


def build_docs_page() -> tuple[bytes, str]:
    """Build the documentation page, and a Content-Security-Policy that allows only its own script and style."""
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


@DOCUMENT_ROUTES.add("GET", "/openapi.json", answer={"type": "object"}, role=None)
async def get_openapi(request: Request) -> HTTPResponse:
    """The specification's document."""
    return _document(request, "openapi.json")


@DOCUMENT_ROUTES.add("GET", "/openapi-full.json", answer={"type": "object"}, role=None)
async def get_full_openapi(request: Request) -> HTTPResponse:
    """This document: every route and every answer."""
    return _document(request, "openapi-full.json")


@DOCUMENT_ROUTES.add("GET", "/docs", answer={"type": "string"}, content_type="text/html", role=None)
async def get_docs(request: Request) -> HTTPResponse:
    """The full document to read in a browser."""
    text, policy = request.app.ctx.page
    return HTTPResponse(text, content_type="text/html; charset=utf-8", headers={"content-security-policy": policy})


def _document(request: Request, name: str) -> HTTPResponse:
    return HTTPResponse(request.app.ctx.documents[name], content_type="application/json")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
