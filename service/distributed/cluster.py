"""Cluster: the Ray engines that one server uses."""

import asyncio
import logging
import time
from asyncio import Task
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # pyright: ignore[reportMissingImports] - an extra

from jaxmodels.errors import CheckpointError
from service.distributed.engine_actor import EngineOptions
from service.distributed.pool import Listed, Listing, find_pool
from service.distributed.ray_connection import CannotJoin, Connection, NoAnswer, ask, is_unanswered
from service.distributed.remote_engine import RemoteWorker
from service.distributed.replication import Copy, RetryState
from service.distributed.scaling import Bounds
from service.errors import ServiceError
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.policy_cache import summarize_error
from service.threads import Worker

logger = logging.getLogger(__name__)


class EngineHandle:
    """One engine from joining until leaving; the same actor gets another name when it is used again.

    Attributes:
        worker: where robots' requests go.
        joined_at: when it came, or failed here; monotonic.
        heard_at: when it said last how it does.
        is_gone: nothing is asked of it any more.
        watching: how it does. completing: with policies that it lacks.
        copies: that it has for this front; of the event loop alone.
    """

    def __init__(self, name: str, listed: Listed, joined_at: float, stuck_after: float):
        self.name = name
        self.listed = listed
        self.worker = RemoteWorker(name, self._send, stuck_after)
        self.joined_at = self.heard_at = joined_at
        self.is_gone = False
        self.watching: Task[None] | None = None
        self.completing: Task[None] | None = None
        self.copies: WeakSet[Copy] = WeakSet()
        self._open: set[Future[Any]] = set()
        self._why = ""

    def ask(self, method: str, *arguments: Any) -> "Future[Any]":
        """Call a method of the engine, as `Engines.ask`; from any thread."""
        answer: Future[Any] = Future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        if self.is_gone:
            _settle(answer, DeviceGone(self._why))
            return answer

        def deliver(asked: "Future[Any]") -> None:
            error = asked.exception()
            _settle(answer, asked.result() if error is None else self._unanswered(error))

        try:
            self._call(method, arguments).add_done_callback(deliver)
        except Exception as error:
            _settle(answer, self._unanswered(error))
        return answer

    def _unanswered(self, error: BaseException) -> BaseException:
        return DeviceGone(f"engine {self.name}: {why_gone(error)}") if _is_gone(error) else error

    def fail(self, why: str) -> None:
        """Mark the engine as gone and fail all pending calls, except those of robots, which the worker fails."""
        self.is_gone, self._why = True, f"engine {self.name} is not there any more: {why}"
        for answer in tuple(self._open):
            _settle(answer, DeviceGone(self._why))

    def _send(self, method: str, arguments: tuple[Any, ...], done: Callable[[Any], None]) -> None:
        def deliver(asked: "Future[Any]") -> None:
            error = asked.exception()
            done(asked.result() if error is None else _plain(error))

        try:
            self._call(method, arguments).add_done_callback(deliver)
        except Exception as error:
            done(_plain(error))

    def _call(self, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        return getattr(self.listed.actor, method).remote(*arguments).future()


def why_gone(error: BaseException) -> str:
    """Describe why an engine is gone: Ray does not always know whether it ended."""
    is_known = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    return f"{'its process ended' if is_known else 'it cannot be reached'} ({type(error).__name__})"


def _is_gone(error: BaseException) -> bool:
    # Others of Ray's errors are of what happened in the engine.
    return isinstance(error, RayActorError) or (not isinstance(error, RayError) and is_unanswered(error))


def _settle(answer: "Future[Any]", found: Any) -> None:
    with suppress(InvalidStateError):  # its engine left in the same moment
        if isinstance(found, BaseException):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def _plain(error: BaseException) -> Exception:
    """Convert an error of Ray, which carries the engine's whole traceback."""
    if _is_gone(error):
        return DeviceGone(why_gone(error))
    if isinstance(error, ServiceError):
        return error
    logger.error("an engine raised", exc_info=error)
    return RuntimeError(f"the engine raised {type(error).__name__}")


# Seconds between looks at the pool; that an answer of it may take, and its first one; that joining may take, and
# letting go at the end; that the first engine may take until the server starts; after which an engine that the pool
# goes on listing is used again.
PERIOD = 0.5
ANSWER = 3.0
BEGINNING = 60.0
JOINING, LETTING_GO = 60.0, 3.0
FIRST_ENGINE = 180.0
AGAIN = 5.0
# Seconds in which an engine may be silent while the pool is, too: less than robots wait for an answer, so that they are
# held until there is an engine, and have no error.
SILENT = 3.5
# Seconds in which nothing of the cluster answers, pool nor engines, after which it is joined anew: as long as engines
# answer, those are used. A machine that stood still is well again before.
GONE = 10.0

LOST = "the pool of engines does not answer"
REJOINING = "the cluster is lost; it is joined again as soon as its head answers"


class Cluster:
    """Joins a Ray cluster and tells an `Engine` which engines come and go. An `Engines` for loader threads.

    Args:
        address: as Ray has it: ``local``, ``auto``, ``ray://host:port`` or ``host:port``.
        front: this front's name.
    """

    def __init__(self, address: str, front: str, options: EngineOptions, bounds: Bounds, *, stuck_after: float = 5.0):
        self.front = front
        self._connection = Connection(address)
        # The processes of a Ray of our own end with the thread that started them: one that is there until the end.
        self._thread = Worker("cluster")
        self._options, self._bounds = options, bounds
        self._stuck_after = stuck_after
        self._pool: Any = None
        self._known: dict[str, EngineHandle] = {}
        self._lacking = RetryState()
        self._times = 0
        self._trouble = ""
        self._lost = ""
        self._heard_at = 0.0
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: asyncio.Task[None] | None = None

    async def open(self, engine: Engine) -> None:
        """Connect and wait for the first engine; from then on the `Engine` is told which engines come and go.

        Raises:
            CannotJoin: and why.
        """
        self._engine, self._loop = engine, asyncio.get_running_loop()
        try:
            await asyncio.wait_for(self._connect(), JOINING)
        except TimeoutError:
            raise CannotJoin(f"it has not been joined for {JOINING:g} s; `ray status` says more") from None
        await self._begin()
        self._heard_at = time.monotonic()
        until = self._heard_at + FIRST_ENGINE
        while True:
            try:
                await self._look()
            except NoAnswer as error:
                if time.monotonic() - self._heard_at > JOINING:
                    raise CannotJoin(f"{LOST} ({error}); `ray status` says more") from error
            if self._known:
                break
            if self._trouble or time.monotonic() > until:
                raise CannotJoin(self._trouble or f"no engine has begun for {FIRST_ENGINE:g} s; `ray status` says more")
            await asyncio.sleep(PERIOD)
        self._life = asyncio.create_task(self._run(), name="cluster")

    async def _connect(self) -> None:
        def connect() -> Any:
            self._connection.open()
            return find_pool(self._options, self._bounds)

        self._pool = await self._thread.submit(connect).outcome

    async def _begin(self) -> None:
        try:
            differing = await ask(self._pool, BEGINNING, "begin", self.front, self._options, self._bounds)
        except NoAnswer as error:
            raise CannotJoin(f"{LOST} ({error}); `ray status` says more") from error
        if differing:
            logger.warning("the engines are another front's, whose settings hold: %s", differing)

    async def _run(self) -> None:
        self._heard_at = time.monotonic()
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self._look()
            except (NoAnswer, CannotJoin) as error:
                if not self._lost:
                    logger.warning("%s (%s); engines that are known go on", LOST, error)
                self._lost = LOST
                self._doubt()
            except Exception:
                logger.exception("looking at the cluster failed")
            else:
                if self._lost:
                    logger.info("the pool of engines answers again")
                self._lost = ""
            if time.monotonic() - self._heard_at > GONE:
                await self._rejoin()

    def _doubt(self) -> None:
        """Remove engines that answer neither here nor to the pool, so that robots do not wait for them."""
        now = time.monotonic()
        for known in tuple(self._known.values()):
            if now - known.heard_at > SILENT:
                self._leave(known, "it does not answer, and neither does the pool")

    async def _rejoin(self) -> None:
        """Leave a lost cluster and join it again; robots are held meanwhile, each when its plan runs dry."""
        logger.error("nothing of the cluster has answered for %g s: %s", GONE, REJOINING)
        self._lost = REJOINING
        for known in tuple(self._known.values()):
            self._leave(known, "the cluster is lost")
        said = ""
        while trouble := await self._join_again():
            if trouble != said:
                logger.warning("the cluster cannot be joined again yet: %s", trouble)
            said = trouble
            await asyncio.sleep(AGAIN)
        self._heard_at, self._lost = time.monotonic(), ""
        logger.warning("the cluster is joined again")

    async def _join_again(self) -> str:
        """Try to join again; returns why it failed, or an empty text."""
        self._pool = None
        await self._thread.submit(self._connection.close).outcome
        try:
            await self._connect()
            await self._begin()
        except CannotJoin as error:
            return str(error)
        except Exception as error:  # of a cluster that is coming up, or going down again
            return summarize_error(error)
        return ""

    async def _look(self) -> None:
        listing: Listing | None = await ask(self._pool, ANSWER, "listing", self.front)
        self._heard_at = now = time.monotonic()
        if listing is None:
            await self._begin()  # Ray restarted it
            return
        self._trouble = listing.trouble
        ours = version("robojax")
        there = {listed.name: listed for listed in listing.engines}
        assert self._engine is not None
        for known in tuple(self._known.values()):
            if known.listed.name not in there:
                self._leave(known, "it is not in the cluster any more")
            elif known.name in self._engine.failed_devices and not known.is_gone:
                known.fail("it failed")
                known.joined_at = now
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
        self._complete(now)

    def _complete(self, now: float) -> None:
        """Start to copy missing policies to the engines that are due for another try."""
        there = {known.name: known for known in self._known.values() if not known.is_gone}
        self._lacking.keep(there, {copy.loaded.handle for known in there.values() for copy in known.copies})
        for name in self._lacking.due(now):
            known = there[name]
            if known.completing is None or known.completing.done():
                known.completing = asyncio.create_task(self._try_again(name), name=f"complete {name}")

    async def _try_again(self, name: str) -> None:
        assert self._engine is not None
        began = time.monotonic()
        await self._engine.copy_missing_policies(name)
        self._lacking.forget(name, began)

    def _join(self, listed: Listed, now: float) -> None:
        assert self._engine is not None
        self._times += 1
        name = listed.name.removeprefix("robojax-") + (
            "" if not any(one.listed.name == listed.name for one in self._known.values()) else f".{self._times}"
        )
        if name in self._engine.failed_devices:
            name = f"{name}.{self._times}"
        known = self._known[name] = EngineHandle(name, listed, now, self._stuck_after)
        known.watching = asyncio.create_task(self._watch(known), name=f"watch {name}")
        self._engine.add_device(name, known.worker)
        logger.info("engine %s joins (%s, process %d)", name, listed.begun.node, listed.begun.process)

    def _leave(self, known: EngineHandle, why: str) -> None:
        assert self._engine is not None
        del self._known[known.name]
        if known.watching is not None and known.watching is not asyncio.current_task():
            known.watching.cancel()
        known.fail(why)
        known.worker.fail(why)
        self._engine.retire_device(known.name, why)
        asyncio.get_running_loop().call_later(1.0, self._forget, known.name)

    def _forget(self, name: str) -> None:
        assert self._engine is not None
        task = asyncio.get_running_loop().create_task(self._engine.remove_device(name))
        task.add_done_callback(lambda task: task.exception())

    async def _watch(self, known: EngineHandle) -> None:
        """Poll one engine's state, which also tells it which policies are still used here."""
        while True:
            try:
                handles = sorted({copy.loaded.handle for copy in known.copies})
                known.worker.facts = await ask(known.listed.actor, ANSWER, "facts", handles)
                known.heard_at = self._heard_at = time.monotonic()
            except NoAnswer as error:
                cause = error.__cause__
                if cause is not None and isinstance(cause, RayActorError):
                    self._leave(known, why_gone(cause))
                    return
            except Exception:
                logger.exception("asking %s how it does failed", known.name)
            await asyncio.sleep(PERIOD)

    def facts(self) -> dict[str, object]:
        """Return state and load of all engines for the API; JSON-ready."""
        engines = [
            {
                "engine": known.name,
                "node": known.listed.begun.node,
                "process": known.listed.begun.process,
                "load": round(known.worker.facts.load, 4),
                "queue_ms": round(known.worker.facts.queue * 1e3, 2),
                "waiting": known.worker.facts.waiting,
                "policies": known.worker.facts.policies,
                "batches": {str(size): times for size, times in sorted(known.worker.facts.batches.items())},
                "batch_ms": list(known.worker.facts.batch_ms),
            }
            for known in self._known.values()
            if not known.is_gone
        ]
        trouble = "; ".join(filter(None, (self._lost, self._trouble, self._lacking.words(time.monotonic()))))
        return {"address": self._connection.address, "engines": engines, "trouble": trouble or None}

    async def close(self) -> None:
        """Leave the cluster; its engines go on for other servers."""
        if self._life is not None:
            self._life.cancel()
        if not self._lost:
            with suppress(NoAnswer):  # it will notice by itself
                await ask(self._pool, 1.0, "part", self.front)
        for known in self._known.values():
            known.fail("the server is ending")
            if known.watching is not None:
                known.watching.cancel()
            if known.completing is not None:
                known.completing.cancel()
        within = LETTING_GO / 3 if self._lost else LETTING_GO
        if self._lost != REJOINING:  # in which a thread of its own closes and opens it
            with suppress(TimeoutError):  # Ray waits for a cluster that is gone, and robots are held by now
                await asyncio.wait_for(self._thread.submit(self._connection.close).outcome, within)
        self._thread.close(0.0)

    # For threads that load.

    def pick(self) -> tuple[str, Sequence[str]]:
        """See `Engines.pick`: the engine with least to do, and those that have computed nothing for seconds."""
        there = [one for one in tuple(self._known.values()) if not one.is_gone]
        if not there:
            raise CheckpointError("no engine of the cluster is there; try again when one is")
        first, *others = sorted(there, key=lambda one: (one.worker.facts.policies, one.worker.facts.load, one.name))
        return first.name, [one.name for one in others if not one.worker.facts.load]

    def ask(self, engine: str, method: str, *arguments: Any) -> "Future[Any]":
        """See `Engines.ask`."""
        known = self._known.get(engine)
        if known is not None:
            return known.ask(method, *arguments)
        answer: Future[Any] = Future()
        answer.set_exception(DeviceGone(f"engine {engine} is not there any more"))
        return answer

    def keep(self, copy: Copy) -> None:
        """See `Engines.keep`."""
        self._on_loop(lambda: self._keep(copy))

    def _keep(self, copy: Copy) -> None:
        known = self._known.get(copy.engine)
        if known is not None:
            known.copies.add(copy)
            self._lacking.has(copy.engine, copy.loaded.handle)

    def lacks(self, engine: str, handle: str, why: str) -> None:
        """See `Engines.lacks`."""
        logger.warning("%s goes without policy %s: %s", engine, handle[:12], why)
        self._on_loop(lambda: self._lacking.failed(engine, handle, why, time.monotonic()))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "opened before anything is loaded"
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop has ended, and whoever wanted the policy with it.
            if not self._loop.is_closed():
                raise

    @property
    def connection(self) -> int:
        """See `Engines.connection`."""
        return self._connection.number

    def put(self, piece: bytes) -> Any:
        """See `Engines.put`."""
        if self._pool is None:  # Ray would start a cluster of its own
            raise CheckpointError(f"{REJOINING}; try again then")
        return ray.put(piece)
