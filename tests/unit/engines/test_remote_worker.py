"""Requests to a remote engine: answered, late, refused, or failed at once."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from service.engines import remote_worker
from service.engines.messages import EngineFacts, Loaded, Refusal
from service.engines.remote_policy import RemotePolicy
from service.engines.remote_worker import RemoteWorker
from service.errors import PolicyFailed
from service.inference.device_worker import DeviceGone, InputRefused, Overdue, WorkerClosed
from service.inference.loaded_policy import InferenceResult, InferenceStuck, Replica
from service.threads import settle
from tests.testing.doubles import SO100_REQUIREMENTS
from tests.testing.waiting import until

pytestmark = pytest.mark.timed

OBSERVATION = {"observation.state": np.zeros((1, 6), np.float32)}


class Engine:
    """Double of an engine that answers when the test sets a result."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: list[Any] = []  # Results or errors of the next calls.
        self.pending: list[Callable[[Any], None]] = []  # Functions that settle the other calls.

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        self.calls.append((method, arguments))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.answers:
            settle(answer, self.answers.pop(0))
        else:
            self.pending.append(lambda result: settle(answer, result))
        return answer

    async def wait_for_calls(self, times: int = 1) -> None:
        await until(lambda: len(self.calls) >= times)


def chunk() -> np.ndarray:
    found = np.ones((1, 20, 6), np.float32)
    found.flags.writeable = False  # Arrays from an object store are not writable.
    return found


def check_answer(**seconds: float) -> InferenceResult:
    times = {"queue": 0.01, "to_device": 0.02, "compute": 0.03, "to_host": 0.04, "total": 0.1} | seconds
    return InferenceResult(chunk(), batch=4, **times)  # type: ignore[arg-type]


@pytest.fixture
def replica() -> Replica:
    unused: Any = None
    loaded = Loaded("handle", SO100_REQUIREMENTS, {})
    return Replica(RemotePolicy(loaded, "one", None, ask=unused, ask_briefly=unused, copy=unused), 0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def worker(engine: Engine) -> AsyncIterator[RemoteWorker]:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, about: unhandled.append(about))
    worker = RemoteWorker("one", engine.call, stuck_after=60.0)
    yield worker
    await worker.close(1.0)
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("engine one")])
    gc.collect()
    assert unhandled == []


