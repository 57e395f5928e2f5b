"""Policies in memory: each is loaded and compiled once for all sessions that want it, and dropped after the last."""

import asyncio
import gc
import logging
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from jaxmodels.errors import JaxModelsError
from service.engine.device_lane import DeviceGone
from service.engine.served import Frames, LoadPolicy, Policy, Replica, Served, Sizes, in_words
from service.engine.worker import call_in_thread
from service.errors import PolicyError, PolicyFailed

logger = logging.getLogger(__name__)

# Path, revision, and the folder in which they are.
_Key = tuple[str, str | None, str | None]


@dataclass
class _Entry:
    loading: asyncio.Task[Served]
    users: int = 0
    listeners: list[Callable[[str], None]] = field(default_factory=list)


class Store:
    """Loads in threads of their own, one after the other.

    Args:
        replicate: a loaded policy on each device it is to run on; in a thread.
        loaded: told of every policy that is ready.
        are_elsewhere: devices are not of this process. What comes from there is compiled already, which says nothing
            of whose programs it runs, so nothing that was learnt of another policy is believed of it.

    Attributes:
        building: held by whatever loads or compiles, so that only one thing at a time does.
    """

    def __init__(
        self,
        replicate: Callable[[Policy], tuple[Replica, ...]],
        loaded: Callable[[Served], None],
        niceness: int,
        *,
        are_elsewhere: bool = False,
    ):
        self._replicate = replicate
        self._loaded = loaded
        self._niceness = niceness
        self._are_elsewhere = are_elsewhere
        self._entries: dict[_Key, _Entry] = {}
        self._compiling: dict[tuple[Served, Frames], asyncio.Task[None]] = {}
        self._is_frozen = False
        # Two loads at once would take both cores of a small machine away from the control loops.
        self.building = asyncio.Semaphore(1)

    @property
    def all(self) -> list[Served]:
        """What is loaded."""
        return [entry.loading.result() for entry in self._entries.values() if _is_loaded(entry)]

    @property
    def loading(self) -> int:
        """How many are not yet."""
        return sum(not _is_loaded(entry) for entry in self._entries.values())

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
    ) -> AsyncIterator[Served]:
        """See ``Engine.policy``."""
        key = (path, revision, folder)
        if folder is None:
            # Files that were verified in a folder will do for whoever asks for no folder, but not the other way round.
            key = next((one for one in self._entries if one[:2] == (path, revision)), key)
        entry = self._entries.get(key)
        # One that nobody waited for any more is about to end.
        is_ending = entry is not None and not entry.users and not entry.loading.done()
        if entry is None or is_ending or (entry.loading.done() and entry.loading.exception() is not None):
            entry = _Entry(asyncio.create_task(self._load(load, key, like), name=f"load {path}"))
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

    def _drop_unused(self, key: _Key, loading: asyncio.Task[Served]) -> None:
        entry = self._entries.get(key)
        failed = loading.cancelled() or loading.exception() is not None
        if entry is not None and entry.loading is loading and (failed or not entry.users):
            del self._entries[key]

    async def _load(self, load: LoadPolicy, key: _Key, like: Policy | None) -> Served:
        path, revision, folder = key
        place = (path, revision) if folder is None else (folder, None)

        def tell(stage: str) -> None:
            entry = self._entries.get(key)
            if entry is not None and not entry.users:  # a download, which may take long, would keep all other loads
                raise PolicyError(f"policy {path!r} is not loaded: nobody waits for it any more")
            for listener in tuple(entry.listeners) if entry else ():
                listener(stage)

        def load_and_compile() -> tuple[Replica, ...]:
            policy = load(*place, like=like, on_progress=tell)
            tell("compiling")
            replicas = self._replicate(policy)
            # All of them first: two on one device share their programs, and what is prepared is compiled for both.
            for replica in replicas:
                if replica.lane in before:
                    replica.take_over(before[replica.lane])
            for replica in replicas:
                replica.prepare(1, None)
                for frames in replica.taken_over:
                    if frames != replica.trained:
                        replica.prepare(1, dict(frames))
            return replicas

        async with self.building:
            before = self._by_lane(like)
            try:
                replicas = await call_in_thread(load_and_compile, "policy-loader", self._niceness)
            except (PolicyError, PolicyFailed):
                raise  # it is not the policy: what it was to run on is gone
            except JaxModelsError as error:
                raise PolicyError(f"policy {path!r} cannot be loaded: {error}") from error
            except Exception as error:
                # Its text may hold anything, so only its kind goes to the client.
                logger.exception("loading policy %r failed", path)
                let_go(error)
                raise PolicyError(f"policy {path!r} cannot be loaded {in_short(error)}") from error
        if not self._is_frozen:
            # The modules that a first policy brings are for life; the collector need not visit them in every round.
            gc.freeze()
            self._is_frozen = True
        served = Served(replicas[0].policy, replicas)
        self._loaded(served)
        return served

    def _by_lane(self, like: Policy | None) -> dict[int, Replica]:
        """The copies of a policy whose programs one that is loaded may share."""
        if self._are_elsewhere:
            return {}
        found = (served.replicas for served in self.all if any(one.policy is like for one in served.replicas))
        return {replica.lane: replica for replica in next(found, ())}

    async def compile(self, served: Served, sizes: Sizes) -> None:
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

    async def _compile(self, served: Served, sizes: Sizes) -> None:
        def compile_all() -> None:
            gone = []
            for replica in (replicas := served.replicas):
                try:
                    replica.prepare(1, sizes)
                except DeviceGone as error:  # it is asked nothing any more, as soon as that is noticed
                    gone.append(error)
            if len(gone) == len(replicas):
                raise gone[0]

        try:
            async with self.building:
                await call_in_thread(compile_all, "policy-compiler", self._niceness)
        except PolicyFailed:
            raise  # it is not the policy: what it was to run on is gone
        except JaxModelsError as error:
            raise PolicyFailed(f"policy cannot be compiled for {in_words(sizes)}: {error}") from error
        except Exception as error:
            logger.exception("compiling for %s failed", in_words(sizes))
            let_go(error)
            raise PolicyFailed(f"policy cannot be compiled for {in_words(sizes)} {in_short(error)}") from error
        finally:
            del self._compiling[served, frozenset(sizes.items())]

    async def copy(self, served: Served, device: str, lane: int) -> Replica:
        """A loaded policy on one more device, ready for what it is ready for on the others.

        Raises:
            Exception: whatever the device raises.
        """

        def copy_and_compile() -> Replica:
            replica = Replica(served.policy.on(device), lane)
            replica.prepare(1, None)
            for frames in {frames for other in served.replicas for frames in other.prepared}:
                replica.prepare(1, dict(frames))
            return replica

        async with self.building:
            return await call_in_thread(copy_and_compile, "policy-loader", self._niceness)

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


def let_go(error: BaseException) -> None:
    """Forget what the functions that failed had in hand: the error is kept as long as its session, weights are not."""
    traceback.clear_frames(error.__traceback__)
