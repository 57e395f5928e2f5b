"""One policy that is asked with pictures of two sizes: what the large ones take says nothing of the small ones."""

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


SMALL_SEEN, LARGE_SEEN = observe(), observe(480, 640)


@dataclass
class Sized(ScriptedPolicy):
    """A batch takes 1 ms, one of large pictures 200 ms, and twice as long for 4 members; so it says."""

    def profile(self, batch: int = 1, cameras: Sizes | None = None) -> float:
        return (0.2 if cameras == LARGE else 0.001) * (2 if batch == 4 else 1)


@asynccontextmanager
async def asked_with_both(policy: ScriptedPolicy, batch_sizes: tuple[int, ...] = (1,)) -> AsyncIterator[Any]:
    engine = Engine(stuck_after=60.0, batch_sizes=batch_sizes)
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        await engine.compile(served, LARGE)
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        yield engine, served
    await engine.close()


@pytest.fixture
def profiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What robots ask for is not learnt: a busy machine makes of it what it likes."""
    learn = LatencyModel.record

    def learn_elsewhere(costs: LatencyModel, size: int, seconds: float) -> None:
        if not threading.current_thread().name.startswith("device"):
            learn(costs, size, seconds)

    monkeypatch.setattr(LatencyModel, "record", learn_elsewhere)


# Milliseconds of batches with pictures of the size that the policy was trained with.
OWN = {"1": {"p50": 1.0, "p90": 1.0}, "4": {"p50": 2.0, "p90": 2.0}}


def milliseconds(engine: Engine) -> Any:
    devices: Any = engine.get_stats()["devices"]
    return [device["batch_ms"] for device in devices]


async def test_each_size_of_pictures_has_its_own_figures() -> None:
    async with asked_with_both(Sized(), (1, 4)) as (engine, served):
        assert latency_model(served).get_stats() == OWN
        for _ in range(5):
            await engine.infer(served, LARGE_SEEN)
        assert latency_model(served).measured(1).median == 0.001
        large = served.replicas[0].latencies[LARGE_FRAMES]
        assert large.measured(4).median == 0.4
        assert large.measured(1).median < 0.2, "it took no time at all, as the robots saw"


async def test_devices_list_latencies_of_other_picture_sizes() -> None:
    engine = Engine(batch_sizes=(1, 4))
    async with engine.policy_cache.open_policy(ScriptedLoader(Sized), "p", None, ignore) as served:
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        assert milliseconds(engine) == [[OWN]]
        await engine.compile(served, LARGE)
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        ((found,),) = milliseconds(engine)
        large = {f"{size} of 480x640 frames": {"p50": each, "p90": each} for size, each in ((1, 200.0), (4, 400.0))}
        assert list(found.items()) == list((OWN | large).items())
    await engine.close()


@pytest.mark.usefixtures("profiled_only")
@pytest.mark.parametrize(("observation", "soon"), [(SMALL_SEEN, 0.002), (LARGE_SEEN, 0.4)], ids=["small", "large"])
async def test_when_an_answer_is_due_depends_on_the_pictures(observation, soon) -> None:
    gate, policy = threading.Event(), Sized()
    async with asked_with_both(policy) as (engine, served):
        policy.failures.append(gate)
        asking = asyncio.create_task(engine.infer(served, observation))
        (worker,) = engine.devices.workers.values()
        batch = await until(lambda: worker._current)
        assert batch.members[0].due - batch.members[0].submitted == pytest.approx(soon, abs=1e-6)
        gate.set()
        await asking


@pytest.mark.usefixtures("profiled_only")
async def test_of_two_equally_due_requests_the_larger_goes_first() -> None:
    """It takes longer; and each is answered in the line of its own size."""
    gate, policy = threading.Event(), Sized()
    order: list[tuple[int, ...]] = []
    act = policy.act

    def noted(observation: Mapping[str, np.ndarray]) -> np.ndarray:
        order.append(observation["observation.images.front"].shape[1:3])
        return act(observation)

    policy.act = noted  # type: ignore[method-assign]
    async with asked_with_both(policy) as (engine, served):
        policy.failures.append(gate)
        due = asyncio.get_running_loop().time() + 0.9
        asking = [asyncio.create_task(engine.infer(served, LARGE_SEEN))]
        await until(lambda: order)
        for observation in (SMALL_SEEN, LARGE_SEEN):
            asking.append(asyncio.create_task(engine.infer(served, observation, due=due)))
        await until(lambda: engine.get_stats()["inferences_waiting"] == 2)
        gate.set()
        await asyncio.gather(*asking)
    assert order == [(480, 640), (480, 640), (48, 64)]


async def test_lone_requests_are_measured_by_size_and_refused_ones_are_not() -> None:
    async with asked_with_both(Sized()) as (engine, served):
        counted = served.replicas[0].latencies[LARGE_FRAMES]._windows[1][0].numbers
        before = len(counted)
        (worker,) = engine.devices.workers.values()
        await worker.submit(served.replicas[0], LARGE_SEEN, None)
        assert len(counted) == before + 1
        assert latency_model(served).measured(1).median == 0.001
        with pytest.raises(Exception, match="observation has"):
            await worker.submit(served.replicas[0], {"observation.images.front": [[[[1]]]]}, None)
        assert list(milliseconds(engine)[0][0]) == ["1", "1 of 480x640 frames"]


def test_a_policy_may_be_blind() -> None:
    blind = LoadedPolicy(ScriptedPolicy(Requirements(policy_type="act", state=6, action=6)))
    blind.replicas[0].prepare(1, None)
    assert latency_model(blind).is_measured
    assert read_layout({"observation.state": np.zeros((1, 6), np.float32)}).frames == blind.replicas[0].trained_frames
