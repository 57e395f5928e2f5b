"""Fair queueing of what a server reads: of all sockets of an event loop together, a little in each of its turns.

Limits of each socket do not add up to one of the loop: sixty that stay below theirs keep it busy all the same, and
control ticks, commands and emergency stops wait. So every connection reads in turns that are given out here, by
start-time fair queueing (Goyal 1996) in two levels: callers share the time, and of each caller its connections do. Who
wants less than its share, as every robot does, never waits for those who want more.
"""

import asyncio
import heapq
import time
from collections.abc import Callable
from itertools import count
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

# Seconds of reading in one turn of the loop, after which ticks and all else that is due come first.
TURN = 0.002
# Of the loop's time, when more is there to be read; and seconds that may be made up for when little was there before.
SHARE, CREDIT = 0.5, 0.02
# What a flow that was silent may have before those that were not, in seconds of work: nobody waits for a whole round.
LEAD = 0.005
# What is done later of a message, a request and a connection that were let in, in seconds: parsed, answered, relayed.
MESSAGE, REQUEST, CONNECTION = 250e-6, 1e-3, 300e-6


class Flow:
    """What one connection has to do, piece by piece.

    Attributes:
        step: does one piece; returns what will be done later because of it, in seconds, and whether there is more now.
        start: its virtual time: how much it has had.
    """

    __slots__ = ("caller", "is_waiting", "start", "step")

    def __init__(self, caller: "_Caller", step: Callable[[], tuple[float, bool]]):
        self.caller = caller
        self.step = step
        self.start = 0.0
        self.is_waiting = False


class _Caller:
    """Who comes from one address; ``now`` is the virtual time of its flows, ``start`` its own among callers."""

    __slots__ = ("__weakref__", "flows", "is_waiting", "now", "start")

    def __init__(self) -> None:
        self.flows: list[tuple[float, int, Flow]] = []
        self.start = self.now = 0.0
        self.is_waiting = False


class FairQueue:
    """Of one event loop: ``FairQueue.here()``."""

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "FairQueue"]] = WeakKeyDictionary()

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ):
        """``cpu`` tells what a step costs; ``clock`` would also tell how long other processes had the core."""
        self._loop = loop
        self._clock, self._cpu = clock, cpu
        self._known: WeakValueDictionary[str, _Caller] = WeakValueDictionary()
        self._callers: list[tuple[float, int, _Caller]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = TURN
        self._credit, self._at = CREDIT, clock()
        self._planned: asyncio.Handle | None = None
        self._is_working = self._is_charged = False

    @classmethod
    def here(cls) -> "FairQueue":
        """The one of the running loop."""
        loop = asyncio.get_running_loop()
        found = cls._of_loops.get(loop)
        if found is None:
            found = cls._of_loops[loop] = cls(loop)
        return found

    def flow(self, caller: str, step: Callable[[], tuple[float, bool]] = lambda: (0.0, False)) -> Flow:
        """A new one, of a connection from this address."""
        known = self._known.get(caller)
        if known is None:
            known = self._known[caller] = _Caller()
        return Flow(known, step)

    def enter(self, flow: Flow) -> None:
        """Let it do its next piece: at once when nobody waits and this turn has time left, else when it is next."""
        if flow.is_waiting:
            return
        if self._is_free(flow) and not self._run(flow):
            return
        self._push(flow)
        self._plan()

    async def turn(self, flow: Flow, cost: float) -> None:
        """Wait until this flow may do what costs so much."""
        if self._is_free(flow):
            self._charge(flow, cost)
            return
        waiter = self._loop.create_future()

        def go() -> tuple[float, bool]:
            if waiter.done():
                return 0.0, False  # who waited was cancelled
            waiter.set_result(None)
            return cost, False

        flow.step = go
        self.enter(flow)
        await waiter

    def spend(self, cost: float) -> None:
        """Count work that no flow asked for."""
        self._left -= cost
        self._credit -= cost
        if not self._is_charged:
            self._is_charged = True
            self._loop.call_soon(self._renew)

    def _renew(self) -> None:
        self._is_charged = False
        self._left = TURN

    def _is_free(self, flow: Flow) -> bool:
        """Whether it need not wait."""
        return not (self._is_working or self._callers) and self._left > 0 and self._pause(flow) <= 0

    def _pause(self, flow: Flow) -> float:
        """Seconds until it may do something, with regard to the share of all; one that had little may at once."""
        now = self._clock()
        self._credit = min(self._credit + (now - self._at) * SHARE, CREDIT)
        self._at = now
        least = -CREDIT if flow.start < flow.caller.now else 0.0
        return (least - self._credit) / SHARE

    def _run(self, flow: Flow) -> bool:
        """Do one piece of it; whether there is more."""
        began = self._cpu()
        later, is_more = flow.step()
        self._charge(flow, self._cpu() - began + later)
        return is_more

    def _charge(self, flow: Flow, cost: float) -> None:
        caller = flow.caller
        # Whoever was silent has no claim to what it did not use, but for the lead.
        start = max(flow.start, caller.now - LEAD)
        caller.now = max(caller.now, start)
        flow.start = start + cost
        start = max(caller.start, self._now - LEAD)
        self._now = max(self._now, start)
        caller.start = start + cost
        self.spend(cost)

    def _push(self, flow: Flow) -> None:
        caller = flow.caller
        flow.is_waiting = True
        flow.start = max(flow.start, caller.now - LEAD)
        heapq.heappush(caller.flows, (flow.start, next(self._numbers), flow))
        self._push_caller(caller)

    def _push_caller(self, caller: _Caller) -> None:
        if caller.flows and not caller.is_waiting:
            caller.is_waiting = True
            caller.start = max(caller.start, self._now - LEAD)
            heapq.heappush(self._callers, (caller.start, next(self._numbers), caller))

    def _next(self) -> Flow:
        return self._callers[0][2].flows[0][2]

    def _pop(self) -> Flow:
        _, _, caller = heapq.heappop(self._callers)
        _, _, flow = heapq.heappop(caller.flows)
        caller.is_waiting = flow.is_waiting = False
        return flow

    def _plan(self) -> None:
        """Go on in the next turn, or when the share of all has come up to it."""
        if not self._callers or self._is_working:
            return
        if self._planned is not None:
            self._planned.cancel()
        pause = self._pause(self._next())
        # A timer of less than half a millisecond is none to uvloop.
        later = self._loop.call_later(max(pause, 0.001), self._work) if pause > 0 else None
        self._planned = later or self._loop.call_soon(self._work)

    def _work(self) -> None:
        """One turn's work."""
        self._planned, self._is_working = None, True
        try:
            while self._callers and self._left > 0 and self._pause(self._next()) <= 0:
                flow, is_more = self._pop(), False
                try:
                    is_more = self._run(flow)
                finally:
                    if is_more and not flow.is_waiting:
                        self._push(flow)
                    self._push_caller(flow.caller)
        finally:
            self._is_working = False
            self._plan()
