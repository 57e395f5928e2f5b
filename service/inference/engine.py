"""Engine: sends each request to a device, again elsewhere on failure."""

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.errors import PolicyFailed
from service.inference.admission import Admission, FrameSizes, Reservations
from service.inference.device_worker import (
    DeviceGone,
    DeviceWorker,
    InferenceWorker,
    InputRefused,
    Overdue,
    WorkerClosed,
)
from service.inference.loaded_policy import (
    InferenceResult,
    InferenceStuck,
    LoadedPolicy,
    LoadPolicy,
    Policy,
    Replica,
    Sizes,
    in_words,
)
from service.inference.policy_cache import BatchCompiler, PolicyCache, in_short, let_go
from service.inference.progress import Durations
from service.inference.replicas import Devices, ReplicaManager
from service.threads import call_in_thread

logger = logging.getLogger(__name__)


class Dispatcher:
    """Sends each request to the least busy device, and to another one where that fails.

    Failures that another device made good count against the device.
    """

    def __init__(self, devices: Devices, replica_manager: ReplicaManager):
        self._devices = devices
        self._replica_manager = replica_manager

    async def run(
        self, loaded: LoadedPolicy, observation: Mapping[str, np.ndarray], due: float | None, *, is_alone: bool
    ) -> InferenceResult:
        """The answer of some device.

        Args:
            due: when the caller's plan runs dry, on the monotonic clock; as soon as possible when None.
            is_alone: it is not batched with others, because it may spoil what they get.

        Raises:
            PolicyFailed: the policy raised; in words that a session may hear.
        """
        devices = self._devices
        usable = loaded.usable or await devices.wait_for_replica(loaded)
        replica = usable[0] if len(usable) == 1 else min(usable, key=self._busyness)
        worker = devices.workers[replica.worker_id]
        try:
            result = await worker.submit(
                replica, observation, due, is_alone=is_alone, may_move=loaded.is_on_several_devices
            )
        except DeviceGone as error:
            self._replica_manager.leave(replica.policy.device, str(error))
            return await self.run(loaded, observation, due, is_alone=is_alone)
        except (JaxModelsError, InputRefused, WorkerClosed) as error:
            _raise_refusal(error)
        except Exception as error:
            try:
                return await self._run_elsewhere(loaded, replica, observation, due, error)
            except DeviceGone:
                return await self.run(loaded, observation, due, is_alone=is_alone)
        if devices.health.failures:
            devices.health.record_success(replica.policy.device)
        return result

    def _busyness(self, replica: Replica) -> tuple[bool, int, float]:
        """Sort key: late answers, then requests under way; of equals, the one used longest ago comes first."""
        worker = self._devices.workers[replica.worker_id]
        return worker.is_late, worker.pending, worker.last_used_at

    async def _run_elsewhere(
        self,
        loaded: LoadedPolicy,
        failed: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        failure: Exception,
    ) -> InferenceResult:
        """What another device answers, or the first one does after all, whichever comes first."""
        late = failure.answer if isinstance(failure, Overdue) else None
        # Some may have left while the first one was waited for.
        others = [replica for replica in loaded.usable if replica.policy.device != failed.policy.device]
        if not others and late is None:
            _raise_refusal(failure)
        other = min(others, key=self._busyness) if others else failed
        tasks = [asyncio.create_task(self._run_alone(other, observation, due))] if others else []
        try:
            result = await _first_good([*tasks, *filter(None, (late,))])
        except DeviceGone:
            raise
        except Exception as error:
            # Neither: it is the observation, or the policy.
            is_another = isinstance(failure, Overdue) or isinstance(error, WorkerClosed | InputRefused)
            _raise_refusal(error if is_another else failure)
        finally:
            for task in tasks:
                task.cancel()
        what = f"it raises {type(failure).__name__}"
        if isinstance(failure, Overdue):
            if failure.is_counted:
                return result
            failure.is_counted, what = True, "it does not answer in time"
        self._replica_manager.record_failure(failed.policy.device, what, other.policy.device, failure)
        return result

    async def _run_alone(
        self, replica: Replica, observation: Mapping[str, np.ndarray], due: float | None
    ) -> InferenceResult:
        try:
            return await self._devices.workers[replica.worker_id].submit(replica, observation, due, is_alone=True)
        except DeviceGone as error:
            self._replica_manager.leave(replica.policy.device, str(error))
            raise


