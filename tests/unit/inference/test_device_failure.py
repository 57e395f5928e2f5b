"""Failing devices: another device answers, the log reports the failure, and the device is no longer used."""

import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from service.errors import PolicyFailed
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from service.inference.replicas import MAX_FAILURES
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy
from tests.testing.rig import OBSERVATION

pytestmark = pytest.mark.timed

STUCK = 1.0
DEAD = RuntimeError("device halted: /root/secret")


class EngineRig:
    """Engine with several devices and a copy of the policy on each device."""

    def __init__(self, devices: tuple[str, ...], stack: AsyncExitStack):
        self.on: dict[str, ScriptedPolicy] = {}
        self.engine = Engine(devices=devices, batch_sizes=(1, 2, 8), stuck_after=STUCK)
        self._stack = stack
        self.served: LoadedPolicy

    async def load(self, path: str = "p") -> LoadedPolicy:
        rig = self

        class Placed(ScriptedPolicy):
            def on(self, device: str) -> ScriptedPolicy:
                rig.on[device] = other = super().on(device)
                return other

        def make() -> ScriptedPolicy:
            first = self.engine.devices.first or "default"
            self.on[first] = policy = Placed(device=first)
            return policy

        opening = self.engine.policy_cache.open_policy(ScriptedLoader(make), path, None, lambda word: None)
        self.served = await self._stack.enter_async_context(opening)
        return self.served

    async def ask(self, asker: object | None = None) -> None:
        assert (await self.engine.infer(self.served, OBSERVATION, caller=asker)).chunk.shape == (1, 20, 6)

    def acted(self, device: str) -> int:
        return self.on[device].acted


@pytest.fixture
async def rig() -> AsyncIterator[EngineRig]:
    async with AsyncExitStack() as stack:
        rig = EngineRig(("a", "b"), stack)
        await rig.load()
        yield rig
    await rig.engine.close()


async def test_another_device_answers_for_a_failing_device(rig: EngineRig) -> None:
    rig.on["a"].failures = [DEAD] * 100
    for _ in range(MAX_FAILURES + 4):
        await rig.ask()
    assert (rig.acted("a"), rig.acted("b")) == (MAX_FAILURES, MAX_FAILURES + 4)
    facts = rig.engine.get_stats()
    assert facts["devices_failed"] == ["a"]
    assert [device["failed"] for device in facts["devices"]] == ["it raises RuntimeError", None]  # type: ignore[index,union-attr]
    assert "secret" not in str(facts)


async def test_a_failed_device_gets_no_compile_and_no_later_policy(rig: EngineRig) -> None:
    rig.on["a"].failures = [DEAD] * 100
    for _ in range(MAX_FAILURES):
        await rig.ask()
    rig.on["a"].compile_failure = DEAD
    await rig.engine.compile(rig.served, {"front": (8, 8)})
    assert rig.served.is_compiled({"front": (8, 8)})
    assert rig.served.policy is rig.on["b"]
    assert rig.engine.devices.first == "b"
    later = await rig.load("later")
    assert [(replica.worker_id, replica.policy.device) for replica in later.replicas] == [(1, "b")]
    await rig.ask()
    assert rig.acted("b") == 1


async def test_a_failure_on_all_devices_is_attributed_to_the_policy(rig: EngineRig) -> None:
    for _ in range(MAX_FAILURES + 2):
        rig.on["a"].failures, rig.on["b"].failures = [DEAD], [DEAD]
        with pytest.raises(PolicyFailed, match="the policy raised RuntimeError"):
            await rig.ask()
    await rig.ask()
    assert rig.engine.get_stats()["devices_failed"] == []


async def test_an_answer_resets_the_failure_count_of_a_device(rig: EngineRig) -> None:
    for _ in range(MAX_FAILURES + 2):
        rig.on["a"].failures = [DEAD]
        for _ in range(4):  # Four requests are enough for a failure and an answer of device "a".
            await rig.ask()
        assert not rig.on["a"].failures
    assert rig.engine.get_stats()["devices_failed"] == []


async def test_the_other_device_is_used_after_a_device_hangs(rig: EngineRig) -> None:
    gate = threading.Event()
    rig.on["a"].failures = [gate]
    try:
        await rig.ask()  # The other device answers when the first device counts as stuck.
        before = rig.acted("a")
        await rig.ask()
        assert (rig.acted("a"), rig.acted("b")) == (before, 2)
    finally:
        gate.set()


async def test_two_workers_of_one_device_count_as_one_device() -> None:
    async with AsyncExitStack() as stack:
        rig = EngineRig(("a", "a"), stack)
        served = await rig.load()
        for replica in served.replicas:
            replica.policy.failures = [DEAD] * 100  # type: ignore[attr-defined]
        with pytest.raises(PolicyFailed):
            await rig.ask()
        assert sum(replica.policy.acted for replica in served.replicas) == 1  # type: ignore[attr-defined]
    await rig.engine.close()
