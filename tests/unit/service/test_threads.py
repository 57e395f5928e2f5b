"""Threads for work off the event loop."""

import threading

import pytest

from service.threads import WorkerThread


async def test_calls_run_in_parallel_and_results_keep_their_order() -> None:
    meeting = threading.Barrier(3)
    workers = WorkerThread("workers", 3)
    calls = [lambda number=number: (meeting.wait(10), number)[1] for number in range(3)]
    assert await workers.submit_all(calls) == [0, 1, 2]


async def test_the_first_error_of_several_calls_is_raised() -> None:
    def fail() -> None:
        raise ValueError("damaged")

    workers = WorkerThread("workers", 2)
    with pytest.raises(ValueError, match="damaged"):
        await workers.submit_all([fail, lambda: None])
    assert await workers.submit(lambda: 7) == 7, "the threads still work"