async def _first_good(answers: Sequence[asyncio.Future[InferenceResult]]) -> InferenceResult:
    """The first that is no error.

    Raises:
        DeviceGone: one of them is gone, and the others are no better: it can be asked of others yet.
        Exception: what the first of them raised.
    """
    waited = set(answers)
    while waited:
        done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for answer in done:
            if answer.exception() is None:
                return answer.result()
    errors = [error for answer in answers if (error := answer.exception()) is not None]
    raise next((error for error in errors if isinstance(error, DeviceGone)), errors[0])


def _raise_refusal(error: Exception) -> NoReturn:
    """Raise an error again, in words that a session may hear."""
    if isinstance(error, PolicyFailed):
        raise error
    if isinstance(error, JaxModelsError):
        raise PolicyFailed(f"the policy refused its input: {error}") from error
    logger.error("a policy raised", exc_info=error)
    let_go(error)
    raise PolicyFailed(f"the policy raised {type(error).__name__} {in_short(error)}") from error


__all__ = [
    "Admission",
    "Engine",
    "InferenceResult",
    "InferenceStuck",
    "LoadPolicy",
    "LoadedPolicy",
    "Policy",
    "Sizes",
    "in_words",
]


# Seconds that a trial waits for a moment in which no robot waits.
TRIAL_WAIT = 1.0
# Requests of a caller that have to go well after one that failed, before they are batched with others again.
PROBATION = 16
# Seconds without a question after which nobody is served: clients without a control loop here ask when they like.
QUIET = 3.0


