"""The operations as functions, by huggingface_hub's names; each takes ``token=`` and ``endpoint=``.

See `WebhooksClient` for what they do, and for more: ``ensure``, ``heal``, ``replay``, limits and allowed hosts.
"""

from collections.abc import Iterable, Mapping

from hooks.management.arguments import Watchable
from hooks.management.client import WebhooksClient
from hooks.management.operations import Token
from hooks.management.webhooks import WebhookInfo


def list_webhooks(*, token: Token = None, endpoint: str | None = None) -> list[WebhookInfo]:
    """All of the account's."""
    return WebhooksClient(endpoint, token).list_webhooks()


def get_webhook(webhook_id: str, *, token: Token = None, endpoint: str | None = None) -> WebhookInfo:
    """One by its id."""
    return WebhooksClient(endpoint, token).get_webhook(webhook_id)


def create_webhook(
    *,
    url: str | None = None,
    job_id: str | None = None,
    watched: Watchable | Iterable[Watchable],
    domains: str | Iterable[str] | None = None,
    secret: str | None = None,
    secrets: Mapping[str, str] | None = None,
    token: Token = None,
    endpoint: str | None = None,
) -> WebhookInfo:
    """Make one that sends to ``url``, or starts the job ``job_id``."""
    return WebhooksClient(endpoint, token).create_webhook(
        url=url, job_id=job_id, watched=watched, domains=domains, secret=secret, secrets=secrets
    )


def update_webhook(
    webhook_id: str,
    *,
    url: str | None = None,
    job_id: str | None = None,
    watched: Watchable | Iterable[Watchable] | None = None,
    domains: str | Iterable[str] | None = None,
    secret: str | None = None,
    secrets: Mapping[str, str] | None = None,
    allow_empty: bool = False,
    token: Token = None,
    endpoint: str | None = None,
) -> WebhookInfo:
    """Change what is named and keep the rest."""
    return WebhooksClient(endpoint, token).update_webhook(
        webhook_id,
        url=url,
        job_id=job_id,
        watched=watched,
        domains=domains,
        secret=secret,
        secrets=secrets,
        allow_empty=allow_empty,
    )


def enable_webhook(webhook_id: str, *, token: Token = None, endpoint: str | None = None) -> WebhookInfo:
    """Let it deliver (again)."""
    return WebhooksClient(endpoint, token).enable_webhook(webhook_id)


def disable_webhook(webhook_id: str, *, token: Token = None, endpoint: str | None = None) -> WebhookInfo:
    """Let it deliver nothing until it is enabled."""
    return WebhooksClient(endpoint, token).disable_webhook(webhook_id)


def delete_webhook(webhook_id: str, *, token: Token = None, endpoint: str | None = None) -> None:
    """Delete it, for good."""
    WebhooksClient(endpoint, token).delete_webhook(webhook_id)
