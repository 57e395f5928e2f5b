"""Devices that join, fail and leave, and copies of policies on them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from service.inference.device_worker import DeviceGone, DeviceWorker, WorkerClosed
from service.inference.loaded_policy import InferenceStuck, LoadedPolicy, Policy, Replica
from service.inference.policy_cache import PolicyCache, clear_frames, summarize_error

# Consecutive failures that another device made good: one may be chance, while a lost device fails each time.
MAX_FAILURES = 3


class DeviceHealth:
    """Consecutive failures by device, and the failed devices with reasons; these stay unused until a restart."""

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.failed: dict[str, str] = {}

    def record_success(self, device: str) -> None:
        """Forget earlier failures of a device that works."""
        self.failures.pop(device, None)

    def record_failure(self, device: str, what: str) -> bool:
        """Record that another device answered what this one did not; returns whether it is out of use from now on."""
        if device in self.failed:
            return False
        self.failures[device] = self.failures.get(device, 0) + 1
        return self.failures[device] >= MAX_FAILURES and self.mark_failed(device, what)

    def forget(self, device: str) -> None:
        """Forget a device that left; no other one will have its name."""
        self.failures.pop(device, None)
        self.failed.pop(device, None)

    def mark_failed(self, device: str, what: str) -> bool:
        """Take a device out of use; returns whether it was in use."""
        if device in self.failed:
            return False
        self.failed[device] = what
        return True


logger = logging.getLogger(__name__)


class Devices:
    """Devices by number, each with its worker; numbers are never reused.

    Attributes:
        workers: present workers by number.
        health: which devices are reliable, by their names in policies.
        join_timeout: seconds that a request waits for a device to join; 0 if none can.
        joined: set when a device gets a policy that requests wait for.
        is_closed: whether the server is ending.
    """

    def __init__(self, workers: Sequence[DeviceWorker], names: Sequence[str], join_timeout: float = 0.0):
        """Add the initial devices, named as in the settings. ``join_timeout`` is in seconds, 0 without joining."""
        self.workers: dict[int, DeviceWorker] = dict(enumerate(workers))
        self.health = DeviceHealth()
        self._configured_names = dict(enumerate(names))  # names in the settings; may be empty
        self._device_names = dict(self._configured_names)  # the names in policies
        self._numbers = count(len(names) or 1)
        self.join_timeout = join_timeout
        self.joined = asyncio.Event()
        self.is_closed = False

    @property
    def usable(self) -> Sequence[int]:
        """Numbers of the devices that work; the first of this process when none does."""
        working = [number for number in tuple(self.workers) if not self.is_failed(number)]
        return working or ([] if self.join_timeout else [0])

    @property
    def first(self) -> str | None:
        """The device that policies are loaded to first, as the settings name it; None when they name none."""
        usable = self.usable
        return self._configured_names[usable[0]] if self._configured_names and usable else None

    def get_name(self, number: int) -> str | None:
        """Return a device's configured name; None when it left, or has none."""
        return self._configured_names.get(number)

    def find_numbers(self, name: str) -> Sequence[int]:
        """Return the numbers of the devices of this name."""
        return [number for number, named in self._configured_names.items() if named == name]

    def is_failed(self, number: int) -> bool:
        """Return whether a device is out of use."""
        return self._device_names.get(number, "") in self.health.failed

    def add(self, name: str, worker: DeviceWorker) -> int:
        """Add a device; returns its number."""
        number = next(self._numbers)
        self.workers[number], self._configured_names[number], self._device_names[number] = worker, name, name
        return number

    def remove(self, name: str) -> Sequence[DeviceWorker]:
        """Remove a device that left; returns its workers, which are to be closed."""
        removed = [self.workers.pop(number, None) for number in self.find_numbers(name)]
        for number in self.find_numbers(name):
            del self._configured_names[number], self._device_names[number]
        return [worker for worker in removed if worker is not None]

    def replicate(self, policy: Policy) -> tuple[Replica, ...]:
        """Copy a policy to every usable device without it; blocks. Raises DeviceGone if there is no device."""
        usable = self.usable
        if not usable:
            raise DeviceGone("no device is there that the policy could run on")
        copies = self._copies(policy, usable) if self._configured_names else {usable[0]: policy}
        self._device_names |= {number: copy.device for number, copy in copies.items()}
        return tuple(Replica(copy, number) for number, copy in copies.items())

    def _copies(self, policy: Policy, usable: Sequence[int]) -> dict[int, Policy]:
        copies: dict[int, Policy] = {}
        for number in usable:
            try:
                name = self._configured_names[number]
                copies[number] = policy if not copies and policy.device == name else policy.on(name)
            except (DeviceGone, KeyError) as error:
                logger.warning("a policy could not be copied to a device (%s)", type(error).__name__)
            policy = next(iter(copies.values()), policy)  # Its first device may have left.
        if not copies:
            raise DeviceGone("no device could take the policy")
        return copies

    def is_usable(self, replica: Replica) -> bool:
        """Return whether requests can be sent to a replica."""
        return replica.worker_id in self.workers and replica.policy.device not in self.health.failed

    async def wait_for_replica(self, loaded: LoadedPolicy) -> Sequence[Replica]:
        """Wait for a usable replica. Nothing is lost by waiting: the robot is held when its plan runs dry.

        Raises:
            WorkerClosed: the server is ending.
            InferenceStuck: none came in time; a person has to restart the robot then.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self.join_timeout):
                while not loaded.usable:
                    if self.is_closed:
                        raise WorkerClosed("the server is ending")
                    self.joined.clear()
                    await self.joined.wait()
                return loaded.usable
        raise InferenceStuck(f"no engine had the policy for {self.join_timeout:g} s (engine_patience)")

    @property
    def waiting(self) -> int:
        """Requests that have not begun to run, on all devices."""
        return sum(worker.waiting for worker in self.workers.values())

    def get_stats(self, policies: Sequence[LoadedPolicy]) -> list[dict[str, object]]:
        """Return the load and batch latencies of each device; JSON-ready."""
        return [self._get_worker_stats(number, worker, policies) for number, worker in self.workers.items()]

    def _get_worker_stats(
        self, number: int, worker: DeviceWorker, policies: Sequence[LoadedPolicy]
    ) -> dict[str, object]:
        here = [replica for loaded in policies for replica in loaded.replicas if replica.worker_id == number]
        device = self._device_names.get(number)
        return {
            "device": device,
            "failed": None if device is None else self.health.failed.get(device),
            "waiting": worker.waiting,
            "load": round(worker.load(time.monotonic()), 4),
            "batches": {str(size): count for size, count in sorted(worker.batches.items())},
            "batch_ms": [replica.get_latency_stats() for replica in here],
        }

    async def close(self) -> None:
        """Close all workers; a running inference gets a second. Pending requests fail."""
        self.is_closed = True
        self.joined.set()
        ended = await asyncio.gather(*(worker.close(1.0) for worker in self.workers.values()))
        if not all(ended):
            logger.warning("the device thread is still busy; it is left behind")


class ReplicaManager:
    """Keeps copies of the cached policies on all devices that work."""

    def __init__(self, devices: Devices, store: PolicyCache):
        self._devices = devices
        self._policy_cache = store
        self._joining: set[asyncio.Task[None]] = set()

    def add_device(self, device: str, worker: DeviceWorker) -> None:
        """Add a device (a new name in policies) at runtime; it is used once the loaded policies are copied to it."""
        if not self._devices.is_closed:
            self._start_copying(self._devices.add(device, worker), self._policy_cache.all)

    def add_policy(self, loaded: LoadedPolicy) -> None:
        """Copy a new policy to devices that joined since it was loaded, and drop its copies on devices that left."""
        self._refresh(loaded)
        there = {replica.worker_id for replica in loaded.replicas}
        for number in sorted(self._devices.workers.keys() - there):
            if not self._devices.is_failed(number):
                self._start_copying(number, [loaded])

    def _start_copying(self, number: int, policies: Sequence[LoadedPolicy]) -> None:
        task = asyncio.create_task(self._copy_policies(number, policies), name=f"join {self._devices.get_name(number)}")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def copy_missing_policies(self, device: str) -> None:
        """Copy to a device the loaded policies that it could not get before; failures are only logged."""
        for number in self._devices.find_numbers(device):
            missing = [
                one for one in self._policy_cache.all if number not in {replica.worker_id for replica in one.replicas}
            ]
            await self._copy_policies(number, missing)

    async def _copy_policies(self, number: int, policies: Sequence[LoadedPolicy]) -> None:
        devices, device = self._devices, self._devices.get_name(number)
        for loaded in policies:
            if device is None or number not in devices.workers or device in devices.health.failed:
                return  # it left
            try:
                replica = await self._policy_cache.copy(loaded, device, number)
            except DeviceGone as error:
                logger.warning("%s goes without a policy: %s", device, error)
                clear_frames(error)
                continue
            except Exception as error:
                logger.error("%s cannot be used for a policy: %s", device, summarize_error(error), exc_info=error)
                clear_frames(error)
                continue
            if devices.is_usable(replica):
                loaded.add_replica(replica)
                self._refresh(loaded)
                devices.joined.set()

    def retire_device(self, device: str, why: str) -> None:
        """Send no more requests to a device; its pending requests go to others."""
        if not self._devices.health.mark_failed(device, why):
            return
        logger.warning("device %s is not used any more: %s", device, why)
        self._refresh_all()

    def record_failure(self, device: str, what: str, other: str, why: Exception) -> None:
        """Record that another device answered what this one did not, and retire it when that happens repeatedly."""
        health = self._devices.health
        if health.record_failure(device, what):
            logger.error(
                "device %s is not used any more: %s, and %s answers what it does not",
                device,
                health.failed.get(device),
                other,
                exc_info=why,
            )
            self._refresh_all()

    async def remove_device(self, device: str) -> None:
        """Remove a device that left, and close its workers."""
        workers = self._devices.remove(device)
        self._refresh_all()
        for worker in workers:
            await worker.close(1.0)
        self._devices.health.forget(device)

    def _refresh_all(self) -> None:
        for loaded in self._policy_cache.all:
            self._refresh(loaded)

    def _refresh(self, loaded: LoadedPolicy) -> None:
        loaded.use_working(self._devices.is_usable, may_wait=self._devices.join_timeout > 0)

    def close(self) -> None:
        """Cancel all copying."""
        for task in self._joining:
            task.cancel()
