"""Pool of engines: one Ray actor that creates, watches and scales engine actors for all servers.

Ray restarts the pool on another machine when its machine fails. The engines continue, and the new pool finds them by
their names. Ray Serve is slower, and hides which engine owes an answer, so a server could not ask another in time.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ray  # pyright: ignore[reportMissingImports] - an extra
from ray.exceptions import RayActorError, RayError  # pyright: ignore[reportMissingImports]

import jaxmodels
from jaxmodels import PolicyFolder
from jaxmodels.errors import JaxModelsError
from service.distributed.artifacts import PolicyArtifact, unpack
from service.distributed.ray_connection import NAMESPACE
from service.distributed.scaling import PLACEMENT_TIMEOUT, Bounds, Scaling, explain_shortage
from service.engines.host import EngineHost
from service.engines.messages import Begun, EngineFacts, EngineOptions, Loaded, LocalFolder, Refusal
from service.threads import call_in_thread

logger = logging.getLogger(__name__)

POOL_NAME = "robojax-pool"
ENGINE_PREFIX = "robojax-engine-"
# Calls that an actor runs side by side: its work is in threads of its own, and waiting costs nothing.
MAX_CONCURRENCY = 4096

# Seconds between two polls of all engines; that one may be silent before it is replaced; that it may take to begin.
POLL_PERIOD = 0.5
SILENCE_TIMEOUT = 4.0
BEGIN_TIMEOUT = 120.0
# Seconds for which servers may still use an engine that is removed, seconds before another engine is created after a
# refusal, and seconds without a request of a server after which the pool ends.
RELEASE_SECONDS = 5.0
REFUSAL_PAUSE = 20.0
IDLE_TIMEOUT = 60.0


@dataclass(frozen=True)
class Listed:
    """An engine that servers may use.

    Attributes:
        actor: Ray's handle.
    """

    name: str
    actor: Any
    begun: Begun


@dataclass(frozen=True)
class Listing:
    """The pool's answer to a server.

    Attributes:
        trouble: why there are fewer engines than there should be, or an empty text.
    """

    engines: Sequence[Listed] = ()
    trouble: str = ""


@dataclass(eq=False)
class _Engine:
    name: str
    actor: Any
    made_at: float
    begun: Begun | None = None
    facts: EngineFacts = field(default_factory=EngineFacts)
    answered_at: float = 0.0
    state: Literal["coming", "up", "going"] = "coming"
    node: str = ""
    poll_task: asyncio.Task[None] | None = None


class EngineActor(EngineHost):
    """Ray actor with an inference engine, created by the pool; it reads policies out of the object store."""

    async def node(self) -> str:
        """Return the name of the machine that Ray started it on."""
        return socket.gethostname()

    async def load_sent(self, artifact: PolicyArtifact, like: str | None = None) -> Loaded | Refusal:
        """Load a policy whose files were sent; see `EngineHost.load`."""
        cache = jaxmodels.user_cache() / "robojax" / "parcels"

        def open_files() -> LocalFolder:
            with PolicyFolder(unpack(artifact, cache, ray.get)) as folder:
                return replace(LocalFolder.of(folder), sha=artifact.sha)

        try:
            files = await call_in_thread(open_files, "policy-files")
        except JaxModelsError as error:
            return Refusal("policy", str(error))
        except OSError as error:
            return Refusal("engine", f"{self.name} cannot write its policy cache ({error.strerror})")
        return await self.load(files, like)


class Pool:
    """Ray actor that creates, watches and scales engines; all methods but `__init__` run on its event loop."""

    def __init__(self, options: EngineOptions, bounds: Bounds):
        self._options, self._bounds = options, bounds
        self._scaling = Scaling(bounds)
        self._engines: dict[str, _Engine] = {}
        self._last_number = 0
        self._servers: dict[str, float] = {}
        self._trouble = ""
        self._retry_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def begin(self, server: str, options: EngineOptions, bounds: Bounds) -> str:
        """Register a server and start the engines.

        Returns:
            In which options it differs from an earlier server; an empty text if in none.
        """
        self._servers[server] = time.monotonic()
        if self._task is None:
            await asyncio.to_thread(self._find_engines)
            self._task = asyncio.create_task(self._run(), name="pool")
        differing = [
            f"{name}: {getattr(ours, name)!r} there, {getattr(theirs, name)!r} here"
            for ours, theirs in ((self._options, options), (self._bounds, bounds))
            for name in vars(ours)
            if getattr(ours, name) != getattr(theirs, name)
        ]
        return "; ".join(differing)

    async def listing(self, server: str) -> Listing | None:
        """Return the engines that may be used; None if the pool was restarted and `begin` must be called again."""
        if self._task is None:
            return None
        self._servers[server] = time.monotonic()
        engines = (engine for engine in self._engines.values() if engine.state == "up")
        return Listing(tuple(Listed(one.name, one.actor, one.begun) for one in engines if one.begun), self._trouble)

    async def part(self, server: str) -> None:
        """Unregister a server that ends in order."""
        self._servers.pop(server, None)

    def _find_engines(self) -> None:
        """Find the engines that an earlier pool created."""
        for name in ray.util.list_named_actors():
            if not name.startswith(ENGINE_PREFIX):
                continue
            try:
                actor = ray.get_actor(name, NAMESPACE)
            except ValueError:
                continue  # It has ended since it was listed.
            self._last_number = max(self._last_number, int(name.removeprefix(ENGINE_PREFIX)))
            self._engines[name] = _Engine(name, actor, time.monotonic(), answered_at=time.monotonic())

    async def _run(self) -> None:
        while True:
            try:
                self._poll()
            except Exception:
                logger.exception("polling the engines failed")
            await asyncio.sleep(POLL_PERIOD)

    def _poll(self) -> None:
        now = time.monotonic()
        self._servers = {name: asked_at for name, asked_at in self._servers.items() if now - asked_at < IDLE_TIMEOUT}
        if not self._servers:
            self._end()
            return
        for engine in tuple(self._engines.values()):
            if engine.poll_task is None or engine.poll_task.done():
                engine.poll_task = asyncio.create_task(self._poll_engine(engine))
            self._check_timeouts(engine, now)
        up = [engine for engine in self._engines.values() if engine.state == "up"]
        coming = [engine for engine in self._engines.values() if engine.state == "coming"]
        if trouble := self._explain_shortage(now):
            self._trouble = trouble
        elif len(up) >= self._bounds.least:
            self._trouble = ""
        target = self._scaling.decide(now, [engine.facts for engine in up], len(coming))
        current = len(up) + len(coming)
        if target != current:
            logger.info("%d engines instead of %d: %s", target, current, self._scaling.why)
        for _ in range(target - current if now >= self._retry_at else 0):
            self._create_engine(now)
        for engine in sorted(up, key=lambda one: (one.facts.load, one.name))[: max(current - target, 0)]:
            engine.state = "going"
            asyncio.get_running_loop().call_later(RELEASE_SECONDS, self._remove, engine, "it is not needed")

    def _create_engine(self, now: float) -> None:
        self._last_number += 1
        name = f"{ENGINE_PREFIX}{self._last_number}"
        resources = dict(self._options.resources)
        kind: Any = ray.remote(EngineActor)
        actor = kind.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=0,  # A new engine has a new name, so it is not mistaken for the ended one.
            max_concurrency=MAX_CONCURRENCY,
            scheduling_strategy="SPREAD",
        ).remote(name, self._options)
        self._engines[name] = _Engine(name, actor, now, answered_at=now)

    async def _poll_engine(self, engine: _Engine) -> None:
        try:
            if not engine.node:
                engine.node = await engine.actor.node.remote()
            if engine.begun is None:
                begun = await engine.actor.begin.remote()
                if isinstance(begun, Refusal):
                    self._trouble = begun.text
                    self._retry_at = time.monotonic() + REFUSAL_PAUSE
                    self._remove(engine, begun.text)
                    return
                engine.begun, engine.state = begun, "up"
                logger.info("%s runs on %s", engine.name, begun.node)
            engine.facts = await engine.actor.facts.remote()
            engine.answered_at = time.monotonic()
        except RayActorError as error:
            self._remove(engine, f"it ended ({type(error).__name__})")
        except RayError:
            logger.exception("%s cannot be polled", engine.name)

    def _check_timeouts(self, engine: _Engine, now: float) -> None:
        if engine.state == "up" and now - engine.answered_at > SILENCE_TIMEOUT:
            self._remove(engine, f"it did not answer for {SILENCE_TIMEOUT:g} s")
        elif engine.state == "coming" and now - engine.made_at > BEGIN_TIMEOUT:
            self._remove(engine, f"it did not begin in {BEGIN_TIMEOUT:g} s")

    def _remove(self, engine: _Engine, why: str) -> None:
        if self._engines.pop(engine.name, None) is None:
            return
        logger.warning("%s is removed: %s", engine.name, why)
        with suppress(RayError):  # it may have ended already
            ray.kill(engine.actor)

    def _explain_shortage(self, now: float) -> str:
        silent = [engine.made_at for engine in self._engines.values() if not engine.node]
        if not silent or now - min(silent) < PLACEMENT_TIMEOUT:
            return ""
        return explain_shortage(
            self._options.resources,
            ray.cluster_resources(),
            ray.available_resources(),
            running=len(self._engines) - len(silent),
            waiting=len(silent),
            seconds=now - min(silent),
        )

    def _end(self) -> None:
        """Remove all engines and end the pool: no server uses it any more."""
        for engine in tuple(self._engines.values()):
            self._remove(engine, "no server uses the cluster any more")
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def get_or_create_pool(options: EngineOptions, bounds: Bounds) -> Any:
    """Return the pool of the cluster that this process is connected to, created if there is none; blocks.

    The pool outlives the process that created it, and Ray starts it again when it ends.
    """
    actor_class: Any = ray.remote(Pool)
    return actor_class.options(
        name=POOL_NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        # On the cluster's head, because a cluster ends with its head: the failure of another machine spares the pool.
        resources={"node:__internal_head__": 0.001},
        max_restarts=-1,
        max_concurrency=MAX_CONCURRENCY,
    ).remote(options, bounds)
