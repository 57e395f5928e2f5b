"""Other weights for a policy that robots are asked with: what its programs take is known already."""

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
class Shipped(ScriptedPolicy):
    """Notes the programs that it ran once, and those that it profiled; other cameras are an error."""

    tried: list[tuple[int, Sizes]] = field(default_factory=list)
    profiled: list[tuple[int, Sizes]] = field(default_factory=list)

    def compile(self, batch: int = 1, cameras: Sizes | None = None) -> None:
        super().compile(batch, cameras)
        self.tried.append((batch, dict(cameras or self.requirements.cameras)))

    def is_compiled(self, batch: int = 1, cameras: Sizes | None = None) -> bool:
        if cameras is not None and set(cameras) != set(self.requirements.cameras):
            raise ObservationError(f"cameras {sorted(cameras)}, wanted {sorted(self.requirements.cameras)}")
        return super().is_compiled(batch, cameras)

    def profile(self, batch: int = 1, cameras: Sizes | None = None) -> float:
        self.profiled.append((batch, dict(cameras or self.requirements.cameras)))
        return super().profile(batch, cameras)

    def on(self, device: str) -> "Shipped":
        """On its own device one that runs the same programs."""
        other = replace(self, device=device, tried=[], profiled=[])
        return other if device == self.device else replace(other, compiled=[], batches=[])

    def pushed(self, **changes: Any) -> "Shipped":
        """Other weights in the same programs."""
        return replace(self, tried=[], profiled=[], **changes)


def giving(policy: ScriptedPolicy) -> Callable[..., ScriptedPolicy]:
    return lambda path, revision=None, /, **more: policy


def costs_of(replica: Replica) -> list[dict[str, dict[str, float]]]:
    return [replica.latencies[frames].get_stats() for frames in (TRAINED_FRAMES, LARGE_FRAMES)]


@dataclass
class Rig:
    """A policy that robots are asked with in batches of up to 2 and with pictures of two sizes, on two workers."""

    engine: Engine
    policy: Shipped
    served: LoadedPolicy

    def pushed(self, later: Shipped) -> AbstractAsyncContextManager[LoadedPolicy]:
        return self.engine.policy_cache.open_policy(giving(later), "q", None, ignore, like=self.policy)

    async def until_grown(self) -> None:
        await until(lambda: not self.engine.get_stats()["batch_sizes_to_compile"])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine, policy = Engine(devices=("a", "a"), batch_sizes=(1, 2)), Shipped(device="a")
    async with engine.policy_cache.open_policy(giving(policy), "p", None, ignore) as served:
        made = Rig(engine, policy, served)
        await engine.compile(served, LARGE)
        await made.until_grown()
        for replica in served.replicas:
            for _ in range(WINDOW):
                replica.latencies[TRAINED_FRAMES].record(1, 0.001)
                replica.latencies[LARGE_FRAMES].record(2, 0.004 + replica.worker_id)
        engine.has_running_robot = lambda: True
        yield made
    await engine.close()


async def test_a_push_takes_over_what_batches_took_and_tries_each_program_once(rig: Rig) -> None:
    later = rig.policy.pushed(latency=9.9)
    async with rig.pushed(later) as served:
        assert later.profiled == []
        await rig.until_grown()
        assert len(served.replicas) == 2
        assert [costs_of(replica) for replica in served.replicas] == [costs_of(one) for one in rig.served.replicas]
        assert latency_model(served).measured(1).median == 0.001
        assert [replica.latencies[LARGE_FRAMES].measured(2).median for replica in served.replicas] == [0.004, 1.004]
        for replica in served.replicas:
            assert sorted(replica.policy.tried, key=PROGRAMS.index) == PROGRAMS
            assert replica.policy.profiled == []
            assert replica.batch_sizes[TRAINED_FRAMES] == replica.batch_sizes[LARGE_FRAMES] == (1, 2)
        before = costs_of(rig.served.replicas[0])
        served.replicas[0].latencies[TRAINED_FRAMES].record(1, 1.0)
        assert costs_of(rig.served.replicas[0]) == before, "from now on each learns what its own take"


