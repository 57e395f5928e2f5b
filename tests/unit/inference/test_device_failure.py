"""A device that fails where another one answers: nobody notices but the log, and it is not asked any more."""

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


class House:
    """An engine on some devices and a policy on each."""

    def __init__(self, devices: tuple[str, ...], stack: AsyncExitStack):
        self.on: dict[str, ScriptedPolicy] = {}
        self.engine = Engine(devices=devices, batch_sizes=(1, 2, 8), stuck_after=STUCK)
        self._stack = stack
        self.served: LoadedPolicy

    async def load(self, path: str = "p") -> LoadedPolicy:
        house = self

        class Placed(ScriptedPolicy):
            def on(self, device: str) -> ScriptedPolicy:
                house.on[device] = other = super().on(device)
                return other

        def make() -> ScriptedPolicy:
            first = self.engine.devices.first or "somewhere"
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
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        house = House(("a", "b"), stack)
        await house.load()
        yield house
    await house.engine.close()


async def test_another_device_answers_for_one_that_fails(house: House) -> None:
    house.on["a"].failures = [DEAD] * 100
    for _ in range(MAX_FAILURES + 4):
        await house.ask()
    assert (house.acted("a"), house.acted("b")) == (MAX_FAILURES, MAX_FAILURES + 4)
    facts = house.engine.get_stats()
    assert facts["devices_failed"] == ["a"]
    assert [device["failed"] for device in facts["devices"]] == ["it raises RuntimeError", None]  # type: ignore[index,union-attr]
    assert "secret" not in str(facts)


async def test_a_failed_device_gets_no_compile_and_no_later_policy(house: House) -> None:
    house.on["a"].failures = [DEAD] * 100
    for _ in range(MAX_FAILURES):
        await house.ask()
    house.on["a"].compile_failure = DEAD
    await house.engine.compile(house.served, {"front": (8, 8)})
    assert house.served.is_compiled({"front": (8, 8)})
    assert house.served.policy is house.on["b"]
    assert house.engine.devices.first == "b"
    later = await house.load("later")
    assert [(replica.worker_id, replica.policy.device) for replica in later.replicas] == [(1, "b")]
    await house.ask()
    assert house.acted("b") == 1


async def test_what_fails_everywhere_is_the_policys_fault_and_no_devices(house: House) -> None:
    for _ in range(MAX_FAILURES + 2):
        house.on["a"].failures, house.on["b"].failures = [DEAD], [DEAD]
        with pytest.raises(PolicyFailed, match="the policy raised RuntimeError"):
            await house.ask()
    await house.ask()
    assert house.engine.get_stats()["devices_failed"] == []


async def test_an_answer_in_between_makes_up_for_failures(house: House) -> None:
    for _ in range(MAX_FAILURES + 2):
        house.on["a"].failures = [DEAD]
        for _ in range(4):  # of which each device is asked two, or one and what the other does not answer
            await house.ask()
        assert not house.on["a"].failures
    assert house.engine.get_stats()["devices_failed"] == []


async def test_other_device_is_used_after_one_hangs(house: House) -> None:
    gate = threading.Event()
    house.on["a"].failures = [gate]
    try:
        await house.ask()  # when the first device counts as stuck
        before = house.acted("a")
        await house.ask()
        assert (house.acted("a"), house.acted("b")) == (before, 2)
    finally:
        gate.set()


async def test_two_lanes_of_one_device_are_one_device() -> None:
    async with AsyncExitStack() as stack:
        house = House(("a", "a"), stack)
        served = await house.load()
        for replica in served.replicas:
            replica.policy.failures = [DEAD] * 100  # type: ignore[attr-defined]
        with pytest.raises(PolicyFailed):
            await house.ask()
        assert sum(replica.policy.acted for replica in served.replicas) == 1  # type: ignore[attr-defined]
    await house.engine.close()
