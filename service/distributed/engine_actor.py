"""Engine actor: an inference engine in a Ray actor, and its messages.

It holds the same ``Engine`` that a server without a cluster has: requests of all fronts go together in batches where
that makes nobody late.
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
from service.inference.engine import Engine, FrameSizes, InferenceResult, InferenceStuck, LoadedPolicy, Policy
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
        accelerators: places on its machine that Ray gave it, `engine_resources`.
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
    devices: Sequence[str]


@dataclass(frozen=True)
class Loaded:
    """A policy that is loaded in an engine.

    Attributes:
        handle: by which the engine knows it.
        compiled: sizes of frames that it is compiled for.
    """

    handle: str
    requirements: Requirements
    device: str
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


# Seconds after which a policy that no front speaks of any more is let go.
UNUSED = 30.0
# Newest requests that waiting is counted of.
COUNTED = 256


@dataclass
class _Held:
    served: LoadedPolicy
    stack: AsyncExitStack
    compiled: list[FrameSizes]
    wanted_at: float = field(default_factory=time.monotonic)


class EngineActor:
    """Ray actor with an inference engine, created by the pool; all methods but `__init__` run on its event loop.

    Args:
        name: of the actor.
    """

    def __init__(self, name: str, options: EngineOptions):
        self._name = name
        self._options = options
        self._held: dict[str, _Held] = {}
        self._loading: dict[str, asyncio.Task[Loaded | Refusal]] = {}
        self._stages: dict[str, str] = {}
        self._queues: deque[tuple[float, float]] = deque(maxlen=COUNTED)
        self._engine: Engine | None = None
        self._beginning = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def node(self) -> str:
        """Return the name of the machine that Ray started it on."""
        return socket.gethostname()

    async def begin(self) -> Begun | Refusal:
        """Import JAX and open the devices; called again, it returns the same."""
        async with self._beginning:
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
                self._watch = asyncio.create_task(self._drop_unused(), name="unused policies")
        return Begun(version("robojax"), socket.gethostname(), os.getpid(), tuple(self._options.devices))

    async def load(self, parcel: PolicyArtifact, like: str | None = None) -> Loaded | Refusal:
        """Load a policy and compile it for batches of one; servers that want the same one share it."""
        task = self._loading.get(parcel.sha)
        if task is None:
            task = self._loading[parcel.sha] = asyncio.create_task(self._load(parcel, like))
            task.add_done_callback(lambda task: self._loading.pop(parcel.sha, None))
        return await asyncio.shield(task)

    async def stage(self, sha: str) -> str | None:
        """Return the stage of loading a policy; None when it is not being loaded."""
        return self._stages.get(sha)

    async def _load(self, parcel: PolicyArtifact, like: str | None) -> Loaded | Refusal:
        if (held := self._held.get(parcel.sha)) is not None:
            held.wanted_at = time.monotonic()
            return self._loaded(parcel.sha, held)
        engine, stack = self._begun(), AsyncExitStack()
        self._stages[parcel.sha] = "reading"
        before = self._held.get(like or "")
        cache = jaxmodels.user_cache() / "robojax" / "parcels"
        try:
            folder = await call_in_thread(partial(unpack, parcel, cache, _get), "policy-files")
            served = await stack.enter_async_context(
                engine.open_policy(
                    self._read,
                    str(folder),
                    None,
                    lambda stage: self._stages.__setitem__(parcel.sha, stage),
                    like=None if before is None else before.served.policy,
                )
            )
        except (PolicyError, PolicyFailed, JaxModelsError) as error:
            return Refusal("policy", str(error))
        except OSError as error:
            return Refusal("engine", f"{self._name} cannot write its policy cache ({error.strerror})")
        finally:
            self._stages.pop(parcel.sha, None)
        sizes = [dict(served.requirements.cameras), *(before.compiled if before is not None else ())]
        held = self._held[parcel.sha] = _Held(served, stack, [one for one in sizes if served.is_compiled(one)])
        return self._loaded(parcel.sha, held)

    def _read(self, path: str, revision: str | None = None, /, *, like: Any = None, on_progress: Any = None) -> Policy:
        options, first = self._options, self._begun().first_device
        return jaxmodels.load_policy(
            path,
            revision,
            options.dtype,
            first,
            like=like,
            on_progress=on_progress,
            inspect=CheckpointSandbox(options.load_memory),
        )

    def _loaded(self, sha: str, held: _Held) -> Loaded:
        policy = held.served.policy
        return Loaded(sha, policy.requirements, policy.device, tuple(held.compiled))

    async def compile(self, handle: str, sizes: FrameSizes | None) -> Refusal | None:
        """Compile a policy for frames of these sizes."""
        if (held := self._find(handle)) is None:
            return _unknown(self._name)
        wanted = dict(held.served.requirements.cameras if sizes is None else sizes)
        try:
            await self._begun().compile(held.served, wanted)
        except PolicyFailed as error:
            return Refusal("policy", str(error))
        if wanted not in held.compiled:
            held.compiled.append(wanted)
        return None

    async def rehearse(self, handle: str, sizes: FrameSizes | None) -> float | Refusal:
        """Return the seconds that one inference takes now, measured with zeros."""
        if (held := self._find(handle)) is None:
            return _unknown(self._name)
        return await call_in_thread(lambda: held.served.policy.rehearse(1, sizes), "policy-rehearsal", 5)

    async def act(
        self, handle: str, observation: Mapping[str, np.ndarray], due_in: float | None
    ) -> InferenceResult | Refusal:
        """Run a policy on an observation, in a batch with others when that makes nobody late; due in so many
        seconds.
        """
        if (held := self._find(handle)) is None:
            return _unknown(self._name)
        due = None if due_in is None else time.monotonic() + due_in
        try:
            inference = await self._begun().infer(held.served, observation, due=due)
        except PolicyFailed as error:
            return Refusal(_kind(error), str(error))
        self._queues.append((time.monotonic(), inference.queue))
        return inference

    async def try_out(self, handle: str, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float] | Refusal:
        """One inference that no robot waits for: chunk and seconds."""
        if (held := self._find(handle)) is None:
            return _unknown(self._name)
        try:
            return await self._begun().run_trial(held.served, observation)
        except PolicyFailed as error:
            return Refusal(_kind(error), str(error))

    async def prepare_task(self, handle: str, text: str) -> Refusal | None:
        """Encode an instruction ahead of ``act``."""
        if (held := self._find(handle)) is None:
            return _unknown(self._name)

        def read() -> None:
            for replica in held.served.replicas:
                replica.policy.prepare_task(text)

        try:
            await call_in_thread(read, "instruction", 5)
        except JaxModelsError as error:
            return Refusal("input", str(error))
        return None

    async def facts(self, handles: Sequence[str] = ()) -> EngineFacts:
        """How it does; whoever asks still wants these policies."""
        for handle in handles:
            self._find(handle)
        engine = self._begun()
        told: Any = engine.get_stats()
        now = time.monotonic()
        queues = sorted(seconds for when, seconds in self._queues if now - when < 5)
        batches: dict[int, int] = {}
        for device in told["devices"]:
            for size, times in device["batches"].items():
                batches[int(size)] = batches.get(int(size), 0) + times
        return EngineFacts(
            load=max((device["load"] for device in told["devices"]), default=0.0),
            queue=queues[int(0.9 * len(queues))] if queues else 0.0,
            waiting=told["inferences_waiting"],
            batches=batches,
            batch_ms=tuple(figures for device in told["devices"] for figures in device["batch_ms"]),
            policies=len(self._held),
        )

    def _begun(self) -> Engine:
        assert self._engine is not None, "begin() comes first"
        return self._engine

    def _find(self, handle: str) -> _Held | None:
        held = self._held.get(handle)
        if held is not None:
            held.wanted_at = time.monotonic()
        return held

    async def _drop_unused(self) -> None:
        while True:
            await asyncio.sleep(UNUSED / 6)
            for handle, held in tuple(self._held.items()):
                if time.monotonic() - held.wanted_at > UNUSED:
                    del self._held[handle]
                    await held.stack.aclose()


def _kind(error: PolicyFailed) -> Any:
    if isinstance(error, InferenceStuck):
        return "stuck"
    return "input" if isinstance(error.__cause__, JaxModelsError) else "failed"


def _unknown(name: str) -> Refusal:
    return Refusal("unknown", f"{name} does not have the policy any more")


def _get(piece: Any) -> bytes:
    import ray  # pyright: ignore[reportMissingImports] - an extra

    return ray.get(piece)
