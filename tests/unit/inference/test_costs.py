"""Latency model per batch size, written and read by several threads."""

import sys
import threading
from bisect import insort
from collections.abc import Iterator
from random import Random

import pytest

from service.inference.batching import PACE_WINDOW, STALE_AFTER, WINDOW, LatencyModel


def costs(**seconds: float) -> LatencyModel:
    made = LatencyModel()
    for size, taken in seconds.items():
        made.record(int(size[1:]), taken)
    return made


def test_copied_figures_are_updated_independently() -> None:
    before, after = costs(b1=0.010, b8=0.020), LatencyModel()
    before.record(8, 0.030)
    assert after.copy_from(before, 8)
    assert not after.copy_from(before, 4), "this size is not measured"
    assert after.get_stats() == {"8": {"p50": 25.0, "p90": 30.0}}
    for _ in range(WINDOW):
        after.record(8, 0.1)
    assert (after.measured(8).median, before.measured(8).median) == (0.1, 0.025), "each model has only its own samples"


def test_copied_figures_count_as_fresh_at_the_current_speed() -> None:
    before, after = costs(b8=0.020), costs(b1=0.010)
    for seconds in [0.010] * STALE_AFTER + [0.030] * PACE_WINDOW:
        before.record(1, seconds)
        after.record(1, 0.010)
    assert before.is_stale(8)
    assert after.copy_from(before, 8)
    assert not after.is_stale(8)
    assert after.predict(8).median == pytest.approx(0.060), "the slow device also counts for a new policy"


def test_predictions_follow_the_newest_batches_of_any_size() -> None:
    model = LatencyModel()
    for _ in range(WINDOW):
        for size, seconds in ((1, 0.010), (8, 0.020)):
            model.record(size, seconds)
    for _ in range(PACE_WINDOW):
        model.record(1, 0.030)
    assert model.predict(8) == (pytest.approx(0.060), pytest.approx(0.060)), (
        "the slowdown also applies to a size that did not run"
    )
    assert model.measured(8).median == model.measured(8).p90 == 0.020, "the measured values stay"


def test_a_slower_size_changes_predictions_and_outliers_do_not() -> None:
    model = costs(b1=0.010, b8=0.020)
    for _ in range(2 * WINDOW):
        model.record(1, 0.010)
        model.record(8, 0.040)
    assert model.predict(8).median / model.predict(1).median == pytest.approx(4, rel=0.05)
    model = costs(b1=0.010, b8=0.020)
    model.record(8, 9.0)
    assert model.predict(1).median == 0.010
    model = costs(b1=0.0, b8=0.020)
    for _ in range(PACE_WINDOW):
        model.record(1, 0.0001)
    assert model.predict(8).median == 0.020


def test_predictions_do_not_drift_from_the_measurements() -> None:
    """The sample is a day of batches, some of which take longer and none shorter."""
    model, random = LatencyModel(), Random(0)
    true = {1: 0.001, 4: 0.002, 8: 0.004}
    for _ in range(30_000):
        size = random.choice([1, 1, 1, 4, 8])
        model.record(size, true[size] * (1 + max(random.gauss(0, 0.5), 0)))
    for size, seconds in true.items():
        assert seconds / 3 < model._now[0][size].normalized.median < 3 * seconds
        assert seconds / 2 < model.predict(size).median < 2 * seconds


def test_profiling_marks_all_sizes_as_fresh() -> None:
    model = costs(b1=0.010)
    for _ in range(STALE_AFTER):
        model.record(8, 0.020)
    assert model.is_stale(1)
    model.mark_fresh()
    assert not model.is_stale(1)
    assert model.measured(1).median == 0.010


def test_concurrent_records_of_two_threads_are_both_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, is_in_the_middle, other_is_done = LatencyModel(), threading.Event(), threading.Event()

    def interrupted(ordered: list[float], number: float) -> None:
        if number == 0.001:
            is_in_the_middle.set()
            other_is_done.wait(0.3)  # The other thread can only finish here if the lock fails.
        insort(ordered, number)

    def record_another() -> None:
        is_in_the_middle.wait(30)
        model.record(2, 0.002)
        other_is_done.set()

    monkeypatch.setattr("service.inference.batching.insort", interrupted)
    other = threading.Thread(target=record_another)
    other.start()
    model.record(1, 0.001)
    other.join()
    assert set(model.get_stats()) == {"1", "2"}


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
def test_figures_stay_consistent_with_several_threads() -> None:
    """Device threads and compilations write; the event loop and the statistics read."""
    failed: list[BaseException] = []
    ended = threading.Event()

    def reading(models: list[LatencyModel]) -> None:
        try:
            while not ended.is_set():
                for model in models:
                    model.get_stats()
                    model.measured(1000)
                    model.upper_bound(1000)
        except BaseException as error:
            failed.append(error)

    def writing(models: list[LatencyModel], first: int) -> None:
        try:
            for model in models:
                for size in range(first, 60, 2):
                    model.record(size, 0.001 * size)
        except BaseException as error:
            failed.append(error)

    models = [LatencyModel() for _ in range(100)]
    readers = [threading.Thread(target=reading, args=(models,)) for _ in range(2)]
    writers = [threading.Thread(target=writing, args=(models, first)) for first in (1, 2, 1)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    for thread in readers:
        thread.join()
    assert failed == []
    assert all(set(model.get_stats()) == {str(size) for size in range(1, 60)} for model in models)
