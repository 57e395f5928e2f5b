"""Bootstrap of a cluster: connects to Ray and creates the engine whose devices are in it."""

import os
import socket

from service.distributed.cluster import Cluster
from service.distributed.config import ClusterSettings
from service.distributed.engine_actor import EngineOptions
from service.distributed.ray_connection import CannotJoin, to_ray_address
from service.distributed.remote_engine import RemoteLoader
from service.distributed.scaling import Bounds
from service.errors import NoEngine
from service.inference.config import PolicySettings
from service.inference.engine import Engine
from service.inference.policy_sources import allowed_roots
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox


class ClusterBootstrap:
    """Creates the cluster, its policy loader and its engine from settings.

    Attributes:
        cluster: used once it is open.
        load: loads policies into engines.
    """

    def __init__(self, policies: PolicySettings, cluster: ClusterSettings):
        """Prepare everything; nothing is connected yet."""
        self._policies, self._settings = policies, cluster
        options = EngineOptions(
            dtype=policies.dtype,
            devices=policies.devices or ((policies.device,) if policies.device else ()),
            together=policies.placement == "shard",
            batch_sizes=policies.engine_batch_sizes,
            stuck_after=policies.stuck_after,
            load_memory=policies.load_memory,
            resources=dict(cluster.engine_resources),
        )
        bounds = Bounds(least=cluster.engines, most=cluster.engines_most or cluster.engines, wait=cluster.engine_wait)
        # Until it listens, its port is not known; this name is announced to nobody before.
        self.cluster = Cluster(
            to_ray_address(cluster.engine),
            f"{socket.gethostname()}:{os.getpid()}",
            options,
            bounds,
            stuck_after=policies.stuck_after,
        )
        self.load = RemoteLoader(
            self.cluster,
            policies.policy_bytes,
            roots=allowed_roots(policies),
            inspect=CheckpointSandbox(policies.load_memory),
        )

    async def open(self, durations: LoadDurations, name: str) -> Engine:
        """Connect and wait for the first engine.

        Args:
            name: what this server is called.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        policies, cluster = self._policies, self._settings
        engine = Engine(
            stuck_after=policies.stuck_after,
            durations=durations,
            max_load=policies.engine_load,
            are_remote=True,
            join_timeout=cluster.engine_patience,
        )
        self.cluster.front = name
        try:
            await self.cluster.open(engine)
        except CannotJoin as error:
            await self.cluster.close()
            raise NoEngine(f"engine {cluster.engine}: {error}") from error
        return engine

    async def close(self) -> None:
        """Leave the cluster."""
        await self.cluster.close()
