"""Public names of hooks, imported when first used: the Hub's webhook API, a receiving server, a registry."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks.client.client import (
        AsyncWebhooksClient,
        HubRefused,
        HubSilent,
        HubUnreachable,
        WebhooksClient,
        create_webhook,
        delete_webhook,
        disable_webhook,
        enable_webhook,
        get_webhook,
        list_webhooks,
        update_webhook,
    )
    from hooks.client.webhook import WebhookInfo, WebhookWatchedItem, find_secret, generate_secret
    from hooks.errors import HooksError, HubTrouble, InvalidWebhook, RetryableError, UnknownWebhook
    from hooks.payload import (
        ObjectId,
        WebhookPayload,
        WebhookPayloadComment,
        WebhookPayloadDiscussion,
        WebhookPayloadDiscussionChanges,
        WebhookPayloadEvent,
        WebhookPayloadMovedTo,
        WebhookPayloadRepo,
        WebhookPayloadUpdatedFile,
        WebhookPayloadUpdatedRef,
        WebhookPayloadUrl,
        WebhookPayloadWebhook,
    )
    from hooks.receiver.endpoint import ReceiverSettings
    from hooks.receiver.inbox import Event
    from hooks.receiver.receiver import Receiver
    from hooks.server.server import WebhooksServer, webhook_endpoint

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

__all__ = [
    "AsyncWebhooksClient",
    "Event",
    "HooksError",
    "HubRefused",
    "HubSilent",
    "HubTrouble",
    "HubUnreachable",
    "InvalidWebhook",
    "ObjectId",
    "Receiver",
    "ReceiverSettings",
    "RetryableError",
    "UnknownWebhook",
    "WebhookInfo",
    "WebhookPayload",
    "WebhookPayloadComment",
    "WebhookPayloadDiscussion",
    "WebhookPayloadDiscussionChanges",
    "WebhookPayloadEvent",
    "WebhookPayloadMovedTo",
    "WebhookPayloadRepo",
    "WebhookPayloadUpdatedFile",
    "WebhookPayloadUpdatedRef",
    "WebhookPayloadUrl",
    "WebhookPayloadWebhook",
    "WebhookWatchedItem",
    "WebhooksClient",
    "WebhooksServer",
    "create_webhook",
    "delete_webhook",
    "disable_webhook",
    "enable_webhook",
    "find_secret",
    "generate_secret",
    "get_webhook",
    "list_webhooks",
    "update_webhook",
    "webhook_endpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
