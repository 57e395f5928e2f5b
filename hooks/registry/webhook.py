"""A registered webhook, and which events it wants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hooks.sending.schedule import iso

WATCHABLE = ("bucket", "dataset", "kernel", "model", "org", "space", "user")
DOMAINS = ("repo", "discussion", "session")
HUB_DOMAINS = DOMAINS[:2]

# What ``disabled`` says beside true and false, as on the Hub.
SUSPENDED = "suspended-after-failure"


@dataclass(frozen=True)
class Watched:
    """A repo by its type and name, or all of a user or org."""

    type: str
    name: str


@dataclass(frozen=True)
class Webhook:
    """One of ``url`` and ``job`` is set.

    Attributes:
        job: id of a job in the operator's file.
        disabled: empty while it gets events, ``disabled``, or ``SUSPENDED``.
        secrets: environment variables for the job.
    """

    id: str
    url: str | None
    job: str | None
    watched: tuple[Watched, ...]
    domains: tuple[str, ...]
    secret: str | None = field(default=None, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    disabled: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0

    def wire(self) -> dict[str, Any]:
        """As the Hub gives it; the secrets are never in it."""
        given: dict[str, Any] = {
            "id": self.id,
            "watched": [{"type": item.type, "name": item.name} for item in self.watched],
            "domains": list(self.domains),
            "hasSecret": bool(self.secret),
            "disabled": SUSPENDED if self.disabled == SUSPENDED else bool(self.disabled),
            "createdAt": iso(self.created_at),
            "updatedAt": iso(self.updated_at),
        }
        if self.url is not None:
            return given | {"url": self.url}
        # huggingface_hub makes a JobSpec of ``job``; what the job runs is the operator's business and stays here.
        return given | {"jobSourceId": self.job, "job": {"labels": {"id": self.job}}, "secretNames": [*self.secrets]}

    def wants(self, scope: str, repo_type: str, repo_name: str) -> bool:
        """Whether it gets a Hub event of this scope and repo."""
        domain = "discussion" if scope.split(".")[0] == "discussion" else "repo"
        if self.disabled or domain not in self.domains:
            return False
        name = repo_name.casefold()
        owner = name.partition("/")[0] if "/" in name else None
        return any(
            item.name.casefold() == (owner if item.type in ("user", "org") else name)
            and item.type in ("user", "org", repo_type)
            for item in self.watched
        )

    @property
    def wants_sessions(self) -> bool:
        """Whether it gets the events of sessions."""
        return not self.disabled and "session" in self.domains
