"""Batches on the device thread, with policies whose failures the test sets."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from jaxmodels.errors import ObservationError
from jaxmodels.types import PREFIX_ACTIONS, PREFIX_DELAY, PREFIX_LENGTH
from service.errors import PolicyFailed
from service.inference.batching import ALIGNMENT, StackingBuffers, read_layout
from service.inference.engine import Engine
from service.inference.loaded_policy import FrameSizes, InferenceResult, InferenceStuck, LoadedPolicy, add_plan
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedLoader, ScriptedPolicy, ignore
from tests.testing.waiting import until
from tests.unit.inference.conftest import observe

pytestmark = pytest.mark.timed

Ask = tuple[dict[str, np.ndarray], object]


def make_input(position: float = 0.0, size: int = 4) -> dict[str, np.ndarray]:
    return observe(size, 6, position)


@dataclass
class GatedPolicy(ScriptedPolicy):
    """Policy that waits for its gate, so that requests form a batch. It hangs at position 666 and raises at 13."""

    gate: threading.Event = field(default_factory=threading.Event)
    started: int = 0
    calls: list[int] = field(default_factory=list)
    never: threading.Event = field(default_factory=threading.Event)

    def act(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        self.started += 1
        self.gate.wait(30)
        state = observation["observation.state"]
        self.calls.append(len(state))
        if (state == 666).any():
            self.never.wait(30)
        if (state == 13).any():
            raise ValueError("13")
        if not np.isfinite(state).all():
            raise ObservationError("observation.state holds nan")
        chunk = super().act(observation)
        chunk[state[:, 0] == 99] = np.nan
        return chunk


@asynccontextmanager
async def running(policy: ScriptedPolicy, *, stuck_after: float = 20.0) -> AsyncIterator[tuple[Engine, LoadedPolicy]]:
    engine = Engine(stuck_after=stuck_after, batch_sizes=(1, 2, 4, 8))
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        await until(lambda: engine.get_stats()["batch_sizes_to_compile"] == 0)
        await engine.compile(served, {"front": (4, 6)})
        await until(lambda: engine.get_stats()["batch_sizes_to_compile"] == 0)
        yield engine, served
    await engine.close()


async def queue_requests(
    engine: Engine, served: LoadedPolicy, policy: GatedPolicy, asks: list[Ask]
) -> list[asyncio.Task[InferenceResult]]:
    """Return the requests: the first is on the device and the others wait."""
    policy.gate.clear()
    started = policy.started
    asking = []
    for observation, caller in asks:
        asking.append(asyncio.create_task(engine.infer(served, observation, caller=caller)))
        if len(asking) == 1:
            await until(lambda: policy.started == started + 1)
    await until(lambda: engine.get_stats()["inferences_waiting"] == len(asks) - 1)
    return asking


async def infer_together(
    engine: Engine, served: LoadedPolicy, policy: GatedPolicy, positions: list[float]
) -> list[np.ndarray | Exception]:
    """Return the answers for robots at these positions. The first request runs alone."""
    asking = await queue_requests(
        engine, served, policy, [(make_input(position), asyncio.Lock()) for position in positions]
    )
    policy.gate.set()
    found = await asyncio.gather(*asking, return_exceptions=True)
    return [answer if isinstance(answer, Exception) else answer.chunk for answer in found]  # type: ignore[union-attr]


async def test_requests_during_an_inference_share_the_next_batch() -> None:
    policy = GatedPolicy()
    async with running(policy) as (engine, served):
        chunks = await infer_together(engine, served, policy, [0, 1, 2, 3])
        assert policy.calls == [1, 4]
        for position, chunk in enumerate(chunks):
            assert chunk.shape == (1, 20, 6)
            assert chunk[0, 0, 0] == pytest.approx(position + 0.1)
        # A single request does not wait for others.
        assert (await engine.infer(served, make_input())).batch == 1


async def test_a_failing_request_does_not_fail_others_of_its_batch() -> None:
    policy = GatedPolicy()
    async with running(policy) as (engine, served):
        chunks = await infer_together(engine, served, policy, [0, 1, 13, 3, np.nan])
        assert [type(chunk) for chunk in chunks] == [np.ndarray, np.ndarray, PolicyFailed, np.ndarray, PolicyFailed]
        assert policy.calls == [1, 4, 1, 1, 1, 1]
        assert "refused its input" in str(chunks[4])


async def test_a_non_finite_answer_affects_only_its_own_request() -> None:
    policy = GatedPolicy()
    async with running(policy) as (engine, served):
        chunks = await infer_together(engine, served, policy, [0, 1, 99, 3])
        assert [bool(np.isfinite(np.asarray(chunk)).all()) for chunk in chunks] == [True, True, False, True]
        assert policy.calls == [1, 4]


async def test_only_requests_of_a_hung_batch_are_stuck() -> None:
    policy = GatedPolicy()
    async with running(policy, stuck_after=1.0) as (engine, served):
        asking = await queue_requests(engine, served, policy, [(make_input(666), None), (make_input(1), None)])
        policy.gate.set()
        with pytest.raises(InferenceStuck, match="did not return in 1 s"):
            await asking[0]
        assert not asking[1].done()
        policy.never.set()
        assert (await asking[1]).chunk[0, 0, 0] == pytest.approx(1.1)
        assert (await engine.infer(served, make_input(5))).chunk[0, 0, 0] == pytest.approx(5.1)


async def test_requests_behind_a_batch_that_never_returns_fail() -> None:
    policy = GatedPolicy()
    async with running(policy, stuck_after=0.5) as (engine, served):
        asking = await queue_requests(engine, served, policy, [(make_input(666), None), (make_input(1), None)])
        policy.gate.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(answer) for answer in answers] == [InferenceStuck] * 2
        policy.never.set()


async def test_frames_of_different_sizes_do_not_share_a_batch() -> None:
    policy = GatedPolicy()
    async with running(policy) as (engine, served):
        asking = await queue_requests(
            engine, served, policy, [(make_input(size=size), None) for size in [4, 5, 4, 5, 4]]
        )
        policy.gate.set()
        # For the other size, only batches of 1 are compiled.
        assert sorted(answer.batch for answer in await asyncio.gather(*asking)) == [1, 1, 1, 2, 2]


async def test_one_caller_has_one_request_per_batch() -> None:
    policy, busy = GatedPolicy(), asyncio.Lock()
    async with running(policy) as (engine, served):
        first = await queue_requests(engine, served, policy, [(make_input(), None)])
        asking = [asyncio.create_task(engine.infer(served, make_input(), caller=busy)) for _ in range(4)]
        other = asyncio.create_task(engine.infer(served, make_input()))
        await until(lambda: engine.get_stats()["inferences_waiting"] == 2)
        policy.gate.set()
        await asyncio.gather(*first, other, *asking)
        assert policy.calls == [1, 2, 1, 1, 1]


async def test_batches_are_compiled_only_while_no_robot_runs() -> None:
    policy = ScriptedPolicy()
    engine = Engine(batch_sizes=(1, 2, 4))
    engine.has_running_robot = lambda: True
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore):
        await asyncio.sleep(0.01)
        assert policy.batches == []
        assert engine.get_stats()["batch_sizes_to_compile"] == 2
    # A policy that takes over compiled programs need not wait.
    policy.batches = [(size, dict(policy.requirements.cameras)) for size in (2, 4)]
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "other", None, ignore) as served:
        await until(lambda: served.replicas[0].batch_sizes[frozenset(policy.requirements.cameras.items())] == (1, 2, 4))
    await engine.close()


@pytest.mark.parametrize(("device", "sizes"), [("cuda:0", {2, 4}), ("cpu:0", set())])
async def test_batches_are_compiled_while_robots_wait_for_an_accelerator(device, sizes, monkeypatch) -> None:
    monkeypatch.setattr("service.inference.policy_cache.POLL_INTERVAL", 0.01)
    monkeypatch.setattr("service.inference.device_worker.LOAD_WINDOW", 0.1)
    policy = ScriptedPolicy(device=device, latency=0.01)
    engine = Engine(batch_sizes=(1, 2, 4))
    engine.has_running_robot = lambda: True
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        await engine.infer(served, make_input())
        await asyncio.sleep(0.05)
        assert policy.batches == [], "one robot does not need them"
        for _ in range(40):
            await asyncio.gather(*(engine.infer(served, make_input(position)) for position in range(4)))
            assert engine.batch_compiler.idle.is_set(), "a robot that starts does not wait for it"
        assert {batch for batch, _ in policy.batches} == sizes
    await engine.close()


@pytest.mark.parametrize(("rate", "sizes"), [(20.0, []), (40.0, [2, 4])])
async def test_batches_are_compiled_for_sessions_that_fill_an_accelerator(rate, sizes, monkeypatch) -> None:
    """A refused session would else wait until no robot runs, although hardly any robot runs."""
    monkeypatch.setattr("service.inference.policy_cache.POLL_INTERVAL", 0.01)
    policy = ScriptedPolicy(device="cuda:0", latency=0.01)
    engine = Engine(batch_sizes=(1, 2, 4))
    engine.has_running_robot = lambda: True
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        assert served.replicas[0].latencies[served.replicas[0].trained_frames].measured(1).median == 0.01
        engine.reservations.reserve("robot", served, rate, lambda: None)
        await asyncio.sleep(0.1)
        assert [batch for batch, _ in policy.batches] == sizes
    await engine.close()


SENDS_PLAN = add_plan(SO100_REQUIREMENTS.cameras, SO100_REQUIREMENTS)


@pytest.mark.parametrize("sent", [{"front": (480, 640)}, SENDS_PLAN], ids=["frames", "plan"])
async def test_inputs_that_a_robot_sends_are_compiled_first(monkeypatch, sent: FrameSizes) -> None:
    monkeypatch.setattr("service.inference.policy_cache.POLL_INTERVAL", 0.01)
    policy = ScriptedPolicy()
    engine = Engine(batch_sizes=(1, 2, 4))
    engine.has_running_robot = lambda: True
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        assert engine.get_stats()["batch_sizes_to_compile"] == 2
        await engine.compile(served, sent)
        assert engine.get_stats()["batch_sizes_to_compile"] == 4
        engine.has_running_robot = lambda: False
        await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])
        trained = dict(policy.requirements.cameras)
        assert policy.batches == [(2, sent), (4, sent), (2, trained), (4, trained)]
    await engine.close()


async def test_plans_run_in_batches_that_are_compiled_for_plans() -> None:
    needs = replace(SO100_REQUIREMENTS, takes_prefix=True)
    policy = GatedPolicy(needs)
    plan = {PREFIX_ACTIONS: np.zeros((1, needs.chunk, needs.action), np.float32)}
    plan |= {PREFIX_DELAY: np.zeros(1, np.int32), PREFIX_LENGTH: np.zeros(1, np.int32)}
    asks: list[Ask] = [(make_input() | plan, None) for _ in range(5)]
    async with running(policy) as (engine, served):
        for expected in ([1] * 5, [1, 4]):
            policy.calls.clear()
            asking = await queue_requests(engine, served, policy, asks)
            policy.gate.set()
            await asyncio.gather(*asking)
            assert policy.calls == expected
            await engine.compile(served, add_plan({"front": (4, 6)}, needs))
            await until(lambda: not engine.get_stats()["batch_sizes_to_compile"])


async def test_a_compile_waits_for_clients_without_a_control_loop(monkeypatch) -> None:
    monkeypatch.setattr("service.inference.engine.QUIET_SECONDS", 0.2)
    monkeypatch.setattr("service.inference.policy_cache.POLL_INTERVAL", 0.01)
    policy = ScriptedPolicy()
    engine = Engine(batch_sizes=(1, 2))
    engine.has_running_robot = lambda: True
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        await engine.infer(served, make_input())
        engine.has_running_robot = lambda: False
        await until(lambda: policy.batches)
        assert time.monotonic() >= engine._last_used_at + 0.2
    await engine.close()


async def test_idle_follows_compilations_but_not_trials() -> None:
    compiled = threading.Event()

    @dataclass
    class Slow(ScriptedPolicy):
        def compile(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, **plan: bool) -> None:
            if batch > 1:
                compiled.wait(30)
            super().compile(batch, cameras, **plan)

    policy = Slow()
    engine = Engine(batch_sizes=(1, 2, 4))
    assert engine.batch_compiler.idle.is_set()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore):
        await until(lambda: not engine.batch_compiler.idle.is_set())
        engine.has_running_robot = lambda: True  # The second size waits until the robot stops.
        compiled.set()
        await asyncio.wait_for(engine.batch_compiler.idle.wait(), 30)
        assert [size for size, _ in policy.batches] == [2]
        assert engine.get_stats()["batch_sizes_to_compile"] == 1
    slow = ScriptedPolicy(latency=0.1, batches=[(size, dict(policy.requirements.cameras)) for size in (2, 4)])
    idle_samples: list[bool] = []

    def profile(batch: int = 1, cameras: object = None, **plan: bool) -> float:
        end = time.monotonic() + 30
        while batch > 1 and len(idle_samples) < 6 and time.monotonic() < end:
            time.sleep(0.001)
        return 0.1

    slow.profile = profile  # type: ignore[method-assign]
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: slow), "other", None, ignore):
        while engine.get_stats()["batch_sizes_to_compile"]:
            idle_samples.append(engine.batch_compiler.idle.is_set())
            await asyncio.sleep(0.01)
        assert all(idle_samples)
        assert len(idle_samples) > 5
    await engine.close()


async def test_a_failed_compilation_only_excludes_larger_batches() -> None:
    @dataclass
    class Small(ScriptedPolicy):
        def compile(self, batch: int = 1, cameras=None, **plan: bool) -> None:
            if batch > 2:
                raise RuntimeError("RESOURCE_EXHAUSTED")
            super().compile(batch, cameras, **plan)

    policy = Small()
    async with running(policy) as (engine, served):
        assert {batch for batch, _ in policy.batches} == {2}
        assert served.replicas[0].batch_sizes[frozenset({("front", (4, 6))})] == (1, 2)
        assert await engine.infer(served, make_input())


async def test_batches_are_measured_briefly_while_a_robot_runs() -> None:
    @dataclass
    class ProfiledPolicy(ScriptedPolicy):
        profiled: list[int] = field(default_factory=list)

        def profile(self, batch: int = 1, cameras: object = None, **plan: bool) -> float:
            self.profiled.append(batch)
            return {2: 0.001, 4: 0.1}[batch] if batch > 1 else 0.01

    compiled = [(size, dict(ProfiledPolicy().requirements.cameras)) for size in (2, 4)]
    for is_robot_running, counts in ((False, [3, 16, 3]), (True, [3, 3, 3])):
        policy = ProfiledPolicy(batches=list(compiled))  # All programs are compiled, so only a trial is left.
        engine = Engine(batch_sizes=(1, 2, 4))
        engine.has_running_robot = [lambda: False, lambda: True][is_robot_running]
        async with engine.policy_cache.open_policy(ScriptedLoader(lambda policy=policy: policy), "p", None, ignore):
            await until(lambda engine=engine: not engine.get_stats()["batch_sizes_to_compile"])
            assert [policy.profiled.count(size) for size in (1, 2, 4)] == counts
        await engine.close()


def test_only_complete_observations_with_a_batch_axis_are_stacked() -> None:
    stacks = StackingBuffers()
    shape = read_layout(make_input()).shapes
    stacks.stack(shape, [make_input(0), make_input(np.nan)], 4)
    stacked = stacks.stack(shape, [make_input(1), make_input(2), make_input(3)], 4)
    assert stacked["observation.state"][:, 0].tolist() == [1, 2, 3, 1]
    assert all(array.ctypes.data % ALIGNMENT == 0 and array.flags.c_contiguous for array in stacked.values())
    assert read_layout({"a": np.zeros((2, 3))}).shapes is None
    assert read_layout({"a": np.array(1.0)}).shapes is None
    assert read_layout(make_input()) == read_layout(dict(reversed(make_input().items())))
