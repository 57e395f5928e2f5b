import asyncio
import gc
import time
from collections import Counter
from typing import Any, cast

import pytest

from service.http.fair_queue import (
    BUDGET,
    BURST,
    CREDIT,
    NEWCOMERS,
    NEWCOMERS_AT_ONCE,
    SHARE,
    TURN_SECONDS,
    URGENT,
    URGENT_AT_ONCE,
    FairQueue,
    measure_steps,
)

pytestmark = pytest.mark.timed

COST = 0.0005


class Handle:
    def __init__(self, due, call):
        self.due, self.call = due, call

    def cancel(self):
        self.call = lambda: None


class Loop:
    """Event loop whose turns the test runs. Its clock advances with the work, or to the next timer if it is idle."""

    def __init__(self):
        self.now = 0.0
        self.soon, self.timers = [], []
        self.turns = []  # Seconds of work in each turn.
        self.queue = FairQueue(cast(Any, self), clock=lambda: self.now, cpu=lambda: self.now)

    def call_soon(self, call):
        self.soon.append(Handle(self.now, call))
        return self.soon[-1]

    def call_later(self, pause, call):
        self.timers.append(Handle(self.now + pause, call))
        return self.timers[-1]

    def turn(self):
        began = self.now
        due = [timer for timer in self.timers if timer.due <= self.now]
        self.timers = [timer for timer in self.timers if timer.due > self.now]
        ready, self.soon = [*due, *self.soon], []
        for handle in ready:
            handle.call()
        self.turns.append(self.now - began)
        if not self.soon and self.timers:
            self.now = max(self.now, min(timer.due for timer in self.timers))

    def until(self, when):
        while self.now < when and (self.soon or self.timers):
            self.turn()


class Sender:
    """Connection with this number of unread pieces. ``read`` lists the times at which they are read."""

    def __init__(self, loop, caller="here", pieces=0):
        self.loop, self.pieces, self.read = loop, pieces, []
        self.flow = loop.queue.create_flow(caller, self.step)

    def step(self):
        if not self.pieces:
            return 0.0, False
        self.pieces -= 1
        self.loop.now += COST
        self.read.append(self.loop.now)
        return 0.0, self.pieces > 0

    def send(self, pieces=1):
        self.pieces += pieces
        self.loop.queue.enter(self.flow)


def flood(loop, count=60, caller="here"):
    """Return connections with more unread pieces than the queue can read during a test."""
    flooding = [Sender(loop, caller, pieces=10**6) for _ in range(count)]
    for sender in flooding:
        loop.queue.enter(sender.flow)
    return flooding


def test_data_is_read_at_once_if_no_connection_waits():
    loop = Loop()
    sender = Sender(loop)
    sender.send()
    assert sender.read == [COST]
    assert not sender.flow.is_waiting


def test_a_flood_has_a_limit_per_turn_and_equal_shares():
    loop = Loop()
    flooding = flood(loop)
    loop.until(3.0)
    assert max(loop.turns) <= TURN_SECONDS + COST + 1e-9
    busy = sum(loop.turns)
    # Each connection has its burst at once. After that, all of them together have a share of the time.
    assert busy <= 60 * (BURST + COST) + 3.0 * SHARE + CREDIT + COST
    counts = [len(sender.read) for sender in flooding]
    assert max(counts) - min(counts) <= 2


def test_a_client_within_its_budget_does_not_wait_for_floods():
    loop = Loop()
    flood(loop)
    loop.until(2.0)
    robot, waits = Sender(loop), []
    for _ in range(100):
        arrived = loop.now
        robot.send()
        while len(robot.read) <= len(waits):
            loop.turn()
        waits.append(robot.read[-1] - arrived)
        loop.until(arrived + 0.02)
    assert max(waits) <= TURN_SECONDS + 2 * COST
    assert not robot.flow.is_greedy


def test_only_silence_restores_the_budget_of_a_flooding_connection():
    loop = Loop()
    sender = Sender(loop)
    sender.send(10**3)
    flood(loop, 1)
    loop.until(1.0)
    assert sender.flow.is_greedy
    sender.pieces = 0
    loop.until(1.2)
    loop.now += 2 * BURST / BUDGET
    sender.send()
    assert not sender.flow.is_greedy


def test_a_client_that_was_late_once_regains_its_budget():
    """The slow queue always finds an unread message of this client, but a flood has thousands of messages."""
    loop = Loop()
    _flooding = flood(loop)
    loop.until(2.0)
    robot = Sender(loop)
    robot.flow.unread = lambda: 350.0 * robot.pieces
    robot.send(15)
    robot.flow.is_greedy, robot.flow.budget = True, -BURST / 3
    began, waiting = loop.now, []
    for number in range(250):
        robot.send()
        loop.until(began + 0.02 * number)
        waiting.append(robot.pieces)
    assert max(waiting) < 50, "few of the 265 messages wait"
    assert waiting[-1] < 20


