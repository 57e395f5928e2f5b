"""Devices join and leave while policies are loaded and robots ask: nobody notices as long as one is there."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from service.errors import PolicyError, PolicyFailed
from service.inference.device_worker import DeviceGone, Overdue, WorkerClosed
from service.inference.engine import Engine
from service.inference.loaded_policy import InferenceResult, InferenceStuck, LoadedPolicy, Replica
from tests.testing.doubles import ScriptedLoader, ScriptedPolicy
from tests.testing.rig import OBSERVATION
from tests.testing.waiting import until

pytestmark = pytest.mark.timed


class ScriptedWorker:
    """A `DeviceWorker` without a thread; the next requests raise its `failures`, or wait for them."""

    waiting = 0
    is_late = False

    def __init__(self) -> None:
        self.failures: list[Exception | asyncio.Event] = []
        self.batches: dict[int, int] = {}
        self.pending, self.last_used_at, self.acted = 0, 0.0, 0
        self.is_closed = False

    def load(self, now: float) -> float:
        return 0.0

    async def submit(self, replica: Replica, observation: Any, due: float | None, **options: bool) -> InferenceResult:
        if self.is_closed:
            raise WorkerClosed("the server is ending")
        self.pending += 1
        try:
            if self.failures:
                failure = self.failures.pop(0)
                if isinstance(failure, Exception):
                    raise failure
                await failure.wait()
            self.acted += 1
            return InferenceResult(replica.policy.act(observation), 0.0, 0.0, 0.0, 0.0, 0.0)
        finally:
            self.pending -= 1

    async def close(self, within: float) -> bool:
        self.is_closed = True
        return True


class Somewhere(ScriptedPolicy):
    """A policy that notes the devices it is copied to; a copy raises the device's failure, or waits for it."""

    failures_of: dict[str, Exception | threading.Event]
    copied: list[str]

    def on(self, device: str) -> ScriptedPolicy:
        self.copied.append(device)
        failure = self.failures_of.get(device)
        if isinstance(failure, Exception):
            raise failure
        if failure is not None:
            failure.wait(30)
        other = super().on(device)
        other.failures_of, other.copied = self.failures_of, self.copied
        return other


class House:
    """An engine whose devices are elsewhere."""

    def __init__(self, stack: AsyncExitStack, patience: float = 30.0):
        self.engine = Engine(are_remote=True, join_timeout=patience)
        self.workers: dict[str, ScriptedWorker] = {}
        self.failures_of: dict[str, Exception | threading.Event] = {}
        self.copied: list[str] = []
        self.loader = ScriptedLoader(self._make)
        self._stack = stack

    def _make(self, failures_of: dict[str, Exception | threading.Event] | None = None) -> ScriptedPolicy:
        policy = Somewhere(device="loaded")
        policy.failures_of, policy.copied = self.failures_of if failures_of is None else failures_of, self.copied
        return policy

    def join(self, *devices: str) -> None:
        for device in devices:
            self.workers[device] = ScriptedWorker()
            self.engine.replica_manager.add_device(device, self.workers[device])

    async def load_on(self, *devices: str) -> LoadedPolicy:
        self.join(*devices)
        return await self.load()

    async def load(self, path: str = "p") -> LoadedPolicy:
        opening = self.engine.policy_cache.open_policy(self.loader, path, None, lambda word: None)
        return await self._stack.enter_async_context(opening)

    async def remove(self, device: str) -> None:
        self.engine.replica_manager.retire_device(device, "it ended")
        await self.engine.replica_manager.remove_device(device)

    async def ask(self, served: LoadedPolicy) -> None:
        assert (await self.engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)

    def acted(self) -> dict[str, int]:
        return {device: worker.acted for device, worker in self.workers.items()}

    async def settled(self) -> None:
        """All that joined have what is loaded."""
        await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("join ")])


