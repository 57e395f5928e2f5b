"""Management of webhooks: huggingface_hub's operations, with limits, safe updates and secrets out of sight."""

from hooks.management.client import (
    AsyncWebhooksClient,
    Healing,
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
from hooks.management.webhook import WebhookInfo, WebhookWatchedItem, find_secret, generate_secret

__all__ = [
    "AsyncWebhooksClient",
    "Healing",
    "HubRefused",
    "HubSilent",
    "HubUnreachable",
    "WebhookInfo",
    "WebhookWatchedItem",
    "WebhooksClient",
    "create_webhook",
    "delete_webhook",
    "disable_webhook",
    "enable_webhook",
    "find_secret",
    "generate_secret",
    "get_webhook",
    "list_webhooks",
    "update_webhook",
]
