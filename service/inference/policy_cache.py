"""Policy cache: loads and compiles each policy once, larger batches later; a load without a session is cancelled."""

import asyncio
import logging
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from jaxmodels.errors import JaxModelsError
from service.errors import PolicyError, PolicyFailed
from service.inference.batching import FrameSizesKey
from service.inference.device_worker import DeviceGone, EngineLost
from service.inference.loaded_policy import (
    FrameSizes,
    LoadedPolicy,
    LoadPolicy,
    Policy,
    Replica,
    describe_sizes,
)
from service.inference.sandbox import LoadCancelled, LoadJob, raise_if_cancelled
from service.threads import call_in_thread, mark_retrieved

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Policies that a server has its engines load or compile at a time. Each engine builds one policy at a time.
MAX_REMOTE_BUILDS = 64
# Characters of an error: enough to list 200 tensors.
MAX_ERROR_LENGTH = 20_000
# Path, revision, and the folder in which they are.
_Key = tuple[str, str | None, str | None]


@dataclass
class _Entry:
    job: LoadJob
    loading: asyncio.Task[LoadedPolicy]
    users: int = 0
    listeners: list[Callable[[str], None]] = field(default_factory=list)


class PolicyCache:
    """Policies in memory; each is loaded in its own thread, and in an engine one at a time is compiled.

    Args:
        replicate: copies a policy to each of its devices, in a thread.
        on_loaded: called with each ready policy.
        are_remote: devices belong to other processes, so latencies of a similar policy are not inherited.
        load_timeout: seconds for reading a policy, and for compiling it; None without a limit.

    Attributes:
        building: held while something is compiled.
        has_lost_thread: whether a thread may still run although its time is over.
    """

    def __init__(
        self,
        replicate: Callable[[Policy], tuple[Replica, ...]],
        on_loaded: Callable[[LoadedPolicy], None],
        *,
        are_remote: bool = False,
        load_timeout: float | None = None,
    ):
        self._replicate = replicate
        self._on_loaded = on_loaded
        self._are_remote = are_remote
        self._entries: dict[_Key, _Entry] = {}
        self._compiling: dict[tuple[LoadedPolicy, FrameSizesKey], asyncio.Task[None]] = {}
        self._load_timeout = load_timeout
        # Two compilations at once would take both cores of a small machine away from the inferences.
        self.building = asyncio.Semaphore(MAX_REMOTE_BUILDS if are_remote else 1)
        self.has_lost_thread = False

    @property
    def all(self) -> list[LoadedPolicy]:
        """Loaded policies; readable from any thread."""
        return [entry.loading.result() for entry in tuple(self._entries.values()) if _is_loaded(entry)]

    @property
    def loading_count(self) -> int:
        """Number of policies that are being loaded."""
        return sum(not _is_loaded(entry) for entry in self._entries.values())

    @asynccontextmanager
    async def open_policy(
        self,
        load: LoadPolicy,
        path: str,
        revision: str | None,
        on_progress: Callable[[str], None],
        *,
        folder: str | None = None,
        like: Policy | None = None,
    ) -> AsyncIterator[LoadedPolicy]:
        """Load and compile a policy; it stays in memory as long as the context lasts.

        Args:
            on_progress: takes a word (``downloading``, ``reading``, ``compiling``); called in another thread.
            folder: folder that already has the files of this path and revision; None if there is none.
            like: policy that this one is expected to resemble.

        Raises:
            PolicyError: the policy cannot be loaded or compiled.
        """
        key = (path, revision, folder)
        if folder is None:
            # A request without a folder may use files that were verified in a folder, but not the reverse.
            key = next((one for one in self._entries if one[:2] == (path, revision)), key)
        entry = self._entries.get(key)
        if entry is None or (entry.loading.done() and entry.loading.exception() is not None):
            job, listeners = LoadJob(), list[Callable[[str], None]]()
            loading = asyncio.create_task(self._load(load, key, like, job, listeners), name=f"load {path}")
            entry = _Entry(job, loading, listeners=listeners)
            entry.loading.add_done_callback(lambda task: self._drop_unused(key, task))
            self._entries[key] = entry
        del like  # it may be replaced, and its weights let go, while this context lasts
        entry.listeners.append(on_progress)
        entry.users += 1
        try:
            # A caller that stops waiting must not cancel the load of the others.
            loaded = await asyncio.shield(entry.loading)
            loaded.users = entry.users
            yield loaded
        finally:
            entry.users -= 1
            entry.listeners.remove(on_progress)
            if entry.loading.done():
                self._drop_unused(key, entry.loading)
            elif not entry.users:
                entry.job.cancel()
                if self._entries.get(key) is entry:
                    del self._entries[key]

    def _drop_unused(self, key: _Key, loading: asyncio.Task[LoadedPolicy]) -> None:
        entry = self._entries.get(key)
        failed = loading.cancelled() or loading.exception() is not None
        if entry is not None and entry.loading is loading and (failed or not entry.users):
            del self._entries[key]

    async def _load(
        self,
        load: LoadPolicy,
        key: _Key,
        like: Policy | None,
        job: LoadJob,
        listeners: Sequence[Callable[[str], None]],
    ) -> LoadedPolicy:
        path, revision, folder = key
        source = (path, revision) if folder is None else (folder, None)

        def report(stage: str) -> None:
            raise_if_cancelled(job)
            for listener in tuple(listeners):
                listener(stage)

        built: list[Policy] = []  # Empty once it is compiled: sessions keep errors, which must not keep weights.

        def compile_copies() -> tuple[Replica, ...]:
            report("compiling")
            before = self._replicas_by_worker(like)
            replicas = self._replicate(built.pop())
            # All of them first: two on one device share their programs, and what is prepared is compiled for both.
            for replica in replicas:
                if replica.worker_id in before:
                    replica.inherit_latency(before[replica.worker_id])
            for replica in replicas:
                replica.prepare(1, None)
                for frames in replica.inherited_frames:
                    raise_if_cancelled(job)
                    if frames != replica.trained_frames:
                        replica.prepare(1, dict(frames))
            return replicas

        try:
            await self._call(job, lambda: built.append(load(*source, like=like, on_progress=report)))
            replicas = await self._build(job, compile_copies)
            raise_if_cancelled(job)
        except (PolicyError, PolicyFailed):
            raise
        except (JaxModelsError, LoadCancelled) as error:
            raise PolicyError(f"policy {path!r} cannot be loaded: {truncate_error(error)}") from error
        except Exception as error:
            # Its text may hold anything, so only its kind goes to the client.
            logger.exception("loading policy %r failed", path)
            clear_frames(error)
            raise PolicyError(f"policy {path!r} cannot be loaded {summarize_error(error)}") from error
        loaded = LoadedPolicy(replicas[0].policy, replicas)
        self._on_loaded(loaded)
        return loaded

    async def _build(self, job: LoadJob, call: Callable[[], Result]) -> Result:
        """Call in a thread while nothing else is compiled; raises LoadCancelled if the job was cancelled before."""
        async with self.building:
            return await self._call(job, call)

    async def _call(self, job: LoadJob, call: Callable[[], Result]) -> Result:
        """Call in a thread; raises JaxModelsError after ``load_timeout`` seconds. The thread cannot be ended then."""
        limit = asyncio.timeout(self._load_timeout)
        try:
            async with limit:
                return await call_in_thread(partial(job.run, call), "policy-loader")
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.has_lost_thread = True
            raise JaxModelsError(
                f"building and compiling it took over {self._load_timeout:g} s (load_timeout)"
            ) from error

    def _replicas_by_worker(self, like: Policy | None) -> dict[int, Replica]:
        """Return the replicas of a resembling policy by worker id; the new one may share their programs."""
        if self._are_remote:
            return {}
        resembling = (loaded.replicas for loaded in self.all if any(one.policy is like for one in loaded.replicas))
        return {replica.worker_id: replica for replica in next(resembling, ())}

    async def compile(self, loaded: LoadedPolicy, sizes: FrameSizes) -> None:
        """See ``Engine.compile``."""
        if loaded.is_compiled(sizes):
            return
        key = (loaded, frozenset(sizes.items()))
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile(loaded, sizes), name="compile")
            task.add_done_callback(mark_retrieved)
        # A caller that stops waiting does not cancel the compile, and can ask again.
        await asyncio.shield(task)

    async def _compile(self, loaded: LoadedPolicy, sizes: FrameSizes) -> None:
        def compile_all() -> None:
            gone = []
            for replica in (replicas := loaded.replicas):
                try:
                    replica.prepare(1, sizes)
                except DeviceGone as error:  # it gets no more requests once that is noticed
                    gone.append(error)
            if len(gone) == len(replicas):
                raise gone[0]

        try:
            await self._build(LoadJob(), compile_all)
        except PolicyFailed:
            raise  # it is not the policy: what it was to run on is gone
        except DeviceGone as error:
            raise EngineLost(f"policy is not compiled for {describe_sizes(sizes)}: {error}; try again") from error
        except JaxModelsError as error:
            raise PolicyFailed(f"policy cannot be compiled for {describe_sizes(sizes)}: {error}") from error
        except Exception as error:
            logger.exception("compiling for %s failed", describe_sizes(sizes))
            clear_frames(error)
            raise PolicyFailed(
                f"policy cannot be compiled for {describe_sizes(sizes)} {summarize_error(error)}"
            ) from error
        finally:
            del self._compiling[loaded, frozenset(sizes.items())]

    async def copy(self, loaded: LoadedPolicy, device: str, worker: int) -> Replica:
        """Copy a policy to another device and compile it for all present frame sizes; raises the device's errors."""

        def copy_and_compile() -> Replica:
            replica = Replica(loaded.policy.on(device), worker)
            replica.prepare(1, None)
            for frames in {frames for other in loaded.replicas for frames in other.compiled_frames}:
                replica.prepare(1, dict(frames))
            return replica

        return await self._build(LoadJob(), copy_and_compile)

    def close(self) -> None:
        """Cancel all loads and compilations."""
        for entry in self._entries.values():
            entry.job.cancel()
            entry.loading.cancel()
        for task in self._compiling.values():
            task.cancel()