def where(served: LoadedPolicy) -> list[str]:
    return [replica.policy.device for replica in served.replicas]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    others = set(threading.enumerate())  # another test's thread may still be busy
    async with AsyncExitStack() as stack:
        house = House(stack)
        yield house
    await house.engine.close()
    await until(lambda: not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
    begun = ("policy-loader", "device")
    await until(lambda: not [one for one in set(threading.enumerate()) - others if one.name in begun])
    assert all(worker.is_closed for worker in house.workers.values())


async def test_what_is_loaded_is_put_on_one_that_joins_and_asked_of_it(house: House) -> None:
    served = await house.load_on("a")
    await house.engine.compile(served, {"front": (8, 8)})
    house.join("b")
    await house.settled()
    assert where(served) == ["a", "b"]
    assert served.is_compiled({"front": (8, 8)})
    workers = house.workers
    workers["a"].pending = 1  # it is busy
    await house.ask(served)
    assert house.acted() == {"a": 0, "b": 1}
    workers["a"].pending = 0


async def test_one_that_joins_while_a_policy_is_loaded_gets_it_too(house: House) -> None:
    house.join("a")
    house.loader.gate = threading.Event()
    loading = asyncio.create_task(house.load())
    await until(lambda: house.loader.loads)
    house.join("b")
    house.loader.gate.set()
    served = await loading
    await house.settled()
    assert sorted(where(served)) == ["a", "b"]


async def test_policies_need_a_device_and_devices_an_open_engine(house: House) -> None:
    with pytest.raises(PolicyError, match="cannot be loaded"):
        await house.load()
    house.join("a")
    assert where(await house.load()) == ["a"]
    await house.engine.close()
    house.engine.replica_manager.add_device("b", ScriptedWorker())
    assert len(house.engine.get_stats()["devices"]) == 1  # type: ignore[arg-type]


async def test_a_device_that_leaves_during_a_copy_gets_no_policy(house: House) -> None:
    served = await house.load_on("a")
    gate = house.failures_of["b"] = threading.Event()
    house.join("b")
    await until(lambda: "b" in house.copied)
    await house.remove("b")
    gate.set()
    await house.settled()
    assert where(served) == ["a"]
    assert house.engine.get_stats()["devices_failed"] == []


async def test_one_that_is_gone_while_a_policy_is_loaded_does_not_spoil_it(house: House) -> None:
    house.join("a", "b", "c")
    house.failures_of["b"] = DeviceGone("b ended")
    assert where(await house.load())[:2] == ["a", "c"]
    await house.settled()


async def test_one_that_left_is_not_copied_to(house: House) -> None:
    house.join("a", "b")
    house.engine.replica_manager.retire_device("b", "it ended")
    served = await house.load()
    await house.settled()
    assert (where(served), house.copied) == (["a"], ["a"])


async def test_a_failed_device_of_this_process_is_not_copied_to() -> None:
    async with AsyncExitStack() as stack:
        house = House(stack)
        engine = house.engine = Engine(devices=("a", "b"))
        engine.replica_manager.retire_device("a", "it raises")
        served = await house.load()
        await house.settled()
        assert (where(served), house.copied) == (["b"], ["b"])
    await engine.close()


async def test_of_three_two_may_fail_at_one_moment(house: House) -> None:
    served = await house.load_on("a", "b", "c")
    house.workers["a"].failures = [Overdue("a is slow")]
    house.workers["b"].failures = [DeviceGone("b ended")]
    house.workers["b"].last_used_at, house.workers["c"].last_used_at = 1.0, 2.0
    await house.ask(served)
    assert tuple(house.engine.devices.health.failed) == ("b",)
    assert house.acted()["a"] + house.acted()["c"] == 1
    assert where(served) == ["a", "c"]


class LateWorker(ScriptedWorker):
    """Its first answer is late: `said` is what it says in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Future[InferenceResult] = asyncio.get_running_loop().create_future()

    async def submit(self, *args: object, **more: object) -> InferenceResult:
        self.acted += 1
        late = Overdue("a is slow")
        late.answer = self.said
        raise late

    def answer(self) -> InferenceResult:
        inference = InferenceResult(np.zeros((1, 20, 6), np.float32), 0.0, 0.0, 0.0, 0.0, 0.0)
        self.said.set_result(inference)
        return inference


def put_late(house: House, served: LoadedPolicy) -> LateWorker:
    worker = LateWorker()
    house.engine.devices.workers[served.replicas[0].worker_id] = house.workers["a"] = worker
    return worker


@pytest.mark.parametrize("what", ["waits", "is stuck", "is gone", "left meanwhile"])
async def test_a_late_answer_is_taken_when_no_other_device_answers(house: House, what: str) -> None:
    served = await house.load_on("a", "b")
    late = put_late(house, served)
    house.workers["b"].last_used_at = 1.0
    if what == "left meanwhile":
        house.engine.replica_manager.retire_device("b", "it ended")
        served.replicas = tuple(served.replicas[:1])
    else:
        never = asyncio.Event()
        failures = {"waits": never, "is stuck": InferenceStuck("did not return"), "is gone": DeviceGone("b ended")}
        house.workers["b"].failures = [failures[what]]
    asking = asyncio.create_task(house.engine.infer(served, OBSERVATION))
    for _ in range(50):  # no thread has a part in it
        await asyncio.sleep(0)
    assert not asking.done()
    assert house.workers["b"].pending == (what == "waits")
    wanted = late.answer()
    async with asyncio.timeout(30):
        assert await asking is wanted
    await asyncio.sleep(0)
    assert house.workers["b"].pending == 0, "it is not waited for any more"
    assert tuple(house.engine.devices.health.failed) == (("b",) if what in ("is gone", "left meanwhile") else ())


async def test_where_neither_has_an_answer_the_robot_hears_of_it(house: House) -> None:
    served = await house.load_on("a", "b")
    late = put_late(house, served)
    house.workers["b"].last_used_at = 1.0
    house.workers["b"].failures = [InferenceStuck("b did not return")]
    late.said.set_exception(InferenceStuck("a did not return"))
    with pytest.raises(InferenceStuck, match="b did not return"):
        await house.ask(served)


async def test_one_that_owes_an_answer_is_asked_last(house: House) -> None:
    served = await house.load_on("a", "b")
    house.workers["a"].is_late = True
    house.workers["a"].pending, house.workers["b"].pending = 1, 5
    await house.ask(served)
    assert (house.acted()["a"], house.acted()["b"]) == (0, 1)


async def test_devices_that_leave_during_a_wait_are_not_asked(house: House) -> None:
    served = await house.load_on("a", "b")

    class Slow(ScriptedWorker):
        async def submit(self, *args: object, **more: object) -> InferenceResult:
            await house.remove("b")
            raise Overdue("a is slow")

    number = served.replicas[0].worker_id
    house.engine.devices.workers[number] = house.workers["a"] = Slow()
    with pytest.raises(PolicyFailed):
        await house.ask(served)


async def test_requests_wait_until_a_device_joins(house: House) -> None:
    house.join("a")
    served, other = await house.load(), await house.load("other")
    await house.remove("a")
    robots = [asyncio.create_task(house.ask(one)) for one in (served, other, served)]
    await asyncio.sleep(0.01)
    assert not any(robot.done() for robot in robots)
    house.join("b")
    async with asyncio.timeout(30):
        await asyncio.gather(*robots)
    assert (where(served), where(other)) == (["b"], ["b"])
    assert house.acted()["b"] == 3


async def test_a_robot_goes_on_before_the_policies_of_others_are_copied(house: House) -> None:
    served = await house.load_on("a")
    gate = threading.Event()
    house.loader.make = lambda: house._make({"b": gate})
    await house.load("slow")
    house.engine.replica_manager.retire_device("a", "it ended")
    robot = asyncio.create_task(house.ask(served))
    await asyncio.sleep(0)
    house.join("b")
    async with asyncio.timeout(30):
        await robot
    gate.set()
    await house.settled()


async def test_a_device_without_one_policy_gets_later_ones(house: House) -> None:
    served = await house.load_on("a")
    house.failures_of["b"] = OSError(28, "No space left on device")
    house.join("b")
    await house.settled()
    assert where(served) == ["a"]
    house.failures_of.clear()
    later = await house.load("later")
    assert where(later) == ["a", "b"]


async def test_after_its_patience_a_request_fails_with_a_text() -> None:
    async with AsyncExitStack() as stack:
        house = House(stack, patience=0.05)
        served = await house.load_on("a")
        house.engine.replica_manager.retire_device("a", "it ended")
        with pytest.raises(InferenceStuck, match=r"no engine had the policy for 0.05 s"):
            await house.ask(served)
    await house.engine.close()


async def test_a_waiting_request_ends_with_the_server(house: House) -> None:
    served = await house.load_on("a")
    house.engine.replica_manager.retire_device("a", "it ended")
    robot = asyncio.create_task(house.ask(served))
    await asyncio.sleep(0.01)
    await house.engine.close()
    async with asyncio.timeout(30):
        with pytest.raises(WorkerClosed):
            await robot


async def test_compiling_goes_on_without_one_that_is_gone(house: House) -> None:
    served = await house.load_on("a", "b")
    served.replicas[1].policy.compile_failure = DeviceGone("b ended")  # type: ignore[attr-defined]
    await house.engine.compile(served, {"front": (8, 8)})
    house.engine.replica_manager.retire_device("b", "it ended")
    assert served.is_compiled({"front": (8, 8)})


async def test_devices_that_come_and_go_leave_nothing_behind(house: House) -> None:
    served = await house.load_on("first")
    before = "first"
    for number in range(50):
        house.join(f"device {number}")
        await house.settled()
        await house.remove(before)
        before = f"device {number}"
    await house.ask(served)
    facts = house.engine.get_stats()
    assert facts["devices_failed"] == []
    assert len(facts["devices"]) == len(served.replicas) == 1  # type: ignore[arg-type]
