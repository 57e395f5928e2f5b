"""Figures for Prometheus, asked for by many at once."""

import asyncio
import threading
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from service.metrics import Metrics


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
    metrics, looked = Metrics(lambda: [], lambda: []), _Looked()
    metrics._registry.register(looked)
    before = looked.times
    texts = await asyncio.gather(*(metrics.text() for _ in range(50)))
    assert looked.times - before <= 2
    assert len(looked.threads - {threading.current_thread().name}) == 1
    assert all(b"robojax_sessions" in text for text in texts)


async def test_what_happened_before_a_question_is_in_its_answer() -> None:
    metrics = Metrics(lambda: [], lambda: [])
    for number in range(1, 6):
        before = asyncio.create_task(metrics.text())  # somebody else's
        await asyncio.sleep(0)
        metrics.answered("GET", "/x", 200, 0.001)
        line = f'robojax_requests_total{{method="GET",route="/x",status="200"}} {number}.0'
        assert line.encode() in await metrics.text()
        await before


async def test_a_question_that_is_given_up_ends_nobody_elses() -> None:
    metrics = Metrics(lambda: [], lambda: [])
    given_up, other = (asyncio.create_task(metrics.text()) for _ in range(2))
    await asyncio.sleep(0)
    given_up.cancel()
    assert b"robojax_sessions" in await other
