"""One route: its handler and what that takes, which deliveries it wants, who may send them, and how they are run."""

import functools
import inspect
import random
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

from pydantic import BaseModel

from hooks.errors import InvalidWebhook, RetryableError
from hooks.payload import WebhookPayload, within
from hooks.receiving.answers import refusal
from hooks.receiving.event import Answer, Event
from hooks.receiving.payloads import Facts
from hooks.receiving.settings import ReceiverSettings
from hooks.signatures import is_github, is_secret, is_standard

PAYLOAD, REQUEST, EVENT = "payload", "request", "event"


@dataclass(frozen=True)
class Handler:
    """A callable and what it takes.

    Attributes:
        wants: name of each parameter that gets something, what that is, and whether only its position counts.
        model: class of the payload; None for a dict.
    """

    function: Callable[..., Any]
    name: str
    is_async: bool
    wants: tuple[tuple[str, str, bool], ...]
    model: type[BaseModel] | None

    def takes(self, what: str) -> bool:
        """Whether it wants ``payload``, ``request`` or ``event``."""
        return any(kind == what for _, kind, _ in self.wants)

    def bind(self, payload: Any, request: Any, event: Event) -> Callable[[], Any]:
        """The call with what it wants."""
        given = {PAYLOAD: payload, REQUEST: request, EVENT: event}
        places = [given[kind] for _, kind, is_place in self.wants if is_place]
        names = {name: given[kind] for name, kind, is_place in self.wants if not is_place}
        return functools.partial(self.function, *places, **names)


def handler_of(function: Callable[..., Any]) -> Handler:
    """Read a callable's parameters: by annotation first, by name where there is none.

    Raises:
        InvalidWebhook: it cannot be called, or a parameter wants something that there is not.
    """
    name = name_of(function)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise InvalidWebhook(f"handler {name}: found {type(function).__name__}, wanted a function") from None
    hints, bound = _hints(function), _bound(function)
    wants: list[tuple[str, str, bool]] = []
    model: type[BaseModel] | None = None
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in bound:
            continue
        found = _meaning(parameter.name, hints.get(parameter.name, parameter.annotation))
        if found is None and parameter.default is not parameter.empty:
            continue
        if found is None:
            raise InvalidWebhook(
                f"handler {name}: nothing is known for its parameter {parameter.name!r}; annotate it as a pydantic "
                "model or dict (the payload), Request or Event, call it payload, request or event, or give it a default"
            )
        kind, found_model = found
        if kind is PAYLOAD:
            model = found_model
        wants.append((parameter.name, kind, parameter.kind is parameter.POSITIONAL_ONLY))
    called = inspect.unwrap(function) if inspect.isfunction(function) else function
    # For an object with __call__, that is what would have to be async.
    ways = (function, called, type(called).__call__)
    if any(inspect.isasyncgenfunction(one) for one in ways):
        raise InvalidWebhook(f"handler {name}: found an async generator, whose body would not run; return, not yield")
    is_async = any(inspect.iscoroutinefunction(one) for one in ways)
    return Handler(function, name, is_async, tuple(wants), model)


