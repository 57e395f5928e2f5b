"""Fair queueing of what a server reads from the sockets of an event loop.

Connections read in turns, so that many sockets do not delay control ticks and emergency stops. Connections within their
budget go first; the others share the remaining time. Each class uses start-time fair queueing (Goyal 1996) between
callers, and between the connections of a caller.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from itertools import count
from types import coroutine
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from service.http.limits import Bucket

# Seconds of reading in one turn of the loop. A stop over a new connection takes ten turns.
TURN_SECONDS = 0.001
# Share of the loop's time for flows beyond their budgets, and seconds that idle time adds at most.
SHARE, CREDIT = 0.8, 0.01
# Budget of a connection: seconds per second (120 messages, where a robot sends 50), and burst seconds (30 requests).
BUDGET, BURST = 0.03, 0.015
# Unread bytes up to which a connection counts as keeping up.
UNREAD = 16_384
# Estimated seconds of later work per message, request and connection. ``FairQueue.correct_credit`` corrects them.
MESSAGE, REQUEST, CONNECTION = 250e-6, 1e-3, 100e-6
# New connections of a caller with a full budget, per second and at once. A robot with eight cameras has twenty.
NEWCOMERS, NEWCOMERS_AT_ONCE = 20.0, 64.0
# Priority requests of one caller, per second and at once.
URGENT, URGENT_AT_ONCE = 50.0, 20.0


class Flow:
    """One connection's place in the queue: its next step, and the budget for its steps.

    Attributes:
        step: runs one step; returns the seconds of later work that it causes, and whether there is more now.
        unread: returns the number of received bytes that wait.
        idle_at: start of its idle time. The budget grows while the flow is idle or keeps up.
        is_greedy: whether the flow is beyond its budget.
        is_own: whether it carries commands of this server's sessions; they are always first, without a budget.
    """

    def __init__(
        self,
        callers: tuple["_Caller", "_Caller"],
        step: Callable[[], tuple[float, bool]],
        now: float,
        budget: tuple[float, float],
    ):
        self.callers = callers
        self.step = step
        self.unread: Callable[[], float] = lambda: math.inf
        self.rate, self.burst = budget
        self.budget, self.idle_at = self.burst, now
        self.is_greedy = self.is_own = self.is_waiting = False
        self.start = 0.0


class _Caller:
    """All flows from one address in one lane; ``now`` is the virtual time of its flows, ``start`` its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.newcomers = Bucket(NEWCOMERS, NEWCOMERS_AT_ONCE, clock)
        self.urgent = Bucket(URGENT, URGENT_AT_ONCE, clock)
        self.flows: list[tuple[float, int, Flow]] = []
        self.start = self.now = 0.0
        self.is_waiting = False


