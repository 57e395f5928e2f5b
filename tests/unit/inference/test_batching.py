from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.batching import STALE_AFTER, WINDOW, BatchPlan, BatchScheduler, LatencyModel
from tests.unit.inference.test_costs import costs

SIZES = (1, 2, 4, 8)


@dataclass(eq=False)
class Asked:
    due: float
    is_alone: bool = False
    is_awaited: bool = True


# As on a device that a batch of 8 costs twice what one costs.
GENTLE = costs(b1=0.010, b2=0.012, b4=0.015, b8=0.020)
# As on a device that gains nothing.
LINEAR = costs(b1=0.010, b2=0.020, b4=0.040, b8=0.080)


def line(*dues: float, known: LatencyModel = GENTLE) -> BatchScheduler[Asked]:
    batching: BatchScheduler[Asked] = BatchScheduler()
    for due in dues:
        batching.add("line", Asked(due), known, SIZES)
    return batching


def chosen(batching: BatchScheduler[Asked], now: float = 0.0) -> BatchPlan[Asked]:
    return batching.next_batch(now)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("dues", "known", "members", "size"),
    [
        ([9.0], GENTLE, 1, 1),
        ([0.1] * 8, GENTLE, 8, 8),
        ([0.1] * 7, GENTLE, 7, 8),
        # 5 in a batch of 8 give 250 a second, 4 in a batch of 4 give 400.
        ([1.0] * 5, costs(b1=0.005, b2=0.006, b4=0.010, b8=0.020), 4, 4),
        ([1.0] * 8, LINEAR, 1, 1),
        # A larger batch would make the first one late, unless it is late anyway.
        ([0.013, 0.5, 0.5, 0.5], GENTLE, 2, 2),
        ([0.011, 0.5, 0.5], GENTLE, 1, 1),
        ([-1.0, 0.005, 0.5, 0.5], GENTLE, 4, 4),
        # There is time for all, then just enough if the first goes alone, then 15 in time at the cost of one.
        ([0.012, *[0.063] * 15], GENTLE, 2, 2),
        ([0.012, *[0.061] * 15], GENTLE, 1, 1),
        ([0.012, *[0.059] * 15], GENTLE, 8, 8),
        # 8 by 0.020, then 8 by 0.040 would be too late for one of them; 4 by 0.035 are not, and the rest has time.
        ([*[0.021] * 8, 0.046, *[0.2] * 9], GENTLE, 8, 8),
        # Not all can be in time: 8 go, of whom one is late.
        ([0.012, *[0.021] * 8, *[0.2] * 7], GENTLE, 8, 8),
    ],
)
def test_a_batch_is_as_large_as_times_allow(dues: list[float], known: LatencyModel, members: int, size: int) -> None:
    batching = line(*dues, known=known)
    found = chosen(batching)
    assert (len(found.members), found.size, found.members[0].due) == (members, size, min(dues))
    assert len(batching) == len(dues) - members


def test_as_many_as_possible_are_in_time_in_later_batches_too() -> None:
    # To be in time the first would go in a batch of 2, by 0.012; then 8 by 0.032 and the last 6 by 0.052.
    batching = line(0.012, *[0.041] * 15)
    assert [len(chosen(batching, now).members) for now in (0.0, 0.020)] == [8, 8]


def test_soonest_due_first() -> None:
    batching = line(0.3, 0.1, 0.2, known=LINEAR)
    assert [chosen(batching).members[0].due for _ in range(3)] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("dues", "other_due", "other_takes", "now", "size"),
    [
        ([0.2] * 8, 0.211, 0.195, 0.0, 1),  # it has to begin at 0.016, before the others have to
        ([0.1] * 8, 0.117, 0.001, 0.095, 8),  # they are late already, and it is quick
        ([*[0.029] * 4, *[0.06] * 4], 0.0347, 0.0146, 0.0, 8),
        ([*[0.029] * 4, *[0.06] * 4], 0.0345, 0.0146, 0.0, 4),
        ([0.029] * 8, 0.0345, 0.0146, 0.0, 8),  # late by 0.1 ms; otherwise four here are late by 1 ms
    ],
)
def test_a_batch_makes_nobody_in_another_line_late(dues, other_due, other_takes, now, size) -> None:
    batching = line(*dues)
    batching.add("other", Asked(other_due), costs(b1=other_takes), SIZES)
    found = chosen(batching, now)
    assert (found.key, found.size) == ("other" if size == 1 else "line", size)


