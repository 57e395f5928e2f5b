"""Endpoint of a receiver: its handler, accepted signatures, filter, settings, and answers to senders."""

import functools
import inspect
import json
import logging
import math
import random
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Self

import pydantic_core
from pydantic import BaseModel
from sanic import HTTPResponse

from hooks.errors import InvalidWebhook, RetryableError
from hooks.payload import WebhookPayload, is_in_scope
from hooks.receiver.events import Answer, Event, Status
from hooks.receiver.filters import Facts
from hooks.signatures import is_valid_github, is_valid_secret, is_valid_standard, sign_standard

log = logging.getLogger(__name__)

# What a handler passes on of another server's answer does not say how this one is sent.
CONNECTION_HEADERS = ("content-type", "content-length", "transfer-encoding", "connection")
MAX_STORED_ANSWER = 1 << 20  # bytes of an answer that are kept for duplicates


def build_answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Build an answer with a JSON body."""
    return Answer(status, json.dumps(body, separators=(",", ":")).encode(), headers=headers or {})


def build_error(status: int, error: str, **more: object) -> Answer:
    """Build a JSON answer that names the error."""
    return build_answer({"error": error, **more}, status)


def build_busy_answer(error: str, retry_after: float) -> Answer:
    """Build the 503 answer that asks the sender to send the event again later."""
    headers = {"retry-after": str(max(1, round(retry_after)))}
    return build_answer({"error": error}, 503, headers)


def build_accepted_answer(event_id: str) -> Answer:
    """Build the 202 answer: the event is stored and will be handled."""
    return build_answer({"status": "accepted", "event_id": event_id}, 202)


def build_failure_answer(event_id: str) -> Answer:
    """Build the 500 answer after a failed handler; the error itself stays in the log and the inbox."""
    return build_answer({"error": "The handler of this webhook failed.", "event_id": event_id}, 500)


def convert_value(handler: str, value: object) -> Answer:
    """Convert a handler's return value into an answer: an HTTPResponse as it is, anything else as JSON.

    A value that has no JSON is told as null: the handler has run, and an error would make the sender send again.
    """
    if isinstance(value, HTTPResponse):
        headers = {name: text for name, text in value.headers.items() if name.lower() not in CONNECTION_HEADERS}
        return Answer(value.status, value.body or b"", value.content_type or "text/plain", headers)
    try:
        return Answer(200, pydantic_core.to_json(value, by_alias=True, inf_nan_mode="null"))
    except (ValueError, TypeError, RecursionError) as error:
        log.error("handler %s returned a %s, which has no JSON: %s", handler, type(value).__name__, error)
        return Answer(200, b"null")


def shorten_answer(answer: Answer) -> Answer:
    """Return the answer to store for duplicates: a body above ``MAX_STORED_ANSWER`` is replaced."""
    return answer if len(answer.body) <= MAX_STORED_ANSWER else build_answer({"status": "done"})


def build_duplicate_answer(event: Event) -> Answer:
    """Build the answer to a duplicate of an event that was accepted before."""
    headers = {"x-webhook-duplicate": "true"}
    if event.answer is not None and event.status is Status.DONE:
        answer = event.answer
        return Answer(answer.status, answer.body, answer.content_type, {**answer.headers, **headers})
    if event.status in (Status.WAITING, Status.RUNNING):
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
        secrets: accepted in ``X-Webhook-Secret``; several while one replaces another, none for an open receiver.
        standard_secrets: of Standard Webhooks signatures.
        github_secrets: of ``X-Hub-Signature-256``.
        database: file of the events; None keeps them in memory, which a restart forgets.
        answer_within: what a handler gets before the sender is told 202 and the handler goes on in the background.
        read_within: what a sender gets for its body.
        store_within: what the database gets before the sender is told 503.
        max_body: of a delivery; the Hub's largest, 10,000 files of a bucket, have about 1.7 MB.
        max_waiting: events accepted and not finished; a sender is told 503 above it.
        rate: deliveries per second that one source may send in the long run.
        burst: deliveries that one source may send at once.
        attempts: runs that may fail before an event is a dead letter.
        backoff: before the second attempt; it doubles with every one.
        longest_backoff: and doubles no further.
        crashes: how often the process may end during an event before that event is a dead letter.
        threads: sync handlers at one time.
        concurrency: async handlers at one time.
        same_body_within: in which an equal body without ``Webhook-Id`` is a duplicate.
        kept: for how long finished events are kept; until then their duplicates are known.
        kept_dead: for how long dead letters and refused events are kept.
        kept_bytes: of bodies of finished events; the oldest go first.
        stop_within: what running handlers get when the server stops; what does not end resumes at the next start.
        retry_after: what a sender is told with 503.
    """

    secrets: tuple[str, ...] = field(default=(), repr=False)
    standard_secrets: tuple[str, ...] = field(default=(), repr=False)
    github_secrets: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    answer_within: float = 5.0
    read_within: float = 10.0
    store_within: float = 8.0
    max_body: int = 5 << 20
    max_waiting: int = 1000
    rate: float = 100.0
    burst: int = 1000
    attempts: int = 5
    backoff: float = 1.0
    longest_backoff: float = 60.0
    crashes: int = 20
    threads: int = 8
    concurrency: int = 32
    same_body_within: float = 10.0
    kept: float = 7 * DAY
    kept_dead: float = 90 * DAY
    kept_bytes: int = 1 << 30
    stop_within: float = 2.0
    retry_after: float = 5.0

    def __post_init__(self) -> None:
        for name in ("secrets", "standard_secrets", "github_secrets"):
            check_secrets(name, getattr(self, name))
        for secret in self.standard_secrets:
            sign_standard(secret, "", 0, b"")
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int | float) and (value < 0 or not math.isfinite(value)):
                raise InvalidWebhook(f"{name} is {value}; wanted a number that is not negative")
        for name in ("max_body", "max_waiting", "rate", "burst", "attempts", "threads", "concurrency"):
            if getattr(self, name) <= 0:
                raise InvalidWebhook(f"{name} is {getattr(self, name)}; wanted more than 0")


