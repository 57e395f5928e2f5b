"""What a webhook is made of, checked before it is sent: its target, what it watches, its domains and its secret."""

import difflib
import ipaddress
import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import huggingface_hub

from hooks.errors import InvalidWebhook
from hooks.management.webhooks import WebhookWatchedItem, masked_url

WATCHED_TYPES = ("bucket", "dataset", "kernel", "model", "org", "space", "user")
# ``session`` is what a robojax server tells of its sessions; the Hub itself has the first two.
DOMAINS = ("repo", "discussion", "session")
HUB_DOMAINS = ("repo", "discussion")
GOOD_SECRET = 16  # characters
# Examples of huggingface_hub have secrets of 8 and 9 characters, so those pass, with a warning in the log.
SHORTEST_SECRET = 8

Watchable = str | Mapping[str, str] | huggingface_hub.WebhookWatchedItem

log = logging.getLogger("hooks.management")


def check_target(
    url: str | None, job_id: str | None, *, required: bool = True, allow_http: Collection[str] = ()
) -> None:
    """One of the two, and an address that may be delivered to.

    Args:
        allow_http: hosts and networks (``robot.local``, ``10.0.0.0/8``, ``*``) besides loopback without TLS.

    Raises:
        InvalidWebhook: says what to give.
    """
    if url is not None and job_id is not None:
        raise InvalidWebhook(
            f"Set `url` or `job_id` but not both. Found {masked_url(url)!r} and {job_id!r}: "
            "a webhook either sends to an address or starts a job"
        )
    if url is None and job_id is None and required:
        raise InvalidWebhook(
            "Missing argument for webhook: `url` or `job_id`. Give the address that it sends to, or the job it starts"
        )
    if job_id is not None and not job_id.strip():
        raise InvalidWebhook("job_id is empty; wanted the id of a job, as run_job(...).id")
    if url is not None:
        _check_url(url, allow_http)


def _check_url(url: str, allow_http: Collection[str]) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidWebhook(f"url cannot be read: {error}; wanted https://host/path") from None
    shown = masked_url(url)
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidWebhook(f"url {shown!r} is no web address; wanted https://host/path")
    if any(character.isspace() or not character.isprintable() for character in url):
        raise InvalidWebhook(f"url {shown!r} has blanks or control characters; wanted them as %20 and the like")
    if parts.scheme == "http" and not _may_be_http(host, allow_http):
        raise InvalidWebhook(
            f"url {shown!r} is http, over which the secret travels in the open; wanted https, "
            f"or allow this host: allow_http=[{host!r}] (--allow-http {host})"
        )


def _may_be_http(host: str, allowed: Collection[str]) -> bool:
    if host == "localhost" or host.endswith(".localhost") or "*" in allowed:
        return True
    if host.lower() in {name.lower() for name in allowed}:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for name in allowed:
        try:
            if address in ipaddress.ip_network(name, strict=False):
                return True
        except ValueError:
            continue  # a host's name
    return address.is_loopback


def read_watched(watched: Watchable | Iterable[Watchable], *, stacklevel: int = 3) -> list[WebhookWatchedItem]:
    """The items in order, each once. Warns of a type that is not known: the Hub may have learned a new one.

    Args:
        watched: items, mappings with ``type`` and ``name``, or text ``type:name``; a single one too.
        stacklevel: frames between the warning and the line it is about.

    Raises:
        InvalidWebhook: one of them cannot be read.
    """
    is_one = isinstance(watched, str | Mapping | huggingface_hub.WebhookWatchedItem)
    given = cast(Iterable[Watchable], [watched] if is_one else watched)
    items: dict[tuple[str, str], WebhookWatchedItem] = {}
    for item in given:
        type_, name = _watched_pair(item)
        if type_ not in WATCHED_TYPES:
            warnings.warn(
                f"watched type {type_!r} is not known{_meant(type_, WATCHED_TYPES)}; it is sent as it is. "
                f"Known: {', '.join(WATCHED_TYPES)}",
                UserWarning,
                stacklevel=stacklevel,
            )
        items.setdefault((type_, name), WebhookWatchedItem(type=cast(Any, type_), name=name))
    return list(items.values())


def _watched_pair(item: Watchable) -> tuple[str, str]:
    if isinstance(item, huggingface_hub.WebhookWatchedItem):
        kind, name = item.type, item.name
    elif isinstance(item, Mapping):
        kind, name = item.get("type"), item.get("name")
    elif isinstance(item, str):
        kind, _, name = item.partition(":")
    else:
        kind = name = None
    if not (isinstance(kind, str) and isinstance(name, str) and kind and name) or any(map(str.isspace, kind + name)):
        raise InvalidWebhook(
            f"watched item {item!r} cannot be read; wanted 'type:name', as 'model:someone/arm' or 'org:someone'"
        )
    return kind, name


def read_domains(domains: str | Iterable[str]) -> list[str]:
    """The domains in order, each once; ``discussions``, as older huggingface_hub has it, becomes ``discussion``.

    Raises:
        InvalidWebhook: one is not known, or there is none.
    """
    found = [domains] if isinstance(domains, str) else list(domains)
    known = list(dict.fromkeys("discussion" if domain == "discussions" else domain for domain in found))
    for domain in known:
        if domain not in DOMAINS:
            raise InvalidWebhook(
                f"domain {domain!r} is not known{_meant(domain, DOMAINS)}; known: {', '.join(DOMAINS)}"
            )
    if not known:
        raise InvalidWebhook("domains is empty: the webhook would never be sent anything; leave it out for all of them")
    return known


def check_secret(secret: str | None, *, shortest: int = SHORTEST_SECRET) -> None:
    """A secret that fits in a header and is hard to guess; the message never holds it.

    Raises:
        InvalidWebhook: it has other characters than visible ASCII, or fewer than ``shortest``.
    """
    if secret is None:
        return
    wanted = f"wanted at least {GOOD_SECRET} visible ASCII characters, as generate_secret() makes them"
    if not all("!" <= character <= "~" for character in secret):
        raise InvalidWebhook(f"the secret has characters that are not visible ASCII (it travels in a header); {wanted}")
    if len(secret) < shortest:
        raise InvalidWebhook(f"the secret has {len(secret)} characters; {wanted}")
    if len(secret) < GOOD_SECRET:
        log.warning("the webhook's secret has %d characters and can be guessed; %s", len(secret), wanted)


def check_job_secrets(secrets: Mapping[str, str] | None, job_id: str | None) -> None:
    """Secrets for a job, only together with it.

    Raises:
        InvalidWebhook: there is no job, or a name or value is no text.
    """
    if secrets is None:
        return
    if job_id is None:
        raise InvalidWebhook(
            "`secrets` can only be set together with `job_id`. They are variables of the job it starts"
        )
    for name, value in secrets.items():
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise InvalidWebhook(f"job secret {name!r}: wanted a name and a text each")


def check_webhook_id(webhook_id: str) -> str:
    """An id that names one webhook and nothing else when it is put into a path.

    Raises:
        InvalidWebhook: it is empty or has other characters.
    """
    if not isinstance(webhook_id, str) or not webhook_id.strip("."):
        raise InvalidWebhook(f"webhook id {webhook_id!r} is empty; list_webhooks() tells those there are")
    if not all(character.isascii() and (character.isalnum() or character in "._-") for character in webhook_id):
        raise InvalidWebhook(f"webhook id {webhook_id!r} has characters that no id has; wanted letters and digits")
    return webhook_id


def _meant(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
