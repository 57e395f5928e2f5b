import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmodels import TemporalEnsembler
from service.control.action_queue import ActionQueue
from service.control.aggregation import EnsembleAggregation, WeightedAggregation

PERIOD = 0.05


def numbered(length: int, first: float = 0.0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.float32)[:, None]


def join(queue: ActionQueue, chunk: np.ndarray, observed_at: float, now: float) -> None:
    queue.push(queue.aggregate(chunk, observed_at), observed_at, now)


def first_of(action: np.ndarray | None) -> float | None:
    return None if action is None else float(action[0])


@pytest.mark.parametrize(
    ("tick_period", "moment", "found"),
    [
        (None, 10.0, (1, 1.0)),
        (None, 10.29, (4, 1.0)),
        (None, 10.25, (3, 1.0)),  # Halfway between two actions, the earlier action counts as executed.
        (None, 9.5, (0, 1.0)),
        (0.05, 10.25, (3, 0.5)),
        (0.05, 10.3, (4, 1.0)),
        (0.05, 9.8, (0, 1.0)),
    ],
)
def test_a_chunk_continues_with_the_first_action_after_a_time(tick_period, moment, found) -> None:
    first, share = ActionQueue(0.1, tick_period).first_after(moment + 1e-9, 10.0)
    assert (first, share) == (found[0], pytest.approx(found[1], abs=1e-6))


def test_each_tick_returns_the_due_action_of_the_newest_chunk() -> None:
    queue = ActionQueue(PERIOD)
    queue.push(numbered(4), observed_at=10.0, now=10.0)
    ticks = [10.0 + number * PERIOD for number in range(5)]
    assert [first_of(queue.take(tick, tick)) for tick in ticks] == [0, 1, 2, 3, None]
    assert (queue.late, queue.consumed, queue.left) == (0, 4, 0)
    queue = ActionQueue(PERIOD)
    queue.push(numbered(10), observed_at=0.0, now=0.0)
    queue.take(0.0, 0.0)
    queue.take(0.05, 0.05)
    queue.push(numbered(10, first=100), observed_at=0.05, now=0.08)
    assert first_of(queue.take(0.1, 0.1)) == 101
    assert queue.consumed == 1


@pytest.mark.parametrize(
    ("periods", "chunk", "usable", "ticks", "taken", "late"),
    [
        ((PERIOD,), (10, 10.0, 10.18), 6, [10.2], [4], 4),
        ((PERIOD,), (10, 10.0, 11.0), 0, [11.0], [None], 10),
        ((PERIOD,), (100, 0.0, 0.0), 100, [0.0, 2.0], [0, 40], 39),
        ((0.02, 0.04), (10, 0.0, 0.0), 10, [0.0, 0.04, 0.08, 0.12, 0.16], [0, 2, 4, 6, 8], 0),
        # The last action is held for its own period.
        ((0.04, 0.01), (2, 0.0, 0.0), 2, np.array([*range(8), 9]) * 0.01, [0, 0.25, 0.5, 0.75, *[1] * 4, None], 0),
    ],
    ids=["late", "wholly late", "after a pause", "slower ticks", "faster ticks"],
)
def test_ticks_return_due_actions_and_drop_late_actions(periods, chunk, usable, ticks, taken, late) -> None:
    queue = ActionQueue(*periods)
    length, observed_at, now = chunk
    assert queue.push(numbered(length), observed_at, now) == usable
    assert [first_of(queue.take(tick, tick)) for tick in ticks] == pytest.approx(taken)
    assert queue.late == late


@pytest.mark.parametrize("tick_period", [None, 0.02, 0.12])
@pytest.mark.parametrize("executed", [0, 3])
def test_the_first_tick_after_a_rest_takes_the_next_action(tick_period: float | None, executed: int) -> None:
    queue = ActionQueue(PERIOD, tick_period)
    tick = tick_period or PERIOD
    assert queue.push(numbered(20), observed_at=10.0, now=10.7, executed=executed) == 20 - executed
    assert queue.due_times()[0] == pytest.approx(10.7)
    # Several ticks are missed and the next tick is late. The robot is at rest until then.
    first = 10.7 + 9 * tick
    assert first_of(queue.take(first, first + 0.9 * tick)) == executed
    assert first_of(queue.take(first + tick, first + tick)) == pytest.approx(executed + tick / PERIOD)
    assert (queue.late, queue.observed_at) == (executed, 10.0)
    assert queue.dry_at == pytest.approx(first + (20 - executed) * PERIOD)


def test_the_next_chunk_is_aligned_to_the_executed_actions() -> None:
    queue = ActionQueue(PERIOD, aggregation=WeightedAggregation("average", 0.5))
    queue.push(numbered(20), observed_at=10.0, now=10.7, executed=0)
    assert queue.take(10.75, 10.75) is not None
    # The frame is older than the motion, so both chunks begin with the same action.
    assert queue.aggregate(numbered(20), 10.6).tolist() == numbered(20).tolist()
    join(queue, numbered(20), observed_at=10.6, now=10.76)
    assert first_of(queue.take(10.8, 10.8)) == 1
    # This frame is two actions later in the motion.
    join(queue, numbered(20, first=2), observed_at=10.85, now=10.92)
    assert first_of(queue.take(10.95, 10.95)) == 4
    # After another rest, the time begins again.
    queue.clear()
    queue.push(numbered(20), observed_at=11.0, now=11.3, executed=0)
    assert first_of(queue.take(11.35, 11.35)) == 0


