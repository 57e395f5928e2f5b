"""Errors of webhooks, as a tree.

HooksError
├── InvalidWebhook      an argument of a webhook (url, secret, watched, ...) cannot be used; also a ValueError
├── InvalidSettings     a setting of ours cannot be used; also a ValueError
├── HubTrouble          the Hub (or a registry with its API) refused, did not answer in time, or answered nonsense
│   └── UnknownWebhook  it has no webhook of this id
├── DeliveryRefused     a delivery was not accepted; carries the HTTP status
├── StoreError          the database of events cannot be opened or written
├── UnknownEvent        there is no event of this id
├── RetryableError      raised by a handler: not now, try again later
├── TunnelFailed        the program that makes a public address did not give one
├── UnsafeTarget        an address that nothing is sent to
└── SourceError         a revision of a policy cannot be found, fetched or verified
"""

from collections.abc import Mapping
from types import MappingProxyType


class HooksError(Exception):
    """Base of every error this package raises on purpose; its text is safe to show to a user."""


class InvalidWebhook(HooksError, ValueError):
    """An argument of a webhook cannot be used."""


class InvalidSettings(HooksError, ValueError):
    """A setting of a receiver, sender or registry cannot be used."""


class HubTrouble(HooksError):
    """The Hub refused, did not answer in time, or answered something that is no answer.

    Attributes:
        status: the HTTP status of its answer, or None when there was none.
        was_sent: whether it may have got the request, and done it.
    """

    was_sent = True

    def __init__(self, message: str, status: int | None = None, *, was_sent: bool = True):
        super().__init__(message)
        self.status = status
        self.was_sent = was_sent


class UnknownWebhook(HubTrouble):
    """There is no webhook of this id."""


class DeliveryRefused(HooksError):
    """A delivery was not accepted.

    Attributes:
        status: of the answer.
        headers: of the answer.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.headers: Mapping[str, str] = MappingProxyType(dict(headers or {}))


class StoreError(HooksError):
    """The database of events cannot be opened or written."""


class UnknownEvent(HooksError):
    """There is no event of this id."""


class RetryableError(HooksError):
    """Raised by a handler that wants to be run again later; meanwhile its sender is told that the event is accepted.

    Attributes:
        after: seconds until then; as the receiver's backoff says when None.
    """

    def __init__(self, message: str = "", after: float | None = None):
        super().__init__(message)
        self.after = after


class TunnelFailed(HooksError):
    """The program that makes a public address did not give one."""


class UnsafeTarget(HooksError):
    """An address that nothing is sent to."""


class SourceError(HooksError):
    """A revision of a policy cannot be found, fetched or verified.

    Attributes:
        code: stable, e.g. ``unknown_revision``, ``checksum``, ``unreachable``.
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
