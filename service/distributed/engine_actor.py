"""Engine actor: an inference engine in a Ray actor, and its messages.

It holds the same ``Engine`` as a server without a cluster. Requests of all servers share batches if no answer is late
because of it.
"""

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

import jaxmodels
from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from service.distributed.artifacts import PolicyArtifact, unpack
from service.errors import PolicyError, PolicyFailed
from service.inference.engine import Engine
from service.inference.loaded_policy import FrameSizes, InferenceResult, InferenceStuck, LoadedPolicy, Policy
from service.inference.sandbox import CheckpointSandbox
from service.threads import call_in_thread

# input: the policy refused it, as it would anywhere. failed: it raised. stuck: it did not come back in time.
# unknown: the engine does not have the policy (any more). policy: it cannot be loaded. engine: this engine cannot be
# used at all.
Kind = Literal["input", "failed", "stuck", "unknown", "policy", "engine"]


@dataclass(frozen=True)
class Refusal:
    """Why an engine gives no answer, with a text that clients may read."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs policies; from the settings of these names, of the first server.

    Attributes:
        resources: what Ray reserves for an engine, as the setting `engine_resources`.
    """

    dtype: str | None = None
    devices: Sequence[str] = ()
    together: bool = False
    batch_sizes: Sequence[int] = (1,)
    stuck_after: float = 5.0
    load_memory: int = 1 << 30
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})


@dataclass(frozen=True)
class Begun:
    """What an engine reports once it is started."""

    version: str
    node: str
    process: int


@dataclass(frozen=True, eq=False)
class Loaded:
    """A policy that is loaded in an engine.

    Attributes:
        handle: by which the engine knows it.
        compiled: sizes of frames that it is compiled for.
    """

    handle: str
    requirements: Requirements
    compiled: Sequence[FrameSizes]


@dataclass(frozen=True)
class EngineFacts:
    """Load and latencies of an engine.

    Attributes:
        load: share of the newest seconds that its busiest device computed.
        queue: seconds that nine of ten of the newest requests waited for the device.
        waiting: requests not yet begun.
        batches: how many there were of each size.
        batch_ms: of each policy, batch size to median and p90.
    """

    load: float = 0.0
    queue: float = 0.0
    waiting: int = 0
    batches: Mapping[int, int] = field(default_factory=dict)
    batch_ms: Sequence[Mapping[str, Any]] = ()
    policies: int = 0


# Seconds after which a policy that no front uses any more is dropped.
UNUSED_TIMEOUT = 30.0
# Newest requests that waiting is counted of.
QUEUE_SAMPLES = 256


@dataclass
class _CachedPolicy:
    served: LoadedPolicy
    stack: AsyncExitStack
    compiled: list[FrameSizes]
    last_used_at: float = field(default_factory=time.monotonic)


