"""Cluster: the Ray engines that one server uses, and the engine source that creates it from settings."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # pyright: ignore[reportMissingImports] - an extra

from jaxmodels.errors import CheckpointError
from service.distributed.artifacts import PolicyArtifact, pack
from service.distributed.config import ClusterSettings
from service.distributed.pool import Listed, Listing, get_or_create_pool
from service.distributed.ray_connection import CannotJoin, Connection, NoAnswer, call_actor, means_no_answer
from service.distributed.scaling import Bounds
from service.engines.engine_set import EngineMember, EngineSet
from service.engines.messages import EngineOptions
from service.engines.remote_policy import RemoteLoader
from service.errors import NoEngine
from service.inference.config import PolicySettings
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.policy_cache import summarize_error
from service.inference.policy_sources import allowed_roots
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox
from service.threads import Worker, settle_threadsafe

logger = logging.getLogger(__name__)


# Methods that have another name in a Ray actor, because the files are sent to it.
RAY_METHODS = {"load": "load_sent"}


class RayMember(EngineMember):
    """An engine that is a Ray actor; the same actor gets another name when it is used again.

    Attributes:
        listed: the actor, as the pool lists it.
    """

    def __init__(self, name: str, listed: Listed, stuck_after: float):
        super().__init__(name, listed.begun, stuck_after)
        self.listed = listed
        # Sending large frames takes time, and the event loop has ticks to keep.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"engine {name}")

    def _call(self, method: str, arguments: tuple[Any, ...], deliver: Callable[[Any], None]) -> None:
        def take(reply: "Future[Any]") -> None:
            error = reply.exception()
            deliver(reply.result() if error is None else self._translate(error))

        try:
            remote = getattr(self.listed.actor, RAY_METHODS.get(method, method)).remote
            remote(*arguments).future().add_done_callback(take)
        except Exception as error:
            deliver(self._translate(error))

    def act(self, outcome: asyncio.Future[Any], *arguments: Any) -> None:
        loop = outcome.get_loop()

        def send() -> None:
            if not outcome.done():  # it failed while an earlier request was being sent
                self._call("act", arguments, lambda answer: settle_threadsafe(loop, outcome, answer))

        self._sender.submit(send)

    def on_stuck(self) -> None:
        """Do nothing: the pool finds out whether the engine lives."""

    def fail(self, why: str) -> None:
        """Mark the engine as gone and fail all pending calls."""
        super().fail(why)
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _translate(self, error: BaseException) -> BaseException:
        # Other errors of Ray report what happened inside the engine.
        is_gone = isinstance(error, RayActorError) or (not isinstance(error, RayError) and means_no_answer(error))
        return DeviceGone(f"engine {self.name}: {describe_loss(error)}") if is_gone else error


def describe_loss(error: BaseException) -> str:
    """Describe why an engine is gone: Ray does not always know whether it ended."""
    is_known = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    return f"{'its process ended' if is_known else 'it cannot be reached'} ({type(error).__name__})"


class RayFiles:
    """A policy's files in the object store of a cluster, packed again when the cluster was joined again."""

    def __init__(self, cluster: "Cluster", folder: Path):
        """Pack the files; raises CheckpointError if they cannot be sent."""
        self._cluster, self._folder = cluster, folder
        self._artifact, self._packed_connection = pack(folder, cluster.put), cluster.connection

    def __call__(self) -> PolicyArtifact:
        """Return the files in the store of the present connection; raises CheckpointError if they changed."""
        if (connection := self._cluster.connection) != self._packed_connection:
            artifact = pack(self._folder, self._cluster.put)
            if artifact.sha != self._artifact.sha:
                raise CheckpointError(
                    f"{self._folder.name}: the files there are others than those that run; restart the session"
                )
            self._artifact, self._packed_connection = artifact, connection
        return self._artifact


# Seconds between two polls of the pool, for its answers, for its first answer, for joining, for leaving at the end, and
# for the first engine at a start. After the last figure, a failed engine that the pool still lists is used again.
POLL_PERIOD = 0.5
ANSWER_TIMEOUT = 3.0
BEGIN_TIMEOUT = 60.0
JOIN_TIMEOUT, LEAVE_TIMEOUT = 60.0, 3.0
FIRST_ENGINE_TIMEOUT = 180.0
REJOIN_AFTER = 5.0
# Seconds for which an engine may be silent while the pool is silent, too. Robots wait longer for an answer, so they are
# held until there is an engine, and get no error.
SILENCE_TIMEOUT = 3.5
# Seconds without any answer of the pool or an engine after which the cluster is joined again. Engines that answer are
# used. A machine that stalled recovers in less time.
LOSS_TIMEOUT = 10.0

POOL_SILENT = "the pool of engines does not answer"
CLUSTER_LOST = "the cluster is lost; it is joined again as soon as its head answers"


