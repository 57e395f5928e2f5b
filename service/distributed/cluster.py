"""Cluster: the Ray engines that one server uses, and the engine source that creates it from settings."""

import asyncio
import logging
import time
from asyncio import Task
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # pyright: ignore[reportMissingImports] - an extra

from jaxmodels.errors import CheckpointError
from service.distributed.config import ClusterSettings
from service.distributed.engine_actor import EngineOptions, Loaded
from service.distributed.pool import Listed, Listing, get_or_create_pool
from service.distributed.ray_connection import CannotJoin, Connection, NoAnswer, call_actor, means_no_answer
from service.distributed.remote_engine import RemoteLoader, RemoteWorker, RetryState
from service.distributed.scaling import Bounds
from service.errors import NoEngine
from service.inference.config import PolicySettings
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.policy_cache import summarize_error
from service.inference.policy_sources import allowed_roots
from service.inference.progress import LoadDurations
from service.inference.sandbox import CheckpointSandbox
from service.threads import Worker

logger = logging.getLogger(__name__)


class EngineHandle:
    """One engine from joining until leaving; the same actor gets another name when it is used again.

    Attributes:
        worker: sends the requests of robots to the engine.
        joined_at: monotonic time at which it joined, or failed here.
        last_reply_at: monotonic time at which it last reported its load.
        is_gone: no calls are sent to it any more.
        poll_task: polls its load.
        copy_task: copies missing policies to it.
        copies: policies in the engine that this server uses; for the event loop only.
    """

    def __init__(self, name: str, listed: Listed, joined_at: float, stuck_after: float):
        self.name = name
        self.listed = listed
        self.worker = RemoteWorker(name, self.ask, stuck_after)
        self.joined_at = self.last_reply_at = joined_at
        self.is_gone = False
        self.poll_task: Task[None] | None = None
        self.copy_task: Task[None] | None = None
        self.copies: WeakSet[Loaded] = WeakSet()
        self._pending: set[Future[Any]] = set()
        self._gone_reason = ""

    def ask(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the engine, from any thread.

        Returns:
            Its answer, or `DeviceGone` as soon as the engine is gone.
        """
        answer: Future[Any] = Future()
        self._pending.add(answer)
        answer.add_done_callback(self._pending.discard)
        if self.is_gone:
            _settle(answer, DeviceGone(self._gone_reason))
            return answer

        def deliver(reply: "Future[Any]") -> None:
            error = reply.exception()
            _settle(answer, reply.result() if error is None else self._translate(error))

        try:
            getattr(self.listed.actor, method).remote(*arguments).future().add_done_callback(deliver)
        except Exception as error:
            _settle(answer, self._translate(error))
        return answer

    def fail(self, why: str) -> None:
        """Mark the engine as gone and fail all pending calls, except those of robots, which the worker fails."""
        self.is_gone, self._gone_reason = True, f"engine {self.name} is not there any more: {why}"
        for answer in tuple(self._pending):
            _settle(answer, DeviceGone(self._gone_reason))

    def _translate(self, error: BaseException) -> BaseException:
        # Other errors of Ray report what happened inside the engine.
        is_gone = isinstance(error, RayActorError) or (not isinstance(error, RayError) and means_no_answer(error))
        return DeviceGone(f"engine {self.name}: {describe_loss(error)}") if is_gone else error


def describe_loss(error: BaseException) -> str:
    """Describe why an engine is gone: Ray does not always know whether it ended."""
    is_known = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    return f"{'its process ended' if is_known else 'it cannot be reached'} ({type(error).__name__})"


def _settle(answer: "Future[Any]", outcome: Any) -> None:
    with suppress(InvalidStateError):  # the engine left at the same moment
        if isinstance(outcome, BaseException):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)


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
    """

    def __init__(self, address: str, front: str, options: EngineOptions, bounds: Bounds, *, stuck_after: float = 5.0):
        self.front = front
        self._connection = Connection(address)
        # A local Ray ends with the thread that started it, so this thread lives until the server ends.
        self._thread = Worker("cluster")
        self._options, self._bounds = options, bounds
        self._stuck_after = stuck_after
        self._pool: Any = None
        self._members: dict[str, EngineHandle] = {}
        self._retries = RetryState()
        self._join_count = 0
        self._trouble = ""
        self._lost = ""
        self._last_reply_at = 0.0
        self._engine: Engine  # set by `open`, like the loop
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[None] | None = None

    async def open(self, engine: Engine) -> None:
        """Connect and wait for the first engine; from then on engines are added to the `Engine` and removed from it.

        Raises:
            CannotJoin: and why.
        """
        self._engine, self._loop = engine, asyncio.get_running_loop()
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
            if self._members:
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
        for member in tuple(self._members.values()):
            if now - member.last_reply_at > SILENCE_TIMEOUT:
                self._remove_engine(member, "it does not answer, and neither does the pool")

    async def _rejoin(self) -> None:
        """Leave a lost cluster and join it again; each robot is held when its plan is used up."""
        logger.error("nothing of the cluster has answered for %g s: %s", LOSS_TIMEOUT, CLUSTER_LOST)
        self._lost = CLUSTER_LOST
        for member in tuple(self._members.values()):
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
        for member in tuple(self._members.values()):
            if member.listed.name not in available:
                self._remove_engine(member, "it is not in the cluster any more")
            elif member.name in self._engine.devices.health.failed and not member.is_gone:
                member.fail("it failed")
                member.joined_at = now
        for name, listed in available.items():
            member = next((one for one in self._members.values() if one.listed.name == name), None)
            if member is not None and member.is_gone and now - member.joined_at > REJOIN_AFTER:
                # It failed here, and the pool finds it well: it stood still, or the network did.
                self._remove_engine(member, "it failed")
                member = None
            if member is None and listed.begun.version != ours:
                self._trouble = f"engine {name} is robojax {listed.begun.version}, this front {ours}"
            elif member is None:
                self._add_engine(listed, now)
        self._retry_copies(now)

    def _retry_copies(self, now: float) -> None:
        """Start to copy missing policies to the engines that are due for another try."""
        alive = {member.name: member for member in self._members.values() if not member.is_gone}
        self._retries.retain(alive, {copy.handle for member in alive.values() for copy in member.copies})
        for name in self._retries.due(now):
            member = alive[name]
            if member.copy_task is None or member.copy_task.done():
                member.copy_task = asyncio.create_task(self._copy_missing(name), name=f"complete {name}")

    async def _copy_missing(self, name: str) -> None:
        began = time.monotonic()
        await self._engine.replica_manager.copy_missing_policies(name)
        self._retries.drop_failures(name, began)

    def _add_engine(self, listed: Listed, now: float) -> None:
        self._join_count += 1
        name = listed.name.removeprefix("robojax-")
        if name in self._engine.devices.health.failed:
            name = f"{name}.{self._join_count}"
        member = self._members[name] = EngineHandle(name, listed, now, self._stuck_after)
        member.poll_task = asyncio.create_task(self._poll_engine(member), name=f"watch {name}")
        self._engine.replica_manager.add_device(name, member.worker)
        logger.info("engine %s joins (%s, process %d)", name, listed.begun.node, listed.begun.process)

    def _remove_engine(self, member: EngineHandle, why: str) -> None:
        del self._members[member.name]
        if member.poll_task is not None and member.poll_task is not asyncio.current_task():
            member.poll_task.cancel()
        member.fail(why)
        member.worker.fail(why)
        self._engine.replica_manager.retire_device(member.name, why)
        asyncio.get_running_loop().call_later(1.0, self._forget_device, member.name)

    def _forget_device(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._engine.replica_manager.remove_device(name))
        task.add_done_callback(lambda task: task.exception())

    async def _poll_engine(self, member: EngineHandle) -> None:
        """Poll one engine's load, which also reports to it which policies are still used here."""
        while True:
            try:
                handles = sorted({copy.handle for copy in member.copies})
                member.worker.facts = await call_actor(member.listed.actor, ANSWER_TIMEOUT, "facts", handles)
                member.last_reply_at = self._last_reply_at = time.monotonic()
            except NoAnswer as error:
                cause = error.__cause__
                if cause is not None and isinstance(cause, RayActorError):
                    self._remove_engine(member, describe_loss(cause))
                    return
            except Exception:
                logger.exception("polling the load of %s failed", member.name)
            await asyncio.sleep(POLL_PERIOD)

    def facts(self) -> dict[str, object]:
        """Return state and load of all engines for the API; JSON-ready."""
        engines = [
            {
                "engine": member.name,
                "node": member.listed.begun.node,
                "process": member.listed.begun.process,
                "load": round(member.worker.facts.load, 4),
                "queue_ms": round(member.worker.facts.queue * 1e3, 2),
                "waiting": member.worker.facts.waiting,
                "policies": member.worker.facts.policies,
                "batches": {str(size): times for size, times in sorted(member.worker.facts.batches.items())},
                "batch_ms": list(member.worker.facts.batch_ms),
            }
            for member in self._members.values()
            if not member.is_gone
        ]
        trouble = "; ".join(filter(None, (self._lost, self._trouble, self._retries.describe(time.monotonic()))))
        return {"address": self._connection.address, "engines": engines, "trouble": trouble or None}

    async def close(self) -> None:
        """Leave the cluster; its engines go on for other servers."""
        if self._task is not None:
            self._task.cancel()
        if not self._lost:
            with suppress(NoAnswer):  # it will notice by itself
                await call_actor(self._pool, 1.0, "part", self.front)
        for member in self._members.values():
            member.fail("the server is ending")
            if member.poll_task is not None:
                member.poll_task.cancel()
            if member.copy_task is not None:
                member.copy_task.cancel()
        within = LEAVE_TIMEOUT / 3 if self._lost else LEAVE_TIMEOUT
        if self._lost != CLUSTER_LOST:  # While it is lost, the thread leaves and joins it.
            with suppress(TimeoutError):  # Ray waits for a cluster that is gone, and robots are held by now
                await asyncio.wait_for(self._thread.submit(ray.shutdown), within)
        self._thread.close(0.0)

    # For threads that load policies.

    def pick_engines(self) -> tuple[str, Sequence[str]]:
        """Return the engine with the least work, to load a policy to first, and all others that are idle.

        Raises:
            CheckpointError: the cluster has no engine.
        """
        alive = [one for one in tuple(self._members.values()) if not one.is_gone]
        if not alive:
            raise CheckpointError("no engine of the cluster is there; try again when one is")
        first, *others = sorted(alive, key=lambda one: (one.worker.facts.policies, one.worker.facts.load, one.name))
        return first.name, [one.name for one in others if not one.worker.facts.load]

    def ask(self, engine: str, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the engine of this name; see `EngineHandle.ask`."""
        member = self._members.get(engine)
        if member is not None:
            return member.ask(method, *arguments)
        answer: Future[Any] = Future()
        answer.set_exception(DeviceGone(f"engine {engine} is not there any more"))
        return answer

    def keep_copy(self, engine: str, loaded: Loaded) -> None:
        """Keep a policy in an engine for as long as this object is referenced."""

        def keep() -> None:
            if (member := self._members.get(engine)) is not None:
                member.copies.add(loaded)
                self._retries.record_success(engine, loaded.handle)

        self._call_on_loop(keep)

    def record_failure(self, engine: str, handle: str, why: str) -> None:
        """Record that an engine could not load a policy that others have; it is tried again."""
        logger.warning("%s is missing policy %s: %s", engine, handle[:12], why)
        self._call_on_loop(lambda: self._retries.record_failure(engine, handle, why, time.monotonic()))

    def _call_on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop has ended, and with it the caller that loads the policy.
            if not self._loop.is_closed():
                raise

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
            load_memory=policies.load_memory,
            resources=dict(settings.engine_resources),
        )
        bounds = Bounds(settings.engines, settings.engines_most or settings.engines, settings.engine_wait)
        address = {"ray-local": "local", "ray-auto": "auto"}.get(settings.engine, settings.engine)
        self.cluster = Cluster(address, "", options, bounds, stuck_after=policies.stuck_after)
        self.load = RemoteLoader(
            self.cluster,
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