class _Lane:
    """Waiting flows of one kind, ordered by virtual start time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.callers: WeakValueDictionary[str, _Caller] = WeakValueDictionary()
        self.waiting: list[tuple[float, int, _Caller]] = []
        self._numbers = count()
        self._now = 0.0

    def find_caller(self, name: str) -> _Caller:
        caller = self.callers.get(name)
        if caller is None:
            caller = self.callers[name] = _Caller(self._clock)
        return caller

    def charge(self, flow: Flow, caller: _Caller, cost: float) -> None:
        # Idle time gives a flow no advantage.
        caller.now = max(caller.now, flow.start)
        flow.start = caller.now + cost
        self._now = max(self._now, caller.start)
        caller.start = self._now + cost

    def push(self, flow: Flow, caller: _Caller) -> None:
        flow.start = max(flow.start, caller.now)
        heapq.heappush(caller.flows, (flow.start, next(self._numbers), flow))
        self.push_caller(caller)

    def push_caller(self, caller: _Caller) -> None:
        if caller.flows and not caller.is_waiting:
            caller.is_waiting = True
            caller.start = max(caller.start, self._now)
            heapq.heappush(self.waiting, (caller.start, next(self._numbers), caller))

    def pop(self) -> tuple[Flow, _Caller]:
        _, _, caller = heapq.heappop(self.waiting)
        _, _, flow = heapq.heappop(caller.flows)
        caller.is_waiting = False
        return flow, caller


class FairQueue:
    """Fair queue of one event loop; ``FairQueue.of_running_loop()`` returns it."""

    _queues: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "FairQueue"]] = WeakKeyDictionary()

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ):
        """Create a queue; ``cpu`` returns the processor seconds of this thread."""
        self._loop = loop
        self._clock, self._cpu = clock, cpu
        self._prompt, self._greedy = _Lane(clock), _Lane(clock)
        self._own: deque[Flow] = deque()
        self._recent: deque[tuple[float, _Caller]] = deque(maxlen=4096)
        self._left = TURN_SECONDS
        self._credit, self._at = CREDIT, clock()
        self._scheduled: asyncio.Handle | None = None
        self._due = math.inf
        self._is_working = self._is_charged = False

    @classmethod
    def of_running_loop(cls) -> "FairQueue":
        """Return the queue of the running loop; the first call creates it."""
        loop = asyncio.get_running_loop()
        queue = cls._queues.get(loop)
        if queue is None:
            queue = cls._queues[loop] = cls(loop)
        return queue

    def create_flow(
        self,
        caller: str,
        step: Callable[[], tuple[float, bool]] = lambda: (0.0, False),
        budget: tuple[float, float] = (BUDGET, BURST),
    ) -> Flow:
        """Create the flow of a connection from this address; ``budget`` is seconds per second, and burst seconds."""
        return Flow((self._prompt.find_caller(caller), self._greedy.find_caller(caller)), step, self._clock(), budget)

    def create_new_flows(self, caller: str, *steps: Callable[[], tuple[float, bool]]) -> list[Flow]:
        """Create flows of a new connection; they start beyond budget if their caller opens too many connections."""
        flows, now = [self.create_flow(caller, step) for step in steps], self._clock()
        source = flows[0].callers[0]
        # A reference keeps each caller until its bucket is full again.
        while self._recent and self._recent[0][0] < now - NEWCOMERS_AT_ONCE / NEWCOMERS:
            self._recent.popleft()
        if not self._recent or self._recent[-1] != (now, source):
            self._recent.append((now, source))
        if not source.newcomers.take():
            for flow in flows:
                flow.budget, flow.is_greedy = 0.0, True
        return flows

    def take_urgent(self, flow: Flow, cost: float) -> bool:
        """Charge work of this cost if the flow may run it before all others, and return whether it may."""
        if not flow.callers[0].urgent.take():
            # A stop beyond the limit still goes before all flows beyond their budgets.
            flow.budget, flow.is_greedy = flow.burst, False
            return False
        self.charge_turn(cost)
        return True

    def enter(self, flow: Flow, is_idle: bool = True) -> None:
        """Let a flow take its next step now or in its turn; ``is_idle`` is False if it was only slowed down."""
        if flow.is_waiting:
            return
        self._refill_budget(flow, is_idle)
        if self._is_free(flow) and not self._run(flow):
            return
        self._push(flow)
        self._schedule()

    async def wait_turn(self, flow: Flow, cost: float, is_idle: bool = True) -> None:
        """Wait until this flow may do work of this cost; ``is_idle`` as for ``enter``."""
        self._refill_budget(flow, is_idle)
        if self._is_free(flow):
            self._charge(flow, cost)
            return
        waiter: asyncio.Future[None] = self._loop.create_future()

        def go() -> tuple[float, bool]:
            if waiter.done():
                return 0.0, False  # the waiting task was cancelled
            waiter.set_result(None)
            return cost, False

        flow.step = go
        self._push(flow)
        self._schedule()
        await waiter

    def correct_credit(self, difference: float) -> None:
        """Subtract the difference between measured and charged seconds of flows beyond their budgets."""
        self._credit = min(self._credit - difference, CREDIT)

    def charge_turn(self, cost: float) -> None:
        """Charge this turn of the loop for work that belongs to no flow."""
        self._left -= cost
        if not self._is_charged:
            self._is_charged = True
            self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_charged = False
        self._left = TURN_SECONDS

    def _refill_budget(self, flow: Flow, is_idle: bool) -> None:
        now = self._clock()
        if is_idle or flow.unread() <= UNREAD:
            flow.budget = min(flow.budget + (now - flow.idle_at) * flow.rate, flow.burst)
        flow.idle_at = now
        if flow.is_greedy and flow.budget > flow.burst / 4:
            flow.is_greedy, flow.start = False, 0.0

    def _is_free(self, flow: Flow) -> bool:
        """Return whether a flow may run without waiting."""
        if self._is_working or self._own:
            return False
        if flow.is_own:
            return True
        if self._left <= 0 or self._prompt.waiting:
            return False
        return not flow.is_greedy or (not self._greedy.waiting and self._seconds_until_credit() <= 0)

    def _seconds_until_credit(self) -> float:
        """Return seconds until flows beyond their budgets may run."""
        # The time by which a turn is late adds no credit, because the loop or its core was busy.
        now = min(self._clock(), self._due)
        self._credit = min(self._credit + max(now - self._at, 0.0) * SHARE, CREDIT)
        self._at = max(now, self._at)
        return -self._credit / SHARE

    def _run(self, flow: Flow) -> bool:
        """Run one step of a flow; returns whether it has more."""
        began = self._cpu()
        later, is_more = flow.step()
        self._charge(flow, self._cpu() - began + later)
        return is_more

    def _charge(self, flow: Flow, cost: float) -> None:
        """Charge a flow for what its step cost."""
        self.charge_turn(cost)
        if flow.is_own:
            return
        lane, caller = self._lane_of(flow)
        lane.charge(flow, caller, cost)
        flow.budget -= cost
        if flow.is_greedy:
            self._credit -= cost
            flow.budget = max(flow.budget, -flow.burst / 3)
        elif flow.budget < 0:
            flow.is_greedy, flow.start = True, 0.0
        self._refill_budget(flow, is_idle=False)

    def _lane_of(self, flow: Flow) -> tuple[_Lane, _Caller]:
        return (self._greedy, flow.callers[1]) if flow.is_greedy else (self._prompt, flow.callers[0])

    def _push(self, flow: Flow) -> None:
        flow.is_waiting = True
        if flow.is_own:
            self._own.append(flow)
            return
        lane, caller = self._lane_of(flow)
        lane.push(flow, caller)

    def _schedule(self) -> None:
        """Schedule the next turn: at once, or when flows beyond their budgets may run."""
        if self._is_working or not (self._own or self._prompt.waiting or self._greedy.waiting):
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
        if self._own or self._prompt.waiting or (pause := self._seconds_until_credit()) <= 0:
            self._scheduled = self._loop.call_soon(self._run_turn)
            return
        pause = max(pause, 0.001)  # uvloop rounds shorter timers to zero
        self._due = self._clock() + pause
        self._scheduled = self._loop.call_later(pause, self._run_turn)

    def _run_turn(self) -> None:
        """Run steps of waiting flows until the turn's time is used up."""
        self._scheduled, self._is_working = None, True
        if self._due <= (now := self._clock()):
            self._seconds_until_credit()
            self._due, self._at = math.inf, now
        try:
            for _ in range(len(self._own)):
                self._take_step(self._own.popleft())
            while self._left > 0:
                lane = self._prompt if self._prompt.waiting else self._greedy
                if not lane.waiting or (lane is self._greedy and self._seconds_until_credit() > 0):
                    return
                flow, caller = lane.pop()
                try:
                    self._take_step(flow)
                finally:
                    lane.push_caller(caller)
        finally:
            self._is_working = False
            self._schedule()

    def _take_step(self, flow: Flow) -> None:
        flow.is_waiting = is_more = False
        try:
            is_more = self._run(flow)
        finally:
            if is_more and not flow.is_waiting:
                self._push(flow)


@coroutine
def measure_steps(work: Coroutine[Any, Any, None], report: Callable[[float], None]) -> Generator[Any, Any, None]:
    """Run a coroutine and report the thread's processor time of each step, from one await to the next."""
    step: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        began = time.thread_time()
        try:
            awaited = step(value)
        except StopIteration:
            return
        finally:
            report(time.thread_time() - began)
        try:
            step, value = work.send, (yield awaited)
        except BaseException as error:  # the coroutine handles every error, also a cancellation
            step, value = work.throw, error