def test_who_may_spoil_a_batch_runs_alone_and_the_others_together() -> None:
    batching = line(0.1, 0.1, 0.1)
    batching.add("line", Asked(0.05, is_alone=True), GENTLE, SIZES)
    assert [len(chosen(batching).members) for _ in range(2)] == [1, 3]


def test_who_is_not_wanted_any_more_is_left_out() -> None:
    batching = line(0.2)
    batching.add("line", Asked(0.1, is_awaited=False), GENTLE, SIZES)
    assert chosen(batching).members[0].due == 0.2
    batching.add("line", Asked(0.1, is_awaited=False), GENTLE, SIZES)
    assert batching.next_batch(0.0) is None
    assert not len(batching)


def test_sizes_that_are_not_compiled_yet_are_not_used() -> None:
    batching: BatchScheduler[Asked] = BatchScheduler()
    for _ in range(8):
        batching.add("line", Asked(1.0), GENTLE, (1, 2))
    assert chosen(batching).size == 2
    batching.add("line", Asked(1.0), GENTLE, (1, 2, 4))  # compiled meanwhile
    assert chosen(batching).size == 4


def measured_in_a_bad_moment() -> LatencyModel:
    """8 took 60 ms once; since then the device did a lot of batches of 2, 12 ms each."""
    known = costs(b1=0.010, b8=0.060)
    for _ in range(STALE_AFTER):
        known.record(2, 0.012)
    return known


def test_a_size_that_was_slow_long_ago_is_tried_again_and_believed_again() -> None:
    known = measured_in_a_bad_moment()
    assert chosen(line(*[1.0] * 8, known=known)).size == 8
    known.record(8, 0.020)
    assert known.measured(8).median == known.measured(8).p90 == 0.020, "the figures of the bad moment do not count"
    assert chosen(line(*[1.0] * 8, known=known)).size == 8, "400 answers a second; batches of 2 give 167"


def test_a_size_that_is_still_slow_is_left_alone_for_as_long_again() -> None:
    known = measured_in_a_bad_moment()
    known.record(8, 0.060)
    for _ in range(STALE_AFTER):
        assert chosen(line(*[1.0] * 8, known=known)).size == 2
        known.record(2, 0.012)
    assert chosen(line(*[1.0] * 8, known=known)).size == 8


def test_only_a_full_batch_that_delays_nobody_is_retried() -> None:
    known = measured_in_a_bad_moment()
    assert chosen(line(*[1.0] * 7, known=known)).size == 2
    # 8 in batches of 2 take 48 ms.
    assert chosen(line(*[0.047] * 8, known=known)).size == 2
    assert chosen(line(*[0.049] * 8, known=known)).size == 8
    beside = line(*[0.050] * 8, known=known)
    beside.add("other", Asked(0.055), costs(b1=0.010), SIZES)
    assert chosen(beside).size == 2


def run(true: dict[int, float], known: LatencyModel, batches: int, pace: float = 1.0) -> list[int]:
    """The sizes of so many batches, while more wait than fit into one, and nobody is in a hurry."""
    sizes = []
    for _ in range(batches):
        sizes.append(chosen(line(*[9.0] * 12, known=known)).size)
        known.record(sizes[-1], pace * true[sizes[-1]])
    return sizes


TRUE = {1: 0.002, 2: 0.003, 4: 0.005, 8: 0.009}


