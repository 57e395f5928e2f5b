"""The engines of a Ray cluster, as one front uses them."""

import asyncio
import logging
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import GetTimeoutError, RayActorError, RayError  # pyright: ignore[reportMissingImports]

from jaxmodels.errors import CheckpointError
from service.cluster.messages import EngineOptions
from service.cluster.pool import NAMESPACE, Listed, Listing, find_pool
from service.cluster.remote_lane import RemoteLane
from service.cluster.remote_policy import RemotePolicy
from service.cluster.scaling import Bounds
from service.engine.device_lane import DeviceGone
from service.engine.engine import Engine
from service.errors import ServiceError

logger = logging.getLogger(__name__)

# Seconds between looks at the pool; that an answer of it may take; that the first engine may take until the server
# starts; after which an engine that the pool goes on listing is used again.
PERIOD = 0.5
ANSWER = 5.0
FIRST = 180.0
AGAIN = 5.0
# Seconds between looks whether an engine that something is waited for is still there.
LOOK = 0.5


class CannotJoin(Exception):
    """The cluster cannot be joined, or has no engine; the text says what to do."""


@dataclass(eq=False)
class _Known:
    """An engine that this front uses; the same actor has another name when it is used again."""

    name: str
    listed: Listed
    lane: RemoteLane
    joined_at: float
    is_gone: bool = False
    asking: asyncio.Task[None] | None = None
    policies: "WeakSet[RemotePolicy]" = field(default_factory=WeakSet)


