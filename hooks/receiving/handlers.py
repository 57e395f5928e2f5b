"""A function of the user as the receiver calls it: what its parameters want is found out once."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hooks.errors import InvalidWebhook
from hooks.payload import WebhookPayload
from hooks.receiving.event import Event

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
