"""A request's JSON body as a model, or the list of what is wrong with it; never with what was sent."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from sanic.headers import parse_content_header

from service.edge.unique import Repeated, once
from service.errors import ServiceError
from service.routes.context import Request

Model = TypeVar("Model", bound=BaseModel)

# Strings are stepped over, so that a constant is only found where a value stands.
_CONSTANT = re.compile(rb'"(?:[^"\\]|\\.)*"|(-?Infinity|NaN)')
# Bytes; none that means something has as many, and reading a MiB of brackets keeps every robot waiting for 0.1 s.
LARGEST = 1 << 17
# Words of errors may be shorter strings that happen to have been sent; only their quoted form is taken out.
_LONG = 6
_WORD = re.compile("[A-Za-z_]+")


class InvalidBody(Exception):
    """A body that does not fit; ``detail`` is HTTPValidationError's list."""

    def __init__(self, detail: Sequence[dict[str, Any]]):
        super().__init__("; ".join(entry["msg"] for entry in detail))
        self.detail = list(detail)


def read_body(request: Request, model: type[Model]) -> Model:
    """The body, which has to be there.

    Raises:
        InvalidBody: missing, too long, of another content type, not JSON, or not what the model wants.
    """
    if not request.body:
        raise _invalid("missing", "Field required")
    if len(request.body) > LARGEST:
        raise _invalid("too_long", f"Body should have at most {LARGEST} bytes")
    kind = request.headers.get("content-type")
    if kind is not None and not _is_json(kind):
        raise _invalid("content_type", "Content-Type should be application/json")
    try:
        return model.model_validate(_decode(request.body))
    except ValidationError as error:
        entries = error.errors(include_url=False, include_input=False, include_context=False)
        raise InvalidBody(
            [{"loc": ["body", *entry["loc"]], "msg": entry["msg"], "type": entry["type"]} for entry in entries]
        ) from None


def refused(error: ServiceError, sent: BaseModel) -> InvalidBody:
    """What was found wrong with a body after it was read."""
    loc = list(getattr(error, "loc", ("body", "policy_path")))
    return InvalidBody([{"loc": loc, "msg": without(str(error), sent), "type": error.code}])


def without(text: str, sent: BaseModel) -> str:
    """An error's text with everything that was sent replaced by where it stood, e.g. ``<policy_path>``."""
    places = {part: place for place, value in _values(sent) for part in _forms(value)}
    if not places:
        return text
    # In one go, the longest first: what was put in is not looked at again.
    found = re.compile("|".join(map(re.escape, sorted(places, key=len, reverse=True))))
    return found.sub(lambda match: f"<{places[match[0]]}>{':' * match[0].endswith(':')}", text)


def _forms(value: str | float) -> Iterator[str]:
    """How a value stands in texts. A folder is often called by the last part of its path."""
    for part in {value, PurePath(value).name} if isinstance(value, str) else {value}:
        yield repr(part)
        if isinstance(part, str) and len(part) >= _LONG:
            # A plain word may be one of the text's own: a folder is told from it by what comes after.
            yield f"{part}:" if _WORD.fullmatch(part) else part


def _values(sent: BaseModel) -> Iterator[tuple[str, str | float]]:
    for name in sorted(sent.model_fields_set):
        value = getattr(sent, name)
        if isinstance(value, str | float):
            yield name, value
        elif isinstance(value, list):
            yield from ((f"{name}.{position}", part) for position, part in enumerate(value))


def _decode(raw: bytes) -> Any:
    def refuse(literal: str) -> None:
        raise ValueError(literal)

    try:
        return json.loads(raw, parse_constant=refuse, object_pairs_hook=once)
    except Repeated as error:
        raise _invalid("json_invalid", f"JSON decode error: {error}") from None
    except json.JSONDecodeError as error:
        raise _invalid("json_invalid", "JSON decode error", error.pos) from None
    except (ValueError, RecursionError):
        # NaN and Infinity, which Python would take; numbers too long to read; not UTF-8; nested too deep.
        found = next((match for match in _CONSTANT.finditer(raw) if match[1]), None)
        raise _invalid("json_invalid", "JSON decode error", found.start() if found else 0) from None


def _is_json(content_type: str) -> bool:
    kind, _ = parse_content_header(content_type)
    main, _, sub = kind.lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _invalid(kind: str, message: str, *place: int) -> InvalidBody:
    return InvalidBody([{"loc": ["body", *place], "msg": message, "type": kind}])
