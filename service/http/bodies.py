"""Strict JSON request bodies, streamed bodies, JSON responses and errors."""

import asyncio
import heapq
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar, cast

from pydantic import BaseModel, ValidationError
from sanic import HTTPResponse, Request, Sanic
from sanic.constants import HTTP_METHODS
from sanic.exceptions import MethodNotAllowed, NotFound, RequestCancelled, SanicException
from sanic.headers import parse_content_header
from sanic.helpers import STATUS_CODES

from service.errors import ServiceError, TooLarge
from service.http.strict_json import RepeatedName, TooManyValues, loads, reject_repeated_names
from service.logging import sanitize_text

Model = TypeVar("Model", bound=BaseModel)

# Strings are stepped over, so that a constant is only found where a value stands. Nothing is looked at twice: one that
# does not end is stepped over, too, and no character of it is given back.
_CONSTANT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|(-?Infinity|NaN)|[^"IN-]++', re.DOTALL)
# Bytes; none that means something has as many, and reading a MiB of brackets keeps every robot waiting for 0.1 s.
MAX_BODY = 1 << 17
# Values in a body, and names in its object. The largest that has a meaning names 64 cameras and 256 joints, twice.
MAX_VALUES = 4096
_MAX_NAMES = 256
# Of what is wrong with a body, as much is told: 12,000 names that nobody knows would be told in 2 MB.
_MAX_ERRORS = 64
# Words of errors may be shorter strings that happen to have been sent; only their quoted form is taken out.
_MIN_MASKED = 6
_WORD = re.compile("[A-Za-z_]+")


class InvalidBody(Exception):
    """The body of a request does not fit; ``detail`` is the list of an HTTPValidationError."""

    def __init__(self, detail: Sequence[dict[str, Any]]):
        super().__init__("; ".join(entry["msg"] for entry in detail))
        self.detail = list(detail)


def read_body(request: Request[Any, Any], model: type[Model]) -> Model:
    """Parse the required JSON body of a request as a model.

    Raises:
        InvalidBody: missing, too long, of another content type, not JSON, or not what the model wants.
    """
    if not request.body:
        raise _invalid_body_error("missing", "Field required")
    if len(request.body) > MAX_BODY:
        raise _invalid_body_error("too_long", f"Body should have at most {MAX_BODY} bytes")
    kind = request.headers.get("content-type")
    if kind is not None and not _is_json(kind):
        raise _invalid_body_error("content_type", "Content-Type should be application/json")
    value = _decode(request.body)
    if isinstance(value, dict) and len(value) > _MAX_NAMES:
        raise _invalid_body_error("too_long", f"Object should have at most {_MAX_NAMES} names")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        entries = error.errors(include_url=False, include_input=False, include_context=False)
        errors = [
            {"loc": ["body", *entry["loc"]], "msg": entry["msg"], "type": entry["type"]}
            for entry in entries[:_MAX_ERRORS]
        ]
        if more := len(entries) - len(errors):
            errors.append({"loc": ["body"], "msg": f"{more} more errors are not listed", "type": "too_many_errors"})
        raise InvalidBody(errors) from None


def to_invalid_body(error: ServiceError, input: BaseModel) -> InvalidBody:
    """Turn an error that was found after the body was read into the 422 answer of a body."""
    loc = list(getattr(error, "loc", ("body", "policy_path")))
    return InvalidBody([{"loc": loc, "msg": mask_input(str(error), input), "type": error.code}])


def mask_input(text: str, input: BaseModel) -> str:
    """Replace every value that was sent in an error's text by its field's name, e.g. ``<policy_path>``."""
    fields = {part: place for place, value in _list_values(input) for part in _spellings(value, text)}
    pieces, end = [], 0
    for start, part in _find_parts(text, fields):
        pieces += [text[end:start], f"<{fields[part]}>{':' * part.endswith(':')}"]
        end = start + len(part)
    return "".join([*pieces, text[end:]])


def _find_parts(text: str, parts: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Find parts in a text: each time the first one, and of those that begin there the longest.

    A regular expression of 64 cameras and 256 joints takes 0.2 s to build. Here each part is looked for once along the
    text, from where it was found last.
    """
    next_of = [(start, -len(part), part) for part in parts if part and (start := text.find(part)) >= 0]
    heapq.heapify(next_of)
    end = 0
    while next_of:
        start, length, part = heapq.heappop(next_of)
        if start >= end:
            yield start, part
            end = start + len(part)
        if (start := text.find(part, end)) >= 0:
            heapq.heappush(next_of, (start, length, part))


def _spellings(value: str | float, text: str) -> Iterator[str]:
    """Return how a value may be spelled in a text. A folder is often named by the last part of its path."""
    for part in {value, PurePath(value).name} if isinstance(value, str) else {value}:
        quoted = repr(part)
        if isinstance(part, str) and quoted[1:-1] == part and part not in text:
            continue  # which is so of nearly all of 256 joints
        yield quoted
        if isinstance(part, str) and len(part) >= _MIN_MASKED:
            # A plain word may be one of the text's own: a folder is told from it by what comes after.
            yield f"{part}:" if _WORD.fullmatch(part) else part


def _list_values(sent: BaseModel) -> Iterator[tuple[str, str | float]]:
    for name in sorted(sent.model_fields_set):
        value = getattr(sent, name)
        if isinstance(value, str | float):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}.{position}", part) for position, part in enumerate(value))


class _Constant(ValueError):
    """NaN or Infinity stands in the JSON, which Python would accept."""


def _refuse_constant(literal: str) -> NoReturn:
    raise _Constant(literal)


def _decode(raw: bytes) -> Any:
    try:
        # Not brackets: as many of them as there can be take 5 ms.
        return loads(
            raw, MAX_VALUES, counted=",{", parse_constant=_refuse_constant, object_pairs_hook=reject_repeated_names
        )
    except TooManyValues as error:
        raise _invalid_body_error("too_long", f"Body should have at most {MAX_VALUES} values") from error
    except RepeatedName as error:
        raise _invalid_body_error("json_invalid", f"JSON decode error: {error}") from None
    except json.JSONDecodeError as error:
        raise _invalid_body_error("json_invalid", "JSON decode error", error.pos) from None
    except (ValueError, RecursionError) as error:
        # NaN and Infinity; numbers too long to read; not UTF-8; nested too deep. Of these only the first two are looked
        # for, in what was read up to them.
        is_looked_for = isinstance(error, _Constant)
        found = next((match for match in _CONSTANT.finditer(raw) if match[1]), None) if is_looked_for else None
        raise _invalid_body_error("json_invalid", "JSON decode error", found.start() if found else 0) from None


def _is_json(content_type: str) -> bool:
    kind, _ = parse_content_header(content_type)
    main, _, sub = kind.lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _invalid_body_error(kind: str, message: str, *place: int) -> InvalidBody:
    return InvalidBody([{"loc": ["body", *place], "msg": message, "type": kind}])


log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> HTTPResponse:
    """Create a JSON answer. A number that JSON does not have is an error of ours and raises ValueError."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":"))
    return HTTPResponse(text, status=status, headers=dict(headers or {}), content_type="application/json")


def request_id(request: Request[Any, Any]) -> str:
    """Return the id of a request in the log and in ``X-Request-Id``: the client's own if it is short and plain."""
    if not hasattr(request.ctx, "request_id"):
        sent = request.headers.get("x-request-id", "")
        request.ctx.request_id = sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(8)
    return request.ctx.request_id


def install_errors(app: Sanic[Any, Any]) -> None:
    """Install handlers that answer every error of this app as JSON."""
    app.exception(InvalidBody)(_invalid_body)
    app.exception(ServiceError)(_service_error)
    app.exception(SanicException)(_http_error)
    app.exception(RequestCancelled)(_client_gone)  # pyright: ignore[reportArgumentType] - a CancelledError, which it takes
    app.exception(Exception)(_unexpected)


async def _invalid_body(request: Request[Any, Any], error: InvalidBody) -> HTTPResponse:
    return json_response({"detail": error.detail}, 422)


async def _service_error(request: Request[Any, Any], error: ServiceError) -> HTTPResponse:
    if error.status >= 500:
        log.error("%s %s [%s]: %s", request.method, request.path, request_id(request), error)
    if error.status == 422:
        # The documents promise a list for 422; the text may quote what was sent, which must not go back.
        entry = {"loc": list(getattr(error, "loc", ("body",))), "msg": str(error), "type": error.code}
        return json_response({"detail": [entry]}, 422)
    return json_response({"detail": str(error), "code": error.code}, error.status, error.headers)


async def _client_gone(request: Request[Any, Any], error: RequestCancelled) -> HTTPResponse:
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
    return json_response({"detail": _DETAILS.get(status, phrase), "code": code}, status, headers)


def _is_routed(request: Request[Any, Any], method: str) -> bool:
    """Whether the router knows this method for the path; Sanic itself only says so for paths without variable parts."""
    try:
        request.app.router.get(request.path, method, None)
    except (NotFound, MethodNotAllowed):
        return False
    return True


async def _unexpected(request: Request[Any, Any], error: Exception) -> HTTPResponse:
    log.error("%s %s [%s] failed", request.method, request.path, request_id(request), exc_info=error)
    detail = f"Internal Server Error; the server's log says more under {request_id(request)}"
    return json_response({"detail": detail, "code": "internal"}, 500)


_DETAILS: dict[int, str] = {
    HTTPStatus.REQUEST_TIMEOUT: "The request did not arrive in time",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The request's body or head is too large",
    HTTPStatus.SERVICE_UNAVAILABLE: "The answer took too long; look at GET /sessions for what became of it",
}


_AT_ONCE = 1 << 18


async def read_streamed_body(request: Request[Any, Any], most: int, setting: str) -> Sequence[bytes]:
    """Read the whole body of a streamed route, in pieces.

    Raises:
        TooLarge: it has more than ``most`` bytes, which ``setting`` says; found from its head when that tells.
    """
    pieces: list[bytes] = []
    async for piece in _read_stream(request, most, setting):
        pieces.append(piece)
    return pieces


async def discard_body(request: Request[Any, Any], most: int) -> None:
    """Read and drop a body: a client that sends before it listens would not receive the answer otherwise."""
    # Who asks before sending will not send.
    if request.headers.get("expect") is None:
        with suppress(TooLarge):
            async for _ in _read_stream(request, most, "it is not looked at"):
                pass


async def _read_stream(request: Request[Any, Any], most: int, setting: str) -> AsyncIterator[bytes]:
    refusal = f"the body has more than {most} bytes ({setting})"
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise TooLarge(refusal)
    count = 0
    # Sanic calls the type of its own stream Stream, which is less than it is.
    async for piece in cast(AsyncIterator[bytes], request.stream):
        count += len(piece)
        if count > most:
            raise TooLarge(refusal)
        yield piece


async def send_response(
    request: Request[Any, Any],
    pieces: Sequence[bytes | memoryview],
    content_type: str,
    headers: Mapping[str, str],
    *,
    timeout: float,
) -> HTTPResponse | None:
    """Answer 200 with these bytes; None when they are sent already. A client that does not read is cut off.

    Args:
        timeout: seconds in which it must have read a long answer.
    """
    size = sum(len(piece) for piece in pieces)
    if size <= _AT_ONCE:
        return HTTPResponse(b"".join(pieces), headers=dict(headers), content_type=content_type)
    length = {"content-length": str(size)}
    response = HTTPResponse(headers={**headers, **length}, content_type=content_type)
    await request.respond(response)
    try:
        async with asyncio.timeout(timeout):
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(view), _AT_ONCE):
                    await response.send(bytes(view[start : start + _AT_ONCE]), end_stream=False)
    except TimeoutError:
        cast(asyncio.Transport, request.transport).abort()
    return None


# Seconds that a stop waits for the rest of a body; a client that sends it at once sends it with the head.
REASON_TIMEOUT = 0.05

# No types: nothing that is sent is refused.
REASON = {"properties": {"reason": {"title": "Reason", "description": "Text that each session's status then shows."}}}


async def read_reason(request: Request[Any, Any]) -> str:
    """Read the reason from the body of an emergency stop, as far as it has arrived: a stop waits for nobody."""
    body = bytearray()
    with suppress(TimeoutError, SanicException):
        async with asyncio.timeout(REASON_TIMEOUT):
            # Sanic calls the type of its own stream Stream, which is less than it is.
            async for piece in cast(AsyncIterator[bytes], request.stream):
                body += piece
                if len(body) > MAX_BODY:
                    break
    return parse_reason(bytes(body))


def parse_reason(body: bytes) -> str:
    """Return the printable text of ``{"reason": "..."}``, or a default text."""
    try:
        body_object = loads(body, MAX_VALUES) if 0 < len(body) <= MAX_BODY else None
    except (ValueError, RecursionError):
        body_object = None
    reason = body_object.get("reason") if isinstance(body_object, dict) else None
    if not isinstance(reason, str) or not reason.strip():
        return "asked for over HTTP"
    return sanitize_text(reason)
