"""Which deliveries an endpoint wants, who may send them, and what a handler's parameters want."""

import functools
from typing import Annotated, Any

import huggingface_hub
import pytest
import sanic
from pydantic import BaseModel

from hooks.errors import InvalidWebhook
from hooks.payload import WebhookPayload
from hooks.receiver.endpoint import AcceptedSecrets, Filter, ReceiverSettings, read_handler
from hooks.receiver.events import Event, Status
from hooks.receiver.filters import Facts
from hooks.signatures import sign_github, sign_standard

PUSH = Facts(
    webhook_id="w",
    repo_id="1",
    repo="robots/act-cubes",
    repo_type="model",
    scope="repo.content",
    action="update",
    refs=("refs/heads/main", "refs/tags/v1.2"),
)


@pytest.mark.parametrize(
    ("wanted", "is_wanted"),
    [
        ({}, True),
        ({"repos": "robots/act-cubes"}, True),
        ({"repos": ["others/*", "robots/*"]}, True),
        ({"repos": "robots"}, False),
        ({"repo_types": ("model", "bucket")}, True),
        ({"repo_types": "dataset"}, False),
        ({"scopes": "repo"}, True),
        ({"scopes": "repo.content"}, True),
        ({"scopes": "repo.content.files"}, False),
        ({"scopes": "rep"}, False),
        ({"actions": ["create", "update"]}, True),
        ({"actions": "create"}, False),
        ({"refs": "main"}, True),
        ({"refs": "refs/heads/main"}, True),
        ({"refs": "v1.*"}, True),
        ({"refs": "refs/tags/v2*"}, False),
        ({"refs": "heads/main"}, False),
        ({"events": "repo:update"}, True),
        ({"events": ["discussion", "repo.content"]}, True),
        ({"events": "repo.content:create"}, False),
        ({"repos": "robots/*", "actions": "create"}, False),
    ],
)
def test_everything_that_is_named_has_to_hold(wanted: dict, is_wanted: bool) -> None:
    assert Filter.build(**wanted).matches(PUSH) is is_wanted


def test_a_delivery_that_does_not_say_is_not_wanted_by_a_filter_that_asks() -> None:
    assert Filter().matches(Facts())
    for wanted in ({"repos": "*"}, {"repo_types": "model"}, {"scopes": "repo"}, {"refs": "*"}, {"events": "repo"}):
        assert Filter.build(**wanted).matches(Facts()) is ("repos" in wanted)


NOW = 1_700_000_000
BODY = b'{"a": 1}'
STANDARD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ALL = AcceptedSecrets(("old-secret", "new-secret"), (STANDARD,), ("github-secret",))


def standard(secret: str = STANDARD, *, at: int = NOW, body: bytes = BODY) -> dict[str, str]:
    return {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(at),
        "webhook-signature": sign_standard(secret, "msg_1", at, body),
    }


def github(secret: str = "github-secret", body: bytes = BODY) -> dict[str, str]:
    return {"x-hub-signature-256": sign_github(secret, body)}


@pytest.mark.parametrize(
    ("proofs", "headers", "status"),
    [
        (AcceptedSecrets(), {}, None),
        (AcceptedSecrets(), {"x-webhook-secret": "anything"}, None),
        (ALL, {}, 401),
        (ALL, {"webhook-id": "msg_1"}, 401),
        (ALL, {"x-webhook-secret": "old-secret"}, None),
        (ALL, {"x-webhook-secret": "new-secret"}, None),
        (ALL, {"x-webhook-secret": "new-secret "}, 403),
        (ALL, {"x-webhook-secret": ""}, 403),
        (ALL, {"x-webhook-secret": "\udcff\u1234"}, 403),
        (ALL, standard(), None),
        (ALL, standard("whsec_AAAA"), 403),
        (ALL, standard(at=NOW - 301), 403),
        (ALL, standard(body=b"{}"), 403),
        (ALL, {**standard(), "webhook-id": "\udcff"}, 403),
        (ALL, {**standard(), "webhook-timestamp": "soon"}, 403),
        (ALL, github(), None),
        (ALL, github("guessed"), 403),
        (ALL, {"x-webhook-secret": "wrong", **standard()}, None),
        (ALL, {"x-webhook-secret": "wrong", **standard("whsec_AAAA"), **github("x")}, 403),
        (AcceptedSecrets(("a-secret",)), standard(), 401),
        (AcceptedSecrets(("a-secret",)), github(), 401),
        (AcceptedSecrets(standard=(STANDARD,)), {"x-webhook-secret": "x"}, 401),
        (AcceptedSecrets(standard=(STANDARD,)), standard(), None),
    ],
)
def test_one_that_verifies_is_enough(proofs: AcceptedSecrets, headers: dict[str, str], status: int | None) -> None:
    early = proofs.check_headers(headers)
    late = proofs.check_delivery(headers, BODY, now=NOW)
    assert (late and late.status) == status
    # What is refused before the body is read would have been refused with it.
    assert early is None or early == late


def test_a_refusal_names_the_header_that_is_wanted() -> None:
    told = [
        proofs.check_delivery({}, BODY, now=NOW)
        for proofs in (ALL, AcceptedSecrets(standard=(STANDARD,)), AcceptedSecrets(github=("x",)))
    ]
    assert [one.body for one in told if one] == [
        b'{"error":"x-webhook-secret header not set."}',
        b'{"error":"webhook-signature header not set."}',
        b'{"error":"x-hub-signature-256 header not set."}',
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"secrets": ("",)},
        {"secrets": "text"},
        {"secrets": ("geheim-für-alle",)},
        {"standard_secrets": ("whsec_no base64",)},
        {"max_body": 0},
        {"rate": float("inf")},
        {"answer_within": -1.0},
    ],
)
def test_settings_that_cannot_be_used_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidWebhook):
        ReceiverSettings(**wrong)


def test_secrets_are_not_shown() -> None:
    shown = repr(ReceiverSettings(secrets=("old-secret",), standard_secrets=(STANDARD,))) + repr(ALL)
    assert "secret" not in shown.replace("kept", "")
    assert STANDARD not in shown


EVENT = Event("e1", 1, "/webhooks/x", Status.RUNNING, 1, 0.0)


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

    assert [kind for _, kind, _ in read_handler(local).arguments] == ["payload", "request", "payload"]


def test_a_handler_that_yields_is_refused_because_it_would_not_run() -> None:
    async def later(payload: WebhookPayload):
        yield payload

    with pytest.raises(InvalidWebhook, match=r"later: .* would not run"):
        read_handler(later)


@pytest.mark.parametrize(
    "function",
    [lambda number: number, lambda payload, port=1, *, other: None, 3, "text"],
    ids=["unknown", "other", "number", "text"],
)
def test_a_parameter_nobody_knows_is_refused_when_it_is_added(function: Any) -> None:
    with pytest.raises(InvalidWebhook, match=r"handler .*(parameter|wanted a function)"):
        read_handler(function)