def test_a_moment_in_which_the_device_is_slow_gives_no_size_a_bad_name() -> None:
    known = LatencyModel()
    for size in [*TRUE] * WINDOW:
        known.record(size, TRUE[size])
    for pace in (1.5, 1.0, 2.5, 1.0):
        assert set(run(TRUE, known, STALE_AFTER - len(TRUE), pace)) == {8}, "the others would take longer, too"
        for size in TRUE:
            known.record(size, pace * TRUE[size])


@pytest.mark.parametrize("wrong", [{4: 0.002}, {8: 0.040}, {1: 0.0002}])
def test_what_is_thought_of_a_size_is_put_right_by_the_others(wrong: dict[int, float]) -> None:
    """Even of one that seems so good that no other runs any more: it could be the device that got slower."""
    known = LatencyModel()
    for size, seconds in [*(TRUE | wrong).items()] * WINDOW:
        known.record(size, seconds)
    run(TRUE, known, 8 * STALE_AFTER)
    assert run(TRUE, known, STALE_AFTER).count(8) >= STALE_AFTER - len(TRUE)


def test_sizes_are_not_old_because_little_was_measured() -> None:
    known = costs(b1=0.010, b2=0.012, b4=0.015, b8=0.090)
    for _ in range(STALE_AFTER - 4):
        known.record(1, 0.010)
    assert not any(known.is_stale(size) for size in (1, 2, 4, 8, 16))


@given(st.lists(st.tuples(st.floats(-0.1, 0.5), st.sampled_from("ab"), st.booleans()), max_size=20), st.floats(0, 0.1))
def test_every_request_is_served_once_and_in_time_if_possible(asked: list[tuple[float, str, bool]], now: float) -> None:
    batching: BatchScheduler[Asked] = BatchScheduler()
    known = {"a": GENTLE, "b": costs(b1=0.002, b2=0.003, b8=0.009)}
    waiting: list[tuple[str, Asked]] = []
    for due, key, is_alone in asked:
        waiting.append((key, request := Asked(due, is_alone)))
        batching.add(key, request, known[key], SIZES)
    served: list[Asked] = []
    while (found := batching.next_batch(now)) is not None:
        served += found.members
        assert found.size in SIZES
        assert len(found.members) <= found.size
        end, at_best = now + known[str(found.key)].measured(found.size).p90, now + known[str(found.key)].measured(1).p90
        made_late = [member for member in found.members if at_best <= member.due < end]
        assert not made_late or not one_at_a_time(now, waiting, known)
        now, waiting = end, [each for each in waiting if each[1] not in found.members]
    assert len(served) == len(asked)
    assert len(set(map(id, served))) == len(asked)


def one_at_a_time(now: float, waiting: list[tuple[str, Asked]], known: dict[str, LatencyModel]) -> bool:
    """Whether all who are not late already are in time that way, with half of the largest batch to spare."""
    end = now
    for key, request in sorted(waiting, key=lambda each: each[1].due):
        end += known[key].measured(1).p90
        if request.due >= now + known[key].measured(1).p90 and request.due < end + known[key].measured(8).p90 / 2:
            return False
    return True


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.01), (4, 0.03), (8, 0.06), (2, 0.02), (3, 0.03)])
def test_a_size_that_nobody_measured_is_guessed_from_the_nearest_with_care(size: int, seconds: float) -> None:
    assert costs(b1=0.01, b4=0.03).measured(size).median == pytest.approx(seconds)


def test_latencies_are_the_median_and_the_90th_percentile() -> None:
    made = LatencyModel()
    assert not made.is_measured
    assert made.measured(4).median == made.measured(4).p90 == 0
    for milliseconds in range(1, 12):
        made.record(1, milliseconds / 1e3)
    assert made.get_stats() == {"1": {"p50": 6.0, "p90": 10.0}}
    for _ in range(32):
        made.record(1, 0.5)
    assert made.measured(1).median == 0.5, "what is long over counts no more"
