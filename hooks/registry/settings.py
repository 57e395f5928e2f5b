"""How the registry is set up."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hooks.errors import InvalidSettings
from hooks.sending.post import TIMEOUT
from hooks.sending.sender import SenderSettings
from hooks.sending.targets import TargetRules

MIN_TOKEN = 16
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


@dataclass(frozen=True)
class RegistrySettings:
    """What the operator decides.

    Attributes:
        tokens: ``Authorization: Bearer ...`` of those who may manage webhooks; at least one.
        read_tokens: of those who may only look.
        database: the SQLite file; None keeps everything in memory, and a restart loses it.
        owner: the user name that ``/api/whoami-v2`` gives.
        allowed_networks: networks that may be sent to although they are not public, e.g. ``192.168.1.0/24``.
        folders: policy folders that are watched, by the name of the repo that they are to the receivers.
        jobs_file: TOML of the jobs that webhooks may start; None for none.
        max_webhooks: that may be registered.
        quiet: seconds without a change after which a watched folder is taken as whole.
        poll: seconds between looks at the folders without being told of a change (network file systems tell nothing).
        timeout: seconds for one attempt.
        jobs_at_once: processes of jobs that run at once.
        suspend_after: deliveries in a row that were given up, after which a webhook is suspended.
        sender: retries, order, retention.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    read_tokens: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    owner: str = "robojax"
    allowed_networks: tuple[str, ...] = ()
    folders: Mapping[str, Path] = field(default_factory=dict)
    jobs_file: Path | None = None
    max_webhooks: int = 100
    quiet: float = 2.0
    poll: float = 30.0
    timeout: float = TIMEOUT
    jobs_at_once: int = 2
    suspend_after: int = 3
    sender: SenderSettings = field(default_factory=SenderSettings)

    def __post_init__(self) -> None:
        wrong = []
        if not self.tokens:
            wrong.append(
                "no token is configured, and without one anybody could make this server send requests and start jobs; "
                "set at least one (e.g. from `openssl rand -hex 32`) and give it to clients as HF_TOKEN"
            )
        if any(len(token) < MIN_TOKEN or not token.isascii() for token in (*self.tokens, *self.read_tokens)):
            wrong.append(f"a token is shorter than {MIN_TOKEN} characters or not ASCII; make one: openssl rand -hex 32")
        for network in self.allowed_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                wrong.append(f"allowed network {network!r}: {error}; wanted e.g. 192.168.1.0/24")
        wrong += [
            f"folder {name!r}: wanted a repo's name, e.g. act or lab/act=/srv/act"
            for name in self.folders
            if not _NAME.fullmatch(name)
        ]
        for name in ("max_webhooks", "jobs_at_once", "suspend_after", "quiet", "poll", "timeout"):
            if not getattr(self, name) > 0:
                wrong.append(f"{name}: {getattr(self, name)!r}, wanted more than 0")
        if wrong:
            raise InvalidSettings("registry of webhooks: " + "; ".join(wrong))

    @property
    def rules(self) -> TargetRules:
        """Which addresses may be sent to."""
        return TargetRules.of(self.allowed_networks)
