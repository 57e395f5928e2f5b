"""Strict JSON request bodies, streamed bodies, JSON responses and errors."""

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from sanic import HTTPResponse, Request, Sanic
from sanic.constants import HTTP_METHODS
from sanic.exceptions import MethodNotAllowed, NotFound, RequestCancelled, SanicException
from sanic.headers import parse_content_header
from sanic.helpers import STATUS_CODES

from service.errors import NotAcceptable, ServiceError, SessionLoading, TooLarge, UnknownForm
from service.http.strict_json import RepeatedName, TooManyValues, loads, reject_repeated_names
from service.logging import redact_secrets, sanitize_text

Model = TypeVar("Model", bound=BaseModel)
Form = TypeVar("Form")

# The pattern matches strings too, so that it finds constants only outside of strings. It never backtracks.
_CONSTANT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|(-?Infinity|NaN)|[^"IN-]++', re.DOTALL)
# Bytes of a JSON body. Parsing a MiB of brackets would block the event loop for 0.1 s.
MAX_BODY = 1 << 17
# Values in a body, and names in its object. The largest useful request has 64 cameras and 256 joints, twice.
MAX_VALUES, _MAX_NAMES = 4096, 256
# Without this limit, a body with 12,000 unknown fields would produce a 2 MB error response.
_MAX_ERRORS = 64
# Characters of one value in an error, of a whole error, and of an unknown name that is compared with known names.
_MAX_VALUE, _MAX_TEXT, _MAX_NAME = 200, 8192, 40
_JSON_TYPES = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_TYPE_NAME = re.compile(r"constrained-|dict\[constrained-")
_SECRET_NAME = re.compile("key|token|secret|passw|credential", re.IGNORECASE)


class InvalidBody(Exception):
    """The body of a request is invalid; ``detail`` is the list of an HTTPValidationError."""

    def __init__(self, detail: Sequence[dict[str, Any]]):
        super().__init__("; ".join(entry["msg"] for entry in detail))
        self.detail = list(detail)


def read_body(request: Request[Any, Any], model: type[Model]) -> Model:
    """Parse the required JSON body of a request as a model.

    Raises:
        InvalidBody: the body is missing, too long, of another content type, not JSON, or does not fit the model.
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
        entries = error.errors(include_url=False, include_context=False)
        errors = [_describe_error(entry, model) for entry in entries[:_MAX_ERRORS]]
        if more := len(entries) - len(errors):
            errors.append({"loc": ["body"], "msg": f"{more} more errors are not listed", "type": "too_many_errors"})
        raise InvalidBody(errors) from None


class _EmptyBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


def read_empty_body(request: Request[Any, Any]) -> None:
    """Refuse fields in a request that takes none, e.g. ``{"dry_run": true}`` in a start.

    Raises:
        InvalidBody: there is a body, and it is not an empty object.
    """
    if request.body:
        read_body(request, _EmptyBody)


def to_invalid_body(error: ServiceError, sent: BaseModel) -> InvalidBody:
    """Convert an error that was found after parsing to the 422 response of a body."""
    loc = list(getattr(error, "loc", ("body", "policy_path")))
    return InvalidBody([{"loc": loc, "msg": show_to_sender(str(error), sent), "type": error.code}])


def show_to_sender(text: str, sent: BaseModel) -> str:
    """Return the text of an error for the sender, with shortened values and without control characters and secrets."""
    for value in _list_strings([getattr(sent, name) for name in sent.model_fields_set]):
        shown = _shorten(value)
        if shown != value:
            text = text.replace(value, shown).replace(repr(value)[1:-1], shown)
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT].rpartition(' ')[0]} ..."  # half of a secret would not be recognized
    return _escape(redact_secrets(text))


def describe_unknown_field(name: str, known: Collection[str]) -> str:
    """Return the error text for an unknown field of a request, with the nearest known name."""
    shown = redact_secrets(repr(_shorten(name)))
    if not known:
        return f"unknown field {shown}; this request takes no fields"
    given = name[:_MAX_NAME].lower().replace("-", "_")
    # A known name that begins with the given name (``age`` of ``age_ms``) comes first.
    near = sorted(get_close_matches(given, known, 3), key=lambda other: not other.startswith(given))
    if near:
        return f"unknown field {shown}; did you mean {near[0]!r}? Correct it or leave it out"
    return f"unknown field {shown}; the known fields are: {', '.join(known)}"


def _describe_error(entry: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Convert an error of pydantic to an entry of a 422 response."""
    # For a union, pydantic adds the name of a type to the location.
    parts = [part for part in entry["loc"] if not (isinstance(part, str) and _TYPE_NAME.match(part))]
    place = [_escape(_shorten(part)) if isinstance(part, str) else part for part in parts]
    message, value = entry["msg"], entry.get("input")
    if entry["type"] == "extra_forbidden":
        message = describe_unknown_field(str(entry["loc"][-1]), model.model_fields)
    elif entry["type"] == "model_type":
        message = f"Body should be a JSON object, got {_JSON_TYPES.get(type(value), 'a number')}"
    elif (value is None or isinstance(value, str | int | float)) and not _SECRET_NAME.search(str(entry["loc"][:1])):
        shown = repr(_shorten(value)) if isinstance(value, str) else _shorten(json.dumps(value))
        message = f"{message}, got {redact_secrets(shown)}"
    return {"loc": ["body", *place], "msg": message, "type": entry["type"]}


def _list_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _list_strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _list_strings(part)


def _shorten(value: str) -> str:
    """Return at most ``_MAX_VALUE`` characters of a value, without the password of a URL."""
    before, _, after = value.rpartition("@")
    if ":" in before:
        value = f"***@{after}"
    return value if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]}..."


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class _Constant(ValueError):
    """NaN or Infinity in JSON; Python would accept both."""


