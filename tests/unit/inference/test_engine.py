import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxmodels.errors import ConfigError, ObservationError
from service.errors import PolicyError, PolicyFailed
from service.inference.batching import WINDOW
from service.inference.device_worker import InferenceWorker, WorkerClosed
from service.inference.engine import Engine
from service.inference.loaded_policy import InferenceStuck, LoadedPolicy, describe_sizes
from service.threads import call_in_thread
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy, ignore
from tests.testing.rig import OBSERVATION
from tests.testing.waiting import until

pytestmark = pytest.mark.timed


@pytest.fixture
async def engine():
    made = Engine(stuck_after=60.0)
    yield made
    await made.close()


@dataclass
class CompilingPolicy(ScriptedPolicy):
    """Policy whose compilation waits for the gate, if there is a gate, before it fails or succeeds."""

    gate: threading.Event | None = None
    started: threading.Event = field(default_factory=threading.Event)

    def compile(self, batch: int = 1, cameras: Mapping[str, tuple[int, int]] | None = None, **plan: bool) -> None:
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        super().compile(batch, cameras, **plan)


async def test_an_inference_runs_on_the_device_thread_with_timings(engine: Engine) -> None:
    policy = ScriptedPolicy(latency=0.01)
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        inference = await engine.infer(served, OBSERVATION)
    assert inference.chunk.shape == (1, 20, 6)
    assert policy.threads == {"device"}
    assert 0.01 <= inference.compute <= inference.total
    assert inference.queue >= 0


async def test_only_a_short_inference_on_an_idle_device_runs_at_once(engine: Engine) -> None:
    policy = ScriptedPolicy()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        (latency,) = served.replicas[0].latencies.values()
        latency.record(1, 1.0)
        assert engine.infer_now(served, OBSERVATION) is None, "the inference may take long"
        for _ in range(2 * WINDOW):
            latency.record(1, 0.0)
        policy.threads.clear()
        result = engine.infer_now(served, OBSERVATION)
        assert result is not None
        np.testing.assert_array_equal(result.chunk, (await engine.infer(served, OBSERVATION)).chunk)
        assert policy.threads == {threading.current_thread().name, "device"}
        policy.failures = [ValueError()]
        assert engine.infer_now(served, OBSERVATION) is None, "the policy raised"
        policy.failures = [gate := threading.Event()]
        other = asyncio.create_task(engine.infer(served, OBSERVATION))
        await asyncio.sleep(0)
        assert engine.infer_now(served, OBSERVATION) is None, "another request waits"
        gate.set()
        await other


async def test_a_policy_is_loaded_once_and_dropped_after_its_last_session(engine: Engine) -> None:
    loader = ScriptedLoader()
    async with engine.policy_cache.open_policy(loader, "p", None, ignore) as first:
        async with engine.policy_cache.open_policy(loader, "p", None, ignore) as second:
            assert first is second
        async with engine.policy_cache.open_policy(loader, "p", "other", ignore) as third:
            assert third is not first
            assert engine.get_stats()["policies_loaded"] == 2
        assert engine.get_stats()["policies_loaded"] == 1
    assert engine.get_stats()["policies_loaded"] == 0
    assert loader.loads == ["p", "p"]


async def test_two_sessions_share_one_load_and_both_get_its_progress(engine: Engine) -> None:
    loader = ScriptedLoader(gate=threading.Event())
    words: list[tuple[int, str]] = []

    async def use(number: int) -> int:
        async with engine.policy_cache.open_policy(
            loader, "p", None, lambda word: words.append((number, word))
        ) as served:
            return id(served)

    tasks = [asyncio.create_task(use(number)) for number in range(2)]
    await asyncio.sleep(0.05)
    loader.gate.set()
    first, second = await asyncio.gather(*tasks)
    assert first == second
    assert loader.loads == ["p"]
    assert [(number, "compiling") in words for number in range(2)] == [True, True]


