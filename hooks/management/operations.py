"""Webhooks of an account: made, looked at, changed, switched on and off, deleted, and replayed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi

from hooks.errors import HubTrouble, InvalidWebhook
from hooks.management.arguments import (
    HUB_DOMAINS,
    Watchable,
    check_job_secrets,
    check_secret,
    check_target,
    check_webhook_id,
    read_domains,
    read_watched,
)
from hooks.management.hub import Hub
from hooks.management.webhooks import WebhookInfo, WebhookWatchedItem, read_webhook

TIMEOUT = 30.0  # seconds
Token = bool | str | None


class Operations:
    """The seven operations of huggingface_hub's ``HfApi`` and ``replay``, each one request (an update two).

    Every method takes ``token=``; without it, the client's, and without that, the one of the login or HF_TOKEN.

    Raises:
        InvalidWebhook: an argument cannot be used (also a ValueError); nothing was sent.
        UnknownWebhook: there is no webhook of this id.
        HubTrouble: the Hub refused, did not answer in time, or answered nonsense.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        token: Token = None,
        *,
        timeout: float = TIMEOUT,
        allow_http: Collection[str] = (),
        api: HfApi | None = None,
    ):
        """Nothing is sent yet.

        Args:
            endpoint: of the Hub or of a robojax server; HF_ENDPOINT or huggingface.co without it.
            timeout: seconds for one operation's request, with all that is waited for and repeated.
            allow_http: hosts and networks that webhooks may send to without TLS, besides loopback.
            api: instead of endpoint and token.
        """
        if api is not None and (endpoint is not None or token is not None):
            raise InvalidWebhook("api has an endpoint and a token of its own; give it alone, or those")
        self.api = api or HfApi(endpoint=endpoint, token=token, library_name="robojax", library_version=_version())
        self.allow_http = tuple(allow_http)
        self._hub = Hub(self.api, timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(endpoint={self._hub.endpoint!r}, timeout={self._hub.timeout!r})"

    @property
    def endpoint(self) -> str:
        """Where the webhooks are."""
        return self._hub.endpoint

    def list_webhooks(self, *, token: Token = None) -> list[WebhookInfo]:
        """All of the account's."""
        told = self._hub.call("GET", token=token, repeats=True)
        if not isinstance(told, list):
            raise HubTrouble(f"{self.endpoint} answered {type(told).__name__} where a list of webhooks was wanted")
        return [read_webhook(webhook) for webhook in told]

    def get_webhook(self, webhook_id: str, *, token: Token = None) -> WebhookInfo:
        """One by its id."""
        return self.send("GET", f"/{check_webhook_id(webhook_id)}", token=token, repeats=True)

    def create_webhook(
        self,
        *,
        url: str | None = None,
        job_id: str | None = None,
        watched: Watchable | Iterable[Watchable],
        domains: str | Iterable[str] | None = None,
        secret: str | None = None,
        secrets: Mapping[str, str] | None = None,
        token: Token = None,
    ) -> WebhookInfo:
        """Make one. It is asked for once only: after a HubTrouble it may be there all the same (see ``ensure``).

        Args:
            url: that is sent to.
            job_id: of the job that is started, instead.
            watched: what is watched: ``type:name``, mappings, or items.
            domains: ``repo`` and ``discussion``, both when None.
            secret: that each delivery carries.
            secrets: variables of the job.
        """
        check_target(url, job_id, allow_http=self.allow_http)
        check_job_secrets(secrets, job_id)
        items = not_empty(read_watched(watched))
        check_secret(secret)
        named = HUB_DOMAINS if domains is None else read_domains(domains)
        return self.send("POST", "", body_of(items, named, url, job_id, secret, secrets), token=token)

    def update_webhook(
        self,
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
    ) -> WebhookInfo:
        """Change what is named and keep the rest.

        The Hub takes what is watched whole or empties it, so it is looked up first when it is not named; a change by
        somebody else in between is lost.

        Args:
            secrets: named ones are replaced, those that are empty removed, others kept; with ``job_id`` only.
            allow_empty: take an empty ``watched``, after which nothing is delivered any more.
        """
        check_webhook_id(webhook_id)
        check_target(url, job_id, required=False, allow_http=self.allow_http)
        check_job_secrets(secrets, job_id)
        items: Sequence[huggingface_hub.WebhookWatchedItem] | None = None if watched is None else read_watched(watched)
        if items == [] and not allow_empty:
            raise InvalidWebhook(
                "watched is empty: nothing would be delivered any more; say allow_empty=True to mean it"
            )
        check_secret(secret)
        named: Sequence[str] | None = None if domains is None else read_domains(domains)
        if items is None or named is None:
            now = self.get_webhook(webhook_id, token=token)
            items = now.watched if items is None else items
            named = now.domains if named is None else named
        body = body_of(items, named, url, job_id, secret, secrets)
        return self.send("POST", f"/{webhook_id}", body, token=token, repeats=True)

    def enable_webhook(self, webhook_id: str, *, token: Token = None) -> WebhookInfo:
        """Let it deliver (again)."""
        return self.send("POST", f"/{check_webhook_id(webhook_id)}/enable", token=token, repeats=True)

    def disable_webhook(self, webhook_id: str, *, token: Token = None) -> WebhookInfo:
        """Let it deliver nothing until it is enabled."""
        return self.send("POST", f"/{check_webhook_id(webhook_id)}/disable", token=token, repeats=True)

    def delete_webhook(self, webhook_id: str, *, token: Token = None) -> None:
        """Delete it, for good."""
        self._hub.call("DELETE", f"/{check_webhook_id(webhook_id)}", token=token, repeats=True)

    def replay(self, webhook_id: str, log_id: str, *, token: Token = None) -> int:
        """Deliver something again, to the address and with the secret that the webhook has now.

        Args:
            log_id: of the delivery, as the webhook's activity page shows it.

        Returns:
            The HTTP status that its receiver answered.
        """
        path = f"/{check_webhook_id(webhook_id)}/replay/{check_webhook_id(log_id)}"
        told = self._hub.call("POST", path, token=token)
        status = told.get("status") if isinstance(told, Mapping) else None
        if not isinstance(status, int):
            raise HubTrouble(f"{self.endpoint} did not say what became of the replay: {str(told)[:100]}")
        return status

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        token: Token = None,
        repeats: bool = False,
    ) -> WebhookInfo:
        """One request that is answered with a webhook; ``repeats`` when doing it twice is doing it once."""
        hidden = [] if body is None else [body.get("secret", ""), *body.get("secrets", {}).values()]
        told = self._hub.call(method, path, body, token=token, repeats=repeats, hidden=hidden)
        return read_webhook(told.get("webhook") if isinstance(told, Mapping) else told)


def not_empty(items: list[WebhookWatchedItem]) -> list[WebhookWatchedItem]:
    """What is watched by a webhook that is to deliver something."""
    if not items:
        raise InvalidWebhook("watched is empty: nothing would ever be delivered; wanted at least 'model:someone/arm'")
    return items


def body_of(
    items: Iterable[huggingface_hub.WebhookWatchedItem],
    domains: Sequence[str],
    url: str | None,
    job_id: str | None,
    secret: str | None,
    secrets: Mapping[str, str] | None,
) -> dict[str, Any]:
    """What is sent; what was not given is not in it."""
    given = {"url": url, "jobSourceId": job_id, "secret": secret, "secrets": None if secrets is None else dict(secrets)}
    return {
        "watched": [{"type": item.type, "name": item.name} for item in items],
        "domains": list(domains),
        **{name: value for name, value in given.items() if value is not None},
    }


def _version() -> str | None:
    try:
        return version("robojax")
    except PackageNotFoundError:
        return None
