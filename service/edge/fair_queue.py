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
from weakref import WeakKeyDictionary, WeakValueDictionary

# Seconds of reading in one turn of the loop, after which ticks and all else that is due come first.
TURN = 0.002
# Of the loop's time, when more is there to be read; and seconds that may be made up for when little was there before.
SHARE, CREDIT = 0.5, 0.02
# What work costs, in seconds; fixed, since a clock also measures how long other processes had the core.
FRAME, MESSAGE, REQUEST, CONNECTION = 10e-6, 150e-6, 500e-6, 150e-6


class Flow:
    """What one connection has to do, piece by piece.

    Attributes:
        step: does one piece; returns what it costs, in seconds, and whether there is more.
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

    _of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, "FairQueue"] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.perf_counter):
        self._loop = loop
        self._clock = clock
        self._known: WeakValueDictionary[str, _Caller] = WeakValueDictionary()
        self._callers: list[tuple[float, int, _Caller]] = []
        self._numbers = count()
        self._now = 0.0
        self._left = TURN
        self._credit, self._at = CREDIT, clock()
        self._is_planned = self._is_working = self._is_charged = False

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
        if self._is_free() and not self._run(flow):
            return
        self._push(flow)
        self._plan()

    async def turn(self, flow: Flow, cost: float) -> None:
        """Wait until this flow may do what costs so much."""
        if self._is_free():
            self.charge(flow, cost)
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

    def _is_free(self) -> bool:
        """Whether somebody who comes now need not wait."""
        return not (self._is_working or self._callers) and self._left > 0 and self._refill() > 0

    def _refill(self) -> float:
        now = self._clock()
        self._credit = min(self._credit + (now - self._at) * SHARE, CREDIT)
        self._at = now
        return self._credit

    def charge(self, flow: Flow, cost: float) -> None:
        """Count what it has had."""
        caller = flow.caller
        # Whoever was silent has no claim to what it did not use, and is before all who wait.
        flow.start = max(flow.start, caller.now) + cost
        caller.start = max(caller.start, self._now) + cost
        self._left -= cost
        self._credit -= cost
        if not self._is_charged:
            self._is_charged = True
            self._loop.call_soon(self._renew)

    def _renew(self) -> None:
        self._is_charged = False
        self._left = TURN

    def _run(self, flow: Flow) -> bool:
        """Do one piece of it; whether there is more."""
        cost, is_more = flow.step()
        self.charge(flow, cost)
        return is_more

    def _push(self, flow: Flow) -> None:
        caller = flow.caller
        flow.is_waiting = True
        flow.start = max(flow.start, caller.now)
        heapq.heappush(caller.flows, (flow.start, next(self._numbers), flow))
        self._push_caller(caller)

    def _push_caller(self, caller: _Caller) -> None:
        if caller.flows and not caller.is_waiting:
            caller.is_waiting = True
            caller.start = max(caller.start, self._now)
            heapq.heappush(self._callers, (caller.start, next(self._numbers), caller))

    def _pop(self) -> Flow:
        self._now, _, caller = heapq.heappop(self._callers)
        caller.now, _, flow = heapq.heappop(caller.flows)
        caller.is_waiting = flow.is_waiting = False
        return flow

    def _plan(self) -> None:
        if self._is_planned or not self._callers:
            return
        self._is_planned = True
        credit = self._refill()
        if credit > 0:
            self._loop.call_soon(self._work)
        else:
            self._loop.call_later(-credit / SHARE, self._work)

    def _work(self) -> None:
        """One turn's work."""
        self._is_planned, self._is_working = False, True
        until = self._clock() + TURN
        try:
            while self._callers and self._left > 0 and self._clock() < until:
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
