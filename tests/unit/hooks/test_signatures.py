"""The comparison of secrets, and signatures by the vector of Standard Webhooks."""

import pytest

from hooks.errors import InvalidWebhook
from hooks.signatures import is_valid_secret, sign_standard

# https://github.com/standard-webhooks/standard-webhooks/blob/main/libraries/python/tests/test_webhooks.py
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
MESSAGE, TIME, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_vector_of_standard_webhooks() -> None:
    assert sign_standard(SECRET, MESSAGE, TIME, BODY) == SIGNATURE


def test_secrets_are_compared_whole() -> None:
    assert is_valid_secret("two", ["one", "two"])
    assert not is_valid_secret("tw", ["one", "two"])
    assert not is_valid_secret("", ["one"])
    assert not is_valid_secret("\udcff", ["one"])


@pytest.mark.parametrize("secret", ["whsec_not*base64", "whsec_", "whsec_===="])
def test_a_secret_of_the_standard_has_to_be_base64(secret: str) -> None:
    with pytest.raises(InvalidWebhook, match="base64"):
        sign_standard(secret, MESSAGE, TIME, BODY)