class Cluster:
    """Joins a Ray cluster and adds its engines to an `Engine` as they come and go.

    Args:
        address: Ray's address: ``local``, ``auto``, ``ray://host:port`` or ``host:port``.
        front: name of this server.

    Attributes:
        engines: its engines.
    """

    def __init__(self, address: str, front: str, options: EngineOptions, bounds: Bounds, *, stuck_after: float = 5.0):
        self.front = front
        self._connection = Connection(address)
        # A local Ray ends with the thread that started it, so this thread lives until the server ends.
        self._thread = Worker("cluster")
        self._options, self._bounds = options, bounds
        self._stuck_after = stuck_after
        self._pool: Any = None
        self.engines = EngineSet(address)
        self.engines.read_trouble = lambda: "; ".join(filter(None, (self._lost, self._trouble)))
        self._join_count = 0
        self._trouble = ""
        self._lost = ""
        self._last_reply_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def open(self, engine: Engine) -> None:
        """Connect and wait for the first engine; from then on engines are added to the `Engine` and removed from it.

        Raises:
            CannotJoin: and why.
        """
        self.engines.open(engine)
        try:
            await asyncio.wait_for(self._connect(), JOIN_TIMEOUT)
        except TimeoutError:
            raise CannotJoin(f"it has not been joined for {JOIN_TIMEOUT:g} s; `ray status` says more") from None
        await self._begin()
        self._last_reply_at = time.monotonic()
        until = self._last_reply_at + FIRST_ENGINE_TIMEOUT
        while True:
            try:
                await self._poll()
            except NoAnswer as error:
                if time.monotonic() - self._last_reply_at > JOIN_TIMEOUT:
                    raise CannotJoin(f"{POOL_SILENT} ({error}); `ray status` says more") from error
            if self.engines.members:
                break
            if self._trouble or time.monotonic() > until:
                raise CannotJoin(
                    self._trouble or f"no engine has begun for {FIRST_ENGINE_TIMEOUT:g} s; `ray status` says more"
                )
            await asyncio.sleep(POLL_PERIOD)
        self._task = asyncio.create_task(self._run(), name="cluster")

    async def _connect(self) -> None:
        def connect() -> Any:
            self._connection.open()
            return get_or_create_pool(self._options, self._bounds)

        self._pool = await self._thread.submit(connect)

    async def _begin(self) -> None:
        try:
            differing = await call_actor(self._pool, BEGIN_TIMEOUT, "begin", self.front, self._options, self._bounds)
        except NoAnswer as error:
            raise CannotJoin(f"{POOL_SILENT} ({error}); `ray status` says more") from error
        if differing:
            logger.warning("the engines are another front's, whose settings hold: %s", differing)

    async def _run(self) -> None:
        self._last_reply_at = time.monotonic()
        while True:
            await asyncio.sleep(POLL_PERIOD)
            try:
                await self._poll()
            except (NoAnswer, CannotJoin) as error:
                if not self._lost:
                    logger.warning("%s (%s); engines that are known go on", POOL_SILENT, error)
                self._lost = POOL_SILENT
                self._remove_silent_engines()
            except Exception:
                logger.exception("polling the cluster failed")
            else:
                if self._lost:
                    logger.info("the pool of engines answers again")
                self._lost = ""
            if time.monotonic() - self._last_reply_at > LOSS_TIMEOUT:
                await self._rejoin()

    def _remove_silent_engines(self) -> None:
        """Remove engines that answer neither here nor to the pool, so that robots do not wait for them."""
        now = time.monotonic()
        for member in self._members():
            if now - member.last_reply_at > SILENCE_TIMEOUT:
                self._remove_engine(member, "it does not answer, and neither does the pool")

    async def _rejoin(self) -> None:
        """Leave a lost cluster and join it again; each robot is held when its plan is used up."""
        logger.error("nothing of the cluster has answered for %g s: %s", LOSS_TIMEOUT, CLUSTER_LOST)
        self._lost = CLUSTER_LOST
        for member in self._members():
            self._remove_engine(member, "the cluster is lost")
        reported = ""
        while trouble := await self._try_rejoin():
            if trouble != reported:
                logger.warning("the cluster cannot be joined again yet: %s", trouble)
            reported = trouble
            await asyncio.sleep(REJOIN_AFTER)
        self._last_reply_at, self._lost = time.monotonic(), ""
        logger.warning("the cluster is joined again")

    async def _try_rejoin(self) -> str:
        """Try to join again; returns why it failed, or an empty text."""
        self._pool = None
        await self._thread.submit(ray.shutdown)
        try:
            await self._connect()
            await self._begin()
        except CannotJoin as error:
            return str(error)
        except Exception as error:  # The cluster is starting, or ending again.
            return summarize_error(error)
        return ""

    async def _poll(self) -> None:
        listing: Listing | None = await call_actor(self._pool, ANSWER_TIMEOUT, "listing", self.front)
        self._last_reply_at = now = time.monotonic()
        if listing is None:
            await self._begin()  # Ray restarted it
            return
        self._trouble = listing.trouble
        ours = version("robojax")
        available = {listed.name: listed for listed in listing.engines}
        for member in self._members():
            if member.listed.name not in available:
                self._remove_engine(member, "it is not in the cluster any more")
            elif self.engines.has_failed(member.name) and not member.is_gone:
                member.fail("it failed")
                member.joined_at = now
        for name, listed in available.items():
            member = next((one for one in self._members() if one.listed.name == name), None)
            if member is not None and member.is_gone and now - member.joined_at > REJOIN_AFTER:
                # It failed here, and the pool finds it well: it stood still, or the network did.
                self._remove_engine(member, "it failed")
                member = None
            if member is None and listed.begun.version != ours:
                self._trouble = f"engine {name} is robojax {listed.begun.version}, this front {ours}"
            elif member is None:
                self._add_engine(listed)
        self.engines.retry_copies()

    def _members(self) -> list[RayMember]:
        return [member for member in self.engines.members.values() if isinstance(member, RayMember)]

    def _add_engine(self, listed: Listed) -> None:
        self._join_count += 1
        name = listed.name.removeprefix("robojax-")
        if self.engines.has_failed(name):
            name = f"{name}.{self._join_count}"
        member = RayMember(name, listed, self._stuck_after)
        self.engines.add(member, lambda: self._poll_engine(member))

    def _remove_engine(self, member: RayMember, why: str) -> None:
        self.engines.retire(member, why)
        asyncio.get_running_loop().call_later(1.0, self._forget_engine, member)

    def _forget_engine(self, member: RayMember) -> None:
        task = asyncio.get_running_loop().create_task(self.engines.forget(member))
        task.add_done_callback(lambda task: task.exception())

    async def _poll_engine(self, member: RayMember) -> None:
        """Poll one engine's load, which also reports to it which policies are still used here."""
        while True:
            try:
                arguments = self.engines.poll_arguments(member)
                facts = await call_actor(member.listed.actor, ANSWER_TIMEOUT, "facts", *arguments)
                self.engines.take_facts(member, facts)
                self._last_reply_at = member.last_reply_at
            except NoAnswer as error:
                cause = error.__cause__
                if cause is not None and isinstance(cause, RayActorError):
                    self._remove_engine(member, describe_loss(cause))
                    return
            except Exception:
                logger.exception("polling the load of %s failed", member.name)
            await asyncio.sleep(POLL_PERIOD)

    async def close(self) -> None:
        """Leave the cluster; its engines go on for other servers."""
        if self._task is not None:
            self._task.cancel()
        if not self._lost:
            with suppress(NoAnswer):  # it will notice by itself
                await call_actor(self._pool, 1.0, "part", self.front)
        self.engines.close()
        within = LEAVE_TIMEOUT / 3 if self._lost else LEAVE_TIMEOUT
        if self._lost != CLUSTER_LOST:  # While it is lost, the thread leaves and joins it.
            with suppress(TimeoutError):  # Ray waits for a cluster that is gone, and robots are held by now
                await asyncio.wait_for(self._thread.submit(ray.shutdown), within)
        self._thread.close(0.0)

    @property
    def connection(self) -> int:
        """Number of the present connection; objects in the store of an earlier one are gone."""
        return self._connection.number

    def put(self, piece: bytes) -> Any:
        """Put bytes into the object store, for any number of engines."""
        if self._pool is None:  # Ray would start a cluster of its own
            raise CheckpointError(f"{CLUSTER_LOST}; try again then")
        return ray.put(piece)