def _is_loaded(entry: _Entry) -> bool:
    return entry.loading.done() and not entry.loading.cancelled() and entry.loading.exception() is None


def summarize_error(error: BaseException) -> str:
    """Summarize an error whose text may hold anything, for clients."""
    # XLA names it in the text only: all of its errors have one class.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "(out of memory); fewer or smaller policies fit"
    return f"({type(error).__name__}); the server's log says more"


def truncate_error(error: BaseException) -> str:
    """Return an error's text, shortened, because it may list the contents of untrusted files."""
    text = str(error)
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]} ... ({len(text)} characters)"


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of an error's traceback: sessions keep the error, which must not keep weights."""
    traceback.clear_frames(error.__traceback__)


# Seconds between looks whether robots stand still.
POLL_INTERVAL = 0.5
# Seconds for measuring a batch size while no robot waits for the device.
PROFILE_SECONDS = 0.25


@dataclass(frozen=True)
class _CompileJob:
    loaded: "weakref.ref[LoadedPolicy]"
    sizes: FrameSizes
    batch: int


class BatchCompiler:
    """Compiles larger batch sizes in sequence while no robot runs, or while many robots need them.

    Args:
        batches: sizes in addition to 1.
        is_allowed: whether it may start: no robot runs and nothing else loads.
        is_needed: whether it may start although robots run.

    Attributes:
        idle: set unless something is compiled that robots wait for.
        remaining_elsewhere: number of programs that engines in other processes still have to compile.
    """

    def __init__(self, batches: Sequence[int], is_allowed: Callable[[], bool], is_needed: Callable[[], bool]):
        self._batches = sorted(set(batches) - {1})
        self._is_allowed = is_allowed
        self._is_needed = is_needed
        self.remaining_elsewhere = 0
        self._jobs: list[_CompileJob] = []
        self._task: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def remaining(self) -> int:
        """Number of programs that are still to be compiled."""
        return len(self._jobs) + self.remaining_elsewhere

    def schedule(self, loaded: LoadedPolicy, sizes: FrameSizes) -> None:
        """Schedule all batch sizes for frames of these sizes, before the frames of earlier calls."""
        scheduled = [(job.loaded(), job.sizes, job.batch) for job in self._jobs]
        reference = weakref.ref(loaded)
        # A robot sends the newest frame sizes, but perhaps no robot sends the sizes that the policy was trained with.
        self._jobs[:0] = [
            _CompileJob(reference, sizes, batch) for batch in self._batches if (loaded, sizes, batch) not in scheduled
        ]
        if self._jobs and self._task is None:
            self._task = asyncio.create_task(self._compile_scheduled(), name="batch sizes")

    async def _compile_scheduled(self) -> None:
        while self._jobs:
            self._jobs = [job for job in self._jobs if job.loaded() is not None]
            is_allowed = self._is_allowed()
            may_start = is_allowed or self._is_needed()
            job = next((job for job in self._jobs if may_start or _is_compiled(job)), None)
            if job is None:
                await asyncio.sleep(POLL_INTERVAL)
                continue
            if is_allowed:  # Other robots run already, or it is only a trial: a robot that starts does not wait for it.
                self.idle.clear()
            try:
                await self._compile(job, PROFILE_SECONDS if is_allowed else 0.0)
            finally:
                self.idle.set()
            if job in self._jobs:
                self._jobs.remove(job)
        self._task = None

    async def _compile(self, job: _CompileJob, profile_seconds: float) -> None:
        def compile_all() -> None:
            loaded = job.loaded()
            for replica in loaded.replicas if loaded is not None else ():
                replica.prepare(job.batch, job.sizes, profile_seconds)

        try:
            await call_in_thread(compile_all, "policy-compiler")
        except Exception as error:
            # Smaller batches do; larger ones would hardly be better.
            logger.warning("batches of %d and more are not used: %s", job.batch, type(error).__name__)
            self._jobs = [
                other
                for other in self._jobs
                if (other.loaded, other.sizes) != (job.loaded, job.sizes) or other.batch < job.batch
            ]

    def close(self) -> None:
        """Begin no more compilations; what runs in its thread is abandoned."""
        if self._task is not None:
            self._task.cancel()


def _is_compiled(job: _CompileJob) -> bool:
    """Return whether another policy's programs will do, so that only profiling is left: a push changes only weights."""
    loaded = job.loaded()
    return loaded is not None and all(replica.is_compiled(job.batch, job.sizes) for replica in loaded.replicas)
