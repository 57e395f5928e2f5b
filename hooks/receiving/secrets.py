"""Who may send: a shared secret, Standard Webhooks or GitHub signatures; one that verifies is enough."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hooks.receiving.answers import refusal
from hooks.receiving.event import Answer
from hooks.signatures import is_github, is_secret, is_standard

# Never kept with an event, nor shown.
SECRET_HEADERS = (
    "authorization",
    "cookie",
    "proxy-authorization",
    "x-webhook-secret",
    "webhook-signature",
    "x-hub-signature",
    "x-hub-signature-256",
)
WRONG = "Invalid webhook secret."


@dataclass(frozen=True)
class Proofs:
    """What an endpoint accepts as proof; nothing at all leaves it open.

    Attributes:
        shared: secrets of ``X-Webhook-Secret``.
        standard: secrets of ``Webhook-Signature``, with ``Webhook-Id`` and ``Webhook-Timestamp``.
        github: secrets of ``X-Hub-Signature-256``.
    """

    shared: tuple[str, ...] = field(default=(), repr=False)
    standard: tuple[str, ...] = field(default=(), repr=False)
    github: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_open(self) -> bool:
        """Whether anybody may send."""
        return not (self.shared or self.standard or self.github)

    def refuse_by_head(self, headers: Mapping[str, str]) -> Answer | None:
        """What can be told before the body is read: None when the body decides, or everything is well."""
        if self.is_open or self._has_secret(headers):
            return None
        if (self.standard and "webhook-signature" in headers) or (self.github and "x-hub-signature-256" in headers):
            return None
        return self._refusal(headers)

    def refuse(self, headers: Mapping[str, str], body: bytes, *, now: float) -> Answer | None:
        """401 without any proof, 403 when none of those given is right, None when one is.

        Args:
            now: seconds since 1970, for signatures with a time.
        """
        # Each is worked out: the time taken does not tell which one was right.
        is_given = (self._has_secret(headers), self._has_standard(headers, body, now), self._has_github(headers, body))
        return None if self.is_open or any(is_given) else self._refusal(headers)

    def _has_secret(self, headers: Mapping[str, str]) -> bool:
        return is_secret(headers.get("x-webhook-secret", ""), self.shared)

    def _has_standard(self, headers: Mapping[str, str], body: bytes, now: float) -> bool:
        names = ("webhook-id", "webhook-timestamp", "webhook-signature")
        message_id, timestamp, signature = (headers.get(name, "") for name in names)
        # A header's odd bytes come as lone surrogates, which nobody has signed.
        if not message_id.isprintable():
            return False
        return bool(message_id) and is_standard(self.standard, message_id, timestamp, signature, body, now=now)

    def _has_github(self, headers: Mapping[str, str], body: bytes) -> bool:
        return is_github(self.github, headers.get("x-hub-signature-256", ""), body)

    def _refusal(self, headers: Mapping[str, str]) -> Answer:
        known = {
            "x-webhook-secret": self.shared,
            "webhook-signature": self.standard,
            "x-hub-signature-256": self.github,
        }
        wanted = [name for name, secrets in known.items() if secrets]
        if any(name in headers for name in wanted):
            return refusal(403, WRONG)
        return refusal(401, f"{wanted[0]} header not set.")
