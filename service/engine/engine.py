"""Policies in memory, and the one device thread that runs them."""

import asyncio
import gc
import logging
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxmodels import Requirements
from jaxmodels.errors import JaxModelsError
from service.engine.progress import Durations
from service.engine.worker import Worker, call_in_thread
from service.errors import PolicyError, PolicyFailed

logger = logging.getLogger(__name__)

Sizes = Mapping[str, tuple[int, int]]
# Seconds that a trial waits for a moment in which no robot waits.
TRIAL_WAIT = 1.0
# Seconds that an inference may keep those of other robots waiting: three times what it usually takes, at least this,
# and so long when nobody knows.
OVERDUE = 0.1
UNKNOWN = 1.0


class Policy(Protocol):
    """What the engine needs of a policy; ``jaxmodels.Policy`` is one."""

    @property
    def requirements(self) -> Requirements: ...
    @property
    def timings(self) -> Mapping[str, float]: ...
    @property
    def device(self) -> str: ...

    commit: str | None
    """What its files are called, when that is known: a commit of the Hub, the hash of a folder."""

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Feature names to arrays with a batch axis -> (b, t, a) float32."""
        ...

    def compile(self, batch: int = 1, cameras: Sizes | None = None) -> None:
        """Make ``act`` quick for frames of these sizes."""
        ...

    def is_compiled(self, batch: int = 1, cameras: Sizes | None = None) -> bool:
        """Whether it is already."""
        ...


class LoadPolicy(Protocol):
    """``jaxmodels.load_policy``, or a double."""

    def __call__(
        self,
        path: str,
        revision: str | None = None,
        /,
        *,
        like: Any = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Policy:
        """Called in a worker thread; raises JaxModelsError with a text that may be shown.

        ``like`` is a policy that it gave before: what was compiled for it may be used again.
        """
        ...


@dataclass(frozen=True)
class Inference:
    """A chunk, and where the time went, in seconds.

    ``total`` runs from asking to having the numpy result; ``queue`` is waiting for the device thread.
    """

    chunk: np.ndarray
    queue: float
    to_device: float
    compute: float
    to_host: float
    total: float


class InferenceStuck(PolicyFailed):
    """An inference did not come back in time; the thread it runs on was given up."""


class Served:
    """One policy in memory, shared by all sessions of the same path and revision.

    Attributes:
        policy: itself.
        users: sessions that hold it.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.users = 0
        self._usual: float | None = None
        self._compiled: set[frozenset[tuple[str, tuple[int, int]]]] = set()

    @property
    def requirements(self) -> Requirements:
        """What the policy needs."""
        return self.policy.requirements

    @property
    def commit(self) -> str | None:
        """What its files are called, when that is known."""
        return self.policy.commit

    def took(self, seconds: float) -> None:
        """An inference went well in so many seconds."""
        self._usual = seconds if self._usual is None else 0.8 * self._usual + 0.2 * seconds

    @property
    def overdue(self) -> float:
        """Seconds after which an inference keeps others waiting for longer than they have to."""
        return UNKNOWN if self._usual is None else max(3 * self._usual, OVERDUE)

    def is_compiled(self, sizes: Sizes) -> bool:
        """Whether frames of these sizes can be acted on at once. Asked at every inference, so remembered."""
        key = frozenset(sizes.items())
        if key not in self._compiled and self.policy.is_compiled(1, sizes):
            self._compiled.add(key)
        return key in self._compiled


# Path, revision, and the folder in which they are.
_Key = tuple[str, str | None, str | None]


@dataclass
class _Entry:
    loading: asyncio.Task[Served]
    users: int = 0
    listeners: list[Callable[[str], None]] = field(default_factory=list)


