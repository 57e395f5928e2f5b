"""Devices that join, fail and leave, and policies on them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from service.inference.device_worker import DeviceGone, DeviceWorker, WorkerClosed
from service.inference.loaded_policy import InferenceStuck, LoadedPolicy, Policy, Replica
from service.inference.policy_cache import PolicyCache, in_short, let_go

# Failures in a row, each of which another device made good. One may be chance, an input that only one of them stumbles
# over; a device that is gone fails each time.
ALLOWED = 3


class DeviceHealth:
    """Of all devices by their names; one that is out stays out until the server starts anew."""

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self._out: dict[str, str] = {}

    def is_out(self, device: str) -> bool:
        """Whether it is not to be asked any more."""
        return device in self._out

    def why(self, device: str) -> str | None:
        """What it failed with last, when it is out."""
        return self._out.get(device)

    @property
    def out(self) -> tuple[str, ...]:
        """All that are."""
        return tuple(self._out)

    def record_success(self, device: str) -> None:
        """It works: what was before is forgotten."""
        self.failures.pop(device, None)

    def record_failure(self, device: str, what: str) -> bool:
        """Another device answered what this one did not, and what that was; whether it is out from now on."""
        if device in self._out:
            return False
        self.failures[device] = self.failures.get(device, 0) + 1
        return self.failures[device] >= ALLOWED and self.take_out(device, what)

    def forget(self, device: str) -> None:
        """It left, and no other one will have its name."""
        self.failures.pop(device, None)
        self._out.pop(device, None)

    def take_out(self, device: str, what: str) -> bool:
        """It is known that it does not work; whether it is out from now on."""
        if device in self._out:
            return False
        self._out[device] = what
        return True


logger = logging.getLogger(__name__)


class Devices:
    """Each has a number that no other one ever had, and a worker that runs what it is asked.

    Attributes:
        workers: of those that are there, by number.
        health: which of them can be relied on, by the names that policies have for them.
    """

    def __init__(self, workers: Sequence[DeviceWorker], named: Sequence[str], patience: float = 0.0):
        """Those that are there from the start.

        Args:
            named: what the settings call them, one for each worker; none where nobody named one.
            patience: seconds that a request waits for one to join where none works; 0 where none ever joins.
        """
        self.workers: dict[int, DeviceWorker] = dict(enumerate(workers))
        self.health = DeviceHealth()
        self._asked_for = dict(enumerate(named))  # as they were named; none where nobody named one
        self._named = dict(self._asked_for)  # as policies call them
        self._numbers = count(len(named) or 1)
        self._patience = patience
        self._joined = asyncio.Event()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the server is ending."""
        return self._is_closed

    @property
    def usable(self) -> Sequence[int]:
        """Numbers of those that work; the first of this process when none does."""
        found = [number for number in tuple(self.workers) if not self.is_out(number)]
        return found or ([] if self._patience else [0])

    @property
    def first(self) -> str | None:
        """Where a policy is loaded before it is copied, as it was named; None where nobody named one."""
        usable = self.usable
        return self._asked_for[usable[0]] if self._asked_for and usable else None

    def name(self, number: int) -> str | None:
        """What one was named; None for one that left, or that nobody named."""
        return self._asked_for.get(number)

    def numbers(self, name: str) -> Sequence[int]:
        """Of those that were named so."""
        return [number for number, named in self._asked_for.items() if named == name]

    def is_out(self, number: int) -> bool:
        """Whether one is not to be asked any more."""
        return self.health.is_out(self._named.get(number, ""))

    def add(self, name: str, worker: DeviceWorker) -> int:
        """One more; its number."""
        number = next(self._numbers)
        self.workers[number], self._asked_for[number], self._named[number] = worker, name, name
        return number

    def remove(self, name: str) -> Sequence[DeviceWorker]:
        """Forget a device that left; its workers, which are to be closed."""
        removed = [self.workers.pop(number, None) for number in self.numbers(name)]
        for number in self.numbers(name):
            del self._asked_for[number], self._named[number]
        return [worker for worker in removed if worker is not None]

    def replicas(self, policy: Policy) -> tuple[Replica, ...]:
        """One for each; a policy that came on another device than the first one's is put there, too. Blocks.

        Raises:
            DeviceGone: there is none.
        """
        usable = self.usable
        if not usable:
            raise DeviceGone("no device is there that the policy could run on")
        copies = self._copies(policy, usable) if self._asked_for else {usable[0]: policy}
        self._named |= {number: copy.device for number, copy in copies.items()}
        return tuple(Replica(copy, number) for number, copy in copies.items())

    def _copies(self, policy: Policy, usable: Sequence[int]) -> dict[int, Policy]:
        copies: dict[int, Policy] = {}
        for number in usable:
            try:
                name = self._asked_for[number]
                copies[number] = policy if not copies and policy.device == name else policy.on(name)
            except (DeviceGone, KeyError) as error:  # it left meanwhile, or cannot have it
                logger.warning("a policy could not be copied to a device (%s)", type(error).__name__)
            policy = next(iter(copies.values()), policy)  # where it was loaded may be out by now
        if not copies:
            raise DeviceGone("no device could take the policy")
        return copies

    def works(self, replica: Replica) -> bool:
        """Whether a copy of a policy can be asked."""
        return replica.worker_id in self.workers and not self.health.is_out(replica.policy.device)

    @property
    def may_come(self) -> bool:
        """Whether requests wait for a device to join where none works."""
        return self._patience > 0

    async def wait_for_replica(self, loaded: LoadedPolicy) -> Sequence[Replica]:
        """The copies that can be asked. Nothing is lost by waiting: the robot is held when its plan runs dry.

        Raises:
            WorkerClosed: the server is ending.
            InferenceStuck: none came in time; a robot that stood still for so long does not go on by itself.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while not loaded.usable:
                    if self._is_closed:
                        raise WorkerClosed("the server is ending")
                    self._joined.clear()
                    await self._joined.wait()
                return loaded.usable
        raise InferenceStuck(f"no engine has been there for {self._patience:g} s that the policy could run on")

    def notify_waiting(self) -> None:
        """A policy runs on one more: requests that wait look again."""
        self._joined.set()

    @property
    def waiting(self) -> int:
        """Requests that none has begun yet."""
        return sum(worker.waiting for worker in self.workers.values())

    @property
    def abandoned(self) -> int:
        """Threads left behind in a batch that did not return in time."""
        return sum(worker.abandoned for worker in self.workers.values())

    def facts(self, loaded: Sequence[LoadedPolicy]) -> list[dict[str, object]]:
        """How busy each is, and what batches take on it; JSON-ready."""
        return [self._figures(number, worker, loaded) for number, worker in self.workers.items()]

    def _figures(self, number: int, worker: DeviceWorker, loaded: Sequence[LoadedPolicy]) -> dict[str, object]:
        here = [replica for served in loaded for replica in served.replicas if replica.worker_id == number]
        device = self._named.get(number)
        return {
            "device": device,
            "failed": None if device is None else self.health.why(device),
            "waiting": worker.waiting,
            "load": round(worker.load(time.monotonic()), 4),
            "batches": {str(size): count for size, count in sorted(worker.batches.items())},
            "batch_ms": [replica.milliseconds() for replica in here],
        }

    async def close(self) -> None:
        """None joins any more; waits a second for an inference that is running. Whoever waits is told."""
        self._is_closed = True
        self._joined.set()
        ended = await asyncio.gather(*(worker.close(1.0) for worker in self.workers.values()))
        if not all(ended):
            logger.warning("the device thread is still busy; it is left behind")


class ReplicaManager:
    """Keeps the policies of a store on the devices that work."""

    def __init__(self, devices: Devices, store: PolicyCache):
        self._devices = devices
        self._store = store
        self._joining: set[asyncio.Task[None]] = set()

    def join(self, device: str, worker: DeviceWorker) -> None:
        """See ``Engine.join``."""
        if not self._devices.is_closed:
            self._begin(self._devices.add(device, worker), self._store.all)

    def add_policy(self, served: LoadedPolicy) -> None:
        """A policy is there: meanwhile devices may have left, or joined."""
        self._refresh(served)
        there = {replica.worker_id for replica in served.replicas}
        for number in sorted(self._devices.workers.keys() - there):
            if not self._devices.is_out(number):
                self._begin(number, [served])

    def _begin(self, number: int, loaded: Sequence[LoadedPolicy]) -> None:
        task = asyncio.create_task(self._extend(number, loaded), name=f"join {self._devices.name(number)}")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def complete(self, device: str) -> None:
        """See ``Engine.complete``."""
        for number in self._devices.numbers(device):
            lacking = [one for one in self._store.all if number not in {replica.worker_id for replica in one.replicas}]
            await self._extend(number, lacking)

    async def _extend(self, number: int, loaded: Sequence[LoadedPolicy]) -> None:
        devices, device = self._devices, self._devices.name(number)
        for served in loaded:
            if device is None or number not in devices.workers or devices.health.is_out(device):
                return  # it left
            try:
                replica = await self._store.copy(served, device, number)
            except DeviceGone as error:  # it left, or says itself why it cannot
                logger.warning("%s goes without a policy: %s", device, error)
                let_go(error)
                continue
            except Exception as error:
                logger.error("%s cannot be used for a policy: %s", device, in_short(error), exc_info=error)
                let_go(error)
                continue
            if devices.works(replica):
                served.add(replica)
                self._refresh(served)
                devices.notify_waiting()

    def leave(self, device: str, why: str) -> None:
        """See ``Engine.leave``."""
        if not self._devices.health.take_out(device, why):
            return
        logger.warning("device %s is not used any more: %s", device, why)
        self._refresh_all()

    def record_failure(self, device: str, what: str, other: str, why: Exception) -> None:
        """Another device answered what this one did not; one that does so again and again is not used any more."""
        health = self._devices.health
        if health.record_failure(device, what):
            logger.error(
                "device %s is not used any more: %s, and %s answers what it does not",
                device,
                health.why(device),
                other,
                exc_info=why,
            )
            self._refresh_all()

    async def forget(self, device: str) -> None:
        """See ``Engine.forget``."""
        workers = self._devices.remove(device)
        self._refresh_all()
        for worker in workers:
            await worker.close(1.0)
        self._devices.health.forget(device)

    def _refresh_all(self) -> None:
        for loaded in self._store.all:
            self._refresh(loaded)

    def _refresh(self, loaded: LoadedPolicy) -> None:
        loaded.keep_working(self._devices.works, may_wait=self._devices.may_come)

    def close(self) -> None:
        """Nothing is put on any device any more."""
        for task in self._joining:
            task.cancel()