class EngineActor:
    """Ray actor with an inference engine, created by the pool; all methods but `__init__` run on its event loop.

    Args:
        name: of the actor, for errors.
    """

    def __init__(self, name: str, options: EngineOptions):
        self._name = name
        self._options = options
        self._policies: dict[str, _CachedPolicy] = {}
        self._loading: dict[str, asyncio.Task[Loaded | Refusal]] = {}
        self._stages: dict[str, str] = {}
        self._queues: deque[tuple[float, float]] = deque(maxlen=QUEUE_SAMPLES)
        self._engine: Engine | None = None
        self._begin_lock = asyncio.Lock()
        self._drop_task: asyncio.Task[None] | None = None

    async def node(self) -> str:
        """Return the name of the machine that Ray started it on."""
        return socket.gethostname()

    async def begin(self) -> Begun | Refusal:
        """Import JAX and open the devices; called again, it returns the same."""
        async with self._begin_lock:
            if self._engine is None:
                options = self._options
                devices: Sequence[str] = ()
                if options.devices:
                    name = partial(jaxmodels.name_devices, options.devices, together=options.together)
                    try:
                        devices = await call_in_thread(name, "import-jax")
                    except JaxModelsError as error:
                        return Refusal("engine", f"devices: {error}")
                else:
                    await call_in_thread(lambda: jaxmodels.load_policy, "import-jax")
                self._engine = Engine(stuck_after=options.stuck_after, batch_sizes=options.batch_sizes, devices=devices)
                self._drop_task = asyncio.create_task(self._drop_unused(), name="unused policies")
        return Begun(version("robojax"), socket.gethostname(), os.getpid())

    async def load(self, artifact: PolicyArtifact, like: str | None = None) -> Loaded | Refusal:
        """Load a policy and compile it for batches of one; servers that want the same one share it."""
        task = self._loading.get(artifact.sha)
        if task is None:
            task = self._loading[artifact.sha] = asyncio.create_task(self._load(artifact, like))
            task.add_done_callback(lambda task: self._loading.pop(artifact.sha, None))
        return await asyncio.shield(task)

    async def stage(self, sha: str) -> str | None:
        """Return the stage of loading a policy; None when it is not being loaded."""
        return self._stages.get(sha)

    async def _load(self, artifact: PolicyArtifact, like: str | None) -> Loaded | Refusal:
        if (cached := self._policies.get(artifact.sha)) is not None:
            cached.last_used_at = time.monotonic()
            return self._describe(artifact.sha, cached)
        engine, stack = self._opened_engine(), AsyncExitStack()
        self._stages[artifact.sha] = "reading"
        before = self._policies.get(like or "")
        cache = jaxmodels.user_cache() / "robojax" / "parcels"
        try:
            folder = await call_in_thread(partial(unpack, artifact, cache, _get_piece), "policy-files")
            served = await stack.enter_async_context(
                engine.policy_cache.open_policy(
                    self._read,
                    str(folder),
                    None,
                    lambda stage: self._stages.__setitem__(artifact.sha, stage),
                    like=None if before is None else before.served.policy,
                )
            )
        except (PolicyError, PolicyFailed, JaxModelsError) as error:
            return Refusal("policy", str(error))
        except OSError as error:
            return Refusal("engine", f"{self._name} cannot write its policy cache ({error.strerror})")
        finally:
            self._stages.pop(artifact.sha, None)
        sizes = [dict(served.requirements.cameras), *(before.compiled if before is not None else ())]
        cached = self._policies[artifact.sha] = _CachedPolicy(
            served, stack, [one for one in sizes if served.is_compiled(one)]
        )
        return self._describe(artifact.sha, cached)

    def _read(self, path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None) -> Policy:
        options, first = self._options, self._opened_engine().devices.first
        return jaxmodels.load_policy(
            path,
            revision,
            options.dtype,
            first,
            like=like,
            on_progress=on_progress,
            inspect=CheckpointSandbox(options.load_memory),
        )

    def _describe(self, sha: str, cached: _CachedPolicy) -> Loaded:
        return Loaded(sha, cached.served.policy.requirements, tuple(cached.compiled))

    async def compile(self, handle: str, sizes: FrameSizes | None) -> Refusal | None:
        """Compile a policy for frames of these sizes."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self._name)
        frame_sizes = dict(cached.served.requirements.cameras if sizes is None else sizes)
        try:
            await self._opened_engine().compile(cached.served, frame_sizes)
        except PolicyFailed as error:
            return Refusal("policy", str(error))
        if frame_sizes not in cached.compiled:
            cached.compiled.append(frame_sizes)
        return None

    async def profile(self, handle: str, sizes: FrameSizes | None) -> float | Refusal:
        """Return the seconds that one inference takes now, measured with zeros."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self._name)
        return await call_in_thread(lambda: cached.served.policy.profile(1, sizes), "policy-profile", 5)

    async def act(
        self, handle: str, observation: Mapping[str, np.ndarray], due_in: float | None
    ) -> InferenceResult | Refusal:
        """Run a policy on an observation, in a batch with others if no answer is late because of it.

        Args:
            due_in: seconds until the answer is due.
        """
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self._name)
        due = None if due_in is None else time.monotonic() + due_in
        try:
            inference = await self._opened_engine().infer(cached.served, observation, due=due)
        except PolicyFailed as error:
            return Refusal(_refusal_kind(error), str(error))
        self._queues.append((time.monotonic(), inference.queue))
        return inference

    async def try_out(self, handle: str, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float] | Refusal:
        """Run one inference that no robot waits for; returns its chunk and seconds."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self._name)
        try:
            return await self._opened_engine().run_trial(cached.served, observation)
        except PolicyFailed as error:
            return Refusal(_refusal_kind(error), str(error))

    async def prepare_task(self, handle: str, text: str, prompt_cut: str | None = None) -> Refusal | int:
        """Encode an instruction ahead of ``act``; returns how many of its tokens are cut off."""
        if (cached := self._find_policy(handle)) is None:
            return _refuse_unknown(self._name)

        def prepare() -> int:
            return max(replica.policy.prepare_task(text, prompt_cut) for replica in cached.served.replicas)

        try:
            return await call_in_thread(prepare, "instruction", 5)
        except JaxModelsError as error:
            return Refusal("input", str(error))

    async def facts(self, handles: Sequence[str] = ()) -> EngineFacts:
        """Return the engine's load and latencies; the policies of these handles are marked as used."""
        for handle in handles:
            self._find_policy(handle)
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
        )

    def _opened_engine(self) -> Engine:
        assert self._engine is not None, "begin() comes first"
        return self._engine

    def _find_policy(self, handle: str) -> _CachedPolicy | None:
        cached = self._policies.get(handle)
        if cached is not None:
            cached.last_used_at = time.monotonic()
        return cached

    async def _drop_unused(self) -> None:
        while True:
            await asyncio.sleep(UNUSED_TIMEOUT / 6)
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


def _get_piece(piece: Any) -> bytes:
    import ray  # pyright: ignore[reportMissingImports] - an extra

    return ray.get(piece)
