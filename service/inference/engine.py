"""Engine: sends each request to a device, again elsewhere on failure."""

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import NoReturn

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.errors import PolicyFailed
from service.inference.admission import Admission, RequestLimiter, Reservations, Seen
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


class Dispatch:
    """Asks devices, and holds against them what others make good."""

    def __init__(self, devices: Devices, turnover: ReplicaManager):
        self._devices = devices
        self._turnover = turnover

    async def ask(
        self, served: LoadedPolicy, observation: Mapping[str, np.ndarray], due: float | None, *, is_alone: bool
    ) -> InferenceResult:
        """The answer of some device.

        Args:
            due: when the plan of whoever asks runs dry, on the monotonic clock; as soon as possible when None.
            is_alone: it is not put together with others, because it may spoil what they get.

        Raises:
            PolicyFailed: the policy raised; in words that a session may hear.
        """
        devices = self._devices
        usable = devices.working(served) or await devices.until_one_works(served)
        replica = devices.least(usable)
        elsewhere = _elsewhere(usable, replica)
        try:
            inference = await self._ask_one(replica, observation, due, is_alone=is_alone, may_move=bool(elsewhere))
        except DeviceGone:
            return await self.ask(served, observation, due, is_alone=is_alone)
        except (JaxModelsError, InputRefused, WorkerClosed) as error:
            _refuse(error)
        except Exception as error:
            try:
                return await self._ask_another(served, replica, observation, due, error)
            except DeviceGone:
                return await self.ask(served, observation, due, is_alone=is_alone)
        devices.health.answered(replica.policy.device)
        return inference

    async def _ask_one(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool,
        may_move: bool = False,
    ) -> InferenceResult:
        lane = self._devices.lanes[replica.lane]
        try:
            return await lane.submit(replica, observation, due, is_alone=is_alone, may_move=may_move)
        except DeviceGone as error:
            self._turnover.leave(replica.policy.device, str(error))
            raise

    async def _ask_another(
        self,
        served: LoadedPolicy,
        failed: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        why: Exception,
    ) -> InferenceResult:
        """What another device answers, or the first one does after all, whichever comes first."""
        late = why.answer if isinstance(why, Overdue) else None
        # Some may have left while the first one was waited for.
        elsewhere = _elsewhere(self._devices.working(served), failed)
        if not elsewhere and late is None:
            _refuse(why)
        other = self._devices.least(elsewhere) if elsewhere else failed
        asking = [asyncio.create_task(self._ask_one(other, observation, due, is_alone=True))] if elsewhere else []
        try:
            inference = await _first_good([*asking, *filter(None, (late,))])
        except DeviceGone:
            raise
        except Exception as error:
            # Neither: it is the observation, or the policy.
            is_another = isinstance(why, Overdue) or isinstance(error, WorkerClosed | InputRefused)
            _refuse(error if is_another else why)
        finally:
            for task in asking:
                task.cancel()
        what = f"it raises {type(why).__name__}"
        if isinstance(why, Overdue):
            if why.is_counted:
                return inference
            why.is_counted, what = True, "it does not answer in time"
        self._turnover.failed(failed.policy.device, what, other.policy.device, why)
        return inference


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


def _elsewhere(usable: Sequence[Replica], replica: Replica) -> Sequence[Replica]:
    return [one for one in usable if one.policy.device != replica.policy.device]


def _refuse(error: Exception) -> NoReturn:
    """Tell a session of an error, in words that it may hear."""
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
# Seconds without a question after which nobody is served: clients without a control loop here ask when they like.
QUIET = 3.0


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
        self._asked, self._asked_at = 0, -QUIET
        self._callers = RequestLimiter()
        self._claims = Reservations(load)
        lanes: Sequence[DeviceWorker] = ()
        if not are_elsewhere:
            names = ["device", *(f"device:{number}" for number in range(1, len(devices)))]
            lanes = [InferenceWorker(name, niceness, stuck_after) for name in names]
        self._devices = Devices(lanes, devices, patience if are_elsewhere else 0.0)
        self._growth = BatchCompiler(batch_sizes, self._may_grow, niceness)
        limit = math.inf if are_elsewhere else load_timeout
        self._store = PolicyCache(
            self._devices.replicas, self._ready, niceness, are_elsewhere=are_elsewhere, limit=limit
        )
        self._turnover = ReplicaManager(self._devices, self._store)
        self._dispatch = Dispatch(self._devices, self._turnover)

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
        self._turnover.loaded(served)
        for frames in served.replicas[0].prepared:
            self._growth.want(served, dict(frames))

    def join(self, device: str, lane: DeviceWorker) -> None:
        """Have policies run on one more device, too, as soon as those that are loaded were put there.

        Args:
            device: what policies call it, a name that no other one had.
        """
        self._turnover.join(device, lane)

    def leave(self, device: str, why: str) -> None:
        """Ask nothing of a device any more; what it was asked, others are."""
        self._turnover.leave(device, why)

    async def complete(self, device: str) -> None:
        """Put on a device what is loaded and could not be put there before; without an error where it cannot again."""
        await self._turnover.complete(device)

    @property
    def failed(self) -> Collection[str]:
        """Names of devices that are not asked any more."""
        return self._devices.health.out

    async def forget(self, device: str) -> None:
        """Let go of a device that left."""
        await self._turnover.forget(device)

    def _may_grow(self) -> bool:
        is_quiet = time.monotonic() >= self._asked_at + QUIET
        return is_quiet and not (self._asked or self.building.locked() or self.has_running_robot())

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
        served: LoadedPolicy,
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

        async def ask(is_alone: bool) -> InferenceResult:
            self._asked += 1
            self._idle.clear()
            try:
                return await self._dispatch.ask(served, observation, due, is_alone=is_alone)
            finally:
                self._asked -= 1
                self._asked_at = time.monotonic()
                if not self._asked:
                    self._idle.set()

        return await self._callers.ask(caller, ask)

    def admit(self, served: LoadedPolicy, per_second: float, *, seen: Seen, who: object = None) -> Admission:
        """Whether there is time for so many more inferences per second of this policy; promises nothing.

        Args:
            seen: sizes of the frames that it is to be asked with. Before they are known and measured, they count as
                those of the session of this policy that costs most, or as those that it was trained with.
            who: whose claim is to be another one; it counts no more.
        """
        return self._claims.admit(served, per_second, seen=seen, who=who)

    def claim(self, who: object, served: LoadedPolicy, per_second: float, seen: Seen) -> None:
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
        while self._asked:
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
        self._turnover.close()
        await self._devices.close()
