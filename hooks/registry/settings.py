"""Settings of a registry of webhooks."""

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from hooks.errors import InvalidSettings
from hooks.registry.delivery import WAITS

MIN_TOKEN = 16
POSITIVE = ("max_webhooks", "jobs_at_once", "suspend_after", "max_parallel", "max_waiting")


@dataclass(frozen=True)
class RegistrySettings:
    """Settings of a registry, for the operator.

    Attributes:
        tokens: accepted in ``Authorization: Bearer ...``; at least one.
        database: the SQLite file; None keeps everything in memory, and a restart loses it.
        allowed_networks: networks that may be sent to although they are not public, e.g. ``192.168.1.0/24``.
        jobs_file: TOML of the jobs that webhooks may start; None for none.
        max_webhooks: largest number of registered webhooks.
        jobs_at_once: largest number of jobs that run in parallel.
        suspend_after: number of deliveries in a row that failed for good, after which a webhook is suspended.
        waits: seconds before each attempt of a delivery.
        max_parallel: deliveries of one webhook that run at once; of one repo it is always one.
        max_waiting: deliveries of one webhook that may wait; above, the oldest are dropped.
        retention: seconds that finished deliveries stay in the log.
        max_retained: finished deliveries in the log, over all webhooks.
    """

    tokens: tuple[str, ...] = field(default=(), repr=False)
    database: Path | None = None
    allowed_networks: tuple[str, ...] = ()
    jobs_file: Path | None = None
    max_webhooks: int = 100
    jobs_at_once: int = 2
    suspend_after: int = 3
    waits: tuple[float, ...] = WAITS
    max_parallel: int = 4
    max_waiting: int = 1000
    retention: float = 14 * 24 * 3600.0
    max_retained: int = 10_000

    def __post_init__(self) -> None:
        wrong = []
        if not self.tokens:
            wrong.append(
                "no token is configured, and without one anybody could make this server send requests and start jobs; "
                "set at least one (e.g. from `openssl rand -hex 32`) and give it to clients as HF_TOKEN"
            )
        if any(len(token) < MIN_TOKEN or not token.isascii() for token in self.tokens):
            wrong.append(f"a token is shorter than {MIN_TOKEN} characters or not ASCII; make one: openssl rand -hex 32")
        for network in self.allowed_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                wrong.append(f"allowed network {network!r}: {error}; wanted e.g. 192.168.1.0/24")
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                wrong.append(f"{name}: {getattr(self, name)!r}, wanted more than 0")
        if not self.waits or any(not 0 <= wait < math.inf for wait in self.waits):
            wrong.append(f"waits: {self.waits!r}, wanted one number of seconds per attempt, none below 0")
        if wrong:
            raise InvalidSettings("registry of webhooks: " + "; ".join(wrong))