def test_due_times_list_the_remaining_actions() -> None:
    queue = ActionQueue(PERIOD)
    queue.push(numbered(3), observed_at=1.0, now=1.04)
    assert queue.due_times() == pytest.approx([1.05, 1.10])
    queue.clear()
    assert (queue.due_times(), queue.take(1.1, 1.1)) == ([], None)


def test_the_phase_between_frames_and_ticks_never_costs_an_action() -> None:
    for phase in np.linspace(0, PERIOD, 41):
        queue = ActionQueue(PERIOD)
        queue.push(numbered(50), observed_at=0.0, now=0.0)
        jitter = np.random.default_rng(0).uniform(0, 0.4 * PERIOD, 40)
        taken = [first_of(queue.take(phase + n * PERIOD, phase + n * PERIOD + jitter[n])) for n in range(40)]
        assert None not in taken
        assert np.diff([value for value in taken if value is not None]).tolist() == [1] * 39


@given(
    period=st.sampled_from([0.005, 0.02, 0.05, 1 / 30]),
    tick_share=st.sampled_from([1.0, 0.5, 1.7]),
    start=st.floats(0, 1e6),
    chunks=st.lists(st.tuples(st.integers(0, 30), st.floats(0, 0.5), st.integers(1, 40)), min_size=1, max_size=5),
    lateness=st.lists(st.floats(0, 0.999), min_size=1, max_size=20),
)
def test_no_action_is_returned_a_period_after_its_due_time(
    period: float, tick_share: float, start: float, chunks: list, lateness: list[float]
) -> None:
    tick_period = period * tick_share
    queue = ActionQueue(period, tick_period)
    arrivals = {tick: (delay, length) for tick, delay, length in chunks}
    for tick in range(60):
        deadline = start + tick * tick_period
        now = deadline + lateness[tick % len(lateness)] * tick_period
        if tick in arrivals:
            delay, length = arrivals[tick]
            # The value of each action is its due time, so that the result shows the due time.
            due = (now - delay) + np.arange(length) * period
            queue.push(due[:, None], observed_at=now - delay, now=now)
        action = queue.take(deadline, now)
        if action is not None:
            assert now - float(action[0]) <= 1.01 * period + 1e-6
            assert float(action[0]) - now <= 0.501 * period + 1e-6


@pytest.mark.parametrize("coefficient", [0.01, 0.0, -0.05, 0.5])
def test_ensembling_with_a_chunk_at_every_tick_equals_lerobots(coefficient: float) -> None:
    random = np.random.default_rng(1)
    reference = TemporalEnsembler(coefficient, 8)
    queue = ActionQueue(PERIOD, aggregation=EnsembleAggregation(coefficient))
    for tick in range(30):
        chunk = random.normal(size=(8, 3)).astype(np.float32)
        now = tick * PERIOD
        join(queue, chunk, observed_at=now, now=now)
        expected = reference.update(chunk[None])[0]
        actual = queue.take(now, now)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_ensembling_aligns_predictions_by_time_until_it_is_cleared() -> None:
    queue = ActionQueue(PERIOD, aggregation=EnsembleAggregation(0.0))
    queue.push(numbered(10), observed_at=0.0, now=0.0)
    queue.take(0.0, 0.0)
    # The same plan, observed three ticks later and answered after two more ticks, changes nothing.
    join(queue, numbered(10, first=3), observed_at=3 * PERIOD, now=5 * PERIOD)
    assert first_of(queue.take(5 * PERIOD, 5 * PERIOD)) == 5
    join(queue, numbered(10, first=16), observed_at=6 * PERIOD, now=6 * PERIOD)
    assert first_of(queue.take(6 * PERIOD, 6 * PERIOD)) == pytest.approx((6 + 6 + 16) / 3)
    queue.clear()
    join(queue, numbered(10, first=50), observed_at=6 * PERIOD, now=6 * PERIOD)
    assert first_of(queue.take(6 * PERIOD, 6 * PERIOD)) == 50


def test_a_chunk_of_another_policy_fades_in_over_the_old_plan() -> None:
    queue = ActionQueue(0.1)
    other = np.full((10, 2), 4, np.float32)
    assert queue.crossfade(other, 0.0, 0.0, 3) is other
    queue.push(np.zeros((10, 2), np.float32), 0.0, 0.0)
    # The frame is from action 2 of the old chunk and the answer from action 4, so three actions from there fade in.
    faded = queue.crossfade(other, 0.2, 0.4, 3)
    assert faded[:, 0].tolist() == [0, 0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert other.min() == 4, "the chunk itself does not change"
    # Fewer actions of the old chunk are left than requested.
    assert queue.crossfade(other, 0.7, 0.7, 9)[:5, 1].tolist() == [1, 2, 3, 4, 4]
    assert queue.crossfade(other, 1.0, 1.0, 3) is other
    assert queue.crossfade(other, 0.1, 0.1, 0) is other
    queue.clear()
    assert queue.crossfade(other, 0.1, 0.1, 3) is other
