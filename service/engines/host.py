"""Engine host: an inference engine that other processes use; its methods are the messages of a connection or of Ray.

Requests of all servers share batches if no answer is late because of it.
"""

import asyncio
import logging
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

import jaxmodels
from jaxmodels.errors import JaxModelsError
from service.engines.launch import ENGINE_NICENESS
from service.engines.messages import Begun, EngineFacts, EngineOptions, Loaded, LocalFolder, Refusal
from service.errors import PolicyError, PolicyFailed
from service.inference.batching import FrameSizesKey
from service.inference.engine import Engine
from service.inference.loaded_policy import (
    FrameSizes,
    InferenceResult,
    InferenceStuck,
    LoadedPolicy,
    Policy,
    Replica,
)
from service.processes import pause_garbage_collection
from service.threads import call_in_thread

logger = logging.getLogger(__name__)

# Seconds for which a thread in Python code may keep the event loop waiting.
SWITCH_INTERVAL = 0.001
# Seconds in which the last lines of the log reach the server.
LOG_SECONDS = 0.2
# Seconds after which a policy that no server uses any more is dropped.
UNUSED_TIMEOUT = 30.0
# Newest requests that waiting is counted of.
QUEUE_SAMPLES = 256
# Seconds for which a robot counts as moving after a server said so.
ROBOT_MEMORY = 2.0


@dataclass
class _CachedPolicy:
    served: LoadedPolicy
    stack: AsyncExitStack
    last_used_at: float = field(default_factory=time.monotonic)