class Engine:
    """Loads policies in threads of their own, runs all of them on one device thread.

    One thread is enough: a device computes one thing at a time, and a session has at most one request
    in flight, so first come, first served is also fair. Only when one inference takes far longer than it usually does
    the others get another thread before it is given up. Both kinds of threads run at a lower
    priority than the event loop (see ``service.engine.worker.yield_to_others``).

    Attributes:
        stuck_after: seconds after which a running inference is given up.
        durations: how long policies took to be made ready.
        building: held by whatever loads or compiles, so that only one thing at a time does.
    """

    def __init__(
        self,
        *,
        stuck_after: float = 5.0,
        niceness: int = 5,
        switch_interval: float | None = 0.001,
        durations: Durations | None = None,
    ):
        self.stuck_after = stuck_after
        self.durations = durations or Durations()
        self._niceness = niceness
        self._entries: dict[_Key, _Entry] = {}
        self._is_frozen = False
        # Python's default of 5 ms is how long a thread in Python code may keep the event loop waiting.
        if switch_interval is not None:
            sys.setswitchinterval(switch_interval)
        # Two loads at once would take both cores of a small machine away from the control loops.
        self.building = asyncio.Semaphore(1)
        self._asked = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._worker = Worker("device", niceness)

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
        """A loaded and compiled policy, for as long as the context lasts.

        Args:
            on_progress: gets short words (``downloading``, ``reading``, ``compiling``), in another thread.
            folder: where the files of this path and revision are already, when they are.
            like: a policy that this one is expected to resemble.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        key = (path, revision, folder)
        if folder is None:
            # Files that were verified in a folder will do for whoever asks for no folder, but not the other way round.
            key = next((one for one in self._entries if one[:2] == (path, revision)), key)
        entry = self._entries.get(key)
        if entry is None or (entry.loading.done() and entry.loading.exception() is not None):
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
            for listener in tuple(entry.listeners) if entry else ():
                listener(stage)

        def load_and_compile() -> Policy:
            policy = load(*place, like=like, on_progress=tell)
            tell("compiling")
            policy.compile(1)
            return policy

        async with self.building:
            try:
                policy = await call_in_thread(load_and_compile, "policy-loader", self._niceness)
            except JaxModelsError as error:
                raise PolicyError(f"policy {path!r} cannot be loaded: {error}") from error
            except Exception as error:
                # Its text may hold anything, so only its kind goes to the client.
                logger.exception("loading policy %r failed", path)
                _let_go(error)
                raise PolicyError(f"policy {path!r} cannot be loaded {_in_short(error)}") from error
        if not self._is_frozen:
            # The modules that a first policy brings are for life; the collector need not visit them in every round.
            gc.freeze()
            self._is_frozen = True
        return Served(policy)

    async def compile(self, served: Served, sizes: Sizes) -> None:
        """Make a policy ready for frames of these sizes, away from the device thread.

        Raises:
            PolicyFailed: it cannot be compiled for them.
        """
        if served.is_compiled(sizes):
            return
        async with self.building:
            policy = served.policy
            try:
                await call_in_thread(lambda: policy.compile(1, sizes), "policy-compiler", self._niceness)
            except JaxModelsError as error:
                raise PolicyFailed(f"policy cannot be compiled for {in_words(sizes)}: {error}") from error
            except Exception as error:
                logger.exception("compiling for %s failed", in_words(sizes))
                _let_go(error)
                raise PolicyFailed(f"policy cannot be compiled for {in_words(sizes)} {_in_short(error)}") from error

    async def submit(
        self, served: Served, observation: Mapping[str, np.ndarray], *, due: float | None = None
    ) -> Inference:
        """Run the policy on one observation (batch of 1), after those asked for before.

        Args:
            due: when the plan of whoever asks runs dry, on the monotonic clock; as soon as possible when None.

        Raises:
            PolicyFailed: the policy raised.
            InferenceStuck: it did not come back in ``stuck_after`` seconds; its thread was replaced.
        """
        del due  # first come, first served
        policy = served.policy

        def act() -> tuple[np.ndarray, Mapping[str, float]]:
            chunk = policy.act(observation)
            return chunk, dict(policy.timings)

        self._asked += 1
        self._idle.clear()
        job = self._worker.submit(act)
        paused, is_left = 0.0, False
        overdue = min(served.overdue, self.stuck_after)
        try:
            while not job.outcome.done():
                looked_at = time.monotonic()
                begun = job.submitted if job.started is None else job.started
                limit = self.stuck_after if is_left else overdue
                # A job that waits behind a stuck one is not stuck itself: look again after a while.
                patience = max(begun + paused + limit - looked_at, limit / 10)
                await asyncio.wait([job.outcome], timeout=patience)
                late = time.monotonic() - looked_at - patience
                if late > self.stuck_after / 10:
                    paused += late  # this whole process stood still, and the job with it
                if job.outcome.done() or job.started is None:
                    continue
                ran = time.monotonic() - job.started - paused
                if ran >= overdue and not is_left and self._worker.waiting:
                    # The others go on in another thread; this one may still come back.
                    is_left = self._worker.abandon(job)
                if ran >= self.stuck_after and (is_left or self._worker.abandon(job)):
                    logger.error("an inference did not return in %.1f s; its thread is replaced", self.stuck_after)
                    raise InferenceStuck(f"inference did not return in {self.stuck_after:g} s")
            chunk, timings = job.outcome.result()
        except asyncio.CancelledError:
            job.is_unwanted = True
            raise
        except JaxModelsError as error:
            raise PolicyFailed(f"the policy refused its input: {error}") from error
        except InferenceStuck:
            raise
        except Exception as error:
            logger.exception("a policy raised")
            _let_go(error)
            raise PolicyFailed(f"the policy raised {type(error).__name__} {_in_short(error)}") from error
        finally:
            self._asked -= 1
            if not self._asked:
                self._idle.set()
        started = job.started or job.submitted
        served.took((job.ended or started) - started)
        return Inference(
            chunk=chunk,
            queue=started - job.submitted,
            to_device=timings.get("to_device", 0.0),
            compute=timings.get("compute", (job.ended or started) - started),
            to_host=timings.get("to_host", 0.0),
            total=(job.ended or started) - job.submitted,
        )

    async def until_idle(self) -> None:
        """Wait until no session waits for an inference: what has time begins only then."""
        while self._asked:
            await self._idle.wait()

    async def try_out(self, served: Served, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float]:
        """One inference that no robot waits for, in a thread that yields to the device thread: chunk and seconds.

        Raises:
            PolicyFailed: the policy raised.
        """

        def infer() -> tuple[np.ndarray, float]:
            began = time.perf_counter()
            chunk = served.policy.act(observation)
            return chunk, time.perf_counter() - began

        # Robots that keep the device busy all the time are yielded to by the thread's priority alone.
        with suppress(TimeoutError):
            async with asyncio.timeout(TRIAL_WAIT):
                await self.until_idle()
        try:
            return await call_in_thread(infer, "policy-trial", 2 * self._niceness)
        except JaxModelsError as error:
            raise PolicyFailed(f"the policy refused its input: {error}") from error
        except Exception as error:
            logger.exception("a policy on trial raised")
            raise PolicyFailed(f"the policy raised {type(error).__name__}; the server's log says more") from error

    def facts(self) -> dict[str, object]:
        """What is loaded, where it runs and how busy the device thread is."""
        loaded = [entry for entry in self._entries.values() if _is_loaded(entry)]
        return {
            "device": next((entry.loading.result().policy.device for entry in loaded), None),
            "policies_loaded": len(loaded),
            "policies_loading": len(self._entries) - len(loaded),
            "inferences_waiting": self._worker.waiting,
            "threads_replaced": self._worker.abandoned,
        }

    async def close(self) -> None:
        """End the device thread; waits a second for an inference that is running."""
        for entry in self._entries.values():
            entry.loading.cancel()
        if not await asyncio.to_thread(self._worker.close, 1.0):
            logger.warning("the device thread is still busy; it is left behind")


def _is_loaded(entry: _Entry) -> bool:
    return entry.loading.done() and not entry.loading.cancelled() and entry.loading.exception() is None


def _in_short(error: BaseException) -> str:
    """What may be said of an error whose text may hold anything."""
    # XLA's name for it is in the text; the class is the one of all its errors.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "(out of memory); fewer or smaller policies fit"
    return f"({type(error).__name__}); the server's log says more"


def _let_go(error: BaseException) -> None:
    """Forget what the functions that failed had in hand: the error is kept as long as its session, weights are not."""
    traceback.clear_frames(error.__traceback__)


def in_words(sizes: Sizes) -> str:
    """``480x640 frames``, or camera by camera when they differ."""
    different = {f"{height}x{width}" for height, width in sizes.values()}
    if len(different) == 1:
        return f"{different.pop()} frames"
    return ", ".join(f"{height}x{width} frames of {camera!r}" for camera, (height, width) in sorted(sizes.items()))
