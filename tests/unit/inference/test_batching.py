from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.inference.batching import STALE_AFTER, WINDOW, BatchPlan, BatchScheduler, LatencyModel
from tests.unit.inference.test_costs import costs

SIZES = (1, 2, 4, 8)


@dataclass(eq=False)
class Request:
    due: float
    is_alone: bool = False
    is_awaited: bool = True


# Device on which a batch of 8 takes twice the time of a single request.
GENTLE = costs(b1=0.010, b2=0.012, b4=0.015, b8=0.020)
# Device on which batches save no time.
LINEAR = costs(b1=0.010, b2=0.020, b4=0.040, b8=0.080)


def line(*dues: float, model: LatencyModel = GENTLE) -> BatchScheduler[Request]:
    batching: BatchScheduler[Request] = BatchScheduler()
    for due in dues:
        batching.add("line", Request(due), model, SIZES)
    return batching


def chosen(batching: BatchScheduler[Request], now: float = 0.0) -> BatchPlan[Request]:
    return batching.next_batch(now)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("dues", "model", "members", "size"),
    [
        ([9.0], GENTLE, 1, 1),
        ([0.1] * 8, GENTLE, 8, 8),
        ([0.1] * 7, GENTLE, 7, 8),
        # 5 requests in a batch of 8 are 250 per second; 4 requests in a batch of 4 are 400.
        ([1.0] * 5, costs(b1=0.005, b2=0.006, b4=0.010, b8=0.020), 4, 4),
        ([1.0] * 8, LINEAR, 1, 1),
        # A larger batch would make the first request late, unless it is late anyway.
        ([0.013, 0.5, 0.5, 0.5], GENTLE, 2, 2),
        ([0.011, 0.5, 0.5], GENTLE, 1, 1),
        ([-1.0, 0.005, 0.5, 0.5], GENTLE, 4, 4),
        # Time for all; then only if the first runs alone; then the first is late so that 15 are in time.
        ([0.012, *[0.063] * 15], GENTLE, 2, 2),
        ([0.012, *[0.061] * 15], GENTLE, 1, 1),
        ([0.012, *[0.059] * 15], GENTLE, 8, 8),
        # After 8 by 0.020, 8 by 0.040 would be too late for one request, but 4 by 0.035 are in time.
        ([*[0.021] * 8, 0.046, *[0.2] * 9], GENTLE, 8, 8),
        # Not all can be in time: a batch of 8 runs and one of its requests is late.
        ([0.012, *[0.021] * 8, *[0.2] * 7], GENTLE, 8, 8),
    ],
)
def test_a_batch_is_as_large_as_times_allow(dues: list[float], model: LatencyModel, members: int, size: int) -> None:
    batching = line(*dues, model=model)
    found = chosen(batching)
    assert (len(found.members), found.size, found.members[0].due) == (members, size, min(dues))
    assert len(batching) == len(dues) - members


def test_the_most_requests_are_in_time_in_later_batches_too() -> None:
    # The first would be in time in a batch of 2 by 0.012, but then the last 6 would be late at 0.052.
    batching = line(0.012, *[0.041] * 15)
    assert [len(chosen(batching, now).members) for now in (0.0, 0.020)] == [8, 8]


def test_the_request_with_the_earliest_due_time_runs_first() -> None:
    batching = line(0.3, 0.1, 0.2, model=LINEAR)
    assert [chosen(batching).members[0].due for _ in range(3)] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("dues", "other_due", "other_takes", "now", "size"),
    [
        ([0.2] * 8, 0.211, 0.195, 0.0, 1),  # The other request must begin at 0.016, before the line.
        ([0.1] * 8, 0.117, 0.001, 0.095, 8),  # The line is late already, and the other request is quick.
        ([*[0.029] * 4, *[0.06] * 4], 0.0347, 0.0146, 0.0, 8),
        ([*[0.029] * 4, *[0.06] * 4], 0.0345, 0.0146, 0.0, 4),
        ([0.029] * 8, 0.0345, 0.0146, 0.0, 8),  # It is late by 0.1 ms, or else four in the line would be late by 1 ms.
    ],
)
def test_a_batch_makes_no_request_of_another_line_late(dues, other_due, other_takes, now, size) -> None:
    batching = line(*dues)
    batching.add("other", Request(other_due), costs(b1=other_takes), SIZES)
    found = chosen(batching, now)
    assert (found.key, found.size) == ("other" if size == 1 else "line", size)