@dataclass(eq=False, slots=True)
class _Caller:
    """What the engine knows of somebody who sends requests.

    Attributes:
        turn: held by the request that is under way; the caller's others wait for it.
        probation: requests that have to go well before they are batched with others again.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    probation: int = 0


class Engine:
    """Loads policies in threads of their own, and runs each device's in batches on one thread of that device.

    Requests wait for the device and go together where that makes nobody late (``service.inference.batching``). A batch
    that fails runs again member by member, so that only the one whose observation it was fails; one that takes far
    longer than it usually does is left aside, and the others go on in another thread. With several devices another one
    is asked when one fails or takes too long; a device that fails again and again where others answer is out
    (``service.inference.replicas``). All threads run at a lower priority than the event loop (see
    ``service.threads.lower_priority``).

    Attributes:
        stuck_after: seconds after which a running inference is given up.
        durations: how long policies took to be made ready.
        has_running_robot: whether any session moves its robot; larger batches are compiled while none does.
    """

    def __init__(
        self,
        *,
        stuck_after: float = 5.0,
        niceness: int = 5,
        switch_interval: float | None = 0.001,
        durations: Durations | None = None,
        batch_sizes: Sequence[int] = (1,),
        devices: Sequence[str] = (),
        load: float | None = None,
        are_elsewhere: bool = False,
        patience: float = 60.0,
        load_timeout: float = 600.0,
    ):
        """One request at a time unless ``batch_sizes`` names larger ones.

        Args:
            devices: where policies run, each a copy; the one that it was loaded on when there are none. A device that
                is named twice runs two batches at a time.
            load: share of the devices' time that may be promised; no end of it when None.
            are_elsewhere: devices are not of this process: there are none until one joins, see ``join``.
            patience: seconds that a request then waits for one to join, where none works.
            load_timeout: seconds that building and compiling a policy may take; that of others is theirs.
        """
        self.stuck_after = stuck_after
        self.durations = durations or Durations()
        self.has_running_robot: Callable[[], bool] = lambda: False
        self._niceness = niceness
        # Python's default of 5 ms is how long a thread in Python code may keep the event loop waiting.
        if switch_interval is not None:
            sys.setswitchinterval(switch_interval)
        self._idle = asyncio.Event()
        self._idle.set()
        self._pending, self._last_used_at = 0, -QUIET
        self._callers: WeakKeyDictionary[object, _Caller] = WeakKeyDictionary()
        self._claims = Reservations(load)
        workers: Sequence[DeviceWorker] = ()
        if not are_elsewhere:
            names = ["device", *(f"device:{number}" for number in range(1, len(devices)))]
            workers = [InferenceWorker(name, niceness, stuck_after) for name in names]
        self._devices = Devices(workers, devices, patience if are_elsewhere else 0.0)
        self._growth = BatchCompiler(batch_sizes, self._may_grow, niceness)
        limit = math.inf if are_elsewhere else load_timeout
        self._store = PolicyCache(
            self._devices.replicas, self._ready, niceness, are_elsewhere=are_elsewhere, limit=limit
        )
        self._replica_manager = ReplicaManager(self._devices, self._store)
        self._dispatcher = Dispatcher(self._devices, self._replica_manager)

    @property
    def building(self) -> asyncio.Semaphore:
        """Held by whatever loads or compiles, so that only one thing at a time does."""
        return self._store.building

    def policy(
        self,
        load: LoadPolicy,
        path: str,
        revision: str | None,
        on_progress: Callable[[str], None],
        *,
        folder: str | None = None,
        like: Policy | None = None,
    ) -> AbstractAsyncContextManager[LoadedPolicy]:
        """A loaded and compiled policy, for as long as the context lasts.

        Args:
            on_progress: gets short words (``downloading``, ``reading``, ``compiling``), in another thread.
            folder: where the files of this path and revision are already, when they are.
            like: a policy that this one is expected to resemble.

        Raises:
            PolicyError: it cannot be loaded or compiled.
        """
        return self._store.policy(load, path, revision, on_progress, folder=folder, like=like)

    @property
    def first_device(self) -> str | None:
        """Where a policy is loaded before it is copied, as it was named; None where nobody named one."""
        return self._devices.first

    def _ready(self, served: LoadedPolicy) -> None:
        self._replica_manager.add_policy(served)
        for frames in served.replicas[0].prepared:
            self._growth.want(served, dict(frames))

    def join(self, device: str, worker: DeviceWorker) -> None:
        """Have policies run on one more device, too, as soon as those that are loaded were put there.

        Args:
            device: what policies call it, a name that no other one had.
        """
        self._replica_manager.join(device, worker)

    def leave(self, device: str, why: str) -> None:
        """Ask nothing of a device any more; what it was asked, others are."""
        self._replica_manager.leave(device, why)

    async def complete(self, device: str) -> None:
        """Put on a device what is loaded and could not be put there before; without an error where it cannot again."""
        await self._replica_manager.complete(device)

    @property
    def failed(self) -> Collection[str]:
        """Names of devices that are not asked any more."""
        return self._devices.health.out

    async def forget(self, device: str) -> None:
        """Let go of a device that left."""
        await self._replica_manager.forget(device)

    def _may_grow(self) -> bool:
        is_quiet = time.monotonic() >= self._last_used_at + QUIET
        return is_quiet and not (self._pending or self.building.locked() or self.has_running_robot())

    @property
    def is_at_rest(self) -> bool:
        """Whether no larger batch is being compiled, as may be when a robot is started; ``rest`` waits for its end."""
        return self._growth.is_at_rest

    async def rest(self) -> None:
        """Wait for the end of what was being compiled when a robot was started; nothing new begins meanwhile."""
        await self._growth.rest()

    async def compile(self, served: LoadedPolicy, sizes: Sizes) -> None:
        """Make a policy ready for frames of these sizes, away from the device thread.

        Raises:
            PolicyFailed: it cannot be compiled for them.
        """
        await self._store.compile(served, sizes)
        self._growth.want(served, sizes)

    async def infer(
        self,
        loaded: LoadedPolicy,
        observation: Mapping[str, np.ndarray],
        *,
        due: float | None = None,
        caller: object | None = None,
    ) -> InferenceResult:
        """Run the policy on one observation (batch of 1), together with those of others when that makes nobody late.

        Args:
            due: when the plan of whoever asks runs dry, on the monotonic clock; as soon as possible when None.
            caller: whoever asks, kept by reference only while it lives. One request of a caller is with the device, its
                others wait for it; after one that failed the next ones run alone until they can be trusted.

        Raises:
            PolicyFailed: the policy raised.
            InferenceStuck: it did not come back in ``stuck_after`` seconds; its thread was replaced.
        """

        known = _Caller() if caller is None else self._callers.get(caller)
        if known is None:
            known = self._callers[caller] = _Caller()
        async with known.turn:
            self._pending += 1
            self._idle.clear()
            try:
                result = await self._dispatcher.run(loaded, observation, due, is_alone=known.probation > 0)
            except Exception:
                known.probation = PROBATION
                raise
            finally:
                self._pending -= 1
                self._last_used_at = time.monotonic()
                if not self._pending:
                    self._idle.set()
            known.probation = max(known.probation - 1, 0)
            return result

    def admit(self, served: LoadedPolicy, per_second: float, *, seen: FrameSizes, who: object = None) -> Admission:
        """Whether there is time for so many more inferences per second of this policy; promises nothing.

        Args:
            seen: sizes of the frames that it is to be asked with. Before they are known and measured, they count as
                those of the session of this policy that costs most, or as those that it was trained with.
            who: whose claim is to be another one; it counts no more.
        """
        return self._claims.admit(served, per_second, seen=seen, who=who)

    def claim(self, who: object, served: LoadedPolicy, per_second: float, seen: FrameSizes) -> None:
        """Promise somebody so many inferences per second, until ``release``; what they take follows the frames."""
        self._claims.claim(who, served, per_second, seen)

    def move_claim(self, who: object, served: LoadedPolicy) -> None:
        """What was promised to somebody is of another policy from now on, which may take more or less of the time."""
        self._claims.move(who, served)

    def release(self, who: object) -> None:
        """Nothing is promised to them any more."""
        self._claims.release(who)

    async def until_idle(self) -> None:
        """Wait until no session waits for an inference: what has time begins only then."""
        while self._pending:
            await self._idle.wait()

    async def try_out(self, served: LoadedPolicy, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float]:
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
        except PolicyFailed:
            raise  # in words that a session may hear
        except JaxModelsError as error:
            raise PolicyFailed(f"the policy refused its input: {error}") from error
        except Exception as error:
            logger.exception("a policy on trial raised")
            raise PolicyFailed(f"the policy raised {type(error).__name__}; the server's log says more") from error

    def facts(self) -> dict[str, object]:
        """What is loaded, where it runs, what its batches take and how busy the devices are; JSON-ready."""
        loaded = self._store.all
        return {
            "device": next((served.policy.device for served in loaded), None),
            "devices_failed": list(self._devices.health.out),
            "devices": self._devices.facts(loaded),
            "policies_loaded": len(loaded),
            "policies_loading": self._store.loading,
            "loads_left_behind": self._store.left_behind,
            "loads_refused": self._store.refusal(),
            "inferences_waiting": self._devices.waiting,
            "threads_replaced": self._devices.abandoned,
            "batch_sizes_to_compile": self._growth.left,
            "promised_per_second": round(self._claims.per_second, 2),
            "promised_load": round(self._claims.share, 4),
        }

    async def close(self) -> None:
        """End the device threads; waits a second for an inference that is running. Whoever waits is told."""
        self._store.close()
        self._growth.close()
        self._replica_manager.close()
        await self._devices.close()
