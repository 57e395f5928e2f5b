"""Answers as JSON, errors among them: what is known is explained, what is not is only given a number to look up."""

import json
import logging
import re
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from sanic import HTTPResponse, Request, Sanic
from sanic.constants import HTTP_METHODS
from sanic.exceptions import MethodNotAllowed, NotFound, RequestCancelled, SanicException
from sanic.helpers import STATUS_CODES

from service.errors import ServiceError
from service.routes.body import InvalidBody

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> HTTPResponse:
    """A JSON answer; a number that JSON does not have is an error of ours and raises ValueError."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":"))
    return HTTPResponse(text, status=status, headers=dict(headers or {}), content_type="application/json")


def request_id(request: Request[Any, Any]) -> str:
    """What this request is called in the log and in ``X-Request-Id``: as its client calls it, if it does so shortly."""
    if not hasattr(request.ctx, "request_id"):
        sent = request.headers.get("x-request-id", "")
        request.ctx.request_id = sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
    return request.ctx.request_id


def install_errors(app: Sanic[Any, Any]) -> None:
    """From now on every error of this app is answered in one of the forms below."""
    app.exception(InvalidBody)(_invalid_body)
    app.exception(ServiceError)(_service_error)
    app.exception(SanicException)(_http_error)
    app.exception(RequestCancelled)(_left)  # pyright: ignore[reportArgumentType] - a CancelledError, which it takes
    app.exception(Exception)(_unexpected)


async def _invalid_body(request: Request[Any, Any], error: InvalidBody) -> HTTPResponse:
    return answer({"detail": error.detail}, 422)


async def _service_error(request: Request[Any, Any], error: ServiceError) -> HTTPResponse:
    if error.status >= 500:
        log.error("%s %s [%s]: %s", request.method, request.path, request_id(request), error)
    if error.status == 422:
        # The documents promise a list for 422; the text may quote what was sent, which must not go back.
        entry = {"loc": list(getattr(error, "loc", ("body",))), "msg": str(error), "type": error.code}
        return answer({"detail": [entry]}, 422)
    return answer({"detail": str(error), "code": error.code}, error.status, error.headers)


async def _left(request: Request[Any, Any], error: RequestCancelled) -> HTTPResponse:
    # Nobody is there to read it, and nothing of ours failed: it only counts, under nginx's number for this.
    return HTTPResponse(status=499)


async def _http_error(request: Request[Any, Any], error: SanicException) -> HTTPResponse:
    status = error.status_code or 500
    phrase = STATUS_CODES[status].decode()  # our codes are made of it, and HTTPStatus has others in Python 3.13
    if status >= 500:
        log.error("%s %s [%s]: %s", request.method, request.path, request_id(request), phrase)
    headers = {name: str(value) for name, value in (error.headers or {}).items()}
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(method for method in HTTP_METHODS if _is_routed(request, method))
    code = phrase.lower().replace(" ", "_").replace("-", "_")
    return answer({"detail": _DETAILS.get(status, phrase), "code": code}, status, headers)


def _is_routed(request: Request[Any, Any], method: str) -> bool:
    """Asked of the router, since Sanic names the allowed methods for paths without variable parts only."""
    try:
        request.app.router.get(request.path, method, None)
    except (NotFound, MethodNotAllowed):
        return False
    return True


async def _unexpected(request: Request[Any, Any], error: Exception) -> HTTPResponse:
    log.error("%s %s [%s] failed", request.method, request.path, request_id(request), exc_info=error)
    detail = f"Internal Server Error; the server's log says more under {request_id(request)}"
    return answer({"detail": detail, "code": "internal"}, 500)


_DETAILS: dict[int, str] = {
    HTTPStatus.REQUEST_TIMEOUT: "The request did not arrive in time",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The request's body or head is too large",
    HTTPStatus.SERVICE_UNAVAILABLE: "The answer took too long; look at GET /sessions for what became of it",
}
