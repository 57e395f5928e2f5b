"""Webhooks: manage those of the Hub, receive them, keep a registry of one's own, deliver policies by them.

Names are looked up when first used, so that importing this package imports nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooks.errors import HooksError, HubTrouble, InvalidWebhook, RetryableError, UnknownWebhook
    from hooks.management import (
        AsyncWebhooksClient,
        Healing,
        HubRefused,
        HubSilent,
        HubUnreachable,
        WebhookInfo,
        WebhooksClient,
        WebhookWatchedItem,
        create_webhook,
        delete_webhook,
        disable_webhook,
        enable_webhook,
        find_secret,
        generate_secret,
        get_webhook,
        list_webhooks,
        update_webhook,
    )
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
    from hooks.receiving.event import Event
    from hooks.receiving.receiver import Receiver
    from hooks.receiving.settings import ReceiverSettings
    from hooks.serving.endpoint import webhook_endpoint
    from hooks.serving.server import WebhooksServer

_HOMES = {
    "AsyncWebhooksClient": "hooks.management",
    "Event": "hooks.receiving.event",
    "Healing": "hooks.management",
    "HooksError": "hooks.errors",
    "HubRefused": "hooks.management",
    "HubSilent": "hooks.management",
    "HubTrouble": "hooks.errors",
    "HubUnreachable": "hooks.management",
    "InvalidWebhook": "hooks.errors",
    "ObjectId": "hooks.payload",
    "Receiver": "hooks.receiving.receiver",
    "ReceiverSettings": "hooks.receiving.settings",
    "RetryableError": "hooks.errors",
    "UnknownWebhook": "hooks.errors",
    "WebhookInfo": "hooks.management",
    "WebhookPayload": "hooks.payload",
    "WebhookPayloadComment": "hooks.payload",
    "WebhookPayloadDiscussion": "hooks.payload",
    "WebhookPayloadDiscussionChanges": "hooks.payload",
    "WebhookPayloadEvent": "hooks.payload",
    "WebhookPayloadMovedTo": "hooks.payload",
    "WebhookPayloadRepo": "hooks.payload",
    "WebhookPayloadUpdatedFile": "hooks.payload",
    "WebhookPayloadUpdatedRef": "hooks.payload",
    "WebhookPayloadUrl": "hooks.payload",
    "WebhookPayloadWebhook": "hooks.payload",
    "WebhookWatchedItem": "hooks.management",
    "WebhooksClient": "hooks.management",
    "WebhooksServer": "hooks.serving.server",
    "create_webhook": "hooks.management",
    "delete_webhook": "hooks.management",
    "disable_webhook": "hooks.management",
    "enable_webhook": "hooks.management",
    "find_secret": "hooks.management",
    "generate_secret": "hooks.management",
    "get_webhook": "hooks.management",
    "list_webhooks": "hooks.management",
    "update_webhook": "hooks.management",
    "webhook_endpoint": "hooks.serving.endpoint",
}

__all__ = [
    "AsyncWebhooksClient",
    "Event",
    "Healing",
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
