"""What the routes of one app share."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import sanic
from sanic.config import Config

from service.auth.guard import Guard
from service.doors.doors import Doors
from service.edge.limits import Creates
from service.edge.policy_places import PolicyPlaces
from service.engine.policy_reader import PolicyReader
from service.logs import RecentLogs
from service.loop_watchdog import LoopWatchdog
from service.metrics import Metrics
from service.models.models import Models
from service.recording.recordings import Recordings
from service.sessions.sessions import Sessions
from service.settings import Settings
from service.transport.rooms import RoomTable
from service.ui.live import Live
from service.updates.updates import Updates

if TYPE_CHECKING:
    # They import Ray, and PostgreSQL's driver, which only some servers need.
    from service.cluster.cluster import Cluster
    from service.cluster.front import FrontOfCluster


class OtherFronts(Protocol):
    """The other servers of a database, as far as routes ask for them (``service.cluster.redirects``)."""

    async def stop_all(self, request: "Request", reason: str) -> dict[str, Any]:
        """Stop the robots of all of them: how many, and which did not answer."""
        ...


@dataclass
class Context:
    """The app's ``ctx``.

    Attributes:
        documents: served file name to its bytes.
        page: the documentation's HTML and its Content-Security-Policy.
        versions: of this and of what matters below it.
        table: the embedded transport's rooms, or None when it is off.
        guard: who is let in where.
        creates: how often each caller may make a session.
        doors: for clients that need no rooms.
        loop_watchdog: how often the event loop was blocked.
        sessions, models, updates, recordings: there from the server's start to its stop.
        places: where policies may come from.
        policy_reader: what policies need, before they are loaded.
        live: pages that look on.
        engines: those of a cluster; None where policies run here.
        front, others: this server among those that share its database, and those; None for one of its own.
        importing: done when JAX is imported, which takes seconds; None where nothing needs it.
        started_at: monotonic.
    """

    settings: Settings
    documents: Mapping[str, bytes]
    page: tuple[bytes, str]
    versions: Mapping[str, str]
    metrics: Metrics
    logs: RecentLogs
    table: RoomTable | None
    guard: Guard
    places: PolicyPlaces
    policy_reader: PolicyReader
    live: Live
    creates: Creates
    doors: Doors
    loop_watchdog: LoopWatchdog
    started_at: float = field(default_factory=time.monotonic)
    importing: asyncio.Future[Any] | None = None
    engines: "Cluster | None" = None
    front: "FrontOfCluster | None" = None
    others: OtherFronts | None = None
    sessions: Sessions = field(init=False)
    models: Models = field(init=False)
    updates: Updates = field(init=False)
    recordings: Recordings = field(init=False)


App: TypeAlias = sanic.Sanic[Config, Context]
Request: TypeAlias = sanic.Request[App, SimpleNamespace]