class Cluster:
    """Joins a cluster and keeps an `Engine` told of its engines. An `Engines` for loaders' threads.

    Args:
        address: as Ray has it: ``local``, ``auto``, ``ray://host:port`` or ``host:port``.
        front: this front's name.
    """

    def __init__(self, address: str, front: str, options: EngineOptions, bounds: Bounds, *, stuck_after: float = 5.0):
        self.front = front
        self._address = address
        self._options, self._bounds = options, bounds
        self._stuck_after = stuck_after
        self._pool: Any = None
        self._known: dict[str, _Known] = {}
        self._times = 0
        self._trouble = ""
        self._engine: Engine | None = None
        self._life: asyncio.Task[None] | None = None

    async def open(self, engine: Engine) -> None:
        """Connect and wait for the first engine; from then on this one is told who comes and goes.

        Raises:
            CannotJoin: and why.
        """
        self._engine = engine
        await asyncio.to_thread(self._connect)
        differing = await self._begin()
        if differing:
            logger.warning("the engines are another front's, whose settings hold: %s", differing)
        until = time.monotonic() + FIRST
        while True:
            await self._look()
            if self._known:
                break
            if self._trouble or time.monotonic() > until:
                raise CannotJoin(self._trouble or f"no engine has begun for {FIRST:g} s; `ray status` says more")
            await asyncio.sleep(PERIOD)
        self._life = asyncio.create_task(self._run(), name="cluster")

    def _connect(self) -> None:
        try:
            ray.init(
                self._address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False if self._address == "local" else None,
            )
            self._pool = find_pool(self._options, self._bounds)
        except (RayError, ConnectionError, OSError, ValueError, RuntimeError, TimeoutError) as error:
            text = str(error).strip("'\"") or repr(error)
            raise CannotJoin(text.splitlines()[0]) from error

    async def _begin(self) -> str:
        return await asyncio.wait_for(self._pool.begin.remote(self.front, self._options, self._bounds), 60)

    async def _run(self) -> None:
        is_lost = False
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self._look()
            except (RayError, TimeoutError) as error:
                if not is_lost:
                    logger.warning("the pool of engines does not answer (%s); those known go on", type(error).__name__)
                is_lost = True
            except Exception:
                logger.exception("looking at the cluster failed")
            else:
                if is_lost:
                    logger.info("the pool of engines answers again")
                is_lost = False

    async def _look(self) -> None:
        listing: Listing | None = await asyncio.wait_for(self._pool.listing.remote(self.front), ANSWER)
        if listing is None:
            await self._begin()  # Ray restarted it
            return
        self._trouble = listing.trouble
        now, ours = time.monotonic(), version("robojax")
        there = {listed.name: listed for listed in listing.engines}
        assert self._engine is not None
        for known in tuple(self._known.values()):
            if known.listed.name not in there:
                self._leave(known, "it is not in the cluster any more")
            elif known.name in self._engine.failed and not known.is_gone:
                known.is_gone, known.joined_at = True, now
        for name, listed in there.items():
            known = next((one for one in self._known.values() if one.listed.name == name), None)
            if known is not None and known.is_gone and now - known.joined_at > AGAIN:
                # It failed here, and the pool finds it well: it stood still, or the network did.
                self._leave(known, "it failed")
                known = None
            if known is None and listed.begun.version != ours:
                self._trouble = f"engine {name} is robojax {listed.begun.version}, this front {ours}"
            elif known is None:
                self._join(listed, now)
        for known in self._known.values():
            if known.asking is None or known.asking.done():
                known.asking = asyncio.create_task(self._ask(known))

    def _join(self, listed: Listed, now: float) -> None:
        assert self._engine is not None
        self._times += 1
        name = listed.name.removeprefix("robojax-") + (
            "" if not any(one.listed.name == listed.name for one in self._known.values()) else f".{self._times}"
        )
        if name in self._engine.failed:
            name = f"{name}.{self._times}"
        lane = RemoteLane(name, self._sender(listed.actor), self._stuck_after)
        self._known[name] = _Known(name, listed, lane, now)
        self._engine.join(name, lane)
        logger.info("engine %s joins (%s, process %d)", name, listed.begun.node, listed.begun.process)

    def _leave(self, known: _Known, why: str) -> None:
        assert self._engine is not None
        known.is_gone = True
        del self._known[known.name]
        known.lane.fail(why)
        self._engine.leave(known.name, why)
        asyncio.get_running_loop().call_later(1.0, self._forget, known.name)

    def _forget(self, name: str) -> None:
        assert self._engine is not None
        task = asyncio.get_running_loop().create_task(self._engine.forget(name))
        task.add_done_callback(lambda task: task.exception())

    async def _ask(self, known: _Known) -> None:
        """How it does, and that its policies are still wanted here."""
        try:
            handles = sorted({policy.handle for policy in known.policies})
            known.lane.facts = await known.listed.actor.facts.remote(handles)
        except RayActorError as error:
            if self._known.get(known.name) is known:
                self._leave(known, f"its process ended ({type(error).__name__})")
        except RayError as error:
            logger.warning("%s: %s", known.name, type(error).__name__)
        await asyncio.sleep(PERIOD)

    def facts(self) -> dict[str, object]:
        """For the API; JSON-ready."""
        engines = [
            {
                "engine": known.name,
                "node": known.listed.begun.node,
                "process": known.listed.begun.process,
                "load": round(known.lane.facts.load, 4),
                "queue_ms": round(known.lane.facts.queue * 1e3, 2),
                "waiting": known.lane.facts.waiting,
                "policies": known.lane.facts.policies,
                "batches": {str(size): times for size, times in sorted(known.lane.facts.batches.items())},
                "batch_ms": list(known.lane.facts.batch_ms),
            }
            for known in self._known.values()
            if not known.is_gone
        ]
        return {"address": self._address, "engines": engines, "trouble": self._trouble or None}

    async def close(self) -> None:
        """Let go of the cluster; its engines go on for other fronts."""
        if self._life is not None:
            self._life.cancel()
        if self._pool is not None:
            with suppress(RayError, TimeoutError):  # it will notice by itself
                await asyncio.wait_for(self._pool.part.remote(self.front), 1.0)
        await asyncio.to_thread(ray.shutdown)

    @property
    def node_address(self) -> str:
        """Where other machines of the cluster reach this one."""
        return str(ray.util.get_node_ip_address())

    # For threads that load.

    def pick(self) -> str:
        """See `Engines.pick`: the one with the least to do."""
        known = [one for one in tuple(self._known.values()) if not one.is_gone]
        if not known:
            raise CheckpointError("no engine of the cluster is there; try again when one is")
        return min(known, key=lambda one: (one.lane.facts.policies, one.lane.facts.load, one.name)).name

    def call(self, engine: str, method: str, *arguments: Any) -> Any:
        """See `Engines.call`."""
        known = self._known.get(engine)
        if known is None:
            raise DeviceGone(f"engine {engine} is not there any more")
        asked = getattr(known.listed.actor, method).remote(*arguments)
        while True:
            try:
                return ray.get(asked, timeout=LOOK)
            except GetTimeoutError:
                if known.is_gone:
                    raise DeviceGone(f"engine {engine} is not there any more") from None
            except RayActorError as error:
                raise DeviceGone(f"engine {engine} ended") from error

    def keep(self, policy: RemotePolicy) -> None:
        """See `Engines.keep`."""
        known = self._known.get(policy.device)
        if known is not None:
            known.policies.add(policy)

    def put(self, piece: bytes) -> Any:
        """See `Engines.put`."""
        return ray.put(piece)

    def _sender(self, actor: Any) -> Any:
        def send(method: str, arguments: tuple[Any, ...], done: Any) -> None:
            def deliver(future: "Future[Any]") -> None:
                error = future.exception()
                done(future.result() if error is None else _plain(error))

            try:
                getattr(actor, method).remote(*arguments).future().add_done_callback(deliver)
            except Exception as error:
                done(_plain(error))

        return send


def _plain(error: BaseException) -> Exception:
    """Ray's errors carry what happened in the engine with all its traceback."""
    if isinstance(error, RayActorError):
        return DeviceGone(f"its process ended ({type(error).__name__})")
    if isinstance(error, ServiceError):
        return error
    logger.error("an engine raised", exc_info=error)
    return RuntimeError(f"the engine raised {type(error).__name__}")


def address_of(setting: str) -> str:
    """Ray's address for the setting ``engine``: ray-local, ray-auto, ray://host:port."""
    return {"ray-local": "local", "ray-auto": "auto"}.get(setting, setting)
