"""Constant-time comparison of secrets."""

import hmac
from collections.abc import Iterable


def is_valid_secret(text: str, secrets: Iterable[str]) -> bool:
    """Return whether a text equals one of the secrets; the time does not depend on where they differ."""
    is_equal = False
    for secret in secrets:
        is_equal |= hmac.compare_digest(text.encode("utf-8", "surrogateescape"), secret.encode())
    return is_equal
