"""Metrics for Prometheus, with concurrent requests."""

import asyncio
import threading
from collections.abc import Iterable

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from service.api.metrics import Metrics
from service.stats import BOUNDS, Rate, Recent, Tally


class _RecordingCollector:
    """Collector that records the number of collections and their threads."""

    def __init__(self) -> None:
        self.times = 0
        self.threads: set[str] = set()

    def collect(self) -> Iterable[Metric]:
        self.times += 1
        self.threads.add(threading.current_thread().name)
        yield GaugeMetricFamily("times", "Looks", value=self.times)


async def test_concurrent_requests_share_one_thread_and_few_collections() -> None:
    metrics, collector = Metrics(), _RecordingCollector()
    metrics._registry.register(collector)
    before = collector.times
    texts = await asyncio.gather(*(metrics.text() for _ in range(50)))
    assert collector.times - before <= 2
    assert len(collector.threads - {threading.current_thread().name}) == 1
    assert all(b"robojax_sessions" in text for text in texts)


async def test_an_answer_is_complete_if_another_request_is_cancelled() -> None:
    metrics = Metrics()
    for number in range(1, 6):
        before = asyncio.create_task(metrics.text())  # Another request is in progress.
        await asyncio.sleep(0)
        metrics.count_answer("GET", "/x", 200, 0.001)
        line = f'robojax_requests_total{{method="GET",route="/x",status="200"}} {number}.0'
        assert line.encode() in await metrics.text()
        await before
    cancelled, other = (asyncio.create_task(metrics.text()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert b"robojax_sessions" in await other


def test_percentiles_use_the_newest_samples_and_counts_use_all() -> None:
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


def test_rates_follow_their_events_and_tallies_count_by_reason() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0
    for number in range(100):
        rate.add(number / 25)
    assert (rate.per_second(4.0), rate.per_second(10.0), rate.count) == (25.0, 0.0, 100)
    simultaneous = Rate()
    simultaneous.add(1.0)
    simultaneous.add(1.0)
    assert simultaneous.per_second(1.0) == 0.0
    tally = Tally()
    tally.add("b")
    tally.add("a", 2)
    assert tally.by_reason() == {"a": 2, "b": 1}
    assert (tally.total, tally["never"]) == (3, 0)