def _refuse_constant(literal: str) -> NoReturn:
    raise _Constant(literal)


def _decode(raw: bytes) -> Any:
    try:
        # Square brackets are not counted: a body full of brackets takes 5 ms.
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
        # NaN, infinity, too long numbers, not UTF-8, nested too deep. Only constants are located in the text.
        found = next(filter(lambda match: match[1], _CONSTANT.finditer(raw)), None)
        if found is None or not isinstance(error, _Constant):
            raise _invalid_body_error("json_invalid", "JSON decode error", 0) from None
        text = f"JSON decode error: {error} is not a JSON number; send a finite number"
        raise _invalid_body_error("json_invalid", text, found.start()) from None


def _is_json(content_type: str) -> bool:
    kind, _ = parse_content_header(content_type)
    main, _, sub = kind.lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _invalid_body_error(kind: str, message: str, *place: int) -> InvalidBody:
    return InvalidBody([{"loc": ["body", *place], "msg": message, "type": kind}])


log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def encode_json(body: object) -> str:
    """Encode a value as JSON; raises ValueError for NaN and infinity."""
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> HTTPResponse:
    """Create a JSON response."""
    return HTTPResponse(encode_json(body), status=status, headers=dict(headers or {}), content_type="application/json")


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
    app.exception(RequestCancelled)(_client_gone)  # pyright: ignore[reportArgumentType] - Sanic accepts a CancelledError
    app.exception(Exception)(_unexpected)


async def _invalid_body(request: Request[Any, Any], error: InvalidBody) -> HTTPResponse:
    return json_response({"detail": error.detail}, 422)


async def _service_error(request: Request[Any, Any], error: ServiceError) -> HTTPResponse:
    if error.status >= 500:
        # A client that waits for a policy repeats its request, so this is not an error of the server.
        level = logging.INFO if isinstance(error, SessionLoading) else logging.ERROR
        log.log(level, "%s %s [%s]: %s", request.method, request.path, request_id(request), error)
    if error.status == 422:
        # The OpenAPI documents promise a list for 422.
        entry = {"loc": list(getattr(error, "loc", ("body",))), "msg": str(error), "type": error.code}
        return json_response({"detail": [entry]}, 422)
    return json_response({"detail": str(error), "code": error.code}, error.status, error.headers)