async def test_robots_with_pictures_of_another_size_are_answered_at_once(rig: Rig) -> None:
    later = rig.policy.pushed(latency=0.0)
    async with rig.pushed(later) as served:
        assert served.is_compiled(LARGE)
        assert (await rig.engine.infer(served, observe(480, 640))).chunk.shape == (1, 20, 6)


TOP, TWO = {"top": (48, 64)}, {"front": (48, 64), "wrist": (48, 64)}


@pytest.mark.parametrize(
    ("changes", "cameras"),
    [
        ({"compiled": [], "batches": []}, TRAINED),  # another architecture
        ({"requirements": replace(SO100_REQUIREMENTS, cameras=TOP)}, TOP),
        ({"requirements": replace(SO100_REQUIREMENTS, cameras=TWO)}, TWO),
    ],
)
async def test_a_push_with_other_programs_takes_nothing_over(changes: Any, cameras: Sizes, rig: Rig) -> None:
    later = rig.policy.pushed(latency=0.5, **changes)
    async with rig.pushed(later) as served:
        for replica in served.replicas:
            assert replica.latencies[frozenset(cameras.items())].get_stats() == {"1": {"p50": 500.0, "p90": 500.0}}
            assert replica.policy.profiled == [(1, cameras)] * 3
            assert replica.compiled_frames == (frozenset(cameras.items()),)
            assert not replica.latencies[LARGE_FRAMES].is_measured


async def test_what_was_not_compiled_for_the_one_before_is_learnt(rig: Rig) -> None:
    later = rig.policy.pushed(latency=0.5)
    async with rig.pushed(later) as served:
        await rig.until_grown()
        await rig.engine.compile(served, small := {"front": (4, 6)})
        assert later.profiled == [(1, small)] * 3
        assert served.replicas[0].latencies[frozenset(small.items())].measured(1).median == 0.5


async def test_a_load_that_is_like_nothing_that_is_in_memory_learns_for_itself(rig: Rig) -> None:
    for like in (None, rig.policy.pushed()):
        later = rig.policy.pushed(latency=0.5)
        async with rig.engine.policy_cache.open_policy(giving(later), "q", None, ignore, like=like) as served:
            assert latency_model(served).measured(1).median == 0.5


async def test_on_a_device_of_its_own_a_copy_is_compiled_anew_and_learns_anew() -> None:
    engine = Engine(devices=("a", "b"))
    first = Shipped(device="a", latency=0.010)
    async with engine.policy_cache.open_policy(giving(first), "p", None, ignore):
        later = first.pushed(latency=0.5)
        async with engine.policy_cache.open_policy(giving(later), "q", None, ignore, like=first) as served:
            assert [replica.latencies[TRAINED_FRAMES].measured(1).median for replica in served.replicas] == [0.010, 0.5]
    await engine.close()


async def test_nothing_is_taken_over_where_policies_come_compiled_from_elsewhere() -> None:
    store = PolicyCache(lambda policy: (Replica(policy),), lambda served: None, are_remote=True)
    first = Shipped(latency=0.010)
    async with store.open_policy(giving(first), "p", None, ignore):
        later = first.pushed(latency=0.5)
        async with store.open_policy(giving(later), "q", None, ignore, like=first) as served:
            assert latency_model(served).measured(1).median == 0.5


async def test_a_push_keeps_nothing_of_the_policy_that_it_learnt_from() -> None:
    engine = Engine()
    policies = {"p": Shipped()}
    policies["q"] = policies["p"].pushed()

    def load(path: str, revision: str | None = None, /, **more: object) -> ScriptedPolicy:
        return policies.pop(path)

    running = engine.policy_cache.open_policy(load, "p", None, ignore)
    first = await running.__aenter__()
    seen = weakref.ref(first.policy)
    async with engine.policy_cache.open_policy(load, "q", None, ignore, like=first.policy) as served:
        assert latency_model(served).is_measured
        del first
        await running.__aexit__(None, None, None)
        del running
        await until(lambda: "policy-loader" not in {thread.name for thread in threading.enumerate()})
        gc.collect()
        assert seen() is None
    await engine.close()
