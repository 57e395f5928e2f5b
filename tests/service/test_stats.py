import numpy as np

from service.stats import BOUNDS, Rate, Recent, Tally


def test_percentiles_are_of_the_newest_samples_and_the_count_of_all() -> None:
    recent = Recent(4)
    assert recent.percentile(50) is None
    assert recent.percentiles_ms(50, 99) == {"p50": None, "p99": None}
    for value in (100.0, 100.0, 1.0, 2.0, 3.0, 4.0):
        recent.add(value)
    assert recent.count == 6
    assert recent.percentile(50) == np.percentile([1, 2, 3, 4], 50)
    assert recent.percentiles_ms(0, 99.9)["p0"] == 1000.0
    assert recent.newest_ms == 4000.0


def test_a_rate_is_of_the_newest_events_and_ends_when_they_do() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    for number in range(100):
        rate.add(number / 25)
    assert rate.per_second(4.0) == 25.0
    assert rate.per_second(10.0) == 0.0
    assert rate.count == 100


def test_events_at_one_moment_have_no_rate() -> None:
    rate = Rate()
    rate.add(1.0)
    rate.add(1.0)
    assert rate.per_second(1.0) == 0.0


def test_a_tally_counts_by_reason() -> None:
    tally = Tally()
    tally.add("b")
    tally.add("a", 2)
    assert tally.by_reason() == {"a": 2, "b": 1}
    assert tally.total == 3
    assert tally["never"] == 0


def test_all_samples_are_spread_over_the_bounds_not_only_the_newest() -> None:
    figures = Recent(2)
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 1e9):
        figures.add(seconds)
    assert figures.spread == (2, 1, *(0,) * (len(BOUNDS) - 2), 1)