async def _client_gone(request: Request[Any, Any], error: RequestCancelled) -> HTTPResponse:
    return HTTPResponse(status=499)  # nginx's status for a closed connection, for the metrics


async def _http_error(request: Request[Any, Any], error: SanicException) -> HTTPResponse:
    status = error.status_code or 500
    phrase = STATUS_CODES[status].decode()  # HTTPStatus has other phrases since Python 3.13
    if status >= 500:
        log.error("%s %s [%s]: %s", request.method, request.path, request_id(request), phrase)
    headers = {name: str(value) for name, value in (error.headers or {}).items()}
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(method for method in HTTP_METHODS if _is_routed(request, method))
    code = phrase.lower().replace(" ", "_").replace("-", "_")
    return json_response({"detail": _DETAILS.get(status, phrase), "code": code}, status, headers)


def _is_routed(request: Request[Any, Any], method: str) -> bool:
    """Return whether the router has this method for the path."""
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
        TooLarge: the body, or its Content-Length, has more than ``most`` bytes, the value of ``setting``.
    """
    return [piece async for piece in _read_stream(request, most, setting)]


async def discard_body(request: Request[Any, Any], most: int) -> None:
    """Read and drop a body, because some clients read the response only after they sent everything."""
    # A client that sent Expect does not send the body.
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
    async for piece in cast(AsyncIterator[bytes], request.stream):  # Sanic's own annotation is too narrow
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
    """Answer 200 with these bytes; a client that reads for more than ``timeout`` seconds is disconnected.

    Returns:
        None if the response has been sent already.
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


# Seconds that a stop waits for the rest of its body. Most clients send it with the head.
REASON_TIMEOUT = 0.05

# The schema has no types, because no body of a stop is refused.
REASON = {"properties": {"reason": {"title": "Reason", "description": "Text that each session's status then shows."}}}


async def read_reason(request: Request[Any, Any]) -> str:
    """Read the reason of an emergency stop from the part of the body that has arrived, because a stop must not wait."""
    body = bytearray()
    with suppress(TimeoutError, SanicException):
        async with asyncio.timeout(REASON_TIMEOUT):
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


def find_form(content_type: str | None, forms: Mapping[str, Form]) -> Form:
    """Return the format of a body that a Content-Type header names.

    Args:
        forms: formats by media type; aliases follow the name that errors list.

    Raises:
        UnknownForm: the header is missing, or names another format.
    """
    form = forms.get(_media_type(content_type or ""))
    if form is None:
        raise UnknownForm(f"Content-Type should be one of {_list_names(forms)}")
    return form


def choose_form(accept: str | None, usual: Form, forms: Mapping[str, Form]) -> Form:
    """Return the format of a response that an Accept header prefers; ``usual`` if it allows every format.

    Sanic's parser accepts media types with ``q=0``, and refuses malformed headers with another status.

    Raises:
        NotAcceptable: the header allows other formats only.
    """
    accepted = [(_quality(part), _media_type(part)) for part in (accept or "*/*").split(",")]
    for quality, kind in sorted(accepted, key=lambda entry: -entry[0]):
        if quality > 0 and kind in ("*/*", "application/*", ""):
            return usual
        if quality > 0 and kind in forms:
            return forms[kind]
    raise NotAcceptable(f"Accept should allow one of {_list_names(forms)}")


def _list_names(forms: Mapping[str, Any]) -> str:
    names: dict[Any, str] = {}
    for name, form in forms.items():
        names.setdefault(form, name)
    return ", ".join(names.values())


def _media_type(header: str) -> str:
    return header.partition(";")[0].strip().lower()


def _quality(part: str) -> float:
    for parameter in part.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