def check_secrets(name: str, secrets: tuple[str, ...]) -> None:
    """Raise for secrets that would let anybody in.

    Raises:
        InvalidWebhook: one is empty or no ASCII, or they are no tuple of texts.
    """
    if isinstance(secrets, str) or not all(isinstance(secret, str) for secret in secrets):
        raise InvalidWebhook(f"{name} has to be a tuple of texts")
    if not all(secret and secret.isascii() for secret in secrets):
        raise InvalidWebhook(
            f"{name} has one that is empty or has characters outside ASCII; leave it out or replace it"
        )


PAYLOAD, REQUEST, EVENT = "payload", "request", "event"


@dataclass(frozen=True)
class Handler:
    """Handler function of an endpoint, and the arguments that it takes.

    Attributes:
        arguments: name of each parameter that gets something, what that is, and whether only its position counts.
        model: class of the payload; None for a dict.
    """

    function: Callable[..., Any]
    name: str
    is_async: bool
    arguments: tuple[tuple[str, str, bool], ...]
    model: type[BaseModel] | None

    def takes(self, kind: str) -> bool:
        """Whether the handler takes a ``payload``, ``request`` or ``event``."""
        return any(argument[1] == kind for argument in self.arguments)

    def bind(self, payload: Any, request: Any, event: Event) -> Callable[[], Any]:
        """Bind the values that the handler takes to its parameters."""
        values = {PAYLOAD: payload, REQUEST: request, EVENT: event}
        positional = [values[kind] for _, kind, is_positional in self.arguments if is_positional]
        named = {name: values[kind] for name, kind, is_positional in self.arguments if not is_positional}
        return functools.partial(self.function, *positional, **named)


