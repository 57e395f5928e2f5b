"""The devices that policies run on: which there are, which of them work, and which is asked next."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from service.engine.device_health import DeviceHealth
from service.engine.device_lane import DeviceGone, DeviceLane, LaneClosed
from service.engine.served import InferenceStuck, Policy, Replica, Served

logger = logging.getLogger(__name__)


class Devices:
    """Each has a number that no other one ever had, and a lane that runs what it is asked.

    Attributes:
        lanes: of those that are there, by number.
        health: which of them can be relied on, by the names that policies have for them.
    """

    def __init__(self, lanes: Sequence[DeviceLane], named: Sequence[str], patience: float = 0.0):
        """Those that are there from the start.

        Args:
            named: what the settings call them, one for each lane; none where nobody named one.
            patience: seconds that a request waits for one to join where none works; 0 where none ever joins.
        """
        self.lanes: dict[int, DeviceLane] = dict(enumerate(lanes))
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

    def add(self, name: str, lane: DeviceLane) -> int:
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

    def working(self, served: Served) -> Sequence[Replica]:
        """The copies that can be asked; all of them where none can and nothing else will ever come."""
        working = list(filter(self.works, served.replicas))
        return working if working or self._patience else served.replicas

    async def until_one_works(self, served: Served) -> Sequence[Replica]:
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
                        raise LaneClosed("the server is ending")
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

    def facts(self, loaded: Sequence[Served]) -> list[dict[str, object]]:
        """How busy each is, and what batches take on it; JSON-ready."""
        return [self._figures(number, lane, loaded) for number, lane in self.lanes.items()]

    def _figures(self, number: int, lane: DeviceLane, loaded: Sequence[Served]) -> dict[str, object]:
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
