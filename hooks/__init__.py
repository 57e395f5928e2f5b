"""Public names of hooks, imported when first used: the Hub's webhook API, a receiving server, a registry."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks.client.client import AsyncWebhooksClient as AsyncWebhooksClient
    from hooks.client.client import HubRefused as HubRefused
    from hooks.client.client import HubSilent as HubSilent
    from hooks.client.client import HubUnreachable as HubUnreachable
    from hooks.client.client import WebhooksClient as WebhooksClient
    from hooks.client.client import create_webhook as create_webhook
    from hooks.client.client import delete_webhook as delete_webhook
    from hooks.client.client import disable_webhook as disable_webhook
    from hooks.client.client import enable_webhook as enable_webhook
    from hooks.client.client import get_webhook as get_webhook
    from hooks.client.client import list_webhooks as list_webhooks
    from hooks.client.client import update_webhook as update_webhook
    from hooks.client.webhook import WebhookInfo as WebhookInfo
    from hooks.client.webhook import WebhookWatchedItem as WebhookWatchedItem
    from hooks.client.webhook import find_secret as find_secret
    from hooks.client.webhook import generate_secret as generate_secret
    from hooks.errors import HooksError as HooksError
    from hooks.errors import HubTrouble as HubTrouble
    from hooks.errors import InvalidWebhook as InvalidWebhook
    from hooks.errors import RetryableError as RetryableError
    from hooks.errors import UnknownWebhook as UnknownWebhook
    from hooks.payload import ObjectId as ObjectId
    from hooks.payload import WebhookPayload as WebhookPayload
    from hooks.payload import WebhookPayloadComment as WebhookPayloadComment
    from hooks.payload import WebhookPayloadDiscussion as WebhookPayloadDiscussion
    from hooks.payload import WebhookPayloadDiscussionChanges as WebhookPayloadDiscussionChanges
    from hooks.payload import WebhookPayloadEvent as WebhookPayloadEvent
    from hooks.payload import WebhookPayloadMovedTo as WebhookPayloadMovedTo
    from hooks.payload import WebhookPayloadRepo as WebhookPayloadRepo
    from hooks.payload import WebhookPayloadUpdatedFile as WebhookPayloadUpdatedFile
    from hooks.payload import WebhookPayloadUpdatedRef as WebhookPayloadUpdatedRef
    from hooks.payload import WebhookPayloadUrl as WebhookPayloadUrl
    from hooks.payload import WebhookPayloadWebhook as WebhookPayloadWebhook
    from hooks.receiver.endpoint import ReceiverSettings as ReceiverSettings
    from hooks.receiver.inbox import Event as Event
    from hooks.receiver.receiver import Receiver as Receiver
    from hooks.server.server import WebhooksServer as WebhooksServer
    from hooks.server.server import webhook_endpoint as webhook_endpoint

_NAMES = {
    "hooks.errors": ("HooksError HubTrouble InvalidWebhook RetryableError UnknownWebhook"),
    "hooks.client.client": (
        "AsyncWebhooksClient HubRefused HubSilent HubUnreachable WebhooksClient create_webhook delete_webhook "
        "disable_webhook enable_webhook get_webhook list_webhooks update_webhook"
    ),
    "hooks.client.webhook": ("WebhookInfo WebhookWatchedItem find_secret generate_secret"),
    "hooks.payload": (
        "ObjectId WebhookPayload WebhookPayloadComment WebhookPayloadDiscussion WebhookPayloadDiscussionChanges "
        "WebhookPayloadEvent WebhookPayloadMovedTo WebhookPayloadRepo WebhookPayloadUpdatedFile "
        "WebhookPayloadUpdatedRef WebhookPayloadUrl WebhookPayloadWebhook"
    ),
    "hooks.receiver.inbox": ("Event"),
    "hooks.receiver.receiver": ("Receiver"),
    "hooks.receiver.endpoint": ("ReceiverSettings"),
    "hooks.server.server": ("WebhooksServer webhook_endpoint"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
