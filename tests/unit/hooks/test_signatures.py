"""Who sent it: vectors from the documents of each scheme, and what is refused."""

import pytest

from hooks.errors import InvalidWebhook
from hooks.signatures import is_valid_github, is_valid_secret, is_valid_standard, sign_github, sign_standard

# https://github.com/standard-webhooks/standard-webhooks/blob/main/libraries/python/tests/test_webhooks.py
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE, TIME, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_vector_of_standard_webhooks() -> None:
    assert sign_standard(SECRET, MESSAGE, TIME, BODY) == SIGNATURE
    assert is_valid_standard([SECRET], MESSAGE, str(TIME), SIGNATURE, BODY, now=TIME + 299)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("message_id", "msg_other"),
        ("timestamp", str(TIME + 1)),
        ("timestamp", "soon"),
        ("timestamp", "9" * 400),
        ("signature", SIGNATURE.replace("v1,", "v2,")),
        ("signature", "v1," + "A" * 44),
        ("signature", ""),
        ("body", BODY + b" "),
        ("now", TIME + 301.0),
        ("now", TIME - 301.0),
        ("secrets", ["whsec_" + "A" * 32]),
        ("secrets", []),
    ],
)
def test_anything_that_differs_is_refused(change: str, value: object) -> None:
    right = {
        "secrets": [SECRET],
        "message_id": MESSAGE,
        "timestamp": str(TIME),
        "signature": SIGNATURE,
        "body": BODY,
        "now": float(TIME),
    }
    assert is_valid_standard(**right)  # type: ignore[arg-type]
    assert not is_valid_standard(**{**right, change: value})  # type: ignore[arg-type]


def test_one_of_several_signatures_and_secrets_is_enough() -> None:
    both = f"v1,{'B' * 44} v2,x {SIGNATURE}"
    assert is_valid_standard(["other", SECRET], MESSAGE, str(TIME), both, BODY, now=TIME)


def test_the_vector_of_github() -> None:
    # https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries#testing-the-webhook-payload-validation
    signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    assert sign_github("It's a Secret to Everybody", b"Hello, World!") == signature
    assert is_valid_github(["new", "It's a Secret to Everybody"], signature, b"Hello, World!")
    assert not is_valid_github(["It's a Secret to Everybody"], signature, b"Hello, World?")
    assert not is_valid_github(["It's a Secret to Everybody"], signature.upper(), b"Hello, World!")


def test_secrets_are_compared_whole() -> None:
    assert is_valid_secret("two", ["one", "two"])
    assert not is_valid_secret("tw", ["one", "two"])
    assert not is_valid_secret("", ["one"])
    assert not is_valid_secret("\udcff", ["one"])


@pytest.mark.parametrize("secret", ["whsec_not*base64", "whsec_", "whsec_===="])
def test_a_secret_of_the_standard_has_to_be_base64(secret: str) -> None:
    with pytest.raises(InvalidWebhook, match="base64"):
        sign_standard(secret, MESSAGE, TIME, BODY)
