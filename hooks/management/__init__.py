"""Management of webhooks: huggingface_hub's operations, with limits, safe updates and secrets out of sight."""

from hooks.management.aio import AsyncWebhooksClient
from hooks.management.client import WebhooksClient
from hooks.management.functions import (
    create_webhook,
    delete_webhook,
    disable_webhook,
    enable_webhook,
    get_webhook,
    list_webhooks,
    update_webhook,
)
from hooks.management.secret import find_secret, generate_secret
from hooks.management.self_test import Healing
from hooks.management.trouble import HubRefused, HubSilent, HubUnreachable
from hooks.management.webhooks import WebhookInfo, WebhookWatchedItem

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
