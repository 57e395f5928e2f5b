"""Inference engine: sends each request to a device, and to another device when that fails."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from jaxmodels.errors import JaxModelsError
from service.errors import PolicyFailed
from service.inference.admission import Reservations
from service.inference.device_worker import (
    DeviceGone,
    DeviceStuck,
    DeviceWorker,
    InferenceWorker,
    InputRefused,
    Overdue,
    WorkerClosed,
)
from service.inference.loaded_policy import (
    FrameSizes,
    InferenceResult,
    InferenceStuck,
    LoadedPolicy,
    Replica,
)
from service.inference.policy_cache import BatchCompiler, PolicyCache, clear_frames, summarize_error
from service.inference.progress import LoadDurations
from service.inference.replicas import Devices, ReplicaManager
from service.threads import call_in_thread

logger = logging.getLogger(__name__)


class Dispatcher:
    """Sends each request to the least busy device; failures that another device made good count against the first."""

    def __init__(self, devices: Devices, replica_manager: ReplicaManager):
        self._devices = devices
        self._replica_manager = replica_manager

    async def run(
        self,
        loaded: LoadedPolicy,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        has_stuck: bool = False,
    ) -> InferenceResult:
        """Run the policy on a device.

        Args:
            due: when the caller's plan runs dry, on the monotonic clock; as soon as possible when None.
            has_stuck: whether a device was given up because it did not answer this request.

        Raises:
            PolicyFailed: the policy raised, with a text for sessions.
            InferenceStuck: two devices were given up because of this request.
        """
        devices = self._devices
        usable = loaded.usable or await devices.wait_for_replica(loaded)
        replica = usable[0] if len(usable) == 1 else min(usable, key=self._busyness)
        worker = devices.workers[replica.worker_id]
        try:
            result = await worker.submit(replica, observation, due, may_move=loaded.is_on_several_devices)
        except DeviceGone as error:
            self._replica_manager.retire_device(replica.policy.device, str(error))
            is_stuck = isinstance(error, DeviceStuck)
            if is_stuck and has_stuck:
                raise InferenceStuck(f"two engines were given up because of it: {error}") from error
            return await self.run(loaded, observation, due, has_stuck=has_stuck or is_stuck)
        except (JaxModelsError, InputRefused, WorkerClosed) as error:
            _raise_refusal(error)
        except Exception as error:
            try:
                return await self._run_elsewhere(loaded, replica, observation, due, error)
            except DeviceGone:
                return await self.run(loaded, observation, due)
        if devices.health.failures:
            devices.health.record_success(replica.policy.device)
        return result

    def _busyness(self, replica: Replica) -> tuple[bool, int, float]:
        """Sort key of devices: late ones last, then by requests under way, then by when they were last used."""
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
        """Ask another device; return the first answer, which may be a late answer of the first device."""
        late = failure.answer if isinstance(failure, Overdue) else None
        # Devices may have left since the request was sent.
        others = [replica for replica in loaded.usable if replica.policy.device != failed.policy.device]
        if not others and late is None:
            _raise_refusal(failure)
        other = min(others, key=self._busyness) if others else failed
        tasks = [asyncio.create_task(self._run_alone(other, observation, due))] if others else []
        try:
            result = await _first_success([*tasks, *filter(None, (late,))])
        except DeviceGone:
            raise
        except Exception as error:
            # Both failed because of the observation or the policy.
            is_another = isinstance(failure, Overdue) or isinstance(error, WorkerClosed | InputRefused)
            _raise_refusal(error if is_another else failure)
        finally:
            for task in tasks:
                task.cancel()
        if not isinstance(failure, Overdue):
            what = f"it raises {type(failure).__name__}"
            self._replica_manager.record_failure(failed.policy.device, what, other.policy.device, failure)
        return result

    async def _run_alone(
        self, replica: Replica, observation: Mapping[str, np.ndarray], due: float | None
    ) -> InferenceResult:
        try:
            return await self._devices.workers[replica.worker_id].submit(replica, observation, due)
        except DeviceGone as error:
            self._replica_manager.retire_device(replica.policy.device, str(error))
            raise


async def _first_success(answers: Sequence[asyncio.Future[InferenceResult]]) -> InferenceResult:
    """Return the first successful result; else raise DeviceGone if one device is gone, or the first error."""
    waited = set(answers)
    while waited:
        done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for answer in done:
            if answer.exception() is None:
                return answer.result()
    errors = [error for answer in answers if (error := answer.exception()) is not None]
    raise next((error for error in errors if isinstance(error, DeviceGone)), errors[0])


def _raise_refusal(error: Exception) -> NoReturn:
    """Raise an error with a text for clients."""
    if isinstance(error, PolicyFailed):
        raise error
    if isinstance(error, JaxModelsError):
        raise PolicyFailed(f"the policy refused its input: {error}") from error
    logger.error("a policy raised", exc_info=error)
    clear_frames(error)
    raise PolicyFailed(f"the policy raised {type(error).__name__} {summarize_error(error)}") from error


# How much lower the priority of trials is than that of robots.
TRIAL_NICENESS = 5
# Seconds for which a trial waits until no robot waits, and between two checks of that.
MAX_TRIAL_WAIT, TRIAL_POLL = 1.0, 0.005
# Seconds without a request after which the engine counts as idle: direct clients send requests at any time.
QUIET_SECONDS = 3.0
# Promised or used share of an accelerator's time above which larger batches are compiled while robots run.
CROWDED_LOAD = 0.3


class Engine:
    """Loads policies in their own threads and runs each device's batches on one thread per device.

    Requests are batched if that makes none late (``service.inference.batching``). A failed batch runs again member by
    member, so only the faulty observation fails. Several devices replace each other, and a device that fails repeatedly
    is excluded (``service.inference.replicas``).

    Attributes:
        stuck_after: seconds after which a running inference is given up.
        durations: load times of policies.
        devices: the devices and their workers.
        policy_cache: policies in memory.
        replica_manager: adds and removes devices, and copies policies to them.
        reservations: device time that sessions reserved.
        batch_compiler: compiles larger batches while no robot runs, or for many robots on an accelerator.
        has_running_robot: whether a session moves its robot.
        needs_batches: whether sessions reserved so much time that larger batches are worth a compilation.
    """

    def __init__(
        self,
        *,
        stuck_after: float = 5.0,
        durations: LoadDurations | None = None,
        batch_sizes: Sequence[int] = (1,),
        devices: Sequence[str] = (),
        max_load: float | None = None,
        are_remote: bool = False,
        join_timeout: float = 60.0,
        load_timeout: float = 600.0,
    ):
        """Create the engine with one thread per device; without ``batch_sizes`` requests run one at a time.

        Args:
            devices: devices that get a copy of each policy, or none for the device it is loaded on; a repeated device
                runs that many batches at a time.
            max_load: reservable share of device time; None is unlimited.
            are_remote: devices belong to other processes and are added by `ReplicaManager.add_device`.
            join_timeout: seconds that a request waits for a remote device.
            load_timeout: seconds for building and compiling a local policy.
        """
        self.stuck_after = stuck_after
        self.durations = durations or LoadDurations()
        self.has_running_robot: Callable[[], bool] = lambda: False
        self.needs_batches: Callable[[], bool] = lambda: self.reservations.load > CROWDED_LOAD
        self._pending, self._last_used_at = 0, -QUIET_SECONDS
        self._turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()
        self.reservations = Reservations(max_load)
        workers: Sequence[DeviceWorker] = ()
        if not are_remote:
            names = ["device", *(f"device:{number}" for number in range(1, len(devices)))]
            workers = [InferenceWorker(name, stuck_after) for name in names]
        self.devices = Devices(workers, devices, join_timeout if are_remote else 0.0)
        self.batch_compiler = BatchCompiler(batch_sizes, self._may_compile_batches, self._is_crowded)
        self.policy_cache = PolicyCache(
            self.devices.replicate,
            self._on_policy_loaded,
            are_remote=are_remote,
            load_timeout=None if are_remote else load_timeout,
        )
        self.replica_manager = ReplicaManager(self.devices, self.policy_cache)
        self._dispatcher = Dispatcher(self.devices, self.replica_manager)

    def _on_policy_loaded(self, loaded: LoadedPolicy) -> None:
        self.replica_manager.add_policy(loaded)
        for frames in loaded.replicas[0].compiled_frames:
            self.batch_compiler.schedule(loaded, dict(frames))

    def _may_compile_batches(self) -> bool:
        is_quiet = time.monotonic() >= self._last_used_at + QUIET_SECONDS
        return is_quiet and not (self._pending or self.policy_cache.building.locked() or self.has_running_robot())

    def _is_crowded(self) -> bool:
        """Return whether robots need larger batches of an accelerator. A CPU would compile where it computes."""
        if self.policy_cache.building.locked():
            return False
        now, replicas = time.monotonic(), [one for loaded in self.policy_cache.all for one in loaded.replicas]
        if all(replica.policy.device.startswith("cpu") for replica in replicas):
            return False
        busiest = max((worker.load(now) for worker in self.devices.workers.values()), default=0.0)
        return self.needs_batches() or (self.devices.waiting > 0 and busiest > CROWDED_LOAD)

    async def compile(self, loaded: LoadedPolicy, sizes: FrameSizes) -> None:
        """Compile a policy for frames of these sizes, outside of the device thread; raises PolicyFailed."""
        sizes = loaded.to_own_names(sizes)
        await self.policy_cache.compile(loaded.unnamed, sizes)
        self.batch_compiler.schedule(loaded.unnamed, sizes)

    async def infer(
        self,
        loaded: LoadedPolicy,
        observation: Mapping[str, np.ndarray],
        *,
        due: float | None = None,
        caller: object | None = None,
    ) -> InferenceResult:
        """Run the policy on one observation (batch of 1), batched with others if that makes none late.

        Args:
            due: monotonic time at which the caller's plan ends; None is as soon as possible.
            caller: weakly referenced sender; its requests run in turn.

        Raises:
            PolicyFailed: the policy raised.
            InferenceStuck: no result came in ``stuck_after`` seconds.
        """
        turn = nullcontext() if caller is None else self._turns.get(caller)
        async with turn or self._turns.setdefault(caller, asyncio.Lock()):
            self._pending += 1
            try:
                if loaded.own_names:
                    loaded, observation = loaded.unnamed, loaded.to_own_names(observation)
                return await self._dispatcher.run(loaded, observation, due)
            finally:
                self._pending -= 1
                self._last_used_at = time.monotonic()

    def infer_now(self, loaded: LoadedPolicy, observation: Mapping[str, np.ndarray]) -> InferenceResult | None:
        """Run the policy on the event loop if it can be answered at once; see `InferenceWorker.run_now`."""
        worker = next(iter(self.devices.workers.values()))
        if len(loaded.usable) != 1 or not isinstance(worker, InferenceWorker):
            return None
        result = worker.run_now(loaded.usable[0], observation)
        self._last_used_at = time.monotonic()
        return result

    async def run_trial(self, loaded: LoadedPolicy, observation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, float]:
        """Run one low-priority inference for no robot; returns the chunk and its seconds. Raises PolicyFailed."""
        named = loaded.to_own_names(observation)

        def infer() -> tuple[np.ndarray, float]:
            began = time.perf_counter()
            chunk = loaded.policy.act(named)
            return chunk, time.perf_counter() - began

        until = time.monotonic() + MAX_TRIAL_WAIT
        while self._pending and time.monotonic() < until:  # noqa: ASYNC110 - the wait is short
            await asyncio.sleep(TRIAL_POLL)
        try:
            return await call_in_thread(infer, "policy-trial", TRIAL_NICENESS)
        except PolicyFailed:
            raise
        except JaxModelsError as error:
            raise PolicyFailed(f"the policy refused its input: {error}") from error
        except Exception as error:
            logger.exception("a policy on trial raised")
            raise PolicyFailed(f"the policy raised {type(error).__name__}; the server's log says more") from error

    def get_stats(self) -> dict[str, object]:
        """Return loaded policies, devices, their load and batch latencies; JSON-ready."""
        policies = self.policy_cache.all
        return {
            "device": next((loaded.policy.device for loaded in policies), None),
            "devices_failed": list(self.devices.health.failed),
            "devices": self.devices.get_stats(policies),
            "policies_loaded": len(policies),
            "policies_loading": self.policy_cache.loading_count,
            "inferences_waiting": self.devices.waiting,
            "batch_sizes_to_compile": self.batch_compiler.remaining,
            "promised_per_second": round(self.reservations.per_second, 2),
            "promised_load": round(self.reservations.load, 4),
        }

    async def close(self) -> None:
        """Close the device threads; a running inference gets a second. Pending requests fail."""
        self.policy_cache.close()
        self.batch_compiler.close()
        self.replica_manager.close()
        await self.devices.close()
