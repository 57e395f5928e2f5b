"""Joins a cluster: engines first, then sessions."""

import os
import socket

from service.distributed.cluster import Cluster
from service.distributed.engine_actor import EngineOptions
from service.distributed.pool import Bounds
from service.distributed.ray_connection import CannotJoin, address_of
from service.distributed.remote_engine import RemoteLoader
from service.errors import NoEngine
from service.inference.engine import Engine
from service.inference.policy_sources import opened_in
from service.inference.progress import Durations
from service.inference.sandbox import CheckpointSandbox
from service.settings import Settings


class ClusterBootstrap:
    """What the composition of a server needs of `service.distributed`.

    Attributes:
        cluster: used once it is open.
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
            inspect=CheckpointSandbox(settings.load_memory),
        )

    async def open(self, durations: Durations, name: str) -> Engine:
        """Connect; there is an engine when this returns.

        Args:
            name: what this server is called.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        settings = self._settings
        engine = Engine(
            stuck_after=settings.stuck_after,
            durations=durations,
            load=settings.engine_load,
            are_elsewhere=True,
            patience=settings.engine_patience,
        )
        self.cluster.front = name
        try:
            await self.cluster.open(engine)
        except CannotJoin as error:
            await self.cluster.close()
            raise NoEngine(f"engine {settings.engine}: {error}") from error
        return engine

    async def close(self) -> None:
        """Leave."""
        await self.cluster.close()