def read_handler(function: Callable[..., Any]) -> Handler:
    """Read a function's parameters into a Handler: by annotation, or by name where there is none.

    Raises:
        InvalidWebhook: it cannot be called, or a parameter wants something that there is not.
    """
    name = get_handler_name(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise InvalidWebhook(f"handler {name}: found {type(function).__name__}, wanted a function") from None
    hints, bound = _get_type_hints(function), _get_bound_names(function)
    arguments: list[tuple[str, str, bool]] = []
    model: type[BaseModel] | None = None
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in bound:
            continue
        meaning = _classify_parameter(parameter.name, hints.get(parameter.name, parameter.annotation))
        if meaning is None and parameter.default is not parameter.empty:
            continue
        if meaning is None:
            raise InvalidWebhook(
                f"handler {name}: nothing is known for its parameter {parameter.name!r}; annotate it as a pydantic "
                "model or dict (the payload), Request or Event, call it payload, request or event, or give it a default"
            )
        kind, argument_model = meaning
        if kind is PAYLOAD:
            model = argument_model
        arguments.append((parameter.name, kind, parameter.kind is parameter.POSITIONAL_ONLY))
    unwrapped = inspect.unwrap(function) if inspect.isfunction(function) else function
    # For an object with __call__, that is what would have to be async.
    callables = (function, unwrapped, type(unwrapped).__call__)
    if any(inspect.isasyncgenfunction(one) for one in callables):
        raise InvalidWebhook(f"handler {name}: found an async generator, whose body would not run; return, not yield")
    is_async = any(inspect.iscoroutinefunction(one) for one in callables)
    return Handler(function, name, is_async, tuple(arguments), model)


def get_handler_name(function: Any) -> str:
    """Return a function's name for its path; of a partial its function's, of an object its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _get_type_hints(function: Any) -> Mapping[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # an annotation may be any expression, and name what exists only for a type checker
        return {}


def _get_bound_names(function: Any) -> set[str]:
    names: set[str] = set()
    while isinstance(function, functools.partial):
        names |= set(function.keywords)
        function = function.func
    return names


def _classify_parameter(name: str, annotation: Any) -> tuple[str, type[BaseModel] | None] | None:
    if isinstance(annotation, str):
        return _classify_by_text(name, annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_classify_parameter("", part) for part in typing.get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else None
    kind = origin or annotation
    if isinstance(kind, type):
        if issubclass(kind, BaseModel):
            return PAYLOAD, kind
        if issubclass(kind, dict) or kind is Mapping:
            return PAYLOAD, None
        if issubclass(kind, Event):
            return EVENT, None
        # sanic's, fastapi's, starlette's: it is given sanic's, whose headers and method have the names of the others'.
        if any(parent.__name__ == "Request" for parent in kind.__mro__):
            return REQUEST, None
    if annotation in (inspect.Parameter.empty, Any):
        return _classify_by_name(name)
    return None


def _classify_by_text(name: str, annotation: str) -> tuple[str, type[BaseModel] | None] | None:
    """Classify an annotation that cannot be resolved, as of a class inside a function."""
    last = annotation.split("[")[0].split("|")[0].strip().split(".")[-1]
    known = {"dict": (PAYLOAD, None), "Request": (REQUEST, None), "Event": (EVENT, None)}
    return known.get(last) or ((PAYLOAD, WebhookPayload) if last == "WebhookPayload" else _classify_by_name(name))


def _classify_by_name(name: str) -> tuple[str, type[BaseModel] | None] | None:
    if name == PAYLOAD:
        return PAYLOAD, WebhookPayload
    return (name, None) if name in (REQUEST, EVENT) else None


# Never kept with an event, nor shown.
SECRET_HEADERS = (
    "authorization",
    "cookie",
    "proxy-authorization",
    "x-webhook-secret",
    "webhook-signature",
    "x-hub-signature",
    "x-hub-signature-256",
)
WRONG_SECRET = "Invalid webhook secret."


@dataclass(frozen=True)
class AcceptedSecrets:
    """Secrets that prove a sender to an endpoint; without any, the endpoint is open.

    Attributes:
        shared: secrets of ``X-Webhook-Secret``.
        standard: secrets of ``Webhook-Signature``, with ``Webhook-Id`` and ``Webhook-Timestamp``.
        github: secrets of ``X-Hub-Signature-256``.
    """

    shared: tuple[str, ...] = field(default=(), repr=False)
    standard: tuple[str, ...] = field(default=(), repr=False)
    github: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_open(self) -> bool:
        """Whether anybody may send to the endpoint."""
        return not (self.shared or self.standard or self.github)

    def check_headers(self, headers: Mapping[str, str]) -> Answer | None:
        """Check the sender before its body is read; None when it may go on, or only the body can decide."""
        if self.is_open or self._has_secret(headers):
            return None
        if (self.standard and "webhook-signature" in headers) or (self.github and "x-hub-signature-256" in headers):
            return None
        return self._build_refusal(headers)

    def check_delivery(self, headers: Mapping[str, str], body: bytes, *, now: float) -> Answer | None:
        """Check the sender's proof: answer 401 without any, 403 when none is right, None when one is.

        Args:
            now: seconds since 1970, for signatures with a time.
        """
        # Each is worked out: the time taken does not tell which one was right.
        is_valid = (
            self._has_secret(headers),
            self._has_standard_signature(headers, body, now),
            self._has_github_signature(headers, body),
        )
        return None if self.is_open or any(is_valid) else self._build_refusal(headers)

    def _has_secret(self, headers: Mapping[str, str]) -> bool:
        return is_valid_secret(headers.get("x-webhook-secret", ""), self.shared)

    def _has_standard_signature(self, headers: Mapping[str, str], body: bytes, now: float) -> bool:
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        message_id, timestamp, signature = (headers.get(name, "") for name in names)
        # A header's odd bytes come as lone surrogates, which nobody has signed.
        if not message_id.isprintable():
            return False
        return bool(message_id) and is_valid_standard(self.standard, message_id, timestamp, signature, body, now=now)

    def _has_github_signature(self, headers: Mapping[str, str], body: bytes) -> bool:
        return is_valid_github(self.github, headers.get("x-hub-signature-256", ""), body)

    def _build_refusal(self, headers: Mapping[str, str]) -> Answer:
        known = {
            "x-webhook-secret": self.shared,
            "webhook-signature": self.standard,
            "x-hub-signature-256": self.github,
        }
        expected = [name for name, secrets in known.items() if secrets]
        if any(name in headers for name in expected):
            return build_error(403, WRONG_SECRET)
        return build_error(401, f"{expected[0]} header not set.")


Names = str | Iterable[str] | None


@dataclass(frozen=True)
class Filter:
    """Filter of deliveries; every condition that is not empty has to hold.

    Attributes:
        events: ``scope`` or ``scope:action``; narrower scopes are included.
        repos: names as shell patterns, ``robots/*``.
        repo_types: ``model``, ``dataset``, ``space``, ``bucket``.
        scopes: with narrower ones: ``repo`` is ``repo.content`` too, ``session`` a registry's ``session.created``.
        actions: ``create``, ``delete``, ``move``, ``update``.
        refs: of those that moved, one has to fit; patterns, whole (``refs/tags/v*``) or short (``main``, a branch
            or tag).
    """

    events: tuple[str, ...] = ()
    repos: tuple[str, ...] = ()
    repo_types: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()

    @classmethod
    def build(cls, **names: Names) -> Self:
        """Build a filter from one name or several for each condition."""
        return cls(
            **{
                key: () if value is None else (value,) if isinstance(value, str) else tuple(value)
                for key, value in names.items()
            }
        )

    def matches(self, facts: Facts) -> bool:
        """Whether a delivery passes the filter; one that lacks what is asked for does not."""
        scope, action = facts.scope or "", facts.action or ""
        return (
            (not self.events or any(_matches_event(event, scope, action) for event in self.events))
            and (not self.repos or any(fnmatchcase(facts.repo or "", pattern) for pattern in self.repos))
            and (not self.repo_types or facts.repo_type in self.repo_types)
            and (not self.scopes or is_in_scope(scope, self.scopes))
            and (not self.actions or action in self.actions)
            and (not self.refs or any(_matches_ref(ref, pattern) for ref in facts.refs for pattern in self.refs))
        )


def _matches_event(event: str, scope: str, action: str) -> bool:
    filter_scope, _, filter_action = event.partition(":")
    return is_in_scope(scope, (filter_scope,)) and filter_action in ("", action)


def _matches_ref(ref: str, pattern: str) -> bool:
    if pattern.startswith("refs/"):
        return fnmatchcase(ref, pattern)
    return any(fnmatchcase(ref, f"refs/{kind}/{pattern}") for kind in ("heads", "tags"))


Mode = Literal["reply", "queue"]
Retry = Literal["any", "retryable", "never"]


@dataclass(frozen=True)
class Endpoint:
    """Path of a receiver with its handler and settings.

    Attributes:
        path: absolute.
        mode: ``reply`` gives the handler's value to the sender when it is there in time, ``queue`` says 202 at once.
        retry: which errors in the background are tried again.
        concurrency: runs of this handler at one time; None for as many as the receiver has.
        timeout: seconds of a run until it has failed; a sync one goes on in its thread and is not tried again.
        answer_within: seconds until a sender is told 202.
        is_coalesced: of what waits for one repo, only the latest is run.
    """

    path: str
    handler: Handler
    filter: Filter
    accepted_secrets: AcceptedSecrets
    mode: Mode
    retry: Retry
    concurrency: int | None
    timeout: float | None
    answer_within: float
    is_coalesced: bool

    def get_retry_delay(self, error: BaseException, failures: int, settings: ReceiverSettings) -> float | None:
        """Return the seconds until the next attempt after this many failures; None for no further attempt."""
        if self.retry == "never" or (self.retry == "retryable" and not isinstance(error, RetryableError)):
            return None
        if isinstance(error, RetryableError) and error.after is not None:
            return error.after
        return backoff(failures, settings)


def backoff(failures: int, settings: ReceiverSettings, chance: Callable[[], float] = random.random) -> float:
    """Doubles with every failure; up to half of it is left to chance, so that not all come back at one time."""
    longest = min(settings.longest_backoff, settings.backoff * 2.0 ** min(failures - 1, 60))
    return longest * (1 - chance() / 2)
