"""Client for the Hub's webhook API."""

from hooks.client.client import (
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
from hooks.client.webhook import WebhookInfo, WebhookWatchedItem, find_secret, generate_secret

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
