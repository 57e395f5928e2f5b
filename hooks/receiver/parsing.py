"""Parsing of payloads, and the facts by which deliveries are ordered, compared and listed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from json.decoder import JSONArray, JSONObject, scanstring  # pyright: ignore[reportAttributeAccessIssue] - missing in its stubs
from json.scanner import py_make_scanner  # pyright: ignore[reportAttributeAccessIssue] - missing in its stubs
from typing import Any, NoReturn

import pydantic_core
from pydantic import BaseModel, TypeAdapter, ValidationError

from hooks.payload import WebhookPayload, WebhookPayloadUpdatedFile

REQUIRED_PARTS = ("event", "repo", "webhook")
MAX_NAMED = 5
LONGEST = 512  # characters of a fact, because a listing contains the facts of many events
AT_ONCE = 500  # files that pydantic validates in one call
QUICK, QUICK_VALUES = 1 << 16, 4096  # bytes and values of a body that is parsed on the event loop
# Limit of values and of escaped characters in a body. A listing of 10,000 files has 50,000 values; 5 MB of values would
# hold the interpreter lock for 0.7 s.
VALUES = 1 << 18
DIGITS = 640  # limit for a number, because parsing takes quadratic time
_FILES = TypeAdapter(list[WebhookPayloadUpdatedFile])
# Modules whose models require only the three parts; a user's subclass may require more.
_PLAIN = (WebhookPayload.__module__, "huggingface_hub._webhooks_payload")


class InvalidPayload(Exception):
    """The body is not a payload for the handler; ``fields`` are names of the model's fields, never text of the body."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()):
        super().__init__(message)
        self.fields = fields


@dataclass(frozen=True)
class Facts:
    """Facts of a payload for ordering, duplicates and listings; None or empty if the payload has no such text."""

    webhook_id: str = ""
    lane: str = ""  # id of the repo, whose events run in order
    repo: str | None = None
    repo_type: str | None = None
    scope: str | None = None
    action: str | None = None


def parse_json(body: bytes) -> Any:
    """Parse the JSON of a body; raise ``InvalidPayload`` if it is not JSON or has more than ``VALUES`` values."""
    if _count_values(body) > VALUES or body.count(b"\\") > VALUES:
        raise InvalidPayload("the body has too many values")
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False) if is_quick_to_parse(body) else _parse_slowly(body)
    except (ValueError, RecursionError):
        raise InvalidPayload("the body is not JSON") from None


def is_quick_to_parse(body: bytes) -> bool:
    """Whether a body is small enough to be parsed and checked on the event loop."""
    return len(body) <= QUICK and _count_values(body) <= QUICK_VALUES


def _count_values(body: bytes) -> int:
    # Every value except the first follows a comma or bracket.
    return sum(map(body.count, (b",", b"[", b"{")))


def read_facts(data: object) -> Facts:
    """Read the facts of any JSON, also of payloads from other senders than the Hub."""
    event, repo, webhook = (_get_object(data, name) for name in REQUIRED_PARTS)
    return Facts(
        webhook_id=_get_text(webhook, "id") or "",
        lane=_get_text(repo, "id") or "",
        repo=_get_text(repo, "name"),
        repo_type=_get_text(repo, "type"),
        # A registry's events of sessions have a type instead of a scope.
        scope=_get_text(event, "scope") or _get_text(data, "type"),
        action=_get_text(event, "action"),
    )


def check_payload(model: type[BaseModel] | None, data: object) -> None:
    """Raise ``InvalidPayload`` as ``build_payload`` does; check only the required parts of the Hub's own payload."""
    if model is not None and model.__module__ in _PLAIN and isinstance(data, dict):
        model, data = WebhookPayload, {name: data[name] for name in REQUIRED_PARTS if name in data}
    build_payload(model, data)


def build_payload(model: type[BaseModel] | None, data: Any) -> Any:
    """Build a handler's payload: an instance of the model, or the JSON object itself without a model.

    If huggingface_hub's stricter model refuses a payload, the handler gets our ``WebhookPayload`` with the same
    attributes. Raise ``InvalidPayload`` if the body is not a JSON object, or the model refuses it.
    """
    if not isinstance(data, dict):
        raise InvalidPayload("the body is not a JSON object")
    if model is None:
        return data
    if _is_hub_model(model):
        files = data.get("updatedFiles")
        if isinstance(files, list) and len(files) > AT_ONCE:
            payload = _build_hub_payload(model, {name: value for name, value in data.items() if name != "updatedFiles"})
            return _add_files(payload, files)
        return _build_hub_payload(model, data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        known = {*model.model_fields, *(field.alias for field in model.model_fields.values())}
        names = (str(one["loc"][0]) for one in error.errors(include_input=False) if one["loc"])
        raise InvalidPayload(
            "the payload does not match the endpoint's model", _join_first(n for n in names if n in known)
        ) from None


def _build_hub_payload(model: type[BaseModel], data: dict[str, Any]) -> BaseModel:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        if not issubclass(model, WebhookPayload):
            return _build_hub_payload(WebhookPayload, data)
        unusable = [".".join(map(str, one["loc"])) for one in error.errors(include_input=False)]
    raise InvalidPayload("the payload is not usable", _join_first(unusable))


def _is_hub_model(model: type[BaseModel]) -> bool:
    return issubclass(model, WebhookPayload) or all(name in model.model_fields for name in REQUIRED_PARTS)


def _add_files(payload: BaseModel, files: list[Any]) -> BaseModel:
    """Add a bucket's up to 10,000 files in small groups, because pydantic holds the interpreter lock per call."""
    if not isinstance(payload, WebhookPayload):
        return payload
    some = (files[start : start + AT_ONCE] for start in range(0, len(files), AT_ONCE))
    with suppress(ValidationError):
        payload.updatedFiles = [file for few in some for file in _FILES.validate_python(few)]
    return payload


def _parse_slowly(body: bytes) -> Any:
    """Parse JSON as pydantic does, but in Python: five times slower, without blocking other threads."""

    def text(raw: str, start: int, strict: bool = True) -> tuple[str, int]:
        value, end = scanstring(raw, start, strict)
        value.encode()  # Raises for a lone surrogate, which SQLite cannot store.
        return value, end

    def refuse(literal: str) -> NoReturn:
        raise ValueError(literal)

    def integer(digits: str) -> int:
        return int(digits) if len(digits) <= DIGITS else refuse("a number")

    decoder: Any = json.JSONDecoder(parse_constant=refuse, parse_int=integer)
    # These parts of the json package are written in Python.
    decoder.parse_object, decoder.parse_array, decoder.parse_string = JSONObject, JSONArray, text
    decoder.scan_once = py_make_scanner(decoder)
    return decoder.decode(body.decode())


def _join_first(names: Any) -> tuple[str, ...]:
    return tuple(sorted(set(names)))[:MAX_NAMED]


def _get_object(data: object, name: str) -> object:
    return data.get(name) if isinstance(data, Mapping) else None


def _get_text(data: object, name: str) -> str | None:
    value = _get_object(data, name)
    return value[:LONGEST] if isinstance(value, str) else None
