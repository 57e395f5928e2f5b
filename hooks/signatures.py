"""Signatures of deliveries: shared secret, Standard Webhooks, GitHub's HMAC.

Sources: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md,
https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries

The standard's own package is not used: it takes bodies for UTF-8, every secret for base64, and a malformed signature
for the program's fault, ends at the first match, and asks the system's clock.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from hooks.errors import InvalidWebhook

STANDARD_PREFIX = "whsec_"
TOLERANCE = 300.0  # seconds between a signature's time and now, as the standard's libraries allow


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


def is_valid_standard(
    secrets: Iterable[str], message_id: str, timestamp: str, signature: str, body: bytes, *, now: float
) -> bool:
    """Whether one of the header's signatures (separated by spaces) is by one of the secrets, and recent.

    Args:
        now: seconds since 1970; ``timestamp`` may be ``TOLERANCE`` from it in either direction.
    """
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) < 16):
        return False
    is_fresh = abs(now - int(timestamp)) <= TOLERANCE
    header_part = [part for part in signature.split() if part.startswith("v1,")]
    is_signed = False
    for secret in secrets:
        expected = sign_standard(secret, message_id, int(timestamp), body)
        for part in header_part:
            is_signed |= hmac.compare_digest(part.encode("utf-8", "surrogateescape"), expected.encode())
    return is_fresh and is_signed


def sign_github(secret: str, body: bytes) -> str:
    """Sign as GitHub does: ``X-Hub-Signature-256`` is ``sha256=`` and the hexadecimal HMAC of the body."""
    return "sha256=" + hmac.digest(secret.encode(), body, hashlib.sha256).hex()


def is_valid_github(secrets: Iterable[str], signature: str, body: bytes) -> bool:
    """Whether the header is the body's GitHub signature by one of the secrets."""
    is_signed = False
    for secret in secrets:
        is_signed |= hmac.compare_digest(
            signature.encode("utf-8", "surrogateescape"), sign_github(secret, body).encode()
        )
    return is_signed


def _get_key(secret: str) -> bytes:
    """Return the bytes of a secret: the base64 after ``whsec_``, else the text itself."""
    if not secret.startswith(STANDARD_PREFIX):
        return secret.encode()
    try:
        key = base64.b64decode(secret.removeprefix(STANDARD_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not key:  # anybody can sign with none
        raise InvalidWebhook(f"a secret that begins with {STANDARD_PREFIX} has to go on in base64")
    return key
