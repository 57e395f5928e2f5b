"""Devices that come and go: policies are put on those that join, and nothing is asked of those that leave."""

import asyncio
import logging
from collections.abc import Sequence

from service.engine.device_lane import DeviceGone, DeviceLane
from service.engine.devices import Devices
from service.engine.served import Served
from service.engine.store import Store, in_short, let_go

logger = logging.getLogger(__name__)


class Turnover:
    """Keeps the policies of a store on the devices that work."""

    def __init__(self, devices: Devices, store: Store):
        self._devices = devices
        self._store = store
        self._joining: set[asyncio.Task[None]] = set()

    def join(self, device: str, lane: DeviceLane) -> None:
        """See ``Engine.join``."""
        if not self._devices.is_closed:
            self._begin(self._devices.add(device, lane), self._store.all)

    def loaded(self, served: Served) -> None:
        """A policy is there: meanwhile devices may have left, or joined."""
        served.keep(self._devices.works)
        there = {replica.lane for replica in served.replicas}
        for number in sorted(self._devices.lanes.keys() - there):
            if not self._devices.is_out(number):
                self._begin(number, [served])

    def _begin(self, number: int, loaded: Sequence[Served]) -> None:
        task = asyncio.create_task(self._extend(number, loaded), name=f"join {self._devices.name(number)}")
        self._joining.add(task)
        task.add_done_callback(self._joining.discard)

    async def complete(self, device: str) -> None:
        """See ``Engine.complete``."""
        for number in self._devices.numbers(device):
            lacking = [one for one in self._store.all if number not in {replica.lane for replica in one.replicas}]
            await self._extend(number, lacking)

    async def _extend(self, number: int, loaded: Sequence[Served]) -> None:
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
