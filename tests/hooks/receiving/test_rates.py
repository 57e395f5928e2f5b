"""How much one source may send."""

from hooks.receiving import arrivals
from hooks.receiving.arrivals import Rates


def test_a_burst_is_let_through_and_then_so_many_per_second() -> None:
    limit = Rates(rate=2.0, burst=3)
    assert [limit.take("a", 10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limit.take("b", 10.0) == 0.0
    assert limit.take("a", 10.4) > 0
    assert limit.take("a", 10.5) == 0.0
    assert [limit.take("a", 1000.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_sources_are_forgotten_before_they_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(arrivals, "SOURCES", 2)
    limit = Rates(rate=1.0, burst=1)
    for source in ("a", "b", "c"):
        limit.take(source, 0.0)
    assert limit.take("c", 0.0) > 0
    assert limit.take("a", 0.0) == 0.0
