"""How a call of the Hub fails: huggingface_hub's and Python's own errors, which are this package's too.

HubTrouble
├── HubRefused         it answered with an error status; also huggingface_hub's HfHubHTTPError
│   └── WebhookUnknown  404 for a webhook; also UnknownWebhook
├── HubSilent          it did not answer in time; also a TimeoutError
└── HubUnreachable     there was no connection, or it broke; also a ConnectionError
"""

import httpx2
from huggingface_hub.errors import HfHubHTTPError

from hooks.errors import HubTrouble, UnknownWebhook


class HubRefused(HubTrouble, HfHubHTTPError):
    """The Hub answered with an error status."""

    def __init__(self, message: str, *, response: httpx2.Response, server_message: str | None = None):
        HfHubHTTPError.__init__(self, message, response=response, server_message=server_message)
        self.status = response.status_code


class WebhookUnknown(UnknownWebhook, HubRefused):
    """There is no webhook of this id; for those who catch huggingface_hub's error."""

    def __init__(self, message: str, *, response: httpx2.Response, server_message: str | None = None):
        HubRefused.__init__(self, message, response=response, server_message=server_message)


class _WithoutAnswer(HubTrouble):
    """No answer.

    Attributes:
        was_sent: whether the Hub may have got the request, and done it.
    """

    def __init__(self, message: str, *, was_sent: bool):
        super().__init__(message)
        self.was_sent = was_sent


class HubSilent(_WithoutAnswer, TimeoutError):
    """The Hub did not answer within the limit."""


class HubUnreachable(_WithoutAnswer, ConnectionError):
    """The Hub could not be connected to, or the connection broke."""
