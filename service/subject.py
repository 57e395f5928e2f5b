"""What is being worked on, for whoever writes it down: log lines carry the ids of their session and request."""

from collections.abc import Mapping
from contextvars import ContextVar

_SUBJECT: ContextVar[Mapping[str, str]] = ContextVar("subject", default={})  # noqa: B039 - it is replaced, never changed


def subject() -> Mapping[str, str]:
    """The ids of now, e.g. ``{"session": "arm", "request": "81c7..."}``; tasks have those of whoever began them."""
    return _SUBJECT.get()


def begin_about(**ids: str | None) -> None:
    """From here on, in this task and those that it begins, it is about these; None takes one away."""
    merged = {**_SUBJECT.get(), **ids}
    _SUBJECT.set({name: value for name, value in merged.items() if value is not None})
