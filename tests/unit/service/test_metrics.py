"""Figures for Prometheus, asked for by many at once."""

import asyncio
import threading
from collections.abc import Iterable

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from service.api.metrics import Metrics
from service.stats import BOUNDS, Rate, Recent, Tally


class _Looked:
    """A collector that notes who looks, and how many at a time."""

    def __init__(self) -> None:
        self.times = 0
        self.threads: set[str] = set()

    def collect(self) -> Iterable[Metric]:
        self.times += 1
        self.threads.add(threading.current_thread().name)
        yield GaugeMetricFamily("times", "Looks", value=self.times)


async def test_a_flood_of_questions_is_one_thread_that_writes_a_few_times() -> None:
    metrics, looked = Metrics(), _Looked()
    metrics._registry.register(looked)
    before = looked.times
    texts = await asyncio.gather(*(metrics.text() for _ in range(50)))
    assert looked.times - before <= 2
    assert len(looked.threads - {threading.current_thread().name}) == 1
    assert all(b"robojax_sessions" in text for text in texts)


async def test_an_answer_is_complete_even_if_another_question_is_given_up() -> None:
    metrics = Metrics()
    for number in range(1, 6):
        before = asyncio.create_task(metrics.text())  # somebody else's
        await asyncio.sleep(0)
        metrics.count_answer("GET", "/x", 200, 0.001)
        line = f'robojax_requests_total{{method="GET",route="/x",status="200"}} {number}.0'
        assert line.encode() in await metrics.text()
        await before
    given_up, other = (asyncio.create_task(metrics.text()) for _ in range(2))
    await asyncio.sleep(0)
    given_up.cancel()
    assert b"robojax_sessions" in await other


def test_percentiles_are_of_the_newest_samples_and_counts_of_all() -> None:
    recent = Recent(4)
    assert recent.percentile(50) is None
    assert recent.percentiles_ms(50, 99) == {"p50": None, "p99": None}
    for value in (100.0, 100.0, 1.0, 2.0, 3.0, 4.0):
        recent.add(value)
    assert recent.count == 6
    assert recent.percentile(50) == np.percentile([1, 2, 3, 4], 50)
    assert (recent.percentiles_ms(0, 99.9)["p0"], recent.newest_ms) == (1000.0, 4000.0)
    figures = Recent(2)
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, 1e9):
        figures.add(seconds)
    assert figures.histogram == (2, 1, *(0,) * (len(BOUNDS) - 2), 1)


def test_rates_end_with_their_events_and_tallies_count_by_reason() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    for number in range(100):
        rate.add(number / 25)
    assert (rate.per_second(4.0), rate.per_second(10.0), rate.count) == (25.0, 0.0, 100)
    at_once = Rate()
    at_once.add(1.0)
    at_once.add(1.0)
    assert at_once.per_second(1.0) == 0.0
    tally = Tally()
    tally.add("b")
    tally.add("a", 2)
    assert tally.by_reason() == {"a": 2, "b": 1}
    assert (tally.total, tally["never"]) == (3, 0)