def name_of(function: Any) -> str:
    """Its name, for a path: that of the function behind a partial, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _hints(function: Any) -> Mapping[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except Exception:  # an annotation may be any expression, and name what exists only for a type checker
        return {}


def _bound(function: Any) -> set[str]:
    names: set[str] = set()
    while isinstance(function, functools.partial):
        names |= set(function.keywords)
        function = function.func
    return names


def _meaning(name: str, annotation: Any) -> tuple[str, type[BaseModel] | None] | None:
    if isinstance(annotation, str):
        return _by_text(name, annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_meaning("", part) for part in typing.get_args(annotation) if part is not type(None)]
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
        return _by_name(name)
    return None


def _by_text(name: str, annotation: str) -> tuple[str, type[BaseModel] | None] | None:
    """An annotation that could not be looked up, as for a class of an enclosing function."""
    last = annotation.split("[")[0].split("|")[0].strip().split(".")[-1]
    known = {"dict": (PAYLOAD, None), "Request": (REQUEST, None), "Event": (EVENT, None)}
    return known.get(last) or ((PAYLOAD, WebhookPayload) if last == "WebhookPayload" else _by_name(name))


def _by_name(name: str) -> tuple[str, type[BaseModel] | None] | None:
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
WRONG = "Invalid webhook secret."


@dataclass(frozen=True)
class Proofs:
    """What an endpoint accepts as proof; nothing at all leaves it open.

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
        """Whether anybody may send."""
        return not (self.shared or self.standard or self.github)

    def refuse_by_head(self, headers: Mapping[str, str]) -> Answer | None:
        """What can be told before the body is read: None when the body decides, or everything is well."""
        if self.is_open or self._has_secret(headers):
            return None
        if (self.standard and "webhook-signature" in headers) or (self.github and "x-hub-signature-256" in headers):
            return None
        return self._refusal(headers)

    def refuse(self, headers: Mapping[str, str], body: bytes, *, now: float) -> Answer | None:
        """401 without any proof, 403 when none of those given is right, None when one is.

        Args:
            now: seconds since 1970, for signatures with a time.
        """
        # Each is worked out: the time taken does not tell which one was right.
        is_given = (self._has_secret(headers), self._has_standard(headers, body, now), self._has_github(headers, body))
        return None if self.is_open or any(is_given) else self._refusal(headers)

    def _has_secret(self, headers: Mapping[str, str]) -> bool:
        return is_secret(headers.get("x-webhook-secret", ""), self.shared)

    def _has_standard(self, headers: Mapping[str, str], body: bytes, now: float) -> bool:
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        message_id, timestamp, signature = (headers.get(name, "") for name in names)
        # A header's odd bytes come as lone surrogates, which nobody has signed.
        if not message_id.isprintable():
            return False
        return bool(message_id) and is_standard(self.standard, message_id, timestamp, signature, body, now=now)

    def _has_github(self, headers: Mapping[str, str], body: bytes) -> bool:
        return is_github(self.github, headers.get("x-hub-signature-256", ""), body)

    def _refusal(self, headers: Mapping[str, str]) -> Answer:
        known = {
            "x-webhook-secret": self.shared,
            "webhook-signature": self.standard,
            "x-hub-signature-256": self.github,
        }
        wanted = [name for name, secrets in known.items() if secrets]
        if any(name in headers for name in wanted):
            return refusal(403, WRONG)
        return refusal(401, f"{wanted[0]} header not set.")


Names = str | Iterable[str] | None


@dataclass(frozen=True)
class Filter:
    """Every one that is not empty has to hold.

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
    def of(cls, **names: Names) -> Self:
        """From one name or several of each."""
        return cls(
            **{
                key: () if value is None else (value,) if isinstance(value, str) else tuple(value)
                for key, value in names.items()
            }
        )

    def wants(self, facts: Facts) -> bool:
        """Whether this delivery passes; one that does not say what is asked for does not."""
        scope, action = facts.scope or "", facts.action or ""
        return (
            (not self.events or any(_is_event(event, scope, action) for event in self.events))
            and (not self.repos or any(fnmatchcase(facts.repo or "", pattern) for pattern in self.repos))
            and (not self.repo_types or facts.repo_type in self.repo_types)
            and (not self.scopes or within(scope, self.scopes))
            and (not self.actions or action in self.actions)
            and (not self.refs or any(_is_ref(ref, pattern) for ref in facts.refs for pattern in self.refs))
        )


def _is_event(event: str, scope: str, action: str) -> bool:
    wanted_scope, _, wanted_action = event.partition(":")
    return within(scope, (wanted_scope,)) and wanted_action in ("", action)


def _is_ref(ref: str, pattern: str) -> bool:
    if pattern.startswith("refs/"):
        return fnmatchcase(ref, pattern)
    return any(fnmatchcase(ref, f"refs/{kind}/{pattern}") for kind in ("heads", "tags"))


Mode = Literal["reply", "queue"]
Retry = Literal["any", "retryable", "never"]


@dataclass(frozen=True)
class Endpoint:
    """A path's handler.

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
    proofs: Proofs
    mode: Mode
    retry: Retry
    concurrency: int | None
    timeout: float | None
    answer_within: float
    is_coalesced: bool

    def delay(self, error: BaseException, failures: int, settings: ReceiverSettings) -> float | None:
        """Seconds until another attempt after so many that failed; None for none."""
        if self.retry == "never" or (self.retry == "retryable" and not isinstance(error, RetryableError)):
            return None
        if isinstance(error, RetryableError) and error.after is not None:
            return error.after
        return backoff(failures, settings)


def backoff(failures: int, settings: ReceiverSettings, chance: Callable[[], float] = random.random) -> float:
    """Doubles with every failure; up to half of it is left to chance, so that not all come back at one time."""
    longest = min(settings.longest_backoff, settings.backoff * 2.0 ** min(failures - 1, 60))
    return longest * (1 - chance() / 2)
