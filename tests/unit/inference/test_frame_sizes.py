"""One policy with frames of two sizes: the latency is measured for each size separately."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxmodels import Requirements
from service.inference.batching import LatencyModel, read_layout
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy, ignore
from tests.testing.rig import latency_model
from tests.testing.waiting import until
from tests.unit.inference.conftest import observe

pytestmark = pytest.mark.timed

Sizes = Mapping[str, tuple[int, int]]
LARGE = {"front": (480, 640)}
SMALL_FRAMES, LARGE_FRAMES = frozenset(SO100_REQUIREMENTS.cameras.items()), frozenset(LARGE.items())


SMALL_INPUT, LARGE_INPUT = observe(), observe(480, 640)


@dataclass
class SizedPolicy(ScriptedPolicy):
    """Policy whose profile is 1 ms for small and 200 ms for large frames, and twice that for a batch of 4."""

    def profile(self, batch: int = 1, cameras: Sizes | None = None, **plan: bool) -> float:
        return (0.2 if cameras == LARGE else 0.001) * (2 if batch == 4 else 1)


@asynccontextmanager
async def open_with_both_sizes(policy: ScriptedPolicy, batch_sizes: tuple[int, ...] = (1,)) -> AsyncIterator[Any]:
    engine = Engine(stuck_after=60.0, batch_sizes=batch_sizes)
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        await engine.compile(served, LARGE)
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        yield engine, served
    await engine.close()


@pytest.fixture
def profiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the latencies of requests, because they vary on a busy machine."""
    record = LatencyModel.record

    def record_profiles(costs: LatencyModel, size: int, seconds: float) -> None:
        if not threading.current_thread().name.startswith("device"):
            record(costs, size, seconds)

    monkeypatch.setattr(LatencyModel, "record", record_profiles)


# Milliseconds of batches with frames of the trained size.
TRAINED = {"1": {"p50": 1.0, "p90": 1.0}, "4": {"p50": 2.0, "p90": 2.0}}


def milliseconds(engine: Engine) -> Any:
    devices: Any = engine.get_stats()["devices"]
    return [device["batch_ms"] for device in devices]


async def test_each_frame_size_has_its_own_figures() -> None:
    async with open_with_both_sizes(SizedPolicy(), (1, 4)) as (engine, served):
        assert latency_model(served).get_stats() == TRAINED
        for _ in range(5):
            await engine.infer(served, LARGE_INPUT)
        assert latency_model(served).measured(1).median == 0.001
        large = served.replicas[0].latencies[LARGE_FRAMES]
        assert large.measured(4).median == 0.4
        assert large.measured(1).median < 0.2, "the requests of robots were faster than the profile"


async def test_devices_list_latencies_of_other_frame_sizes() -> None:
    engine = Engine(batch_sizes=(1, 4))
    async with engine.policy_cache.open_policy(ScriptedLoader(SizedPolicy), "p", None, ignore) as served:
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        assert milliseconds(engine) == [[TRAINED]]
        await engine.compile(served, LARGE)
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        ((found,),) = milliseconds(engine)
        large = {f"{size} of 480x640 frames": {"p50": each, "p90": each} for size, each in ((1, 200.0), (4, 400.0))}
        assert list(found.items()) == list((TRAINED | large).items())
    await engine.close()


@pytest.mark.usefixtures("profiled_only")
@pytest.mark.parametrize(("observation", "soon"), [(SMALL_INPUT, 0.002), (LARGE_INPUT, 0.4)], ids=["small", "large"])
async def test_the_due_time_of_an_answer_depends_on_the_frame_size(observation, soon) -> None:
    gate, policy = threading.Event(), SizedPolicy()
    async with open_with_both_sizes(policy) as (engine, served):
        policy.failures.append(gate)
        asking = asyncio.create_task(engine.infer(served, observation))
        (worker,) = engine.devices.workers.values()
        batch = await until(lambda: worker._current)
        assert batch.members[0].due - batch.members[0].submitted == pytest.approx(soon, abs=1e-6)
        gate.set()
        await asking


@pytest.mark.usefixtures("profiled_only")
async def test_the_larger_of_two_equally_due_requests_runs_first() -> None:
    """The larger request takes longer. Each request is in the queue of its own size."""
    gate, policy = threading.Event(), SizedPolicy()
    order: list[tuple[int, ...]] = []
    act = policy.act

    def noted(observation: Mapping[str, np.ndarray]) -> np.ndarray:
        order.append(observation["observation.images.front"].shape[1:3])
        return act(observation)

    policy.act = noted  # type: ignore[method-assign]
    async with open_with_both_sizes(policy) as (engine, served):
        policy.failures.append(gate)
        due = asyncio.get_running_loop().time() + 0.9
        asking = [asyncio.create_task(engine.infer(served, LARGE_INPUT))]
        await until(lambda: order)
        for observation in (SMALL_INPUT, LARGE_INPUT):
            asking.append(asyncio.create_task(engine.infer(served, observation, due=due)))
        await until(lambda: engine.get_stats()["inferences_waiting"] == 2)
        gate.set()
        await asyncio.gather(*asking)
    assert order == [(480, 640), (480, 640), (48, 64)]


async def test_single_requests_are_measured_by_size_unless_refused() -> None:
    async with open_with_both_sizes(SizedPolicy()) as (engine, served):
        counted = served.replicas[0].latencies[LARGE_FRAMES]._windows[1][0].numbers
        before = len(counted)
        (worker,) = engine.devices.workers.values()
        await worker.submit(served.replicas[0], LARGE_INPUT, None)
        assert len(counted) == before + 1
        assert latency_model(served).measured(1).median == 0.001
        with pytest.raises(Exception, match="observation has"):
            await worker.submit(served.replicas[0], {"observation.images.front": [[[[1]]]]}, None)
        assert list(milliseconds(engine)[0][0]) == ["1", "1 of 480x640 frames"]


def test_a_policy_may_have_no_camera() -> None:
    blind = LoadedPolicy(ScriptedPolicy(Requirements(policy_type="act", state=6, action=6)))
    blind.replicas[0].prepare(1, None)
    assert latency_model(blind).is_measured
    assert read_layout({"observation.state": np.zeros((1, 6), np.float32)}).frames == blind.replicas[0].trained_frames