def test_internal_messages_do_not_wait_and_have_no_budget():
    loop = Loop()
    _flooding = flood(loop)  # All connections are still within their budgets.
    session, waits = Sender(loop), []
    session.flow.is_own = True
    for _ in range(200):
        arrived = loop.now
        session.send(2)
        while session.pieces:
            loop.turn()
        waits.append(session.read[-1] - arrived)
        loop.until(arrived + 0.005)
    assert max(waits) <= 2 * (TURN_SECONDS + 2 * COST)
    assert not session.flow.is_greedy


def test_callers_share_the_time_for_any_number_of_connections():
    loop = Loop()
    senders = {"many": flood(loop, 30, "10.0.0.1"), "one": flood(loop, 1, "10.0.0.2")}
    loop.until(1.0)
    before = {caller: sum(len(sender.read) for sender in group) for caller, group in senders.items()}
    loop.until(3.0)
    reads = Counter(
        {caller: sum(len(sender.read) for sender in group) - before[caller] for caller, group in senders.items()}
    )
    assert abs(reads["many"] - reads["one"]) <= 0.1 * reads["one"]


def test_a_busy_loop_reads_little_beyond_the_budgets():
    loop = Loop()
    [sender] = flood(loop, 1)
    loop.until(1.0)
    before = len(sender.read)
    for _ in range(50):
        loop.now += 0.02  # Other work makes the sender's timer late.
        loop.turn()
    assert (len(sender.read) - before) * COST <= 0.1 * 50 * 0.02
    assert len(sender.read) > before


def test_a_disconnected_caller_is_forgotten():
    loop = Loop()
    for number in range(100):
        Sender(loop, f"10.0.0.{number}").send()
    loop.until(10.0)
    gc.collect()
    assert not loop.queue._prompt.callers


async def test_turns_are_given_in_order_without_cancelled_waiters():
    queue = FairQueue.of_running_loop()
    assert FairQueue.of_running_loop() is queue
    flows, answered = [queue.create_flow("here") for _ in range(40)], []

    async def ask(number):
        await queue.wait_turn(flows[number], 0.001)
        answered.append(number)

    asking = [asyncio.create_task(ask(number)) for number in range(40)]
    await asyncio.sleep(0)
    assert len(answered) <= TURN_SECONDS / 0.001
    asking[20].cancel()
    async with asyncio.timeout(30):
        await asyncio.gather(*asking, return_exceptions=True)
    assert answered == [number for number in range(40) if number != 20]


def test_surplus_connections_get_a_budget_only_after_a_wait():
    loop = Loop()
    flows = [loop.queue.create_new_flows("here", lambda: (0.0, False))[0] for _ in range(500)]
    assert Counter(flow.is_greedy for flow in flows) == {False: NEWCOMERS_AT_ONCE, True: 500 - NEWCOMERS_AT_ONCE}
    assert not loop.queue.create_new_flows("elsewhere", lambda: (0.0, False))[0].is_greedy
    del flows
    gc.collect()
    loop.now += 0.5  # The caller has no connection now, but its count is kept.
    flows = [loop.queue.create_new_flows("here", lambda: (0.0, False))[0] for _ in range(500)]
    assert sum(not flow.is_greedy for flow in flows) == NEWCOMERS / 2
    loop = Loop()
    for _ in range(100):
        loop.queue.create_new_flows("here", lambda: (0.0, False))
    sender = Sender(loop)
    [sender.flow] = loop.queue.create_new_flows("here", sender.step)
    assert sender.flow.is_greedy
    loop.now += BURST / BUDGET
    sender.pieces = 1
    loop.queue.enter(sender.flow)
    assert not sender.flow.is_greedy


def test_urgent_requests_go_first_up_to_a_limit():
    loop = Loop()
    flow = loop.queue.create_flow("here")
    flow.is_greedy = True
    assert sum(loop.queue.take_urgent(flow, COST) for _ in range(500)) == URGENT_AT_ONCE
    assert not flow.is_greedy, "an urgent request does not wait for a flood"
    assert loop.queue.take_urgent(loop.queue.create_flow("elsewhere"), COST)
    loop.now += 0.1
    assert sum(loop.queue.take_urgent(flow, COST) for _ in range(500)) == URGENT / 10


@pytest.mark.parametrize(("took", "min_share"), [(10 * COST, 1), (COST, 8)])
def test_greedy_clients_pay_for_the_measured_cost(took, min_share):
    loop, read = Loop(), 0

    def step():
        nonlocal read
        read += 1
        loop.now += COST
        loop.queue.correct_credit(took - 10 * COST)
        return 9 * COST, True

    loop.queue.enter(loop.queue.create_flow("here", step))
    loop.until(2.0)
    estimated_reads = (2.0 * SHARE + CREDIT + BURST) / (10 * COST)
    assert 0.9 * min_share * estimated_reads <= read <= 1.1 * (2.0 * SHARE + CREDIT + BURST) / took


async def test_step_times_are_reported_and_cancellation_passes_on():
    spent, ended = [], []

    async def work():
        try:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def do():
        await measure_steps(work(), spent.append)

    task = asyncio.create_task(do())
    for _ in range(4):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
    assert len(spent) == 3
    assert spent[0] >= 0.02 > spent[1] + spent[2]
