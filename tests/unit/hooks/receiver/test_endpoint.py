"""Endpoint: accepted senders, settings and arguments of handlers."""

import functools
from typing import Annotated, Any

import huggingface_hub
import pytest
import sanic
from pydantic import BaseModel

from hooks.errors import InvalidWebhook
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import ReceiverSettings, check_sender, read_handler
from hooks.receiver.inbox import Event, EventStatus


@pytest.mark.parametrize(
    ("secrets", "headers", "status"),
    [
        ((), {}, None),
        ((), {"x-webhook-secret": "anything"}, None),
        (("old", "new"), {}, 401),
        *((("old", "new"), {"x-webhook-secret": secret}, None) for secret in ("old", "new")),
        *((("old", "new"), {"x-webhook-secret": secret}, 403) for secret in ("new ", "", "\udcff\u1234")),
    ],
)
def test_each_of_the_secrets_is_accepted(secrets: tuple[str, ...], headers: dict[str, str], status: int | None) -> None:
    refusal = check_sender(headers, secrets)
    assert (refusal and refusal.status) == status


@pytest.mark.parametrize(
    "settings",
    [
        *({"secrets": secrets} for secrets in (("",), "text", ("geheim-für-alle",))),
        *({"max_body": 0}, {"backoff": float("inf")}, {"answer_within": -1.0}),
    ],
)
def test_invalid_settings_are_refused(settings: dict) -> None:
    with pytest.raises(InvalidWebhook):
        ReceiverSettings(**settings)
    assert "old-secret" not in repr(ReceiverSettings(secrets=("old-secret",)))


EVENT = Event("e1", 1, "/webhooks/x", EventStatus.RUNNING, 1, 0.0)


class Push(BaseModel):
    pushed: str


class Request:
    """Request class of a framework that is not installed here."""


class Object:
    async def __call__(self, body: dict) -> object:
        return body

    def method(self, payload: WebhookPayload, /, request: sanic.Request) -> object:
        return payload, request

    @classmethod
    def of_class(cls, event: Event) -> object:
        return event


def by_name(payload, request, event):
    return payload, request, event


def bare() -> str:
    return "called"


def optional(hook: WebhookPayload | None = None, number: int = 3) -> object:
    return hook, number


def extra(data: Annotated[dict[str, Any], "the body"], *rest: object, **more: object) -> object:
    return data, rest, more


def foreign(hook: huggingface_hub.WebhookPayload, raw: Request) -> object:
    return hook, raw


def custom(push: Push, *, when: Event) -> object:
    return push, when


@pytest.mark.parametrize(
    ("function", "model", "expected"),
    [
        (by_name, WebhookPayload, ("p", "r", EVENT)),
        (bare, None, "called"),
        (optional, WebhookPayload, ("p", 3)),
        (extra, None, ("p", (), {})),
        (foreign, huggingface_hub.WebhookPayload, ("p", "r")),
        (custom, Push, ("p", EVENT)),
        (functools.partial(custom, when=EVENT), Push, ("p", EVENT)),
        (functools.partial(by_name, "bound"), None, ("bound", "r", EVENT)),
        (functools.partial(functools.partial(extra), size=3), None, ("p", (), {"size": 3})),
        (Object().method, WebhookPayload, ("p", "r")),
        (Object.of_class, None, EVENT),
        (lambda payload: payload, WebhookPayload, "p"),
    ],
)
def test_arguments_follow_the_annotation_or_name_of_parameters(function: Any, model: object, expected: object) -> None:
    handler = read_handler(function)
    assert handler.model is model
    assert not handler.is_async
    assert handler.bind("p", "r", EVENT)() == expected


async def test_async_handlers_are_recognized() -> None:
    async def later(event: Event) -> str:
        return event.id

    @functools.wraps(later)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return later(*arguments, **named)

    for function in (later, functools.partial(later), wrapped):
        handler = read_handler(function)
        assert (handler.is_async, handler.name) == (True, "later")
        assert await handler.bind(None, None, EVENT)() == "e1"
    called = read_handler(Object())
    assert (called.is_async, called.name, called.model) == (True, "Object", None)
    assert await called.bind({"a": 1}, None, EVENT)() == {"a": 1}


def test_unresolvable_annotations_are_read_as_text() -> None:
    def local(hook: "models.WebhookPayload", request: "Request | None", data: "dict[str, Missing]") -> None:
        """Use names that exist only for a type checker."""

    assert [*read_handler(local).arguments.values()] == ["payload", "request", "payload"]


async def generator(payload: WebhookPayload):
    yield payload


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (generator, "generator: .* would never run"),
        (lambda number: number, "handler .*parameter"),
        (lambda payload, port=1, *, other: None, "handler .*parameter"),
        *((value, "handler .*wanted a function") for value in (3, "text")),
    ],
)
def test_a_handler_that_cannot_run_is_refused(function: Any, message: str) -> None:
    with pytest.raises(InvalidWebhook, match=message):
        read_handler(function)
