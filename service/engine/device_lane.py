"""What the engine needs of a device, be it a thread of this process or an engine on another machine."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from service.engine.served import Inference, Replica
from service.errors import PolicyFailed


class Overdue(Exception):
    """A batch takes far longer than usual, and whoever asked may ask elsewhere.

    Attributes:
        is_counted: whether it was held against the device already; all members of the batch have this one error.
        answer: what the device will say all the same, where it can still be heard.
    """

    is_counted = False
    answer: "asyncio.Future[Inference] | None" = None


class DeviceGone(Exception):
    """The device is there no more; whatever was asked of it can be asked of another one."""


class InputRefused(PolicyFailed):
    """The policy refused its input, which it would on any device; the text is for clients."""


class LaneClosed(PolicyFailed):
    """There will be no answer any more."""

    status = 503
    code = "server_ending"


class DeviceLane(Protocol):
    """Requests in, chunks out; belongs to the event loop it is used on."""

    @property
    def asked(self) -> int:
        """Requests that nobody has answered yet."""
        ...

    @property
    def asked_at(self) -> float:
        """When it was asked last, monotonic."""
        ...

    @property
    def is_late(self) -> bool:
        """Whether it owes an answer for longer than one usually takes: others are asked first."""
        ...

    @property
    def waiting(self) -> int:
        """Requests not yet begun."""
        ...

    @property
    def abandoned(self) -> int:
        """Threads left behind in a batch that did not return in time."""
        ...

    @property
    def batches(self) -> Mapping[int, int]:
        """How many there were of each size."""
        ...

    def load(self, now: float) -> float:
        """Share of the newest seconds that the device was used."""
        ...

    async def ask(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool = False,
        may_move: bool = False,
    ) -> Inference:
        """Have a policy run on one observation, in a batch with others or alone.

        Raises:
            Overdue: with ``may_move``, its batch takes far longer than usual.
            DeviceGone: the device is there no more.
            InputRefused: no other device would do better.
            InferenceStuck: it did not come back in time.
            LaneClosed: the device is closed, or was before there was an answer.
            Exception: whatever the policy raises for this observation.
        """
        ...

    async def close(self, within: float) -> bool:
        """Let go of the device, whose present batch gets so many seconds; whether that was enough."""
        ...
