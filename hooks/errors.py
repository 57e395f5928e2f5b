"""Errors of webhooks, all below HooksError."""


class HooksError(Exception):
    """Base class of the errors that this package raises on purpose; their text is safe to show to users."""


class InvalidWebhook(HooksError, ValueError):
    """An argument or field of a webhook is invalid."""


class InvalidSettings(HooksError, ValueError):
    """A setting of a receiver, sender or registry is invalid."""


class HubTrouble(HooksError):
    """The Hub refused a call, did not respond in time, or sent an invalid response.

    Attributes:
        status: HTTP status of the response; None without a response.
        was_sent: whether the Hub may have received and executed the request.
    """

    was_sent = True

    def __init__(self, message: str, status: int | None = None, *, was_sent: bool = True):
        super().__init__(message)
        self.status = status
        self.was_sent = was_sent


class UnknownWebhook(HubTrouble):
    """There is no webhook with this id."""


class StoreError(HooksError):
    """The database of events cannot be opened or written."""


class UnknownEvent(HooksError):
    """There is no event with this id."""


class RetryableError(HooksError):
    """Raised by a handler that must run again later; the sender gets 202 (accepted).

    Attributes:
        after: seconds until the next run; None for the receiver's backoff.
    """

    def __init__(self, message: str = "", after: float | None = None):
        super().__init__(message)
        self.after = after


class UnsafeTarget(HooksError):
    """Deliveries must not be sent to this address."""
