"""Push of new weights for a running policy: programs and measured latencies are taken over."""

import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jaxmodels.errors import ObservationError
from service.inference.batching import WINDOW
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy, Replica
from service.inference.policy_cache import PolicyCache
from tests.testing.doubles import SO100_REQUIREMENTS, ScriptedPolicy, ignore
from tests.testing.rig import latency_model
from tests.testing.waiting import until
from tests.unit.inference.conftest import observe

pytestmark = pytest.mark.timed

Sizes = Mapping[str, tuple[int, int]]
TRAINED, LARGE = dict(SO100_REQUIREMENTS.cameras), {"front": (480, 640)}
TRAINED_FRAMES, LARGE_FRAMES = frozenset(TRAINED.items()), frozenset(LARGE.items())
PROGRAMS: list[tuple[int, Sizes]] = [(1, TRAINED), (2, TRAINED), (1, LARGE), (2, LARGE)]


@dataclass
class PushedPolicy(ScriptedPolicy):
    """Policy that records its trials and profiles; other cameras are an error."""

    tried: list[tuple[int, Sizes]] = field(default_factory=list)
    profiled: list[tuple[int, Sizes]] = field(default_factory=list)

    def compile(self, batch: int = 1, cameras: Sizes | None = None, **plan: bool) -> None:
        super().compile(batch, cameras, **plan)
        self.tried.append((batch, dict(cameras or self.requirements.cameras)))

    def is_compiled(self, batch: int = 1, cameras: Sizes | None = None, **plan: bool) -> bool:
        if cameras is not None and set(cameras) != set(self.requirements.cameras):
            raise ObservationError(f"cameras {sorted(cameras)}, wanted {sorted(self.requirements.cameras)}")
        return super().is_compiled(batch, cameras, **plan)

    def profile(self, batch: int = 1, cameras: Sizes | None = None, **plan: bool) -> float:
        self.profiled.append((batch, dict(cameras or self.requirements.cameras)))
        return super().profile(batch, cameras, **plan)

    def on(self, device: str) -> "PushedPolicy":
        """Return a copy, which shares the programs if the device is the same."""
        other = replace(self, device=device, tried=[], profiled=[])
        return other if device == self.device else replace(other, compiled=[], batches=[])

    def pushed(self, **changes: Any) -> "PushedPolicy":
        """Return a policy with other weights and the same programs."""
        return replace(self, tried=[], profiled=[], **changes)


def loader_of(policy: ScriptedPolicy) -> Callable[..., ScriptedPolicy]:
    return lambda path, revision=None, /, **more: policy


def costs_of(replica: Replica) -> list[dict[str, dict[str, float]]]:
    return [replica.latencies[frames].get_stats() for frames in (TRAINED_FRAMES, LARGE_FRAMES)]


@dataclass
class Rig:
    """Running policy on two workers, with batches of up to 2 and frames of two sizes."""

    engine: Engine
    policy: PushedPolicy
    served: LoadedPolicy

    def pushed(self, later: PushedPolicy) -> AbstractAsyncContextManager[LoadedPolicy]:
        return self.engine.policy_cache.open_policy(loader_of(later), "q", None, ignore, like=self.policy)

    async def wait_compiled(self) -> None:
        await until(lambda: not self.engine.get_stats()["batch_sizes_to_compile"])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine, policy = Engine(devices=("a", "a"), batch_sizes=(1, 2)), PushedPolicy(device="a")
    async with engine.policy_cache.open_policy(loader_of(policy), "p", None, ignore) as served:
        made = Rig(engine, policy, served)
        await engine.compile(served, LARGE)
        await made.wait_compiled()
        for replica in served.replicas:
            for _ in range(WINDOW):
                replica.latencies[TRAINED_FRAMES].record(1, 0.001)
                replica.latencies[LARGE_FRAMES].record(2, 0.004 + replica.worker_id)
        engine.has_running_robot = lambda: True
        yield made
    await engine.close()


async def test_a_push_copies_the_latencies_and_tries_each_program_once(rig: Rig) -> None:
    later = rig.policy.pushed(latency=9.9)
    async with rig.pushed(later) as served:
        assert later.profiled == []
        await rig.wait_compiled()
        assert len(served.replicas) == 2
        assert [costs_of(replica) for replica in served.replicas] == [
            costs_of(replica) for replica in rig.served.replicas
        ]
        assert latency_model(served).measured(1).median == 0.001
        assert [replica.latencies[LARGE_FRAMES].measured(2).median for replica in served.replicas] == [0.004, 1.004]
        for replica in served.replicas:
            assert sorted(replica.policy.tried, key=PROGRAMS.index) == PROGRAMS
            assert replica.policy.profiled == []
            assert replica.batch_sizes[TRAINED_FRAMES] == replica.batch_sizes[LARGE_FRAMES] == (1, 2)
        before = costs_of(rig.served.replicas[0])
        served.replicas[0].latencies[TRAINED_FRAMES].record(1, 1.0)
        assert costs_of(rig.served.replicas[0]) == before, "each policy records its own latencies from now on"