@pytest.mark.parametrize("is_other_waiting", [True, False])
async def test_a_load_with_a_departed_caller_serves_others_or_is_dropped(engine, is_other_waiting) -> None:
    loader = ScriptedLoader(gate=threading.Event())

    async def use() -> None:
        async with engine.policy_cache.open_policy(loader, "p", None, ignore):
            pass

    first, *others = [asyncio.create_task(use()) for _ in range(1 + is_other_waiting)]
    await asyncio.sleep(0.02)
    first.cancel()
    if others:
        with pytest.raises(asyncio.CancelledError):
            await first
    loader.gate.set()
    await asyncio.gather(*others)
    dropped = {"policies_loaded": 0, "policies_loading": 0}  # The two counts change one after the other.
    await until(lambda: engine.get_stats() | dropped == engine.get_stats())


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (ConfigError("chunk_size is missing"), "policy 'p' cannot be loaded: chunk_size is missing"),
        (OSError("/root/secret"), r"policy 'p' cannot be loaded \(OSError\); the server's log says more"),
        (MemoryError(), r"\(out of memory\)"),
    ],
)
async def test_a_failed_load_states_its_reason_and_can_be_repeated(
    engine: Engine, failure: Exception, text: str
) -> None:
    loader = ScriptedLoader(failure=failure)
    with pytest.raises(PolicyError, match=text) as caught:
        async with engine.policy_cache.open_policy(loader, "p", None, ignore):
            pass
    assert "secret" not in str(caught.value)
    loader.failure = None
    async with engine.policy_cache.open_policy(loader, "p", None, ignore) as served:
        assert served.is_compiled({"front": (48, 64)})


async def test_other_frame_sizes_are_compiled_outside_the_device_thread(engine: Engine) -> None:
    policy = CompilingPolicy()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        sizes = {"front": (480, 640)}
        assert not served.is_compiled(sizes)
        policy.started.clear()
        policy.gate = threading.Event()
        compiling = asyncio.create_task(engine.compile(served, sizes))
        await until(policy.started.is_set)
        await engine.infer(served, OBSERVATION)
        assert not compiling.done()
        policy.gate.set()
        await compiling
        assert served.is_compiled(sizes)


async def abandon_compile(
    engine: Engine, served: LoadedPolicy, policy: CompilingPolicy, sizes: dict[str, tuple[int, int]]
) -> None:
    """Start a compilation, and abandon the wait after it has begun."""
    asking = asyncio.create_task(engine.compile(served, sizes))
    await until(policy.started.is_set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await asking


async def test_an_abandoned_compile_is_continued_by_later_requests(engine: Engine) -> None:
    policy = CompilingPolicy()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        before, sizes = len(policy.compiled), {"front": (480, 640)}
        policy.gate = threading.Event()
        policy.started.clear()
        for _ in range(3):
            await abandon_compile(engine, served, policy, sizes)
            assert engine.policy_cache.building.locked(), "no other policy loads during the compilation"
        policy.gate.set()
        await engine.compile(served, sizes)
        assert len(policy.compiled) == before + 1


async def test_an_abandoned_compile_that_fails_is_tried_again(engine: Engine) -> None:
    policy = CompilingPolicy()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        policy.gate, policy.compile_failure = threading.Event(), RuntimeError("no")
        policy.started.clear()
        await abandon_compile(engine, served, policy, {"front": (4, 4)})
        policy.gate.set()
        async with engine.policy_cache.building:  # The compilation has ended.
            pass
        policy.compile_failure = None
        await engine.compile(served, {"front": (4, 4)})
        assert served.is_compiled({"front": (4, 4)})


async def test_a_failing_compile_is_reported_to_the_session(engine: Engine) -> None:
    policy = ScriptedPolicy()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        policy.compile_failure = ObservationError("no such camera")
        with pytest.raises(PolicyFailed, match="cannot be compiled for 4x4 frames: no such camera"):
            await engine.compile(served, {"front": (4, 4)})
        policy.compile_failure = RuntimeError("/root/secret")
        with pytest.raises(PolicyFailed, match=r"\(RuntimeError\)"):
            await engine.compile(served, {"front": (4, 4)})


@pytest.mark.parametrize("failure", [ValueError("/root/secret"), StopIteration(), TimeoutError()])
async def test_an_exception_of_a_policy_is_reported_by_its_type_only(engine: Engine, failure: Exception) -> None:
    policy = ScriptedPolicy(failures=[failure])
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        with pytest.raises(PolicyFailed, match="the policy raised") as caught:
            await engine.infer(served, OBSERVATION)
        assert not isinstance(caught.value, InferenceStuck)
        assert "secret" not in str(caught.value)
        with pytest.raises(PolicyFailed, match="refused its input: observation has"):
            await engine.infer(served, {})
        assert (await engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)


OUT_OF_MEMORY = RuntimeError(
    "RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes."
)  # The message of XLA.


@pytest.mark.parametrize("failure", [OUT_OF_MEMORY, MemoryError()])
async def test_out_of_memory_is_reported_and_other_policies_continue(engine: Engine, failure: Exception) -> None:
    policy = ScriptedPolicy(failures=[failure], compile_failure=failure)
    async with (
        engine.policy_cache.open_policy(ScriptedLoader(), "other", None, ignore) as other,
        engine.policy_cache.open_policy(
            ScriptedLoader(lambda: ScriptedPolicy(failures=[failure])), "p", None, ignore
        ) as served,
    ):
        with pytest.raises(PolicyFailed, match="out of memory"):
            await engine.infer(served, OBSERVATION)
        assert (await engine.infer(other, OBSERVATION)).chunk.shape == (1, 20, 6)
        assert (await engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)
        with pytest.raises(PolicyError, match="out of memory"):
            async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "third", None, ignore):
                pass


