"""Secrets and signatures of deliveries: the shared secret, and signatures of Standard Webhooks.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from hooks.errors import InvalidWebhook

STANDARD_PREFIX = "whsec_"


def is_valid_secret(text: str, secrets: Iterable[str]) -> bool:
    """Whether a text is one of the secrets, compared in constant time."""
    is_one = False
    for secret in secrets:
        is_one |= hmac.compare_digest(text.encode("utf-8", "surrogateescape"), secret.encode())
    return is_one


def sign_standard(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """Sign for Standard Webhooks: ``webhook-signature`` is ``v1,`` and the base64 of the HMAC-SHA256."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return "v1," + base64.b64encode(hmac.digest(_get_key(secret), signed, hashlib.sha256)).decode()


def _get_key(secret: str) -> bytes:
    """Return the bytes of a secret: the base64 after ``whsec_``, else the text itself."""
    if not secret.startswith(STANDARD_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(STANDARD_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not key:  # anybody can sign with an empty key
        raise InvalidWebhook(f"a secret that begins with {STANDARD_PREFIX} has to go on in base64")
    return key