class ClusterEngine:
    """Engine source whose devices are the engines of a Ray cluster.

    Attributes:
        cluster: usable while the source is open.
        load: loads policies into engines.
    """

    def __init__(self, policies: PolicySettings, settings: ClusterSettings, front_name: Callable[[], str]):
        """Prepare for the cluster of the settings; nothing is connected yet.

        Args:
            front_name: returns the name of this server once it listens.
        """
        self._policies, self._settings, self._front_name = policies, settings, front_name
        options = EngineOptions(
            dtype=policies.dtype,
            devices=policies.devices or ((policies.device,) if policies.device else ()),
            together=policies.placement == "shard",
            batch_sizes=policies.engine_batch_sizes,
            stuck_after=policies.stuck_after,
            load_timeout=policies.load_timeout,
            resources=dict(settings.engine_resources),
        )
        bounds = Bounds(settings.engines, settings.engines_most or settings.engines, settings.engine_wait)
        address = {"ray-local": "local", "ray-auto": "auto"}.get(settings.engine, settings.engine)
        self.cluster = Cluster(address, "", options, bounds, stuck_after=policies.stuck_after)
        self.load = RemoteLoader(
            self.cluster.engines,
            lambda folder, commit: RayFiles(self.cluster, folder.path),
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
        self.cluster.front = self._front_name()
        try:
            try:
                await self.cluster.open(engine)
            except CannotJoin as error:
                raise NoEngine(f"engine {self._settings.engine}: {error}") from error
            yield engine
        finally:
            await self.cluster.close()