class EngineHost:
    """Runs an inference engine for servers; all methods but `__init__` run on its event loop.

    Args:
        name: of the engine, for errors.
    """

    def __init__(self, name: str, options: EngineOptions):
        self.name = name
        self._options = options
        self._policies: dict[str, _CachedPolicy] = {}
        self._loading: dict[str, asyncio.Task[Loaded | Refusal]] = {}
        self._stages: dict[str, str] = {}
        self._queues: deque[tuple[float, float]] = deque(maxlen=QUEUE_SAMPLES)
        self._engine: Engine | None = None
        self._begin_lock = asyncio.Lock()
        self._watch_task: asyncio.Task[None] | None = None
        self._robot_ran_at = -math.inf
        self._needed_batches_at = -math.inf
        self._devices: Sequence[str] = ()

    async def begin(self) -> Begun | Refusal:
        """Import JAX and open the devices; called again, it returns the same."""
        async with self._begin_lock:
            if self._engine is None:
                options = self._options
                # The threads that compute inherit the priority. Ray starts processes with the usual one.
                os.nice(max(ENGINE_NICENESS - os.nice(0), 0))
                sys.setswitchinterval(SWITCH_INTERVAL)
                jaxmodels.isolate_tokenizers()
                try:
                    devices = await call_in_thread(partial(_open_devices, options), "devices")
                except JaxModelsError as error:
                    return Refusal("engine", f"devices: {error}")
                self._engine = Engine(
                    stuck_after=options.stuck_after,
                    batch_sizes=options.batch_sizes,
                    devices=devices,
                    load_timeout=options.load_timeout,
                )
                self._engine.has_running_robot = lambda: time.monotonic() - self._robot_ran_at < ROBOT_MEMORY
                self._engine.needs_batches = lambda: time.monotonic() - self._needed_batches_at < ROBOT_MEMORY
                self._watch_task = asyncio.create_task(self._watch(self._engine), name="unused policies")
                self._devices = devices
        return Begun(version("robojax"), socket.gethostname(), os.getpid(), self._devices)

    async def load(self, files: LocalFolder, like: str | None = None) -> Loaded | Refusal:
        """Load a policy and compile it for batches of one; servers that want the same one share it.

        Args:
            like: handle of a policy that this one probably resembles.
        """
        task = self._loading.get(files.sha)
        if task is None:
            task = self._loading[files.sha] = asyncio.create_task(self._load(files, like))
            task.add_done_callback(lambda task: self._loading.pop(files.sha, None))
        return await asyncio.shield(task)

    async def _load(self, files: LocalFolder, like: str | None) -> Loaded | Refusal:
        if (cached := self._policies.get(files.sha)) is not None:
            cached.last_used_at = time.monotonic()
            return self._describe(files.sha, cached)
        engine, stack = self._opened_engine(), AsyncExitStack()
        self._stages[files.sha] = "reading"
        before = self._policies.get(like or "")
        try:
            served = await stack.enter_async_context(
                engine.policy_cache.open_policy(
                    partial(self._read, files),
                    files.path,
                    None,
                    lambda stage: self._stages.__setitem__(files.sha, stage),
                    folder=files.sha,
                    like=None if before is None else before.served.policy,
                )
            )
        except (PolicyError, PolicyFailed) as error:
            why = error.__cause__ if isinstance(error.__cause__, JaxModelsError) else error
            return Refusal("policy", str(why))
        finally:
            self._stages.pop(files.sha, None)
        cached = self._policies[files.sha] = _CachedPolicy(served, stack)
        return self._describe(files.sha, cached)

    def _read(self, files: LocalFolder, *_: Any, like: Any = None, on_progress: Any = None) -> Policy:
        return jaxmodels.load_policy(
            files.path,
            None,
            self._options.dtype,
            self._opened_engine().devices.first,
            like=like,
            on_progress=on_progress,
            inspect=files.check,
            action_error=self._options.action_error,
        )

    def _describe(self, sha: str, cached: _CachedPolicy) -> Loaded:
        replica = cached.served.replicas[0]
        seconds = {frames: replica.latencies[frames].measured(1).median for frames in replica.compiled_frames}
        return Loaded(sha, replica.policy.requirements, seconds)

    async def compile(self, handle: str, sizes: FrameSizes) -> Refusal | float:
        """Compile a policy for frames of these sizes; returns the seconds of one inference."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self.name)
        try:
            await self._opened_engine().compile(cached.served, sizes)
        except PolicyFailed as error:
            return Refusal("policy", str(error))
        replica, frames = cached.served.replicas[0], frozenset(sizes.items())
        if not replica.latencies[frames].is_measured:  # programs of a similar policy are used
            await call_in_thread(partial(replica.prepare, 1, sizes), "policy-compiler")
        return replica.latencies[frames].measured(1).median

    async def act(
        self, handle: str, observation: Mapping[str, np.ndarray], due_in: float | None
    ) -> InferenceResult | Refusal:
        """Run a policy on an observation, in a batch with others if no answer is late because of it.

        Args:
            due_in: seconds until the answer is due.
        """
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self.name)
        due = None if due_in is None else time.monotonic() + due_in
        try:
            inference = await self._opened_engine().infer(cached.served, observation, due=due)
        except PolicyFailed as error:
            if isinstance(error, InferenceStuck):
                self._end_process(str(error))
            return Refusal(_refusal_kind(error), str(error))
        self._queues.append((time.monotonic(), inference.queue))
        return inference

    def act_now(
        self, handle: str, observation: Mapping[str, np.ndarray], due_in: float | None
    ) -> InferenceResult | None:
        """Run a policy like `act` if it can be done at once; returns None otherwise."""
        if self._engine is None or (cached := self._find_policy(handle)) is None:
            return None
        result = self._engine.infer_now(cached.served, observation)
        if result is not None:
            self._queues.append((time.monotonic(), result.queue))
        return result

    async def try_out(self, handle: str, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float] | Refusal:
        """Run one inference that no robot waits for; returns its chunk and seconds."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self.name)
        try:
            return await self._opened_engine().run_trial(cached.served, observation)
        except PolicyFailed as error:
            return Refusal(_refusal_kind(error), str(error))

    async def prepare_task(self, handle: str, text: str, prompt_cut: str | None = None) -> Refusal | int:
        """Encode an instruction ahead of ``act``; returns how many of its tokens are cut off."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self.name)

        def prepare() -> int:
            return max(replica.policy.prepare_task(text, prompt_cut) for replica in cached.served.replicas)

        try:
            return await call_in_thread(prepare, "instruction")
        except JaxModelsError as error:
            return Refusal("input", str(error))

    async def facts(
        self, handles: Sequence[str] = (), has_running_robot: bool = False, needs_batches: bool = False
    ) -> EngineFacts:
        """Return the engine's load and latencies; the policies of these handles are marked as used.

        Args:
            has_running_robot: whether a robot of the server moves; nothing optional is compiled then.
            needs_batches: whether sessions of the server need larger batches, see `Engine`.
        """
        cached = {handle: policy for handle in handles if (policy := self._find_policy(handle)) is not None}
        if has_running_robot:
            self._robot_ran_at = time.monotonic()
        if needs_batches:
            self._needed_batches_at = time.monotonic()
        engine = self._opened_engine()
        stats: Any = engine.get_stats()
        now = time.monotonic()
        queues = sorted(seconds for when, seconds in self._queues if now - when < 5)
        batches: dict[int, int] = {}
        for device in stats["devices"]:
            for size, times in device["batches"].items():
                batches[int(size)] = batches.get(int(size), 0) + times
        return EngineFacts(
            load=max((device["load"] for device in stats["devices"]), default=0.0),
            queue=queues[int(0.9 * len(queues))] if queues else 0.0,
            waiting=stats["inferences_waiting"],
            batches=batches,
            batch_ms=tuple(figures for device in stats["devices"] for figures in device["batch_ms"]),
            policies=len(self._policies),
            is_compiling=not engine.batch_compiler.idle.is_set(),
            to_compile=engine.batch_compiler.remaining,
            stages=dict(self._stages),
            latencies={handle: _get_latencies(policy.served.replicas[0]) for handle, policy in cached.items()},
        )

    def _end_process(self, why: str) -> None:
        """End the process because a thread cannot be ended; the server or the pool starts another process."""
        logger.error("the process of engine %s ends: %s", self.name, why)
        asyncio.get_running_loop().call_later(LOG_SECONDS, os._exit, 1)

    def _opened_engine(self) -> Engine:
        assert self._engine is not None, "begin() comes first"
        return self._engine

    def _find_policy(self, handle: str) -> _CachedPolicy | None:
        cached = self._policies.get(handle)
        if cached is not None:
            cached.last_used_at = time.monotonic()
        return cached

    async def _watch(self, engine: Engine) -> None:
        """Drop unused policies. While no robot moves, end a process in which a load takes too long."""
        while True:
            await asyncio.sleep(UNUSED_TIMEOUT / 6)
            if engine.policy_cache.has_lost_thread and not engine.has_running_robot():
                self._end_process("building a policy takes too long (load_timeout)")
            for handle, cached in tuple(self._policies.items()):
                if time.monotonic() - cached.last_used_at > UNUSED_TIMEOUT:
                    del self._policies[handle]
                    await cached.stack.aclose()


def _refusal_kind(error: PolicyFailed) -> Any:
    if isinstance(error, InferenceStuck):
        return "stuck"
    return "input" if isinstance(error.__cause__, JaxModelsError) else "failed"


def _refuse_unknown(name: str) -> Refusal:
    return Refusal("unknown", f"{name} does not have the policy any more")


def import_jax() -> None:
    """Import JAX and the policies, which takes seconds."""
    with pause_garbage_collection():
        _ = jaxmodels.load_policy


def _open_devices(options: EngineOptions) -> Sequence[str]:
    """Return the names of the devices; without any in the options, that of JAX's first choice."""
    import_jax()
    return jaxmodels.name_devices(options.devices or ("0",), together=options.together)


def _get_latencies(replica: Replica) -> Mapping[FrameSizesKey, Mapping[int, float]]:
    return {
        frames: {size: replica.latencies[frames].measured(size).median for size in sizes}
        for frames, sizes in tuple(replica.batch_sizes.items())
    }