async def test_robots_with_another_frame_size_are_answered_at_once(rig: Rig) -> None:
    later = rig.policy.pushed(latency=0.0)
    async with rig.pushed(later) as served:
        assert served.is_compiled(LARGE)
        assert (await rig.engine.infer(served, observe(480, 640))).chunk.shape == (1, 20, 6)


TOP, TWO = {"top": (48, 64)}, {"front": (48, 64), "wrist": (48, 64)}


@pytest.mark.parametrize(
    ("changes", "cameras"),
    [
        ({"compiled": [], "batches": []}, TRAINED),  # Another architecture.
        ({"requirements": replace(SO100_REQUIREMENTS, cameras=TOP)}, TOP),
        ({"requirements": replace(SO100_REQUIREMENTS, cameras=TWO)}, TWO),
    ],
)
async def test_a_push_with_other_programs_copies_no_latency(changes: Any, cameras: Sizes, rig: Rig) -> None:
    later = rig.policy.pushed(latency=0.5, **changes)
    async with rig.pushed(later) as served:
        for replica in served.replicas:
            assert replica.latencies[frozenset(cameras.items())].get_stats() == {"1": {"p50": 500.0, "p90": 500.0}}
            assert replica.policy.profiled == [(1, cameras)] * 3
            assert replica.compiled_frames == (frozenset(cameras.items()),)
            assert not replica.latencies[LARGE_FRAMES].is_measured


async def test_a_frame_size_that_was_not_compiled_before_is_measured(rig: Rig) -> None:
    later = rig.policy.pushed(latency=0.5)
    async with rig.pushed(later) as served:
        await rig.wait_compiled()
        await rig.engine.compile(served, small := {"front": (4, 6)})
        assert later.profiled == [(1, small)] * 3
        assert served.replicas[0].latencies[frozenset(small.items())].measured(1).median == 0.5


async def test_a_load_without_a_similar_policy_in_memory_is_measured(rig: Rig) -> None:
    for like in (None, rig.policy.pushed()):
        later = rig.policy.pushed(latency=0.5)
        async with rig.engine.policy_cache.open_policy(loader_of(later), "q", None, ignore, like=like) as served:
            assert latency_model(served).measured(1).median == 0.5


async def test_a_copy_on_another_device_is_compiled_and_measured_again() -> None:
    engine = Engine(devices=("a", "b"))
    first = PushedPolicy(device="a", latency=0.010)
    async with engine.policy_cache.open_policy(loader_of(first), "p", None, ignore):
        later = first.pushed(latency=0.5)
        async with engine.policy_cache.open_policy(loader_of(later), "q", None, ignore, like=first) as served:
            assert [replica.latencies[TRAINED_FRAMES].measured(1).median for replica in served.replicas] == [0.010, 0.5]
    await engine.close()


async def test_remote_policies_copy_no_latency() -> None:
    store = PolicyCache(lambda policy: (Replica(policy),), lambda served: None, are_remote=True)
    first = PushedPolicy(latency=0.010)
    async with store.open_policy(loader_of(first), "p", None, ignore):
        later = first.pushed(latency=0.5)
        async with store.open_policy(loader_of(later), "q", None, ignore, like=first) as served:
            assert latency_model(served).measured(1).median == 0.5


async def test_a_push_keeps_no_reference_to_the_old_policy() -> None:
    engine = Engine()
    policies = {"p": PushedPolicy()}
    policies["q"] = policies["p"].pushed()

    def load(path: str, revision: str | None = None, /, **more: object) -> ScriptedPolicy:
        return policies.pop(path)

    running = engine.policy_cache.open_policy(load, "p", None, ignore)
    first = await running.__aenter__()
    reference = weakref.ref(first.policy)
    async with engine.policy_cache.open_policy(load, "q", None, ignore, like=first.policy) as served:
        assert latency_model(served).is_measured
        del first
        await running.__aexit__(None, None, None)
        del running
        await until(lambda: "policy-loader" not in {thread.name for thread in threading.enumerate()})
        gc.collect()
        assert reference() is None
    await engine.close()
