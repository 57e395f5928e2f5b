"""WebhookInfo, and checks of a webhook's fields before they are sent."""

import copy
import ipaddress
import logging
import os
import re
import secrets as random_secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import huggingface_hub
from huggingface_hub import WebhookWatchedItem
from huggingface_hub.hf_api import JobSpec  # pyright: ignore[reportPrivateImportUsage]

from hooks.errors import HubTrouble, InvalidWebhook

MASK = "********"
# Query parameters with secrets; the Hub's documentation allows ?secret= in the address of a webhook.
SECRET_PARAMETERS = ("secret", "token", "key", "api_key", "apikey", "access_token", "password", "sig", "signature")
HUB_DOMAINS = ("repo", "discussion")
DOMAINS = (*HUB_DOMAINS, "session")  # Only robojax servers send events of sessions.
GOOD_SECRET = 16  # characters
SHORTEST_SECRET = 8  # Examples of huggingface_hub have 8 and 9 characters, which are accepted with a warning.

Watchable = str | Mapping[str, str] | WebhookWatchedItem

log = logging.getLogger("hooks.client")


@dataclass(repr=False, eq=False)
class WebhookInfo(huggingface_hub.WebhookInfo):
    """A webhook as the Hub describes it.

    ``disabled`` is the Hub's value, which may be text (``"suspended-after-failure"``): see ``status``.

    Attributes:
        has_secret: whether the webhook has a secret; newer Hubs send this instead of ``secret``, which is then None.
        job_id: id of the job that the webhook starts; only a registry sends it.

    Example:
        >>> from hooks import create_webhook, delete_webhook
        >>> webhook = create_webhook(url="https://192.0.2.7/push", watched="model:lab/arm", secret=16 * "s")
        >>> webhook.has_secret, webhook.status
        (True, 'enabled')
        >>> delete_webhook(webhook.id)
    """

    has_secret: bool = False
    job_id: str | None = None

    @property
    def status(self) -> Literal["enabled", "disabled", "suspended"]:
        """Webhook state: ``enabled``, ``disabled`` (by a person) or ``suspended`` (by the Hub, after failures)."""
        if isinstance(self.disabled, str) and self.disabled.startswith("suspended"):
            return "suspended"
        return "disabled" if self.disabled else "enabled"

    def __repr__(self) -> str:
        fields = {
            "id": self.id,
            "url": None if self.url is None else mask_url(self.url),
            "job": None if self.job is None else mask_job(self.job),
            "watched": self.watched,
            "domains": self.domains,
            "secret": MASK if self.has_secret else None,
            "disabled": self.disabled,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def read_webhook(answer: object) -> WebhookInfo:
    """Build a WebhookInfo from the Hub's JSON; raise ``HubTrouble`` for other JSON."""
    if not isinstance(answer, Mapping):
        raise HubTrouble(f"the Hub answered {type(answer).__name__} instead of a webhook")
    try:
        return WebhookInfo(
            id=str(answer["id"]),
            url=answer.get("url"),
            job=JobSpec(**answer["job"]) if answer.get("job") else None,
            watched=[WebhookWatchedItem(type=item["type"], name=item["name"]) for item in answer["watched"]],
            domains=list(answer["domains"]),
            secret=answer.get("secret"),
            disabled=cast(bool, answer["disabled"]),
            has_secret=bool(answer.get("hasSecret", answer.get("secret"))),
            job_id=answer.get("jobSourceId"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise HubTrouble(f"the Hub answered with an invalid webhook: {type(error).__name__} {error}") from None


def mask_url(url: str) -> str:
    """Return a URL with its password and secret parameters masked."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return MASK
    if password:
        parts = parts._replace(netloc=f"{parts.username}:{MASK}@{parts.netloc.rpartition('@')[2]}")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if any(name.lower() in SECRET_PARAMETERS for name, _ in pairs):
        masked = [(name, MASK if name.lower() in SECRET_PARAMETERS else value) for name, value in pairs]
        parts = parts._replace(query=urlencode(masked, safe="*/:"))
    return parts.geturl()


def mask_job(job: JobSpec) -> JobSpec:
    """Return a copy of a job's JSON with the values of its secrets masked."""
    masked = copy.copy(job)
    if isinstance(job.secrets, Mapping):
        masked.secrets = dict.fromkeys(job.secrets, MASK)
    return masked


def make_body(
    url: str | None = None,
    job_id: str | None = None,
    watched: Watchable | Iterable[Watchable] | None = None,
    domains: str | Iterable[str] | None = None,
    secret: str | None = None,
    secrets: Mapping[str, str] | None = None,
    *,
    is_new: bool,
    allow_empty: bool = False,
    allow_http: Collection[str] = (),
    shortest_secret: int = SHORTEST_SECRET,
) -> dict[str, Any]:
    """Build the JSON body that creates or changes a webhook, from the fields that are not None.

    Raises:
        InvalidWebhook: a field is invalid; the text says what is accepted, and never contains a secret.
    """
    if url is not None and job_id is not None:
        raise InvalidWebhook(
            f"Set `url` or `job_id` but not both. Found {mask_url(url)!r} and {job_id!r}: "
            "a webhook either sends to an address or starts a job"
        )
    if url is None and job_id is None and is_new:
        raise InvalidWebhook(
            "Missing argument for webhook: `url` or `job_id`. Give the address or the job of the webhook"
        )
    if job_id is not None and not job_id.strip():
        raise InvalidWebhook("job_id is empty; wanted the id of a job, as run_job(...).id")
    if url is not None:
        _check_url(url, {name.lower() for name in allow_http})
    if secrets is not None and job_id is None:
        raise InvalidWebhook("`secrets` can only be set together with `job_id`. They are variables of the job")
    for name, value in (secrets or {}).items():
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise InvalidWebhook(f"job secret {name!r}: wanted texts as name and value")
    if secret is not None:
        _check_secret(secret, shortest_secret)
    fields = {"url": url, "jobSourceId": job_id, "secret": secret, "secrets": secrets and dict(secrets)}
    body: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if watched is not None:
        body["watched"] = [asdict(item) for item in read_watched(watched)]
        if not body["watched"] and not allow_empty:
            raise InvalidWebhook(
                "watched is empty: nothing would be delivered; wanted at least 'model:someone/arm', "
                "or allow_empty=True in an update"
            )
    if domains is not None:
        body["domains"] = read_domains(domains)
    return body


def _check_url(url: str, allow_http: Collection[str]) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidWebhook(f"url cannot be read: {error}; wanted https://host/path") from None
    masked = mask_url(url)
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidWebhook(f"url {masked!r} is not a web address; wanted https://host/path")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise InvalidWebhook(f"url {masked!r} has spaces or control characters; write them as %20 etc.")
    if parts.scheme == "http" and not _may_be_http(host, allow_http):
        raise InvalidWebhook(
            f"url {masked!r} is http, which does not encrypt the secret; wanted https, "
            f"or allow this host: allow_http=[{host!r}] (--allow-http {host})"
        )


def _may_be_http(host: str, allowed: Collection[str]) -> bool:
    if host == "localhost" or host.endswith(".localhost") or "*" in allowed or host.lower() in allowed:
        return True
    for network in ("127.0.0.0/8", "::1", *allowed):
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False):
                return True
        except ValueError:
            continue  # The host or the entry is a name.
    return False


def _check_secret(secret: str, shortest: int) -> None:
    expected = f"wanted at least {GOOD_SECRET} visible ASCII characters, as generate_secret() makes them"
    if not all("!" <= character <= "~" for character in secret):
        raise InvalidWebhook(
            f"the secret has characters that are not visible ASCII (it is sent in a header); {expected}"
        )
    if len(secret) < shortest:
        raise InvalidWebhook(f"the secret has {len(secret)} characters; {expected}")
    if len(secret) < GOOD_SECRET:
        log.warning("the webhook's secret has %d characters and can be guessed; %s", len(secret), expected)


def read_watched(watched: Watchable | Iterable[Watchable]) -> list[WebhookWatchedItem]:
    """Return the watched items in order without duplicates; the Hub checks their types."""
    is_one = isinstance(watched, str | Mapping | WebhookWatchedItem)
    items: dict[tuple[str, str], WebhookWatchedItem] = {}
    for item in cast(Iterable[Watchable], [watched] if is_one else watched):
        kind = name = None
        if isinstance(item, WebhookWatchedItem):
            kind, name = item.type, item.name
        elif isinstance(item, Mapping):
            kind, name = item.get("type"), item.get("name")
        elif isinstance(item, str):
            kind, _, name = item.partition(":")
        if not (isinstance(kind, str) and isinstance(name, str) and kind and name) or re.search(r"\s", kind + name):
            raise InvalidWebhook(
                f"watched item {item!r} cannot be read; wanted 'type:name', as 'model:someone/arm' or 'org:someone'"
            )
        items.setdefault((kind, name), WebhookWatchedItem(type=cast(Any, kind), name=name))
    return list(items.values())


def read_domains(domains: str | Iterable[str]) -> list[str]:
    """Return the domains in order without duplicates; the older name ``discussions`` becomes ``discussion``."""
    domain_list = [domains] if isinstance(domains, str) else domains
    named = list(dict.fromkeys("discussion" if domain == "discussions" else domain for domain in domain_list))
    for domain in named:
        if domain not in DOMAINS:
            raise InvalidWebhook(f"domain {domain!r} is unknown; wanted: {', '.join(DOMAINS)}")
    if not named:
        raise InvalidWebhook("domains is empty: the webhook would send nothing; omit it for all domains")
    return named


def check_webhook_id(webhook_id: str) -> str:
    """Return the id; raise ``InvalidWebhook`` if it is not a single segment of a URL's path."""
    if not isinstance(webhook_id, str) or not re.fullmatch(r"(?!\.+$)[A-Za-z0-9._-]+", webhook_id):
        raise InvalidWebhook(f"webhook id {webhook_id!r}: wanted letters and digits; list_webhooks() shows the ids")
    return webhook_id


def generate_secret() -> str:
    """Generate a secret of 256 random bits.

    Example:
        >>> len(generate_secret())
        43
    """
    return random_secrets.token_urlsafe(32)


def find_secret(file: str | Path | None = None, *, generate: bool = False) -> str | None:
    """Return the secret in a file; None without a file. With ``generate``, a missing file is created with a new secret.

    Raises:
        InvalidWebhook: the file cannot be read or created, or is empty.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     secret = find_secret(f"{folder}/secret", generate=True)
        >>> len(secret)
        43
    """
    if file is None:
        if generate:
            raise InvalidWebhook("a generated secret is never shown: give a file for it")
        return None
    label = f"secret file {os.fspath(file)!r}"
    try:
        if generate:
            _make_secret_file(file)
        secret = Path(file).read_text("ascii").strip()
    except OSError as error:
        raise InvalidWebhook(
            f"{label} cannot be {'created' if generate else 'read'}: {error.strerror}; create it with generate "
            "(--generate-secret), or write the secret into it"
        ) from None
    except UnicodeDecodeError:
        raise InvalidWebhook(f"{label} is not ASCII text; it must contain only the secret") from None
    if not secret:
        raise InvalidWebhook(f"{label} is empty; it must contain the secret")
    return secret


def _make_secret_file(path: str | Path) -> None:
    """Write a new secret unless the file exists, so that processes that start at the same time share one secret."""
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(opened, "w") as file:
        file.write(generate_secret() + "\n")
