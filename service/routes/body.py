"""A request's JSON body as a model, or the list of what is wrong with it; never with what was sent."""

import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from sanic import Request
from sanic.headers import parse_content_header

from service.edge.bounded_json import Repeated, TooManyValues, loads, once
from service.errors import ServiceError

Model = TypeVar("Model", bound=BaseModel)

# Strings are stepped over, so that a constant is only found where a value stands. Nothing is looked at twice: one that
# does not end is stepped over, too, and no character of it is given back.
_CONSTANT = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|(-?Infinity|NaN)|[^"IN-]++', re.DOTALL)
# Bytes; none that means something has as many, and reading a MiB of brackets keeps every robot waiting for 0.1 s.
LARGEST = 1 << 17
# Values in a body, and names in its object. The largest that has a meaning names 64 cameras and 256 joints, twice.
VALUES = 4096
_NAMES = 256
# Of what is wrong with a body, as much is told: 12,000 names that nobody knows would be told in 2 MB.
_TOLD = 64
# Words of errors may be shorter strings that happen to have been sent; only their quoted form is taken out.
_LONG = 6
_WORD = re.compile("[A-Za-z_]+")


class InvalidBody(Exception):
    """A body that does not fit; ``detail`` is HTTPValidationError's list."""

    def __init__(self, detail: Sequence[dict[str, Any]]):
        super().__init__("; ".join(entry["msg"] for entry in detail))
        self.detail = list(detail)


def read_body(request: Request[Any, Any], model: type[Model]) -> Model:
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
    found = _decode(request.body)
    if isinstance(found, dict) and len(found) > _NAMES:
        raise _invalid("too_long", f"Object should have at most {_NAMES} names")
    try:
        return model.model_validate(found)
    except ValidationError as error:
        entries = error.errors(include_url=False, include_input=False, include_context=False)
        told = [
            {"loc": ["body", *entry["loc"]], "msg": entry["msg"], "type": entry["type"]} for entry in entries[:_TOLD]
        ]
        if more := len(entries) - len(told):
            told.append({"loc": ["body"], "msg": f"{more} more errors are not listed", "type": "too_many_errors"})
        raise InvalidBody(told) from None


def refused(error: ServiceError, sent: BaseModel) -> InvalidBody:
    """What was found wrong with a body after it was read."""
    loc = list(getattr(error, "loc", ("body", "policy_path")))
    return InvalidBody([{"loc": loc, "msg": without(str(error), sent), "type": error.code}])


def without(text: str, sent: BaseModel) -> str:
    """An error's text with everything that was sent replaced by where it stood, e.g. ``<policy_path>``."""
    places = {part: place for place, value in _values(sent) for part in _forms(value, text)}
    found, end = [], 0
    for start, part in _first_of(text, places):
        found += [text[end:start], f"<{places[part]}>{':' * part.endswith(':')}"]
        end = start + len(part)
    return "".join([*found, text[end:]])


def _first_of(text: str, parts: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Where parts stand in a text: each time the first one, of those that begin there the longest.

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


def _forms(value: str | float, text: str) -> Iterator[str]:
    """How a value may stand in a text. A folder is often called by the last part of its path."""
    for part in {value, PurePath(value).name} if isinstance(value, str) else {value}:
        shown = repr(part)
        if isinstance(part, str) and shown[1:-1] == part and part not in text:
            continue  # which is so of nearly all of 256 joints
        yield shown
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


class _Constant(ValueError):
    """NaN or Infinity, which Python would take."""


def _refuse(literal: str) -> NoReturn:
    raise _Constant(literal)


def _decode(raw: bytes) -> Any:
    try:
        # Not brackets: as many of them as there can be take 5 ms.
        return loads(raw, VALUES, counted=",{", parse_constant=_refuse, object_pairs_hook=once)
    except TooManyValues as error:
        raise _invalid("too_long", f"Body should have at most {VALUES} values") from error
    except Repeated as error:
        raise _invalid("json_invalid", f"JSON decode error: {error}") from None
    except json.JSONDecodeError as error:
        raise _invalid("json_invalid", "JSON decode error", error.pos) from None
    except (ValueError, RecursionError) as error:
        # NaN and Infinity; numbers too long to read; not UTF-8; nested too deep. Of these only the first two are looked
        # for, in what was read up to them.
        is_looked_for = isinstance(error, _Constant)
        found = next((match for match in _CONSTANT.finditer(raw) if match[1]), None) if is_looked_for else None
        raise _invalid("json_invalid", "JSON decode error", found.start() if found else 0) from None


def _is_json(content_type: str) -> bool:
    kind, _ = parse_content_header(content_type)
    main, _, sub = kind.lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _invalid(kind: str, message: str, *place: int) -> InvalidBody:
    return InvalidBody([{"loc": ["body", *place], "msg": message, "type": kind}])
