"""Errors of webhooks, all below HooksError."""


class HooksError(Exception):
    """Base class of the errors that this package raises on purpose; their text is safe to show to users."""


class InvalidWebhook(HooksError, ValueError):
    """An argument or field of a webhook is invalid."""


class InvalidSettings(HooksError, ValueError):
    """A setting of a receiver, sender or registry is invalid."""


class HubTrouble(HooksError):
    """The Hub refused a call, did not answer in time, or answered something unusable.

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
    """No webhook has this id."""


class StoreError(HooksError):
    """The database of events cannot be opened or written."""


class UnknownEvent(HooksError):
    """No event has this id."""


class RetryableError(HooksError):
    """Raised by a handler to be run again later; until then its sender is answered that the event is accepted.

    Attributes:
        after: seconds until then; as the receiver's backoff says when None.
    """

    def __init__(self, message: str = "", after: float | None = None):
        super().__init__(message)
        self.after = after


class UnsafeTarget(HooksError):
    """Deliveries must not be sent to this address."""
