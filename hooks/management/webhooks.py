"""What the Hub tells about a webhook: huggingface_hub's classes, with a state and with the secret out of sight."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, urlencode, urlsplit

import huggingface_hub
from huggingface_hub.hf_api import JobSpec  # pyright: ignore[reportPrivateImportUsage]

from hooks.errors import HubTrouble

MASK = "********"
# Names of query parameters that carry a secret: the Hub's documentation allows ?secret= in the address of a webhook.
SECRET_PARAMETERS = ("secret", "token", "key", "api_key", "apikey", "access_token", "password", "sig", "signature")

Status = Literal["enabled", "disabled", "suspended"]


class WebhookWatchedItem(huggingface_hub.WebhookWatchedItem):
    """One thing that a webhook watches; as text it is ``type:name``, and equal to huggingface_hub's of the same."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, huggingface_hub.WebhookWatchedItem):
            return NotImplemented
        return (self.type, self.name) == (other.type, other.name)

    __hash__ = None  # type: ignore[assignment]  # as the class it comes from: its fields may be set

    def __str__(self) -> str:
        return f"{self.type}:{self.name}"


@dataclass(repr=False, eq=False)
class WebhookInfo(huggingface_hub.WebhookInfo):
    """A webhook as the Hub tells it.

    ``disabled`` is what the Hub sent, which may be text (``"suspended-after-failure"``): see ``status``.

    Attributes:
        has_secret: whether it has one; newer Hubs tell this and not ``secret`` itself, which is None then.
        raw: all that the Hub sent, without values of secrets.
    """

    has_secret: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """``enabled``, ``disabled`` (by somebody) or ``suspended`` (by the Hub, after deliveries failed)."""
        return status_of(self.disabled)

    def __repr__(self) -> str:
        shown = {
            "id": self.id,
            "url": None if self.url is None else masked_url(self.url),
            "job": None if self.job is None else masked_job(self.job),
            "watched": self.watched,
            "domains": self.domains,
            "secret": MASK if self.has_secret else None,
            "disabled": self.disabled,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def status_of(disabled: object) -> Status:
    """The state that a webhook's ``disabled`` stands for."""
    if isinstance(disabled, str) and disabled.startswith("suspended"):
        return "suspended"
    return "disabled" if disabled else "enabled"


def read_webhook(told: object) -> WebhookInfo:
    """A webhook from the Hub's JSON.

    Raises:
        HubTrouble: it is none.
    """
    if not isinstance(told, Mapping):
        raise HubTrouble(f"the Hub answered {type(told).__name__} where a webhook was wanted")
    try:
        job = told.get("job")
        secret = told.get("secret")
        return WebhookInfo(
            id=str(told["id"]),
            url=told.get("url"),
            job=JobSpec(**job) if job else None,
            watched=[WebhookWatchedItem(type=item["type"], name=item["name"]) for item in told["watched"]],
            domains=list(told["domains"]),
            secret=secret,
            disabled=cast(bool, told["disabled"]),
            has_secret=bool(told.get("hasSecret", secret)),
            raw=_masked(told),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise HubTrouble(f"the Hub answered something that is no webhook: {type(error).__name__} {error}") from None


def masked_url(url: str) -> str:
    """An address without the password and the secret parameters that may be in it."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return MASK
    if password:
        host = parts.netloc.rpartition("@")[2]
        parts = parts._replace(netloc=f"{parts.username}:{MASK}@{host}")
    if any(name.lower() in SECRET_PARAMETERS for name, _ in parse_qsl(parts.query)):
        pairs = parse_qsl(parts.query, keep_blank_values=True)
        shown = [(name, MASK if name.lower() in SECRET_PARAMETERS else value) for name, value in pairs]
        parts = parts._replace(query=urlencode(shown, safe="*/:"))
    return parts.geturl()


def masked_job(job: JobSpec) -> JobSpec:
    """A copy that names its secrets without their values."""
    shown = copy.copy(job)
    if isinstance(job.secrets, Mapping):
        shown.secrets = dict.fromkeys(job.secrets, MASK)
    return shown


def _masked(told: Mapping[str, Any]) -> dict[str, Any]:
    shown = copy.deepcopy(dict(told))
    if shown.get("secret"):
        shown["secret"] = MASK
    if isinstance(shown.get("url"), str):
        shown["url"] = masked_url(shown["url"])
    job = shown.get("job")
    for holder in (shown, job):
        if isinstance(holder, dict) and isinstance(holder.get("secrets"), dict):
            holder["secrets"] = dict.fromkeys(holder["secrets"], MASK)
    return shown
