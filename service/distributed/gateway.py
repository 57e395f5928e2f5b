"""Gateway: the process between a server and a Ray cluster. Ray may end its driver, so the server is not the driver."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import ActorUnavailableError, RayActorError, RayError  # pyright: ignore[reportMissingImports]

from jaxmodels import PolicyFolder
from jaxmodels.errors import CheckpointError
from service.distributed.artifacts import PolicyArtifact, pack
from service.distributed.pool import Listed, Listing, get_or_create_pool
from service.distributed.ray_connection import CannotJoin, NoAnswer, call_actor, connect, means_no_answer, send_call
from service.distributed.scaling import Bounds
from service.engines.messages import EngineFacts, EngineOptions, LocalFolder, Refusal
from service.engines.process import METHODS, Answer, AnswerNow, SendEvent, main
from service.threads import WorkerThread, call_in_thread, settle

logger = logging.getLogger(__name__)

# Seconds between two polls of the pool, and limits in seconds for its answers, its first answer, joining, leaving, and
# the first engine. An engine that failed here joins again after the last value if the pool lists it.
POLL_PERIOD = 0.5
ANSWER_TIMEOUT = 3.0
BEGIN_TIMEOUT = 60.0
JOIN_TIMEOUT, LEAVE_TIMEOUT = 60.0, 3.0
FIRST_ENGINE_TIMEOUT = 180.0
REJOIN_AFTER = 5.0
# Seconds for which an engine may be silent while the pool is silent, too. Robots wait longer for an answer, so they are
# held until there is an engine, and get no error.
SILENCE_TIMEOUT = 3.5
# Seconds without any answer of the pool or an engine after which the cluster is joined again, by another gateway.
# Engines that answer are used. A machine that stalled recovers in less time.
LOSS_TIMEOUT = 10.0
# Seconds for which the files of a policy that no engine runs stay in the object store.
UNUSED_TIMEOUT = 60.0

POOL_SILENT = "the pool of engines does not answer"


@dataclass(eq=False)
class _RemoteEngine:
    listed: Listed
    # Sending large frames takes time, in which the answers of other engines are passed on.
    sender: ThreadPoolExecutor
    last_reply_at: float
    pending: set[asyncio.Future[Any]] = field(default_factory=set)


@dataclass
class _SharedFiles:
    artifact: PolicyArtifact
    last_used_at: float


class Gateway:
    """Passes the calls of a server on to Ray actors.

    It sends the server the events ``listing`` (engines that can be used and why some are missing), ``left`` (an engine
    and why it cannot be used any more) and ``lost`` (the cluster cannot be used any more).
    """

    def __init__(self, send_event: SendEvent):
        self._send_event = send_event
        # A local Ray ends with the thread that started it, so this thread lives until the process ends.
        self._thread = WorkerThread("cluster")
        self._pool: Any = None
        self._server = ""
        self._engines: dict[str, _RemoteEngine] = {}
        self._failed_at: dict[str, float] = {}
        self._files: dict[str, _SharedFiles] = {}
        self._pack_lock = asyncio.Lock()
        self._trouble = ""
        self._is_silent = False
        self._last_reply_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Answer a call of the server; the first argument of all but ``begin`` is the name of an engine."""
        if method == "begin":
            return await self._open(*arguments)
        engine, *others = arguments
        if method == "pack":
            return await self._pack(*others)
        if method == "load":
            return await self._load(engine, *others)
        if method == "facts":
            return await self._facts(engine, *others)
        if method not in METHODS:
            raise ValueError(f"no method {method!r}")
        return await self._call(engine, method, *others)

    async def _open(
        self, address: str, server_name: str, options: EngineOptions, bounds: Sequence[Any], head: str
    ) -> str | Refusal:
        """Join the cluster; when it is joined for the first time, also wait for the first engine.

        Args:
            address, head: see `connect`.
            server_name: name of the server.
            bounds: fields of `Bounds`.
        """
        self._server, self._options, self._bounds = server_name, options, Bounds(*bounds)

        def join() -> str:
            found = connect(address, head)
            self._pool = get_or_create_pool(options, self._bounds)
            return found

        try:
            try:
                found = await asyncio.wait_for(self._thread.submit(join), JOIN_TIMEOUT)
            except TimeoutError:
                raise CannotJoin(f"it has not been joined for {JOIN_TIMEOUT:g} s; `ray status` says more") from None
            await self._begin()
            self._last_reply_at = time.monotonic()
            if not head:
                await self._wait_for_engine()
        except CannotJoin as error:
            return Refusal("engine", str(error))
        self._task = asyncio.create_task(self._watch(), name="cluster")
        return found

    async def _begin(self) -> None:
        try:
            differing = await call_actor(self._pool, BEGIN_TIMEOUT, "begin", self._server, self._options, self._bounds)
        except NoAnswer as error:
            raise CannotJoin(f"{POOL_SILENT} ({error}); `ray status` says more") from error
        if differing:
            logger.warning("the engines are another server's, whose settings hold: %s", differing)

    async def _wait_for_engine(self) -> None:
        until = time.monotonic() + FIRST_ENGINE_TIMEOUT
        while True:
            try:
                await self._poll()
            except NoAnswer as error:
                if time.monotonic() - self._last_reply_at > JOIN_TIMEOUT:
                    raise CannotJoin(f"{POOL_SILENT} ({error}); `ray status` says more") from error
            if self._engines:
                return
            if self._trouble or time.monotonic() > until:
                raise CannotJoin(
                    self._trouble or f"no engine has begun for {FIRST_ENGINE_TIMEOUT:g} s; `ray status` says more"
                )
            await asyncio.sleep(POLL_PERIOD)

    async def _watch(self) -> None:
        self._last_reply_at = time.monotonic()
        while time.monotonic() - self._last_reply_at <= LOSS_TIMEOUT:
            await asyncio.sleep(POLL_PERIOD)
            try:
                await self._poll()
            except (NoAnswer, CannotJoin) as error:
                if not self._is_silent:
                    logger.warning("%s (%s); known engines are still used", POOL_SILENT, error)
                self._is_silent = True
                self._leave_silent_engines()
                self._report()
            except Exception:
                logger.exception("polling the cluster failed")
        self._pool = None
        self._send_event("lost", f"nothing of the cluster has answered for {LOSS_TIMEOUT:g} s")

    async def _poll(self) -> None:
        listing: Listing | None = await call_actor(self._pool, ANSWER_TIMEOUT, "listing", self._server)
        self._last_reply_at = now = time.monotonic()
        if self._is_silent:
            logger.info("the pool of engines answers again")
        self._is_silent = False
        if listing is None:
            await self._begin()  # Ray restarted it
            return
        self._trouble = listing.trouble
        ours = version("robojax")
        available = {listed.name.removeprefix("robojax-"): listed for listed in listing.engines}
        for name in self._engines.keys() - available.keys():
            self._leave(name, "it is not in the cluster any more")
        self._failed_at = {name: at for name, at in self._failed_at.items() if now - at < REJOIN_AFTER}
        for name, listed in available.items():
            if listed.begun.version != ours:
                self._trouble = f"engine {name} is robojax {listed.begun.version}, this server {ours}"
            elif name not in self._engines and name not in self._failed_at:
                sender = ThreadPoolExecutor(1, thread_name_prefix=f"engine {name}")
                self._engines[name] = _RemoteEngine(listed, sender, now)
        self._files = {sha: files for sha, files in self._files.items() if now - files.last_used_at < UNUSED_TIMEOUT}
        self._report()

    def _report(self) -> None:
        engines = [(name, engine.listed.begun) for name, engine in self._engines.items()]
        trouble = "; ".join(filter(None, (POOL_SILENT if self._is_silent else "", self._trouble)))
        self._send_event("listing", engines, trouble)

    def _leave_silent_engines(self) -> None:
        """Leave engines that answer neither here nor to the pool, so that robots do not wait for them."""
        now = time.monotonic()
        for name, engine in tuple(self._engines.items()):
            if now - engine.last_reply_at > SILENCE_TIMEOUT:
                self._leave(name, "it does not answer, and neither does the pool")

    def _leave(self, name: str, why: str) -> None:
        if (engine := self._engines.pop(name, None)) is None:
            return
        self._send_event("left", name, why)
        engine.sender.shutdown(wait=False)
        for outcome in tuple(engine.pending):
            settle(outcome, NoAnswer(why))

    def _fail(self, name: str, why: str) -> None:
        """Leave an engine that the pool may list for some time, because the pool does not know yet that it failed."""
        self._failed_at[name] = time.monotonic()
        self._leave(name, why)

    async def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of an engine; an engine that cannot be reached is left."""
        if (engine := self._engines.get(name)) is None:
            return Refusal("engine", f"engine {name} is not there any more")
        outcome = send_call(engine.sender.submit, engine.listed.actor, method, *arguments)
        engine.pending.add(outcome)
        try:
            return await outcome
        except Exception as error:
            # Other errors of Ray report what happened inside the engine.
            is_gone = isinstance(error, RayActorError | NoAnswer)
            if not is_gone and (isinstance(error, RayError) or not means_no_answer(error)):
                raise
            why = str(error) if isinstance(error, NoAnswer) else describe_loss(error)
            self._fail(name, why)
            return Refusal("engine", f"engine {name}: {why}")
        finally:
            engine.pending.discard(outcome)

    async def _facts(self, name: str, handles: Sequence[str], *needs: bool) -> EngineFacts | None:
        """Return an engine's load; None when it does not answer. The arguments are those of `EngineHost.facts`."""
        now = time.monotonic()
        for handle in handles:
            if (files := self._files.get(handle)) is not None:
                files.last_used_at = now
        if (engine := self._engines.get(name)) is None:
            return None
        try:
            actor = engine.listed.actor
            facts = await call_actor(actor, ANSWER_TIMEOUT, "facts", handles, *needs)
        except NoAnswer as error:
            cause = error.__cause__
            if cause is not None and isinstance(cause, RayActorError):
                self._fail(name, describe_loss(cause))
            return None
        self._last_reply_at = engine.last_reply_at = time.monotonic()
        return facts

    async def _pack(self, files: LocalFolder) -> str | Refusal:
        """Put a policy's files into the object store; returns the hash of their contents."""
        try:
            return (await self._put(files)).sha
        except (CheckpointError, OSError) as error:
            return Refusal("policy", str(error))

    async def _load(self, name: str, files: LocalFolder, like: str | None) -> Any:
        """Have an engine load a policy, whose files are put into the object store again if they are not there."""
        async with self._pack_lock:
            try:
                shared = self._files.get(files.sha)
                artifact = await self._put(files) if shared is None else shared.artifact
            except (CheckpointError, OSError) as error:
                return Refusal("policy", str(error))
        if artifact.sha != files.sha:
            why = f"{Path(files.path).name}: its files have changed since the session loaded them; restart the session"
            return Refusal("policy", why)
        return await self._call(name, "load_sent", artifact, like)

    async def _put(self, files: LocalFolder) -> PolicyArtifact:
        def put() -> PolicyArtifact:
            artifact = pack(Path(files.path), ray.put)
            with PolicyFolder(Path(files.path)) as folder:
                files.check(folder)
            return artifact

        artifact = await call_in_thread(put, "policy-files")
        self._files[artifact.sha] = _SharedFiles(artifact, time.monotonic())
        return artifact

    async def close(self) -> None:
        """Leave the cluster; its engines go on for other servers."""
        if self._task is not None:
            self._task.cancel()
        with suppress(NoAnswer):  # the pool will notice by itself
            await call_actor(self._pool, 1.0, "part", self._server)
        with suppress(TimeoutError):  # Ray waits for a cluster that is gone
            await asyncio.wait_for(self._thread.submit(ray.shutdown), LEAVE_TIMEOUT)


def describe_loss(error: BaseException) -> str:
    """Describe why an engine is gone: Ray does not always know whether it ended."""
    is_known = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
    return f"{'its process ended' if is_known else 'it cannot be reached'} ({type(error).__name__})"


@asynccontextmanager
async def open_gateway(send_event: SendEvent) -> AsyncIterator[tuple[Answer, AnswerNow]]:
    """Open a gateway, which joins a cluster with the first call."""
    gateway = Gateway(send_event)
    try:
        yield gateway.answer, lambda method, arguments: None
    finally:
        await gateway.close()


if __name__ == "__main__":
    main(open_gateway)
