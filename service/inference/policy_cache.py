"""Loads and compiles each policy once; larger batches later.

A load that nobody waits for any more, or that takes too long, is ended (``service.inference.sandbox``).
"""

import asyncio
import gc
import logging
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from jaxmodels.errors import JaxModelsError
from service.errors import LoadsStuck, PolicyError, PolicyFailed
from service.inference.device_worker import DeviceGone
from service.inference.loaded_policy import Frames, LoadedPolicy, LoadPolicy, Policy, Replica, Sizes, in_words
from service.inference.sandbox import Building, Load, LoadEnded
from service.threads import call_in_thread

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Threads of ended loads that still compile, or still fetch and read: with so many of them nothing new is begun.
LEFT_BUILDING = 4
LEFT_READING = 32
# Characters of an error; one that lists 200 tensors has as many.
TEXT = 20_000
# Path, revision, and the folder in which they are.
_Key = tuple[str, str | None, str | None]


@dataclass
class _Entry:
    load: Load
    loading: asyncio.Task[LoadedPolicy]
    users: int = 0
    listeners: list[Callable[[str], None]] = field(default_factory=list)


class PolicyCache:
    """Loads in threads of their own; what was proved is built and compiled one after the other.

    Args:
        replicate: a loaded policy on each device it is to run on; in a thread.
        loaded: told of every policy that is ready.
        are_elsewhere: devices are not of this process. What comes from there is compiled already, which says nothing
            of whose programs it runs, so nothing that was learnt of another policy is believed of it.
        limit: seconds that building and compiling one may take.
    """

    def __init__(
        self,
        replicate: Callable[[Policy], tuple[Replica, ...]],
        loaded: Callable[[LoadedPolicy], None],
        niceness: int,
        *,
        are_elsewhere: bool = False,
        limit: float = float("inf"),
    ):
        self._replicate = replicate
        self._loaded = loaded
        self._niceness = niceness
        self._are_elsewhere = are_elsewhere
        self._entries: dict[_Key, _Entry] = {}
        self._compiling: dict[tuple[LoadedPolicy, Frames], asyncio.Task[None]] = {}
        self._is_frozen = False
        self._limit = limit
        self._building = Building()
        self._running: set[Load] = set()

    @property
    def building(self) -> asyncio.Semaphore:
        """Held by whatever builds or compiles, so that only one thing at a time does."""
        return self._building.place

    @property
    def all(self) -> list[LoadedPolicy]:
        """What is loaded; from any thread."""
        return [entry.loading.result() for entry in tuple(self._entries.values()) if _is_loaded(entry)]

    @property
    def left_behind(self) -> int:
        """Threads that still run though their load was ended."""
        return sum(load.is_ended for load in self._running)

    @property
    def loading(self) -> int:
        """How many are not yet."""
        return sum(not _is_loaded(entry) for entry in self._entries.values())

    def refusal(self) -> str | None:
        """Why nothing more is loaded at the moment; None when it is."""
        left = [load.is_building for load in self._running if load.is_ended]
        if sum(left) < LEFT_BUILDING and len(left) < LEFT_READING:
            return None
        return f"{len(left)} loads that were ended still run; nothing is loaded until one of them is over"

    @asynccontextmanager
    async def policy(
        self,
        load: LoadPolicy,
        path: str,
        revision: str | None,
        on_progress: Callable[[str], None],
        *,
        folder: str | None = None,
        like: Policy | None = None,
    ) -> AsyncIterator[LoadedPolicy]:
        """See ``Engine.policy``."""
        key = (path, revision, folder)
        if folder is None:
            # Files that were verified in a folder will do for whoever asks for no folder, but not the other way round.
            key = next((one for one in self._entries if one[:2] == (path, revision)), key)
        entry = self._entries.get(key)
        if entry is None or (entry.loading.done() and entry.loading.exception() is not None):
            this, listeners = Load(self._building, self._limit), list[Callable[[str], None]]()
            loading = asyncio.create_task(self._load(load, key, like, this, listeners), name=f"load {path}")
            entry = _Entry(this, loading, listeners=listeners)
            entry.loading.add_done_callback(lambda task: self._drop_unused(key, task))
            self._entries[key] = entry
        del like  # it may be replaced, and its weights let go, while this context lasts
        entry.listeners.append(on_progress)
        entry.users += 1
        try:
            # Whoever gives up waiting must not end the load for the others.
            served = await asyncio.shield(entry.loading)
            served.users = entry.users
            yield served
        finally:
            entry.users -= 1
            entry.listeners.remove(on_progress)
            if entry.loading.done():
                self._drop_unused(key, entry.loading)
            elif not entry.users:
                entry.load.end("nobody waits for it any more")
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
        this: Load,
        listeners: Sequence[Callable[[str], None]],
    ) -> LoadedPolicy:
        path, revision, folder = key
        place = (path, revision) if folder is None else (folder, None)

        def tell(stage: str) -> None:
            this.check()
            for listener in tuple(listeners):
                listener(stage)

        def load_and_compile() -> tuple[Replica, ...]:
            policy = load(*place, like=like, on_progress=tell)
            this.begin_building()
            tell("compiling")
            before = self._by_lane(like)
            replicas = self._replicate(policy)
            this.check()
            # All of them first: two on one device share their programs, and what is prepared is compiled for both.
            for replica in replicas:
                if replica.worker_id in before:
                    replica.take_over(before[replica.worker_id])
            for replica in replicas:
                replica.prepare(1, None)
                for frames in replica.taken_over:
                    this.check()
                    if frames != replica.trained:
                        replica.prepare(1, dict(frames))
            return replicas

        try:
            replicas = await self._run(this, load_and_compile, "policy-loader")
        except (PolicyError, PolicyFailed, LoadsStuck):
            raise  # it is said already, or it is not the policy: what it was to run on is gone
        except (JaxModelsError, LoadEnded) as error:
            raise PolicyError(f"policy {path!r} cannot be loaded: {cut(error)}") from error
        except Exception as error:
            # Its text may hold anything, so only its kind goes to the client.
            logger.exception("loading policy %r failed", path)
            let_go(error)
            raise PolicyError(f"policy {path!r} cannot be loaded {in_short(error)}") from error
        if not self._is_frozen:
            # The modules that a first policy brings are for life; the collector need not visit them in every round.
            gc.freeze()
            self._is_frozen = True
        served = LoadedPolicy(replicas[0].policy, replicas)
        self._loaded(served)
        return served

    async def _run(self, this: Load, call: Callable[[], Result], name: str) -> Result:
        """Call in a thread that is left behind when the load is ended.

        Raises:
            LoadEnded: it was.
            LoadsStuck: too many others were.
            Exception: what the call raises.
        """
        if (why := self.refusal()) is not None:
            raise LoadsStuck(why)
        thread = call_in_thread(partial(this.run, call), name, self._niceness)
        self._running.add(this)
        try:
            await asyncio.wait((thread, this.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if thread.done():
                self._ran(this, thread)
            else:
                this.end("the server ends")
                thread.add_done_callback(partial(self._ran, this))
        if not thread.done():
            if this.is_building:
                logger.warning("%s: %s; its thread is left behind", name, this.ended.result())
            raise LoadEnded(this.ended.result())
        return thread.result()

    def _ran(self, this: Load, thread: asyncio.Future[Result]) -> None:
        this.over()
        self._running.discard(this)
        if not thread.cancelled() and (error := thread.exception()) is not None and this.is_ended:
            let_go(error)

    def _by_lane(self, like: Policy | None) -> dict[int, Replica]:
        """The copies of a policy whose programs one that is loaded may share."""
        if self._are_elsewhere:
            return {}
        found = (served.replicas for served in self.all if any(one.policy is like for one in served.replicas))
        return {replica.worker_id: replica for replica in next(found, ())}

    async def compile(self, served: LoadedPolicy, sizes: Sizes) -> None:
        """See ``Engine.compile``."""
        if served.is_compiled(sizes):
            return
        key = (served, frozenset(sizes.items()))
        task = self._compiling.get(key)
        if task is None:
            task = self._compiling[key] = asyncio.create_task(self._compile(served, sizes), name="compile")
            task.add_done_callback(_hear)
        # Whoever gives up waiting does not end it, and finds it when asking again.
        await asyncio.shield(task)

    async def _compile(self, served: LoadedPolicy, sizes: Sizes) -> None:
        this = Load(self._building, self._limit)

        def compile_all() -> None:
            this.begin_building()
            gone = []
            for replica in (replicas := served.replicas):
                this.check()
                try:
                    replica.prepare(1, sizes)
                except DeviceGone as error:  # it is asked nothing any more, as soon as that is noticed
                    gone.append(error)
            if len(gone) == len(replicas):
                raise gone[0]

        try:
            await self._run(this, compile_all, "policy-compiler")
        except (PolicyFailed, LoadsStuck):
            raise  # it is not the policy: what it was to run on is gone
        except (JaxModelsError, LoadEnded) as error:
            raise PolicyFailed(f"policy cannot be compiled for {in_words(sizes)}: {error}") from error
        except Exception as error:
            logger.exception("compiling for %s failed", in_words(sizes))
            let_go(error)
            raise PolicyFailed(f"policy cannot be compiled for {in_words(sizes)} {in_short(error)}") from error
        finally:
            del self._compiling[served, frozenset(sizes.items())]

    async def copy(self, served: LoadedPolicy, device: str, worker: int) -> Replica:
        """A loaded policy on one more device, ready for what it is ready for on the others.

        Raises:
            Exception: whatever the device raises.
        """

        this = Load(self._building, self._limit)

        def copy_and_compile() -> Replica:
            this.begin_building()
            replica = Replica(served.policy.on(device), worker)
            replica.prepare(1, None)
            for frames in {frames for other in served.replicas for frames in other.prepared}:
                replica.prepare(1, dict(frames))
            return replica

        return await self._run(this, copy_and_compile, "policy-loader")

    def close(self) -> None:
        """Nothing is loaded any more."""
        for entry in self._entries.values():
            entry.loading.cancel()
        for task in self._compiling.values():
            task.cancel()


def _hear(task: asyncio.Task[None]) -> None:
    """Nobody may wait any more for a task that failed."""
    if not task.cancelled():
        task.exception()


def _is_loaded(entry: _Entry) -> bool:
    return entry.loading.done() and not entry.loading.cancelled() and entry.loading.exception() is None


def in_short(error: BaseException) -> str:
    """What may be said of an error whose text may hold anything."""
    # XLA's name for it is in the text; the class is the one of all its errors.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "(out of memory); fewer or smaller policies fit"
    return f"({type(error).__name__}); the server's log says more"


def cut(error: BaseException) -> str:
    """Its text, which may list whatever a stranger's files hold."""
    text = str(error)
    return text if len(text) <= TEXT else f"{text[:TEXT]} ... ({len(text)} characters)"


def let_go(error: BaseException) -> None:
    """Forget what the functions that failed had in hand: the error is kept as long as its session, weights are not."""
    traceback.clear_frames(error.__traceback__)


# Seconds between looks whether robots stand still.
PAUSE = 0.5
# Seconds for learning what a batch size takes, where no robot waits for the device meanwhile.
REHEARSING = 0.25


@dataclass(frozen=True)
class _Wanted:
    served: "weakref.ref[LoadedPolicy]"
    sizes: Sizes
    batch: int


class BatchCompiler:
    """What has to be compiled yet, one batch size after the other.

    Args:
        batches: sizes besides 1.
        may: whether it may begin now: no robot runs, and nothing else is being loaded.
    """

    def __init__(self, batches: Sequence[int], may: Callable[[], bool], niceness: int):
        self._batches = sorted(set(batches) - {1})
        self._may = may
        self._niceness = niceness
        self._wanted: list[_Wanted] = []
        self._task: asyncio.Task[None] | None = None
        self._rest = asyncio.Event()
        self._rest.set()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is being compiled; not even what was begun before a robot was started."""
        return self._rest.is_set()

    async def rest(self) -> None:
        """Wait until what is being compiled is."""
        await self._rest.wait()

    @property
    def left(self) -> int:
        """Programs that are still to be compiled."""
        return len(self._wanted)

    def want(self, served: LoadedPolicy, sizes: Sizes) -> None:
        """Compile all batch sizes for frames of these sizes, in time."""
        known = [(wanted.served(), wanted.sizes, wanted.batch) for wanted in self._wanted]
        place = weakref.ref(served)
        self._wanted += [_Wanted(place, sizes, batch) for batch in self._batches if (served, sizes, batch) not in known]
        if self._wanted and self._task is None:
            self._task = asyncio.create_task(self._grow(), name="batch sizes")

    async def _grow(self) -> None:
        while self._wanted:
            self._wanted = [wanted for wanted in self._wanted if wanted.served() is not None]
            may = self._may()
            wanted = next((wanted for wanted in self._wanted if may or _is_shared(wanted)), None)
            if wanted is None:
                await asyncio.sleep(PAUSE)
                continue
            if may:  # a trial alone keeps nobody waiting
                self._rest.clear()
            try:
                await self._compile(wanted, REHEARSING if may else 0.0)
            finally:
                self._rest.set()
            if wanted in self._wanted:
                self._wanted.remove(wanted)
        self._task = None

    async def _compile(self, wanted: _Wanted, rehearsing: float) -> None:
        def compile_all() -> None:
            served = wanted.served()
            for replica in served.replicas if served is not None else ():
                replica.prepare(wanted.batch, wanted.sizes, rehearsing)

        try:
            await call_in_thread(compile_all, "policy-compiler", self._niceness)
        except Exception as error:
            # Smaller batches do; larger ones would hardly be better.
            logger.warning("batches of %d and more are not used: %s", wanted.batch, type(error).__name__)
            self._wanted = [
                other
                for other in self._wanted
                if (other.served, other.sizes) != (wanted.served, wanted.sizes) or other.batch < wanted.batch
            ]

    def close(self) -> None:
        """Nothing more is begun; what runs in its thread is left to itself."""
        if self._task is not None:
            self._task.cancel()


def _is_shared(wanted: _Wanted) -> bool:
    """Whether another policy's programs will do, so that nothing but a trial is left: a push changes only weights."""
    served = wanted.served()
    return served is not None and all(
        replica.policy.is_compiled(wanted.batch, wanted.sizes) for replica in served.replicas
    )
