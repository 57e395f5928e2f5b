"""Requests of this front to one engine of the cluster, and how long they may take."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from service.cluster.handing_over import hand_over, is_heard, settle
from service.cluster.messages import EngineFacts, Refusal
from service.cluster.remote_policy import RemotePolicy
from service.engine.costs import Costs
from service.engine.device_lane import DeviceGone, InputRefused, LaneClosed, Overdue
from service.engine.served import Frames, Inference, InferenceStuck, Replica, frames_of
from service.errors import PolicyFailed

# Seconds after which another engine is asked: three times what an answer usually takes, at least this, and so long
# when nobody knows. A call over the network takes a millisecond, and now and then tens of them.
OVERDUE = 0.25
UNKNOWN = 1.0

# Asks the engine: method and arguments; whatever comes of it goes to the last argument, in any thread.
Send = Callable[[str, tuple[Any, ...], Callable[[Any], None]], None]


class RemoteLane:
    """A `DeviceLane` whose device is an engine elsewhere.

    Sending takes this process a while for large frames, so it is done by a thread of its own and never by the event
    loop, which has ticks to keep.

    Attributes:
        facts: what the engine said of itself last.
    """

    def __init__(self, name: str, send: Send, stuck_after: float = 5.0):
        self.name = name
        self.facts = EngineFacts()
        self.asked_at = 0.0
        self.abandoned = 0
        self._send = send
        self._stuck_after = stuck_after
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"engine {name}")
        self._open: dict[asyncio.Future[Any], float] = {}  # with when it was asked, oldest first
        self._took = Costs()
        self._gone: str | None = None
        self._is_closed = False

    @property
    def asked(self) -> int:
        """Requests of this front that nobody has answered yet."""
        return len(self._open)

    @property
    def is_late(self) -> bool:
        """Whether an answer to this front has taken longer than usual, and is not there yet."""
        oldest = next(iter(self._open.values()), None)
        return oldest is not None and time.monotonic() - oldest > self._usual

    @property
    def waiting(self) -> int:
        """Requests of all fronts that the engine has not begun."""
        return self.facts.waiting

    @property
    def batches(self) -> Mapping[int, int]:
        """As the engine counted them, for all fronts."""
        return self.facts.batches

    def load(self, now: float) -> float:
        """As the engine said last."""
        return self.facts.load

    async def ask(
        self,
        replica: Replica,
        observation: Mapping[str, np.ndarray],
        due: float | None,
        *,
        is_alone: bool = False,
        may_move: bool = False,
    ) -> Inference:
        """See `DeviceLane.ask`; whether it runs alone is the engine's business."""
        if self._is_closed:
            raise LaneClosed("the server is ending")
        if self._gone is not None:
            raise DeviceGone(self._gone)
        policy = replica.policy
        assert isinstance(policy, RemotePolicy)
        loop, now = asyncio.get_running_loop(), time.monotonic()
        outcome: asyncio.Future[Any] = loop.create_future()
        self._open[outcome] = self.asked_at = now
        # Not when whoever waits gives up: an engine that owes answers has more to do than one that does not, and the
        # next question goes there.
        outcome.add_done_callback(self._open.pop)
        due_in = None if due is None else due - now
        arguments = (policy.handle, dict(observation), due_in)
        self._sender.submit(self._post, arguments, partial(hand_over, loop, outcome), outcome)
        answer = asyncio.create_task(self._answer(outcome, replica, frames_of(observation), now))
        answer.add_done_callback(is_heard)
        if may_move:
            usual = self._usual
            done, _ = await asyncio.wait([answer], timeout=usual)
            if not done:
                # Not held against the engine: it is asked last while it owes answers, and whether it still lives the
                # pool finds out. Where one machine is too busy all of its engines stand still, and are well a moment
                # later.
                late = Overdue(f"{self.name} has not answered for {usual:.2f} s")
                late.is_counted, late.answer = True, answer
                raise late
        return await answer

    @property
    def _usual(self) -> float:
        usual = max(3 * self._took.usual(1), OVERDUE) if self._took.is_known else UNKNOWN
        return min(usual, self._stuck_after)

    async def _answer(
        self, outcome: asyncio.Future[Any], replica: Replica, frames: Frames, asked_at: float
    ) -> Inference:
        done, _ = await asyncio.wait([outcome], timeout=self._stuck_after)
        if not done:
            raise InferenceStuck(f"inference did not return in {self._stuck_after:g} s")
        total = time.monotonic() - asked_at
        inference = _inference(outcome.result(), total)
        self._took.learn(1, total)
        replica.costs(frames).learn(inference.batch, inference.compute)
        return inference

    def _post(self, arguments: tuple[Any, ...], done: Callable[[Any], None], outcome: asyncio.Future[Any]) -> None:
        if not outcome.done():  # sending may have hung, and whoever waited was told so
            self._send("act", arguments, done)

    def fail(self, why: str) -> None:
        """The engine is gone: whoever waits for it is told now, whatever Ray will say later."""
        self._gone = why
        for outcome in tuple(self._open):
            settle(outcome, DeviceGone(why))

    async def close(self, within: float) -> bool:
        """Nobody is left waiting."""
        self._is_closed = True
        for outcome in tuple(self._open):
            settle(outcome, LaneClosed("the server is ending"))
        self._sender.shutdown(wait=False, cancel_futures=True)
        return True


def _inference(found: Any, total: float) -> Inference:
    if isinstance(found, Refusal):
        if found.kind == "input":
            raise InputRefused(found.text)
        if found.kind in ("unknown", "engine"):
            raise DeviceGone(found.text)
        if found.kind == "stuck":
            raise InferenceStuck(found.text)
        raise PolicyFailed(found.text)
    inside = found.queue + found.to_device + found.compute + found.to_host
    return Inference(
        chunk=np.array(found.chunk),  # a copy: what came lies in the object store, and cannot be written to
        # The way there and back is waiting, too.
        queue=found.queue + max(total - inside, 0.0),
        to_device=found.to_device,
        compute=found.compute,
        to_host=found.to_host,
        total=total,
        batch=found.batch,
    )