def test_a_request_that_may_fail_its_batch_runs_alone() -> None:
    batching = line(0.1, 0.1, 0.1)
    batching.add("line", Request(0.05, is_alone=True), GENTLE, SIZES)
    assert [len(chosen(batching).members) for _ in range(2)] == [1, 3]


def test_abandoned_requests_are_skipped() -> None:
    batching = line(0.2)
    batching.add("line", Request(0.1, is_awaited=False), GENTLE, SIZES)
    assert chosen(batching).members[0].due == 0.2
    batching.add("line", Request(0.1, is_awaited=False), GENTLE, SIZES)
    assert batching.next_batch(0.0) is None
    assert not len(batching)


def test_sizes_that_are_not_compiled_yet_are_not_used() -> None:
    batching: BatchScheduler[Request] = BatchScheduler()
    for _ in range(8):
        batching.add("line", Request(1.0), GENTLE, (1, 2))
    assert chosen(batching).size == 2
    batching.add("line", Request(1.0), GENTLE, (1, 2, 4))  # Size 4 is now compiled.
    assert chosen(batching).size == 4


def model_with_an_old_outlier() -> LatencyModel:
    """Return a model with one batch of 8 in 60 ms, followed by many batches of 2 in 12 ms."""
    model = costs(b1=0.010, b8=0.060)
    for _ in range(STALE_AFTER):
        model.record(2, 0.012)
    return model


def test_a_size_that_was_slow_long_ago_is_measured_again() -> None:
    model = model_with_an_old_outlier()
    assert chosen(line(*[1.0] * 8, model=model)).size == 8
    model.record(8, 0.020)
    assert model.measured(8).median == model.measured(8).p90 == 0.020, "the old outlier does not count"
    assert chosen(line(*[1.0] * 8, model=model)).size == 8, (
        "batches of 8 give 400 answers per second, batches of 2 give 167"
    )


def test_a_size_that_is_still_slow_waits_again_for_a_retry() -> None:
    model = model_with_an_old_outlier()
    model.record(8, 0.060)
    for _ in range(STALE_AFTER):
        assert chosen(line(*[1.0] * 8, model=model)).size == 2
        model.record(2, 0.012)
    assert chosen(line(*[1.0] * 8, model=model)).size == 8


def test_only_a_full_batch_without_delay_is_retried() -> None:
    model = model_with_an_old_outlier()
    assert chosen(line(*[1.0] * 7, model=model)).size == 2
    # 8 requests in batches of 2 take 48 ms.
    assert chosen(line(*[0.047] * 8, model=model)).size == 2
    assert chosen(line(*[0.049] * 8, model=model)).size == 8
    batching = line(*[0.050] * 8, model=model)
    batching.add("other", Request(0.055), costs(b1=0.010), SIZES)
    assert chosen(batching).size == 2


def run(true: dict[int, float], model: LatencyModel, batches: int, slowdown: float = 1.0) -> list[int]:
    """Return the sizes of this number of batches while more requests wait than fit, with late due times."""
    sizes = []
    for _ in range(batches):
        sizes.append(chosen(line(*[9.0] * 12, model=model)).size)
        model.record(sizes[-1], slowdown * true[sizes[-1]])
    return sizes


TRUE = {1: 0.002, 2: 0.003, 4: 0.005, 8: 0.009}


