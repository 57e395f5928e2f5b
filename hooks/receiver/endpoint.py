"""Endpoint of a receiver: its handler, the check of senders, settings, and answers."""

import functools
import inspect
import json
import logging
import math
import random
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel
from sanic import HTTPResponse

from hooks.errors import InvalidWebhook
from hooks.payload import WebhookPayload
from hooks.receiver.inbox import Answer, Event, EventStatus
from hooks.registry.delivery import is_valid_secret

log = logging.getLogger(__name__)

# Headers of a handler's response that Sanic sets itself.
CONNECTION_HEADERS = ("content-type", "content-length", "transfer-encoding", "connection")
MAX_STORED_ANSWER = 1 << 20  # bytes of an answer that is stored for duplicates
RETRY_AFTER = 5.0  # seconds after which a sender may repeat a delivery that got 503


def build_answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Build an answer with a JSON body."""
    return Answer(status, json.dumps(body, separators=(",", ":")).encode(), headers=headers or {})


def build_error(status: int, error: str, *, retry_after: float | None = None, **more: object) -> Answer:
    """Build a JSON answer with an error; ``retry_after`` is in seconds, ``more`` are additional fields."""
    headers = None if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
    return build_answer({"error": error, **more}, status, headers)


def build_accepted_answer(event_id: str) -> Answer:
    """Build the 202 answer: the event is stored and will be handled."""
    return build_answer({"status": "accepted", "event_id": event_id}, 202)


def convert_value(handler: str, value: object) -> Answer:
    """Convert a handler's return value into an answer: an HTTPResponse unchanged, other values as JSON.

    A value that JSON cannot represent becomes null, because after an error the sender would repeat the delivery.
    """
    if isinstance(value, HTTPResponse):
        headers = {name: text for name, text in value.headers.items() if name.lower() not in CONNECTION_HEADERS}
        return Answer(value.status, value.body or b"", value.content_type or "text/plain", headers)
    try:
        return Answer(200, pydantic_core.to_json(value, by_alias=True, inf_nan_mode="null"))
    except (ValueError, TypeError, RecursionError) as error:
        log.error("handler %s returned a %s, which is not JSON-serializable: %s", handler, type(value).__name__, error)
        return Answer(200, b"null")


def shorten_answer(answer: Answer) -> Answer:
    """Return the answer to store for duplicates, without a body above ``MAX_STORED_ANSWER``."""
    return answer if len(answer.body) <= MAX_STORED_ANSWER else build_answer({"status": "done"})


def build_duplicate_answer(event: Event) -> Answer:
    """Build the answer to a duplicate of an accepted event."""
    headers = {"x-webhook-duplicate": "true"}
    if event.answer is not None and event.status is EventStatus.DONE:
        answer = event.answer
        return Answer(answer.status, answer.body, answer.content_type, {**answer.headers, **headers})
    if event.status in (EventStatus.WAITING, EventStatus.RUNNING):
        return Answer(202, build_accepted_answer(event.id).body, headers=headers)
    return build_answer({"status": str(event.status), "event_id": event.id}, 200, headers)


def to_response(answer: Answer) -> HTTPResponse:
    """Convert an answer into Sanic's HTTPResponse."""
    return HTTPResponse(answer.body, answer.status, dict(answer.headers), answer.content_type)


DAY = 86_400.0


@dataclass(frozen=True)
class ReceiverSettings:
    """Settings of a receiver; times in seconds, sizes in bytes.

    Attributes:
        secrets: secrets for ``X-Webhook-Secret``; several during a rotation, none for an open receiver.
        database: file of the events; None for memory, which a restart clears.
        answer_within: time after which a sender gets 202 while its handler continues in the background.
        read_within: time for the body of a request.
        max_body: largest body; the Hub's largest (10,000 files of a bucket) has about 1.7 MB.
        max_waiting: number of unfinished events above which senders get 503.
        attempts: failed runs after which an event is a dead letter.
        backoff: time before the second attempt; it doubles with every attempt.
        longest_backoff: upper limit of ``backoff``.
        threads: number of sync handlers that run in parallel.
        concurrency: number of async handlers that run in parallel.
        same_body_within: time in which an equal body without ``Webhook-Id`` is a duplicate.
        kept: time for which finished events are stored, so that duplicates are detected.
        kept_dead: time for which dead letters are stored.
        kept_bytes: size of the bodies of finished events above which the oldest are deleted.
        stop_within: time for running handlers when the server stops; unfinished events run at the next start.

    Example:
        >>> ReceiverSettings(secrets=("a secret of the Hub",), attempts=3).attempts
        3
    """

    secrets: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    answer_within: float = 5.0
    read_within: float = 10.0
    max_body: int = 5 << 20
    max_waiting: int = 1000
    attempts: int = 5
    backoff: float = 1.0
    longest_backoff: float = 60.0
    threads: int = 8
    concurrency: int = 32
    same_body_within: float = 10.0
    kept: float = 7 * DAY
    kept_dead: float = 90 * DAY
    kept_bytes: int = 1 << 30
    stop_within: float = 2.0

    def __post_init__(self) -> None:
        if isinstance(self.secrets, str) or not all(isinstance(secret, str) for secret in self.secrets):
            raise InvalidWebhook("secrets must be a tuple of texts")
        if not all(secret and secret.isascii() for secret in self.secrets):
            raise InvalidWebhook(
                "a secret is empty or has characters outside ASCII; leave it out or replace it with ASCII text"
            )
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and (value < 0 or not math.isfinite(value)):
                raise InvalidWebhook(f"{name} is {value}; wanted a number that is not negative")
        for name in ("max_body", "max_waiting", "attempts", "threads", "concurrency"):
            if getattr(self, name) <= 0:
                raise InvalidWebhook(f"{name} is {getattr(self, name)}; wanted more than 0")


