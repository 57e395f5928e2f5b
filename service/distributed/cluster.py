"""Cluster: the Ray engines that one server uses, through a gateway process. Imports no Ray."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, replace
from typing import Any

from jaxmodels import PolicyFolder
from jaxmodels.errors import CheckpointError
from service.distributed.config import ClusterSettings
from service.distributed.scaling import Bounds
from service.engines.connection import Connection
from service.engines.engine_set import EngineMember, EngineSet
from service.engines.host_process import HostProcess
from service.engines.messages import Begun, EngineOptions, LocalFolder
from service.engines.remote_loader import RemoteLoader
from service.engines.remote_policy import check_answer
from service.errors import NoEngine
from service.inference.config import PolicySettings
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.policy_sources import allowed_roots
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox
from service.threads import WorkerThread

logger = logging.getLogger(__name__)

# Seconds after which an engine that failed here and that the gateway still lists is used again.
REJOIN_AFTER = 5.0
# Seconds for which the gateway may be silent; it needs 3.5 s to notice that the pool or an engine is silent.
GATEWAY_SILENCE = 4.0
# Ray that is started for one server listens on 127.0.0.1 only, because this variable disables clusters of several
# machines, also on Linux. Ray replaces the address 127.0.0.1 in `ray.init` by the address of the machine otherwise.
LOCAL_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class Cluster(HostProcess):
    """Runs the gateway to a Ray cluster, and adds the engines of the cluster to an `EngineSet` as they come and go.

    Attributes:
        server_name: name of this server.
    """

    module = "service.distributed.gateway"
    # The gateway waits for 300 s at most: 60 s to join, 60 s for the pool, and 180 s for the first engine. It leaves
    # within 4 s.
    begin_timeout, end_timeout = 330.0, 4.5
    longest_pause = 5.0

    def __init__(self, address: str, server_name: str, options: EngineOptions, bounds: Bounds):
        # Ray reads the token and the certificates of a cluster from these variables.
        variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        if address == "local":
            variables |= LOCAL_VARIABLES
        super().__init__("the gateway to the cluster", EngineSet(address), WorkerThread("gateway"), variables)
        self.engines.read_trouble = lambda: self.trouble or self._listing_trouble
        self.server_name = server_name
        self._options, self._bounds = options, bounds
        self._head = ""
        self._join_count = 0
        self._listing_trouble = ""
        self._listed_at = 0.0

    def begin_arguments(self) -> tuple[Any, ...]:
        """Return the cluster to join, and what engines it should have."""
        return self.engines.address, self.server_name, self._options, astuple(self._bounds), self._head

    def on_begun(self, connection: Connection, answer: str) -> None:
        """Remember the address of the cluster's head, where the next gateway finds it."""
        self._head = answer

    def on_event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Take an event of the gateway."""
        if name == "listing":
            self._take_listing(*arguments)
        elif name == "left":
            self._remove_engine(*arguments)
        elif name == "lost":
            logger.error("%s; the cluster is joined again as soon as its head answers", *arguments)
            self.on_ended("the cluster is lost")
            if self._connection is not None:
                self._connection.close()
        else:
            super().on_event(name, arguments)

    def _take_listing(self, engines: Sequence[tuple[str, Begun]], trouble: str) -> None:
        self._listing_trouble = trouble
        now = self._listed_at = time.monotonic()
        for listed, begun in engines:
            member = self.members.get(listed)
            if member is not None and self.engines.has_failed(member.name) and not member.is_gone:
                member.fail("it failed")
                member.joined_at = now
            if member is not None and member.is_gone and now - member.joined_at > REJOIN_AFTER:
                # It failed here, and the pool finds it well: it stood still, or the network did.
                self._remove_engine(listed, "it failed")
                member = None
            if member is None:
                self._add_engine(listed, begun)

    def _add_engine(self, listed: str, begun: Begun) -> None:
        assert self._connection is not None, "only a connected gateway sends events"
        call = self._connection.call
        self._join_count += 1
        member = self.members[listed] = EngineMember(
            f"{listed}.{self._join_count}" if self.engines.has_failed(listed) else listed,
            begun,
            lambda method, *arguments: call(method, listed, *arguments),
            self._options.stuck_after,
            on_stuck=self._on_stuck,
            on_silent=self.kill,
            shortest_silence=GATEWAY_SILENCE,
        )
        self.engines.add(member)

    def _on_stuck(self, member: EngineMember, why: str) -> None:
        """Kill a silent gateway. The pool finds out whether an engine behind a gateway that answers is alive."""
        if time.monotonic() - self._listed_at > GATEWAY_SILENCE:
            self.kill(member, why)

    def _remove_engine(self, listed: str, why: str) -> None:
        if (member := self.members.pop(listed, None)) is not None:
            self.engines.retire(member, why)
            asyncio.get_running_loop().call_later(1.0, self._forget_engine, member)

    def _forget_engine(self, member: EngineMember) -> None:
        task = asyncio.get_running_loop().create_task(self.engines.forget(member))
        task.add_done_callback(lambda task: task.exception())

    def on_ended(self, why: str) -> None:
        """Send no more requests to the engines until the cluster is joined again."""
        self._listing_trouble = f"{why}; the cluster is joined again"
        super().on_ended(why)

    def share(self, folder: PolicyFolder, commit: str | None) -> LocalFolder:
        """Have the gateway put the files of a verified folder into the object store; blocks.

        Raises:
            CheckpointError: the files cannot be sent, or there is no gateway.
        """
        files = LocalFolder.of(folder, commit)
        try:
            engine, _ = self.engines.pick()
            return replace(files, sha=check_answer(self.engines.ask(engine, "pack", files).result()))
        except DeviceGone as error:
            raise CheckpointError(f"{folder.name}: cannot be sent to engines ({error}); try again") from error


class ClusterEngine:
    """Engine source whose devices are the engines of a Ray cluster.

    Attributes:
        cluster: usable while the source is open.
        load: loads policies into engines.
    """

    def __init__(self, policies: PolicySettings, settings: ClusterSettings, server_name: Callable[[], str]):
        """Prepare for the cluster of the settings; nothing is connected yet.

        Args:
            server_name: returns the name of this server once it listens.
        """
        self._policies, self._settings, self._server_name = policies, settings, server_name
        options = EngineOptions(
            dtype=policies.dtype,
            action_error=policies.action_error_percent / 100,
            devices=policies.devices or ((policies.device,) if policies.device else ()),
            together=policies.placement == "shard",
            batch_sizes=policies.engine_batch_sizes,
            stuck_after=policies.stuck_after,
            load_timeout=policies.load_timeout,
            resources=dict(settings.engine_resources),
        )
        bounds = Bounds(settings.engines, settings.engines_most or settings.engines, settings.engine_wait)
        address = {"ray-local": "local", "ray-auto": "auto"}.get(settings.engine, settings.engine)
        self.cluster = Cluster(address, "", options, bounds)
        self.load = RemoteLoader(
            self.cluster.engines,
            self.cluster.share,
            policies.policy_bytes,
            roots=allowed_roots(policies),
            inspect=CheckpointSandbox(policies.load_memory),
        )

    @asynccontextmanager
    async def open(self, durations: LoadDurations) -> AsyncIterator[Engine]:
        """Connect and wait for the first engine; the cluster is left when the context ends.

        Raises:
            NoEngine: the cluster cannot be joined, or has no engine.
        """
        engine = Engine(
            stuck_after=self._policies.stuck_after,
            durations=durations,
            max_load=self._policies.engine_load,
            are_remote=True,
            join_timeout=self._settings.engine_patience,
        )
        cluster = self.cluster
        cluster.server_name = self._server_name()
        cluster.engines.open(engine)
        task = asyncio.create_task(cluster.run(), name="gateway")
        try:
            await cluster.is_tried.wait()
            if cluster.trouble:
                raise NoEngine(f"engine {self._settings.engine}: {cluster.trouble}")
            yield engine
        finally:
            cluster.engines.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
