"""What batches take: counted by batch size, fed and read by several threads at a time."""

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


def test_copied_figures_are_updated_on_their_own_from_then_on() -> None:
    before, after = costs(b1=0.010, b8=0.020), LatencyModel()
    before.record(8, 0.030)
    assert after.copy_from(before, 8)
    assert not after.copy_from(before, 4), "this size is not measured"
    assert after.get_stats() == {"8": {"p50": 25.0, "p90": 30.0}}
    for _ in range(WINDOW):
        after.record(8, 0.1)
    assert (after.measured(8).median, before.measured(8).median) == (0.1, 0.025), "no sample of the other one is left"


def test_copied_figures_count_as_measured_now_at_the_pace_of_now() -> None:
    before, after = costs(b8=0.020), costs(b1=0.010)
    for seconds in [0.010] * STALE_AFTER + [0.030] * PACE_WINDOW:
        before.record(1, seconds)
        after.record(1, 0.010)
    assert before.is_stale(8)
    assert after.copy_from(before, 8)
    assert not after.is_stale(8)
    assert after.predict(8).median == pytest.approx(0.060), "the device is slow, and that counts for a push, too"


def test_what_the_next_batch_should_take_follows_the_newest_of_any_size() -> None:
    known = LatencyModel()
    for _ in range(WINDOW):
        for size, seconds in ((1, 0.010), (8, 0.020)):
            known.record(size, seconds)
    for _ in range(PACE_WINDOW):
        known.record(1, 0.030)
    assert known.predict(8) == (pytest.approx(0.060), pytest.approx(0.060)), "8 did not run since, and it is as slow"
    assert known.measured(8).median == known.measured(8).p90 == 0.020, "what was measured is told as it was"


def test_a_slower_size_changes_the_pace_and_outliers_do_not() -> None:
    known = costs(b1=0.010, b8=0.020)
    for _ in range(2 * WINDOW):
        known.record(1, 0.010)
        known.record(8, 0.040)
    assert known.predict(8).median / known.predict(1).median == pytest.approx(4, rel=0.05)
    known = costs(b1=0.010, b8=0.020)
    known.record(8, 9.0)
    assert known.predict(1).median == 0.010
    known = costs(b1=0.0, b8=0.020)
    for _ in range(PACE_WINDOW):
        known.record(1, 0.0001)
    assert known.predict(8).median == 0.020


def test_what_is_remembered_does_not_wander_off_from_what_was_measured() -> None:
    """Over a day of batches of which some take longer, and none shorter."""
    known, random = LatencyModel(), Random(0)
    true = {1: 0.001, 4: 0.002, 8: 0.004}
    for _ in range(30_000):
        size = random.choice([1, 1, 1, 4, 8])
        known.record(size, true[size] * (1 + max(random.gauss(0, 0.5), 0)))
    for size, seconds in true.items():
        assert seconds / 3 < known._now[0][size].normalized.median < 3 * seconds
        assert seconds / 2 < known.predict(size).median < 2 * seconds


def test_profiling_makes_nothing_old() -> None:
    known = costs(b1=0.010)
    for _ in range(STALE_AFTER):
        known.record(8, 0.020)
    assert known.is_stale(1)
    known.mark_fresh()
    assert not known.is_stale(1)
    assert known.measured(1).median == 0.010


def test_what_two_threads_learn_at_one_moment_is_learnt_both(monkeypatch: pytest.MonkeyPatch) -> None:
    known, is_in_the_middle, other_is_through = LatencyModel(), threading.Event(), threading.Event()

    def interrupted(ordered: list[float], number: float) -> None:
        if number == 0.001:
            is_in_the_middle.set()
            other_is_through.wait(0.3)  # it is not, unless it may come in between
        insort(ordered, number)

    def learn_another() -> None:
        is_in_the_middle.wait(30)
        known.record(2, 0.002)
        other_is_through.set()

    monkeypatch.setattr("service.inference.batching.insort", interrupted)
    other = threading.Thread(target=learn_another)
    other.start()
    known.record(1, 0.001)
    other.join()
    assert set(known.get_stats()) == {"1", "2"}


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns in the middle of everything."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
def test_figures_are_whole_while_several_threads_learn() -> None:
    """A device's thread, one that it left behind, and whoever compiles learn; the event loop and the figures read."""
    failed: list[BaseException] = []
    ended = threading.Event()

    def reading(known: list[LatencyModel]) -> None:
        try:
            while not ended.is_set():
                for one in known:
                    one.get_stats()
                    one.measured(1000)
                    one.upper_bound(1000)
        except BaseException as error:
            failed.append(error)

    def learning(known: list[LatencyModel], first: int) -> None:
        try:
            for one in known:
                for size in range(first, 60, 2):
                    one.record(size, 0.001 * size)
        except BaseException as error:
            failed.append(error)

    known = [LatencyModel() for _ in range(100)]
    readers = [threading.Thread(target=reading, args=(known,)) for _ in range(2)]
    writers = [threading.Thread(target=learning, args=(known, first)) for first in (1, 2, 1)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    for thread in readers:
        thread.join()
    assert failed == []
    assert all(set(one.get_stats()) == {str(size) for size in range(1, 60)} for one in known)
