"""A server's way into a cluster: engines first, so that it can serve, then its sessions among those of others."""

import asyncio
import os
import socket
from collections.abc import Sequence

from service.cluster.cluster import Cluster
from service.cluster.connection import CannotJoin, NoAnswer, address_of
from service.cluster.forwarding import Forwarding
from service.cluster.front import FrontOfCluster, NameTaken
from service.cluster.messages import EngineOptions
from service.cluster.remote_policy import RemoteLoader
from service.cluster.scaling import Bounds
from service.edge.origins import Origins
from service.edge.policy_places import opened_in
from service.engine.engine import Engine
from service.engine.loading import Inspection
from service.engine.progress import Durations
from service.errors import FrontNameTaken, NoEngine
from service.sessions.request import NewSession
from service.sessions.sessions import Sessions
from service.settings import Settings

# Seconds that the directory may take at a start.
PATIENCE = 60.0


class Joining:
    """What the composition of a server needs of `service.cluster`.

    Attributes:
        cluster, forwarding: used once it is open.
        load: loads policies into engines.
    """

    def __init__(self, settings: Settings):
        """Nothing is connected yet."""
        self._settings = settings
        options = EngineOptions(
            dtype=settings.dtype,
            devices=settings.devices or ((settings.device,) if settings.device else ()),
            together=settings.placement == "shard",
            batch_sizes=settings.engine_batch_sizes,
            stuck_after=settings.stuck_after,
            load_memory=settings.load_memory,
            resources=dict(settings.engine_resources),
        )
        bounds = Bounds(
            least=settings.engines, most=settings.engines_most or settings.engines, wait=settings.engine_wait
        )
        # Until it listens, its port is not known; nobody is told of this name before.
        self.cluster = Cluster(
            address_of(settings.engine),
            f"{socket.gethostname()}:{os.getpid()}",
            options,
            bounds,
            stuck_after=settings.stuck_after,
        )
        self.load = RemoteLoader(
            self.cluster,
            settings.policy_bytes,
            roots=opened_in(settings),
            inspect=Inspection(settings.load_memory),
        )
        self.forwarding = Forwarding(Origins(settings.origins))
        self._own: tuple[str, int] = ("127.0.0.1", settings.port)
        self._front: FrontOfCluster | None = None

    async def open(self, durations: Durations, own: Sequence[object] | None) -> Engine:
        """Connect; there is an engine when this returns.

        Args:
            own: address and port that this server listens on.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        if own is not None:
            self._own = (str(own[0]), int(str(own[1])))
        settings = self._settings
        engine = Engine(
            stuck_after=settings.stuck_after,
            durations=durations,
            load=settings.engine_load,
            are_elsewhere=True,
            patience=settings.engine_patience,
        )
        self.cluster.front = self._name
        try:
            await self.cluster.open(engine)
        except CannotJoin as error:
            await self.cluster.close()
            raise NoEngine(f"engine {settings.engine}: {error}") from error
        return engine

    async def share(self, sessions: Sessions) -> FrontOfCluster:
        """Tell other fronts of these sessions.

        Raises:
            NoEngine: the directory does not answer, or another server has the name of this front.
        """
        front = FrontOfCluster(self._name, self._url, sessions)
        try:
            await asyncio.wait_for(front.open(), PATIENCE)
        except NameTaken as error:
            raise FrontNameTaken(f"front_name {self._name}: {error}") from None
        except (TimeoutError, NoAnswer) as error:
            what = f"has not answered for {PATIENCE:g} s" if isinstance(error, TimeoutError) else "does not answer"
            raise NoEngine(f"the directory of the cluster {what}; `ray status` says more") from None
        self._front = self.forwarding.front = self.cluster.also = front
        return front

    @property
    def _name(self) -> str:
        return self._settings.front_name or f"{socket.gethostname()}:{self._own[1]}"

    @property
    def _url(self) -> str:
        if self._settings.front_url is not None:
            return self._settings.front_url
        host = self._own[0]
        if host in ("0.0.0.0", "::"):
            host = self.cluster.node_address
        return f"http://[{host}]:{self._own[1]}" if ":" in host else f"http://{host}:{self._own[1]}"

    async def claim(self, new: NewSession) -> None:
        """Take a session's id in the whole cluster; see `FrontOfCluster.claim`."""
        if self._front is not None:
            await self._front.claim(new)

    async def close(self) -> None:
        """Leave: sessions end, and other fronts see them as interrupted."""
        if self._front is not None:
            await self._front.close()
        await self.forwarding.close()
        await self.cluster.close()