def test_a_short_slowdown_of_the_device_is_not_blamed_on_a_size() -> None:
    model = LatencyModel()
    for size in [*TRUE] * WINDOW:
        model.record(size, TRUE[size])
    for slowdown in (1.5, 1.0, 2.5, 1.0):
        assert set(run(TRUE, model, STALE_AFTER - len(TRUE), slowdown)) == {8}, "the other sizes would take longer too"
        for size in TRUE:
            model.record(size, slowdown * TRUE[size])


@pytest.mark.parametrize("errors", [{4: 0.002}, {8: 0.040}, {1: 0.0002}])
def test_a_wrong_latency_of_one_size_is_corrected(errors: dict[int, float]) -> None:
    """This includes a size that seems so fast that no other size runs."""
    model = LatencyModel()
    for size, seconds in [*(TRUE | errors).items()] * WINDOW:
        model.record(size, seconds)
    run(TRUE, model, 8 * STALE_AFTER)
    assert run(TRUE, model, STALE_AFTER).count(8) >= STALE_AFTER - len(TRUE)


def test_few_measurements_do_not_make_a_size_stale() -> None:
    model = costs(b1=0.010, b2=0.012, b4=0.015, b8=0.090)
    for _ in range(STALE_AFTER - 4):
        model.record(1, 0.010)
    assert not any(model.is_stale(size) for size in (1, 2, 4, 8, 16))


@given(st.lists(st.tuples(st.floats(-0.1, 0.5), st.sampled_from("ab"), st.booleans()), max_size=20), st.floats(0, 0.1))
def test_every_request_is_served_once_and_in_time_if_possible(
    requests: list[tuple[float, str, bool]], now: float
) -> None:
    batching: BatchScheduler[Request] = BatchScheduler()
    model = {"a": GENTLE, "b": costs(b1=0.002, b2=0.003, b8=0.009)}
    waiting: list[tuple[str, Request]] = []
    for due, key, is_alone in requests:
        waiting.append((key, request := Request(due, is_alone)))
        batching.add(key, request, model[key], SIZES)
    served: list[Request] = []
    while (found := batching.next_batch(now)) is not None:
        served += found.members
        assert found.size in SIZES
        assert len(found.members) <= found.size
        end, at_best = now + model[str(found.key)].measured(found.size).p90, now + model[str(found.key)].measured(1).p90
        delayed = [member for member in found.members if at_best <= member.due < end]
        assert not delayed or not are_in_time_one_by_one(now, waiting, model)
        now, waiting = end, [each for each in waiting if each[1] not in found.members]
    assert len(served) == len(requests)
    assert len(set(map(id, served))) == len(requests)


def are_in_time_one_by_one(now: float, waiting: list[tuple[str, Request]], model: dict[str, LatencyModel]) -> bool:
    """Return whether all requests can be in time one by one, with half of the largest batch as a margin."""
    end = now
    for key, request in sorted(waiting, key=lambda each: each[1].due):
        end += model[key].measured(1).p90
        if request.due >= now + model[key].measured(1).p90 and request.due < end + model[key].measured(8).p90 / 2:
            return False
    return True


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.01), (4, 0.03), (8, 0.06), (2, 0.02), (3, 0.03)])
def test_an_unmeasured_size_is_estimated_from_the_nearest_sizes(size: int, seconds: float) -> None:
    assert costs(b1=0.01, b4=0.03).measured(size).median == pytest.approx(seconds)


def test_latencies_are_the_median_and_the_90th_percentile() -> None:
    model = LatencyModel()
    assert not model.is_measured
    assert model.measured(4).median == model.measured(4).p90 == 0
    for milliseconds in range(1, 12):
        model.record(1, milliseconds / 1e3)
    assert model.get_stats() == {"1": {"p50": 6.0, "p90": 10.0}}
    for _ in range(32):
        model.record(1, 0.5)
    assert model.measured(1).median == 0.5, "old samples no longer count"