Kind = Literal["payload", "request", "event"]
Meaning = tuple[Kind, type[BaseModel] | None]
# Values of parameters, by the name of the parameter or of its annotation.
MEANINGS: Mapping[str, Meaning] = {
    "payload": ("payload", WebhookPayload),
    "request": ("request", None),
    "event": ("event", None),
    "WebhookPayload": ("payload", WebhookPayload),
    "dict": ("payload", None),
    "Request": ("request", None),
    "Event": ("event", None),
}


@dataclass(frozen=True)
class Handler:
    """Handler function, the values of its parameters, and its payload's class (None for a dict)."""

    function: Callable[..., Any]
    name: str
    is_async: bool
    arguments: Mapping[str, Kind]
    positional: int
    model: type[BaseModel] | None

    def takes(self, kind: Kind) -> bool:
        """Whether the handler takes a ``payload``, ``request`` or ``event``."""
        return kind in self.arguments.values()

    def bind(self, payload: Any, request: Any, event: Event) -> Callable[[], Any]:
        """Bind the values that the handler takes to its parameters."""
        values = {"payload": payload, "request": request, "event": event}
        bound = {name: values[kind] for name, kind in self.arguments.items()}
        positional = [bound.pop(name) for name in list(bound)[: self.positional]]
        return functools.partial(self.function, *positional, **bound)


def read_handler(function: Callable[..., Any]) -> Handler:
    """Find each parameter's value by its annotation or name; raise ``InvalidWebhook`` for an unknown parameter."""
    name = get_handler_name(function)
    arguments: dict[str, Kind] = {}
    positional = 0
    model: type[BaseModel] | None = None
    for parameter in _get_parameters(name, function):
        has_default = parameter.default is not parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (
            has_default and parameter.default is not None
        ):
            continue
        meaning = _classify_parameter(parameter.name, parameter.annotation)
        if meaning is None and has_default:
            continue
        if meaning is None:
            raise InvalidWebhook(
                f"handler {name}: its parameter {parameter.name!r} has no known meaning; annotate it as a pydantic "
                "model or dict (the payload), Request or Event, call it payload, request or event, or give it a default"
            )
        arguments[parameter.name], argument_model = meaning
        positional += parameter.kind is parameter.POSITIONAL_ONLY
        model = argument_model if meaning[0] == "payload" else model
    unwrapped = inspect.unwrap(function) if inspect.isfunction(function) else function
    # An object with __call__ is async when __call__ is.
    callables = (function, unwrapped, type(unwrapped).__call__)
    if any(inspect.isasyncgenfunction(one) for one in callables):
        raise InvalidWebhook(f"handler {name}: found an async generator, which would never run; use return, not yield")
    is_async = any(inspect.iscoroutinefunction(one) for one in callables)
    return Handler(function, name, is_async, arguments, positional, model)


def get_handler_name(function: Any) -> str:
    """Return a handler's name for its path: the function's name, also of a partial, or the object's class name."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _get_parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception:  # An annotation may be any expression, or exist only for a type checker.
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise InvalidWebhook(f"handler {name}: found {type(function).__name__}, wanted a function") from None
    return list(signature.parameters.values())


def _classify_parameter(name: str, annotation: Any) -> Meaning | None:
    if isinstance(annotation, str):
        return MEANINGS.get(annotation.split("[")[0].split("|")[0].strip().split(".")[-1]) or MEANINGS.get(name)
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _classify_parameter(name, annotation.__origin__)
    if origin in (typing.Union, types.UnionType):
        parts = [_classify_parameter("", part) for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else None
    kind = origin or annotation
    if annotation in (inspect.Parameter.empty, Any):
        return MEANINGS.get(name)
    if not isinstance(kind, type):
        return None
    if issubclass(kind, BaseModel):
        return "payload", kind
    if issubclass(kind, dict) or kind is Mapping:
        return "payload", None
    if issubclass(kind, Event):
        return "event", None
    # Requests of FastAPI or Starlette become Sanic's, whose headers and method have the same names.
    return ("request", None) if any(parent.__name__ == "Request" for parent in kind.__mro__) else None


# Headers that are never stored or shown.
SECRET_HEADERS = (
    "authorization",
    "cookie",
    "proxy-authorization",
    "x-webhook-secret",
    "webhook-signature",
    "x-hub-signature",
    "x-hub-signature-256",
)


def check_sender(headers: Mapping[str, str], secrets: tuple[str, ...]) -> Answer | None:
    """Return None for a correct secret, or without configured secrets; else 401 (missing) or 403 (wrong)."""
    if not secrets:
        return None
    if (secret := headers.get("x-webhook-secret")) is None:
        return build_error(401, "x-webhook-secret header not set.")
    return None if is_valid_secret(secret, secrets) else build_error(403, "Invalid webhook secret.")


Mode = Literal["reply", "queue"]


@dataclass(frozen=True)
class Endpoint:
    """Absolute path of a receiver with its handler; see ``Receiver.add`` for the mode."""

    path: str
    handler: Handler
    mode: Mode


def backoff(failures: int, settings: ReceiverSettings, chance: Callable[[], float] = random.random) -> float:
    """Return the seconds before the next attempt; ``chance`` subtracts up to half, so that retries spread."""
    longest = min(settings.longest_backoff, settings.backoff * 2.0 ** min(failures - 1, 60))
    return longest * (1 - chance() / 2)
