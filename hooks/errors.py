"""Errors of webhooks, all below HooksError."""


class HooksError(Exception):
    """Base class of the errors that this package raises on purpose; their text is safe to show to users.

    Example:
        >>> from hooks import InvalidWebhook
        >>> issubclass(InvalidWebhook, HooksError)
        True
    """


class InvalidWebhook(HooksError, ValueError):
    """An argument or field of a webhook is invalid.

    Example:
        >>> from hooks import WebhooksClient
        >>> WebhooksClient(endpoint="huggingface.co")
        Traceback (most recent call last):
        hooks.errors.InvalidWebhook: endpoint 'huggingface.co': wanted https://host, as https://huggingface.co
    """


class InvalidSettings(HooksError, ValueError):
    """A setting of a receiver, sender or registry is invalid."""


class HubTrouble(HooksError):
    """The Hub refused a call, did not respond in time, or sent an invalid response.

    Attributes:
        status: HTTP status of the response; None without a response.
        was_sent: whether the Hub may have received and executed the request.

    Example:
        >>> from hooks import WebhooksClient
        >>> try:
        ...     WebhooksClient(token="hf_unknown").list_webhooks()
        ... except HubTrouble as error:
        ...     print(error.status)
        401
    """

    was_sent = True

    def __init__(self, message: str, status: int | None = None, *, was_sent: bool = True):
        super().__init__(message)
        self.status = status
        self.was_sent = was_sent


class UnknownWebhook(HubTrouble):
    """There is no webhook with this id.

    Example:
        >>> from hooks import get_webhook
        >>> try:
        ...     get_webhook("6390e855e30d9209411de93b")
        ... except UnknownWebhook as error:
        ...     print(error.status)
        404
    """


class StoreError(HooksError):
    """The database of events cannot be opened or written."""


class UnknownEvent(HooksError):
    """There is no event with this id."""


class RetryableError(HooksError):
    """Raised by a handler that must run again later; the sender gets 202 (accepted).

    Attributes:
        after: seconds until the next run; None for the receiver's backoff.

    Example:
        >>> def on_push(payload):
        ...     raise RetryableError("the robot is moving", after=60)
    """

    def __init__(self, message: str = "", after: float | None = None):
        super().__init__(message)
        self.after = after


class UnsafeTarget(HooksError):
    """Deliveries must not be sent to this address."""
