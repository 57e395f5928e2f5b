"""When the next chunk is asked for, by a policy whose latency is what the test says."""

import time
from dataclasses import replace

import numpy as np
import pytest

from service.control.aggregation import AGGREGATIONS
from service.control.observation_buffer import Snapshot
from service.stats import Recent
from tests.unit.control.test_control import FRAME, PACE, POSE, World

STEADY = replace(PACE, action_steps=8)


def figures(world: World) -> dict[str, object]:
    return world.control.scheduler.get_stats(world.control.queue.period)


def answers(world: World) -> dict[str, int]:
    return dict(figures(world)["answers"])  # type: ignore[call-overload]


def test_an_outlier_counts_only_when_it_occurs_twice() -> None:
    expected = Recent(32)
    assert expected.upper_estimate() is None
    for _ in range(20):
        expected.add(0.04)
    expected.add(0.5)
    assert expected.upper_estimate() == 0.04
    expected.add(0.5)
    assert expected.upper_estimate() == 0.5
    for _ in range(16):
        expected.add(0.04)
    assert expected.upper_estimate() == 0.04


@pytest.mark.parametrize("latency", [0.001, 0.1, 0.22, 0.3])
def test_chunks_come_when_they_are_to_take_over(latency: float) -> None:
    world = World(pace=STEADY, latency=latency).begin().run(20.0)
    assert world.control.starvations == 0
    assert np.diff([at for at, _ in world.sent]) == pytest.approx(0.05)
    told = answers(world)
    # The first ones, before anybody knew.
    assert told["late"] <= 1
    assert told["early"] <= 1
    assert told["on_time"] > 30


@pytest.mark.parametrize("latency", [0.02, 0.6], ids=["quick", "slow"])
def test_few_chunks_are_late_or_early_after_a_latency_jump(latency: float) -> None:
    world = World(pace=STEADY, latency=latency).begin().run(0.1)
    world.latency = 0.02
    world.run(10.0)
    assert answers(world)["early"] <= 10
    world.latency = 0.3
    world.run(10.0)
    assert answers(world)["late"] <= 3
    assert world.control.starvations == 0
    before = answers(world)["early"]
    world.latency = 0.02
    world.run(20.0)
    assert answers(world)["early"] - before <= 16
    assert figures(world)["asked_ahead_s"] == pytest.approx(0.02, abs=1e-3)


def test_delay_counts_executed_actions_and_no_compile_wait() -> None:
    world = World(pace=STEADY, latency=0.7).begin().run(0.9)
    assert figures(world)["delay_actions"] is None, "nothing was done before the first chunk"
    world.control.obstruct("compiling", "compiling")
    world.run(3.0)
    world.control.clear("compiling")
    world.latency = 0.12
    world.run(3.0)
    assert figures(world)["delay_actions"] == 3, "the tick that asks, and two more"
    latency = figures(world)["latency_actions"]
    assert latency == {"p50": pytest.approx(2.4, abs=0.01), "p90": pytest.approx(2.4, abs=0.01)}


def test_after_a_hold_the_policy_is_asked_at_once() -> None:
    world = World(pace=STEADY, latency=0.12).begin().run(3.0)
    world.sees = False
    world.run(2.0)
    back, world.sees = world.now, True
    world.run(1.0)
    assert min(at for at in world.asked if at > back) - back < 0.051
    assert world.control.hold is None


def test_seconds_set_by_hand_hold_whatever_is_measured() -> None:
    world = World(pace=replace(STEADY, ask_ahead=0.2), latency=0.02).begin().run(5.0)
    # Asked four actions before eight of a chunk are done, it is there three early.
    assert np.diff(world.asked[2:]) == pytest.approx(0.2, abs=0.051)
    assert answers(world)["early"] > 15
    world.control.adjust(replace(STEADY, ask_ahead=0.0))
    world.latency = 0.15
    late = answers(world)["late"]
    world.run(5.0)
    assert answers(world)["late"] > late + 5
    assert world.control.starvations == 0


def test_a_request_states_when_the_plan_runs_dry() -> None:
    world = World(pace=STEADY)
    dues: list[tuple[float, float | None]] = []
    do = world.do

    def note(step) -> None:
        if step.request is not None:
            dues.append((world.now, step.request.due))
        do(step)

    world.do = note  # type: ignore[method-assign]
    world.begin().run(2.0)
    assert dues[0][1] is None, "there is no plan yet"
    for at, due in dues[1:]:
        assert due is not None
        # Eight of twenty actions are done; the frame of the chunk is as old as its first action.
        assert due - at == pytest.approx(0.05 * 12, abs=0.051)


@pytest.mark.parametrize("rate", [10, 20, 40])
def test_slower_ticks_do_as_many_actions_of_a_chunk_as_faster_ones(rate: float) -> None:
    world = World(pace=replace(STEADY, rate=rate), latency=0.001).begin().run(10.0)
    assert np.diff(world.asked[2:]) == pytest.approx(0.4, abs=0.11)


@pytest.mark.parametrize("name", ["crossfade", "ensemble"])
def test_200_ticks_a_second_interpolate_at_low_cost(name: str) -> None:
    pace = replace(PACE, rate=200, action_rate=25, action_steps=5, overlap=AGGREGATIONS[name])

    def line(snapshot: Snapshot) -> np.ndarray:
        steps = 25 * (snapshot.observed_at - 100) + np.arange(20, dtype=np.float32)[None, :, None]
        return (np.array(list(POSE.values())) + steps).astype(np.float32)

    world = World(pace=pace, latency=0.04, policy=line).begin().run(1.5)  # nothing of the first chunk is left
    moved = np.diff([command[0] for command in world.commands(world.now - 0.4)])
    assert len(moved) == pytest.approx(80, abs=2)
    # One unit per action is an eighth per tick, at every tick.
    assert moved == pytest.approx(1 / 8, abs=1e-3)
    ticks, chunks = [], world.control.chunks
    for _, request in world.answers:
        world.answer(request)
    for _ in range(200):
        world.now = world.control.clock.next_deadline(world.now)
        world.buffer.put_frame("front", FRAME, world.now)
        began = time.thread_time()
        step = world.control.tick(world.now)
        ticks.append(time.thread_time() - began)
        assert step.command is not None
        if step.request is not None:
            world.answer(step.request)
    assert world.control.chunks > chunks + 4
    # 25 us on a quiet machine; the median, because others work here, too.
    assert np.median(ticks) < 100e-6