async def record_latency() -> None:
    """Let the worker record the latency of the last answer, which it does after it returns the answer."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_time_on_the_network_counts_as_waiting(engine: Engine, worker: RemoteWorker, replica: Replica) -> None:
    asking = asyncio.create_task(worker.submit(replica, OBSERVATION, None))
    await engine.wait_for_calls()
    assert worker.pending == 1
    await asyncio.sleep(0.12)
    engine.pending[0](check_answer())
    found = await asking
    await record_latency()
    assert found.queue + found.to_device + found.compute + found.to_host == pytest.approx(found.total)
    assert (found.to_device, found.compute, found.to_host, found.batch) == (0.02, 0.03, 0.04, 4)
    assert found.total > 0.12
    assert worker.pending == 0
    assert replica.latencies[replica.trained_frames].is_measured is False
    assert replica.latencies[frozenset()].measured(4).median == pytest.approx(0.09), "the device was busy for the batch"


async def test_latency_is_kept_per_frame_size(engine: Engine, worker: RemoteWorker, replica: Replica) -> None:
    for height, seconds in ((48, 0.001), (480, 0.004)):
        engine.answers = [check_answer(queue=0.0, total=seconds)]
        await worker.submit(replica, {"observation.images.front": np.zeros((1, height, 64, 3), np.uint8)}, None)
    await record_latency()
    assert replica.latencies[replica.trained_frames].measured(4).median == 0.001
    assert replica.latencies[frozenset({("front", (480, 64))})].measured(4).median == 0.004


async def test_due_time_is_sent_as_seconds_from_now(engine: Engine, worker: RemoteWorker, replica: Replica) -> None:
    engine.answers = [check_answer(), check_answer()]
    await worker.submit(replica, OBSERVATION, None)
    await worker.submit(replica, OBSERVATION, worker.last_used_at + 3600)
    (method, (handle, observation, none)), (_, (_, _, due)) = engine.calls
    assert (method, handle, list(observation), none) == ("act", "handle", ["observation.state"], None)
    assert 3590 < due <= 3600


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("input", InputRefused),
        ("failed", PolicyFailed),
        ("stuck", InferenceStuck),
        ("unknown", DeviceGone),
        ("engine", DeviceGone),
        (DeviceGone("why: its process ended"), DeviceGone),
        (RuntimeError("why"), RuntimeError),
    ],
)
async def test_refusals_and_failed_calls_are_raised(kind, error, engine, worker, replica) -> None:
    engine.answers = [kind if isinstance(kind, Exception) else Refusal(kind, "why")]
    with pytest.raises(error, match="why") as found:
        await worker.submit(replica, OBSERVATION, None)
    assert found.type is error
    assert worker.pending == 0


async def test_a_late_engine_is_asked_last_until_it_answers(engine, worker, replica, monkeypatch) -> None:
    monkeypatch.setattr(remote_worker, "DEFAULT_OVERDUE", 0.02)
    assert not worker.is_late
    with pytest.raises(Overdue, match=r"one has not answered for 0.02 s") as late:
        await worker.submit(replica, OBSERVATION, None, may_move=True)
    assert (worker.is_late, worker.pending) == (True, 1)
    await engine.wait_for_calls()
    engine.pending[0](check_answer())
    assert (await late.value.answer).total > 0.02
    assert (worker.is_late, worker.pending) == (False, 0)


async def test_a_missing_answer_is_stuck_after_a_timeout(engine, worker, replica, monkeypatch) -> None:
    monkeypatch.setattr(remote_worker, "DEFAULT_OVERDUE", 0.02)
    worker._stuck_after = 0.3
    with pytest.raises(Overdue) as late:
        await worker.submit(replica, OBSERVATION, None, may_move=True)
    for answer in (late.value.answer, worker.submit(replica, OBSERVATION, None)):
        with pytest.raises(InferenceStuck, match=r"did not return in 0.3 s"):
            await answer
    assert worker.is_late, "the worker stays late because the answer never arrives"


async def test_the_measured_latency_decides_when_an_answer_is_late(engine, worker, replica, monkeypatch) -> None:
    monkeypatch.setattr(remote_worker, "MIN_OVERDUE", 0.02)
    monkeypatch.setattr(remote_worker, "DEFAULT_OVERDUE", 60.0)
    engine.answers = [check_answer() for _ in range(8)]
    for _ in range(8):
        await worker.submit(replica, OBSERVATION, None)
    with pytest.raises(Overdue):
        await worker.submit(replica, OBSERVATION, None, may_move=True)


@pytest.mark.parametrize(("has_failed", "error"), [(True, DeviceGone), (False, WorkerClosed)], ids=["fail", "close"])
async def test_pending_requests_fail_at_once(has_failed, error, engine, worker, replica) -> None:
    waiting = [asyncio.create_task(worker.submit(replica, OBSERVATION, None)) for _ in range(3)]
    await engine.wait_for_calls(3)
    if has_failed:
        worker.fail("it ended")
    else:
        assert await worker.close(1.0)
    for request in (*waiting, worker.submit(replica, OBSERVATION, None)):
        with pytest.raises(error, match="it ended" if has_failed else "the server is ending"):
            await request
    assert len(engine.calls) == 3
    engine.pending[0](check_answer())  # The late answer is ignored.


@pytest.mark.parametrize("end", ["fail", "close"])
async def test_an_abandoned_request_ends(end: str, engine: Engine, worker: RemoteWorker, replica: Replica) -> None:
    asking = asyncio.create_task(worker.submit(replica, OBSERVATION, None))
    await engine.wait_for_calls()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert worker.pending == 1
    await worker.close(1.0) if end == "close" else worker.fail("it ended")
    await asyncio.sleep(0)
    assert worker.pending == 0


async def test_the_worker_reports_the_last_facts_of_its_engine(worker: RemoteWorker) -> None:
    worker.facts = EngineFacts(load=0.5, waiting=3, batches={1: 2, 4: 8})
    assert (worker.load(0.0), worker.waiting, worker.batches) == (0.5, 3, {1: 2, 4: 8})
