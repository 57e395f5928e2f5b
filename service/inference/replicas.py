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
        self._failures: dict[str, int] = {}
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

    def answered(self, device: str) -> None:
        """It works: what was before is forgotten."""
        self._failures.pop(device, None)

    def failed(self, device: str, what: str) -> bool:
        """Another device answered what this one did not, and what that was; whether it is out from now on."""
        if device in self._out:
            return False
        self._failures[device] = self._failures.get(device, 0) + 1
        return self._failures[device] >= ALLOWED and self.take_out(device, what)

    def forget(self, device: str) -> None:
        """It left, and no other one will have its name."""
        self._failures.pop(device, None)
        self._out.pop(device, None)

    def take_out(self, device: str, what: str) -> bool:
        """It is known that it does not work; whether it is out from now on."""
        if device in self._out:
            return False
        self._out[device] = what
        return True


logger = logging.getLogger(__name__)


class Devices:
    """Each has a number that no other one ever had, and a lane that runs what it is asked.

    Attributes:
        lanes: of those that are there, by number.
        health: which of them can be relied on, by the names that policies have for them.
    """

    def __init__(self, lanes: Sequence[DeviceWorker], named: Sequence[str], patience: float = 0.0):
        """Those that are there from the start.

        Args:
            named: what the settings call them, one for each lane; none where nobody named one.
            patience: seconds that a request waits for one to join where none works; 0 where none ever joins.
        """
        self.lanes: dict[int, DeviceWorker] = dict(enumerate(lanes))
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
        found = [number for number in tuple(self.lanes) if not self.is_out(number)]
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

    def add(self, name: str, lane: DeviceWorker) -> int:
        """One more; its number."""
        number = next(self._numbers)
        self.lanes[number], self._asked_for[number], self._named[number] = lane, name, name
        return number

    async def remove(self, name: str) -> None:
        """It left; whoever waits for it is told."""
        for number in self.numbers(name):
            lane = self.lanes.pop(number, None)
            del self._asked_for[number], self._named[number]
            if lane is not None:
                await lane.close(1.0)

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
        return replica.lane in self.lanes and not self.health.is_out(replica.policy.device)

    def working(self, served: LoadedPolicy) -> Sequence[Replica]:
        """The copies that can be asked; all of them where none can and nothing else will ever come."""
        working = list(filter(self.works, served.replicas))
        return working if working or self._patience else served.replicas

    async def until_one_works(self, served: LoadedPolicy) -> Sequence[Replica]:
        """The copies that can be asked. Nothing is lost by waiting: the robot is held when its plan runs dry.

        Raises:
            LaneClosed: the server is ending.
            InferenceStuck: none came within the patience; a robot that stood still for so long does not go on by
                itself.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while not (working := self.working(served)):
                    if self._is_closed:
                        raise WorkerClosed("the server is ending")
                    self._joined.clear()
                    await self._joined.wait()
                return working
        raise InferenceStuck(f"no engine has been there for {self._patience:g} s that the policy could run on")

    def tell_waiting(self) -> None:
        """A policy runs on one more: whoever waits looks again."""
        self._joined.set()

    def least(self, replicas: Sequence[Replica]) -> Replica:
        """Where no answer is late and fewest wait; of those, who was not asked for the longest."""

        if len(replicas) == 1:
            return replicas[0]

        def haste(replica: Replica) -> tuple[bool, int, float]:
            lane = self.lanes[replica.lane]
            return lane.is_late, lane.asked, lane.asked_at

        return min(replicas, key=haste)

    @property
    def waiting(self) -> int:
        """Requests that none has begun yet."""
        return sum(lane.waiting for lane in self.lanes.values())

    @property
    def abandoned(self) -> int:
        """Threads left behind in a batch that did not return in time."""
        return sum(lane.abandoned for lane in self.lanes.values())

    def facts(self, loaded: Sequence[LoadedPolicy]) -> list[dict[str, object]]:
        """How busy each is, and what batches take on it; JSON-ready."""
        return [self._figures(number, lane, loaded) for number, lane in self.lanes.items()]

    def _figures(self, number: int, lane: DeviceWorker, loaded: Sequence[LoadedPolicy]) -> dict[str, object]:
        here = [replica for served in loaded for replica in served.replicas if replica.lane == number]
        device = self._named.get(number)
        return {
            "device": device,
            "failed": None if device is None else self.health.why(device),
            "waiting": lane.waiting,
            "load": round(lane.load(time.monotonic()), 4),
            "batches": {str(size): count for size, count in sorted(lane.batches.items())},
            "batch_ms": [replica.milliseconds() for replica in here],
        }

    async def close(self) -> None:
        """None joins any more; waits a second for an inference that is running. Whoever waits is told."""
        self._is_closed = True
        self._joined.set()
        ended = await asyncio.gather(*(lane.close(1.0) for lane in self.lanes.values()))
        if not all(ended):
            logger.warning("the device thread is still busy; it is left behind")


class ReplicaManager:
    """Keeps the policies of a store on the devices that work."""

    def __init__(self, devices: Devices, store: PolicyCache):
        self._devices = devices
        self._store = store
        self._joining: set[asyncio.Task[None]] = set()

    def join(self, device: str, lane: DeviceWorker) -> None:
        """See ``Engine.join``."""
        if not self._devices.is_closed:
            self._begin(self._devices.add(device, lane), self._store.all)

    def loaded(self, served: LoadedPolicy) -> None:
        """A policy is there: meanwhile devices may have left, or joined."""
        served.keep(self._devices.works)
        there = {replica.lane for replica in served.replicas}
        for number in sorted(self._devices.lanes.keys() - there):
            if not self._devices.is_out(number):
                self._begin(number, [served])

    def _begin(self, number: int, loaded: Sequence[LoadedPolicy]) -> None:
        task = asyncio.create_task(self._extend(number, loaded), name=f"join {self._devices.name(number)}")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def complete(self, device: str) -> None:
        """See ``Engine.complete``."""
        for number in self._devices.numbers(device):
            lacking = [one for one in self._store.all if number not in {replica.lane for replica in one.replicas}]
            await self._extend(number, lacking)

    async def _extend(self, number: int, loaded: Sequence[LoadedPolicy]) -> None:
        devices, device = self._devices, self._devices.name(number)
        for served in loaded:
            if device is None or number not in devices.lanes or devices.health.is_out(device):
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
                served.keep(devices.works)
                devices.tell_waiting()

    def leave(self, device: str, why: str) -> None:
        """See ``Engine.leave``."""
        if not self._devices.health.take_out(device, why):
            return
        logger.warning("device %s is not used any more: %s", device, why)
        self._keep()

    def failed(self, device: str, what: str, other: str, why: Exception) -> None:
        """Another device answered what this one did not; one that does so again and again is not used any more."""
        health = self._devices.health
        if health.failed(device, what):
            logger.error(
                "device %s is not used any more: %s, and %s answers what it does not",
                device,
                health.why(device),
                other,
                exc_info=why,
            )
            self._keep()

    async def forget(self, device: str) -> None:
        """See ``Engine.forget``."""
        await self._devices.remove(device)
        self._keep()
        self._devices.health.forget(device)

    def _keep(self) -> None:
        for served in self._store.all:
            served.keep(self._devices.works)

    def close(self) -> None:
        """Nothing is put on any device any more."""
        for task in self._joining:
            task.cancel()
