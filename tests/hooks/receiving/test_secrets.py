"""Who may send."""

import pytest

from hooks.errors import InvalidWebhook
from hooks.receiving.endpoint import Proofs
from hooks.receiving.settings import ReceiverSettings
from hooks.signatures import sign_github, sign_standard

NOW = 1_700_000_000
BODY = b'{"a": 1}'
STANDARD = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ALL = Proofs(("old-secret", "new-secret"), (STANDARD,), ("github-secret",))


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
        (Proofs(), {}, None),
        (Proofs(), {"x-webhook-secret": "anything"}, None),
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
        (Proofs(("a-secret",)), standard(), 401),
        (Proofs(("a-secret",)), github(), 401),
        (Proofs(standard=(STANDARD,)), {"x-webhook-secret": "x"}, 401),
        (Proofs(standard=(STANDARD,)), standard(), None),
    ],
)
def test_one_that_verifies_is_enough(proofs: Proofs, headers: dict[str, str], status: int | None) -> None:
    early = proofs.refuse_by_head(headers)
    late = proofs.refuse(headers, BODY, now=NOW)
    assert (late and late.status) == status
    # What is refused before the body is read would have been refused with it.
    assert early is None or early == late


def test_a_refusal_names_the_header_that_is_wanted() -> None:
    told = [proofs.refuse({}, BODY, now=NOW) for proofs in (ALL, Proofs(standard=(STANDARD,)), Proofs(github=("x",)))]
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
