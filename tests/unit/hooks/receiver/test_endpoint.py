"""Senders that an endpoint accepts, its settings, and the arguments of handlers."""

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
def test_any_of_the_secrets_is_enough(secrets: tuple[str, ...], headers: dict[str, str], status: int | None) -> None:
    refusal = check_sender(headers, secrets)
    assert (refusal and refusal.status) == status


@pytest.mark.parametrize(
    "wrong",
    [
        *({"secrets": secrets} for secrets in (("",), "text", ("geheim-für-alle",))),
        *({"max_body": 0}, {"backoff": float("inf")}, {"answer_within": -1.0}),
    ],
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidWebhook):
        ReceiverSettings(**wrong)
    assert "old-secret" not in repr(ReceiverSettings(secrets=("old-secret",)))


EVENT = Event("e1", 1, "/webhooks/x", EventStatus.RUNNING, 1, 0.0)


class Push(BaseModel):
    pushed: str


class Request:
    """As a framework that is not installed here calls its own."""


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


def theirs(hook: huggingface_hub.WebhookPayload, raw: Request) -> object:
    return hook, raw


def custom(push: Push, *, when: Event) -> object:
    return push, when


@pytest.mark.parametrize(
    ("function", "model", "wanted"),
    [
        (by_name, WebhookPayload, ("p", "r", EVENT)),
        (bare, None, "called"),
        (optional, WebhookPayload, ("p", 3)),
        (extra, None, ("p", (), {})),
        (theirs, huggingface_hub.WebhookPayload, ("p", "r")),
        (custom, Push, ("p", EVENT)),
        (functools.partial(custom, when=EVENT), Push, ("p", EVENT)),
        (functools.partial(by_name, "bound"), None, ("bound", "r", EVENT)),
        (functools.partial(functools.partial(extra), size=3), None, ("p", (), {"size": 3})),
        (Object().method, WebhookPayload, ("p", "r")),
        (Object.of_class, None, EVENT),
        (lambda payload: payload, WebhookPayload, "p"),
    ],
)
def test_parameters_get_what_they_are_annotated_or_called(function: Any, model: object, wanted: object) -> None:
    handler = read_handler(function)
    assert handler.model is model
    assert not handler.is_async
    assert handler.bind("p", "r", EVENT)() == wanted


async def test_async_ones_are_told_from_others() -> None:
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


def test_annotations_that_cannot_be_looked_up_are_read_as_text() -> None:
    def local(hook: "models.WebhookPayload", asked: "Request | None", data: "dict[str, Missing]") -> None:
        """Names that exist for a type checker only."""

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
def test_a_handler_that_cannot_run_is_refused_when_it_is_added(function: Any, message: str) -> None:
    with pytest.raises(InvalidWebhook, match=message):
        read_handler(function)