async def test_a_real_out_of_memory_of_jax_is_reported() -> None:
    import jax.numpy as jnp

    class Greedy(ScriptedPolicy):
        def act(self, observation):
            return np.asarray(jnp.zeros((1 << 44,)))

    jnp.zeros(()).block_until_ready()  # The start of JAX takes longer than an inference may.
    engine = Engine(stuck_after=60)
    async with engine.policy_cache.open_policy(ScriptedLoader(Greedy), "p", None, ignore) as served:
        with pytest.raises(PolicyFailed, match="out of memory"):
            await engine.infer(served, OBSERVATION)
    await engine.close()


async def test_a_stored_error_does_not_keep_the_policy_in_memory(engine: Engine, caplog) -> None:
    made: list[weakref.ref[ScriptedPolicy]] = []

    def make() -> ScriptedPolicy:
        policy = ScriptedPolicy(compile_failure=OUT_OF_MEMORY)
        made.append(weakref.ref(policy))
        return policy

    with pytest.raises(PolicyError) as caught:
        async with engine.policy_cache.open_policy(ScriptedLoader(make), "p", None, ignore):
            pass
    caplog.clear()
    gc.collect()
    assert made[0]() is None
    assert caught.value.__cause__ is OUT_OF_MEMORY


async def test_all_waiting_requests_end_with_the_engine() -> None:
    engine, never = Engine(stuck_after=60), threading.Event()
    policy = ScriptedPolicy(failures=[never])
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        waiting = [asyncio.create_task(engine.infer(served, OBSERVATION)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await engine.close()
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [WorkerClosed] * 3
        with pytest.raises(WorkerClosed, match="the server is ending"):
            await engine.infer(served, OBSERVATION)
    never.set()


async def test_waiting_for_a_slow_inference_does_not_count_as_stuck() -> None:
    engine, gate = Engine(stuck_after=1.2), threading.Event()
    slow, quick = ScriptedPolicy(latency=0.15, failures=[gate]), ScriptedPolicy()
    async with (
        engine.policy_cache.open_policy(ScriptedLoader(lambda: slow), "slow", None, ignore) as first,
        engine.policy_cache.open_policy(ScriptedLoader(lambda: quick), "quick", None, ignore) as second,
    ):
        asking = [asyncio.create_task(engine.infer(first, OBSERVATION))]
        await until(lambda: slow.acted)
        asking += [asyncio.create_task(engine.infer(served, OBSERVATION)) for served in (*[first] * 9, second)]
        await until(lambda: engine.get_stats()["inferences_waiting"] == 10)
        gate.set()
        _, *slow_results, quick_result = await asyncio.gather(*asking)
    assert slow_results[-1].queue > 1.2
    assert all(inference.queue > quick_result.queue for inference in slow_results)
    await engine.close()


async def test_a_cancelled_request_that_has_not_begun_is_skipped(engine: Engine) -> None:
    gate = threading.Event()
    policy = ScriptedPolicy(failures=[gate])
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        first = asyncio.create_task(engine.infer(served, OBSERVATION))
        await until(lambda: policy.acted)
        second = asyncio.create_task(engine.infer(served, OBSERVATION))
        await asyncio.sleep(0)
        second.cancel()
        gate.set()
        await first
        await engine.infer(served, OBSERVATION)
    assert policy.acted == 2


async def test_a_trial_runs_outside_the_device_thread(engine: Engine) -> None:
    policy = ScriptedPolicy(step=2.0)
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        chunk, seconds = await engine.run_trial(served, OBSERVATION)
        assert chunk[0, 0, 0] == 2
        assert seconds >= 0
        assert policy.threads == {"policy-trial"}
        policy.failures.append(ValueError("its secret"))
        with pytest.raises(PolicyFailed, match="ValueError") as caught:
            await engine.run_trial(served, OBSERVATION)
        assert "secret" not in str(caught.value)


async def test_a_trial_runs_on_a_device_that_is_never_idle(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.inference.engine.MAX_TRIAL_WAIT", 0.05)
    gate, policy = threading.Event(), ScriptedPolicy()
    async with engine.policy_cache.open_policy(ScriptedLoader(lambda: policy), "p", None, ignore) as served:
        policy.failures.append(gate)
        robot = asyncio.create_task(engine.infer(served, OBSERVATION))
        while not policy.acted:  # noqa: ASYNC110 - another thread changes the count
            await asyncio.sleep(0.001)
        async with asyncio.timeout(30):
            await engine.run_trial(served, OBSERVATION)
        gate.set()
        await robot


async def test_a_revision_is_loaded_from_a_folder_and_like_another_policy(engine: Engine) -> None:
    first, second = ScriptedPolicy(), ScriptedPolicy()
    calls: list[tuple[object, ...]] = []

    def load(path: str, revision: str | None = None, /, *, like: object = None, on_progress: object = None):
        calls.append((path, revision, like))
        return first if like is None else second

    async with (
        engine.policy_cache.open_policy(load, "owner/name", None, ignore) as running,
        engine.policy_cache.open_policy(
            load, "owner/name", "1" * 40, ignore, folder="/files", like=running.policy
        ) as other,
        engine.policy_cache.open_policy(load, "owner/name", "1" * 40, ignore) as same,
    ):
        assert calls == [("owner/name", None, None), ("/files", None, first)]
        assert same is other


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux has a niceness per thread")
async def test_work_runs_at_a_lower_priority_than_the_loop() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    here = niceness()
    assert await call_in_thread(niceness, "nicer", 4) == here + 4
    assert niceness() == here


async def test_close_does_not_wait_for_a_stuck_device_thread(monkeypatch) -> None:
    never = threading.Event()
    engine = Engine(stuck_after=60)
    async with engine.policy_cache.open_policy(
        ScriptedLoader(lambda: ScriptedPolicy(failures=[never])), "p", None, ignore
    ) as served:
        asking = asyncio.create_task(engine.infer(served, OBSERVATION))
        await asyncio.sleep(0.01)
        limits, close = list[float](), InferenceWorker.close
        monkeypatch.setattr(InferenceWorker, "close", lambda self, within: limits.append(within) or close(self, within))
        async with asyncio.timeout(30):
            await engine.close()
        assert limits == [1.0]
        with pytest.raises(WorkerClosed):
            await asking
        never.set()


def test_frame_sizes_are_described_as_text() -> None:
    assert describe_sizes({"a": (480, 640), "b": (480, 640)}) == "480x640 frames"
    assert describe_sizes({"b": (4, 6), "a": (480, 640)}) == "480x640 frames of 'a', 4x6 frames of 'b'"
