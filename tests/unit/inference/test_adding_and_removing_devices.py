"""Devices that join and leave while policies load and robots send requests."""

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
    """`DeviceWorker` without a thread. The next requests raise its `failures` or wait for them."""

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


class CopiedPolicy(ScriptedPolicy):
    """Policy that records the devices of its copies. A copy raises the device's failure or waits for it."""

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


class EngineRig:
    """Engine with remote devices."""

    def __init__(self, stack: AsyncExitStack, timeout: float = 30.0):
        self.engine = Engine(are_remote=True, join_timeout=timeout)
        self.workers: dict[str, ScriptedWorker] = {}
        self.failures_of: dict[str, Exception | threading.Event] = {}
        self.copied: list[str] = []
        self.loader = ScriptedLoader(self._make)
        self._stack = stack

    def _make(self, failures_of: dict[str, Exception | threading.Event] | None = None) -> ScriptedPolicy:
        policy = CopiedPolicy(device="loaded")
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

    async def wait_settled(self) -> None:
        """Wait until all devices that joined have the loaded policies."""
        await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("join ")])


def where(served: LoadedPolicy) -> list[str]:
    return [replica.policy.device for replica in served.replicas]


@pytest.fixture
async def rig() -> AsyncIterator[EngineRig]:
    earlier = set(threading.enumerate())  # A thread of another test may still be busy.
    async with AsyncExitStack() as stack:
        rig = EngineRig(stack)
        yield rig
    await rig.engine.close()
    await until(lambda: not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
    names = ("policy-loader", "device")
    await until(lambda: not [thread for thread in set(threading.enumerate()) - earlier if thread.name in names])
    assert all(worker.is_closed for worker in rig.workers.values())


async def test_a_joining_device_gets_the_loaded_policies_and_requests(rig: EngineRig) -> None:
    served = await rig.load_on("a")
    await rig.engine.compile(served, {"front": (8, 8)})
    rig.join("b")
    await rig.wait_settled()
    assert where(served) == ["a", "b"]
    assert served.is_compiled({"front": (8, 8)})
    workers = rig.workers
    workers["a"].pending = 1  # Device "a" is busy.
    await rig.ask(served)
    assert rig.acted() == {"a": 0, "b": 1}
    workers["a"].pending = 0


async def test_a_device_that_joins_during_a_load_gets_the_policy(rig: EngineRig) -> None:
    rig.join("a")
    rig.loader.gate = threading.Event()
    loading = asyncio.create_task(rig.load())
    await until(lambda: rig.loader.loads)
    rig.join("b")
    rig.loader.gate.set()
    served = await loading
    await rig.wait_settled()
    assert sorted(where(served)) == ["a", "b"]


async def test_policies_need_a_device_and_devices_an_open_engine(rig: EngineRig) -> None:
    with pytest.raises(PolicyError, match="cannot be loaded"):
        await rig.load()
    rig.join("a")
    assert where(await rig.load()) == ["a"]
    await rig.engine.close()
    rig.engine.replica_manager.add_device("b", ScriptedWorker())
    assert len(rig.engine.get_stats()["devices"]) == 1  # type: ignore[arg-type]


async def test_a_device_that_leaves_during_a_copy_gets_no_policy(rig: EngineRig) -> None:
    served = await rig.load_on("a")
    gate = rig.failures_of["b"] = threading.Event()
    rig.join("b")
    await until(lambda: "b" in rig.copied)
    await rig.remove("b")
    gate.set()
    await rig.wait_settled()
    assert where(served) == ["a"]
    assert rig.engine.get_stats()["devices_failed"] == []


async def test_a_device_lost_during_a_load_does_not_fail_the_load(rig: EngineRig) -> None:
    rig.join("a", "b", "c")
    rig.failures_of["b"] = DeviceGone("b ended")
    assert where(await rig.load())[:2] == ["a", "c"]
    await rig.wait_settled()


async def test_a_device_that_left_gets_no_copy(rig: EngineRig) -> None:
    rig.join("a", "b")
    rig.engine.replica_manager.retire_device("b", "it ended")
    served = await rig.load()
    await rig.wait_settled()
    assert (where(served), rig.copied) == (["a"], ["a"])


async def test_a_failed_local_device_gets_no_copy() -> None:
    async with AsyncExitStack() as stack:
        rig = EngineRig(stack)
        engine = rig.engine = Engine(devices=("a", "b"))
        engine.replica_manager.retire_device("a", "it raises")
        served = await rig.load()
        await rig.wait_settled()
        assert (where(served), rig.copied) == (["b"], ["b"])
    await engine.close()


async def test_two_of_three_devices_may_fail_at_the_same_time(rig: EngineRig) -> None:
    served = await rig.load_on("a", "b", "c")
    rig.workers["a"].failures = [Overdue("a is slow")]
    rig.workers["b"].failures = [DeviceGone("b ended")]
    rig.workers["b"].last_used_at, rig.workers["c"].last_used_at = 1.0, 2.0
    await rig.ask(served)
    assert tuple(rig.engine.devices.health.failed) == ("b",)
    assert rig.acted()["a"] + rig.acted()["c"] == 1
    assert where(served) == ["a", "c"]


class LateWorker(ScriptedWorker):
    """Worker whose first answer is late. The future `late_answer` receives the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.late_answer: asyncio.Future[InferenceResult] = asyncio.get_running_loop().create_future()

    async def submit(self, *args: object, **more: object) -> InferenceResult:
        self.acted += 1
        late = Overdue("a is slow")
        late.answer = self.late_answer
        raise late

    def answer(self) -> InferenceResult:
        inference = InferenceResult(np.zeros((1, 20, 6), np.float32), 0.0, 0.0, 0.0, 0.0, 0.0)
        self.late_answer.set_result(inference)
        return inference


def replace_by_late_worker(rig: EngineRig, served: LoadedPolicy) -> LateWorker:
    worker = LateWorker()
    rig.engine.devices.workers[served.replicas[0].worker_id] = rig.workers["a"] = worker
    return worker


@pytest.mark.parametrize("other", ["waits", "is stuck", "is lost", "has left"])
async def test_a_late_answer_is_taken_when_no_other_device_answers(rig: EngineRig, other: str) -> None:
    served = await rig.load_on("a", "b")
    late = replace_by_late_worker(rig, served)
    rig.workers["b"].last_used_at = 1.0
    if other == "has left":
        rig.engine.replica_manager.retire_device("b", "it ended")
        served.replicas = tuple(served.replicas[:1])
    else:
        never = asyncio.Event()
        failures = {"waits": never, "is stuck": InferenceStuck("did not return"), "is lost": DeviceGone("b ended")}
        rig.workers["b"].failures = [failures[other]]
    asking = asyncio.create_task(rig.engine.infer(served, OBSERVATION))
    for _ in range(50):  # No thread takes part, so steps of the loop are enough.
        await asyncio.sleep(0)
    assert not asking.done()
    assert rig.workers["b"].pending == (other == "waits")
    expected = late.answer()
    async with asyncio.timeout(30):
        assert await asking is expected
    await asyncio.sleep(0)
    assert rig.workers["b"].pending == 0, "the request to the other device is cancelled"
    assert tuple(rig.engine.devices.health.failed) == (("b",) if other in ("is lost", "has left") else ())


async def test_a_request_fails_if_no_device_answers(rig: EngineRig) -> None:
    served = await rig.load_on("a", "b")
    late = replace_by_late_worker(rig, served)
    rig.workers["b"].last_used_at = 1.0
    rig.workers["b"].failures = [InferenceStuck("b did not return")]
    late.late_answer.set_exception(InferenceStuck("a did not return"))
    with pytest.raises(InferenceStuck, match="b did not return"):
        await rig.ask(served)


async def test_a_device_with_an_overdue_answer_is_used_last(rig: EngineRig) -> None:
    served = await rig.load_on("a", "b")
    rig.workers["a"].is_late = True
    rig.workers["a"].pending, rig.workers["b"].pending = 1, 5
    await rig.ask(served)
    assert (rig.acted()["a"], rig.acted()["b"]) == (0, 1)


async def test_a_device_that_leaves_during_a_wait_is_not_used(rig: EngineRig) -> None:
    served = await rig.load_on("a", "b")

    class Slow(ScriptedWorker):
        async def submit(self, *args: object, **more: object) -> InferenceResult:
            await rig.remove("b")
            raise Overdue("a is slow")

    number = served.replicas[0].worker_id
    rig.engine.devices.workers[number] = rig.workers["a"] = Slow()
    with pytest.raises(PolicyFailed):
        await rig.ask(served)


async def test_requests_wait_until_a_device_joins(rig: EngineRig) -> None:
    rig.join("a")
    served, other = await rig.load(), await rig.load("other")
    await rig.remove("a")
    robots = [asyncio.create_task(rig.ask(policy)) for policy in (served, other, served)]
    await asyncio.sleep(0.01)
    assert not any(robot.done() for robot in robots)
    rig.join("b")
    async with asyncio.timeout(30):
        await asyncio.gather(*robots)
    assert (where(served), where(other)) == (["b"], ["b"])
    assert rig.acted()["b"] == 3


async def test_a_waiting_robot_continues_before_other_policies_are_copied(rig: EngineRig) -> None:
    served = await rig.load_on("a")
    gate = threading.Event()
    rig.loader.make = lambda: rig._make({"b": gate})
    await rig.load("slow")
    rig.engine.replica_manager.retire_device("a", "it ended")
    robot = asyncio.create_task(rig.ask(served))
    await asyncio.sleep(0)
    rig.join("b")
    async with asyncio.timeout(30):
        await robot
    gate.set()
    await rig.wait_settled()


async def test_a_device_that_failed_one_copy_gets_later_policies(rig: EngineRig) -> None:
    served = await rig.load_on("a")
    rig.failures_of["b"] = OSError(28, "No space left on device")
    rig.join("b")
    await rig.wait_settled()
    assert where(served) == ["a"]
    rig.failures_of.clear()
    later = await rig.load("later")
    assert where(later) == ["a", "b"]


async def test_a_request_without_a_device_fails_after_a_timeout() -> None:
    async with AsyncExitStack() as stack:
        rig = EngineRig(stack, timeout=0.05)
        served = await rig.load_on("a")
        rig.engine.replica_manager.retire_device("a", "it ended")
        with pytest.raises(InferenceStuck, match=r"no engine had the policy for 0.05 s"):
            await rig.ask(served)
    await rig.engine.close()


async def test_a_waiting_request_ends_with_the_server(rig: EngineRig) -> None:
    served = await rig.load_on("a")
    rig.engine.replica_manager.retire_device("a", "it ended")
    robot = asyncio.create_task(rig.ask(served))
    await asyncio.sleep(0.01)
    await rig.engine.close()
    async with asyncio.timeout(30):
        with pytest.raises(WorkerClosed):
            await robot


async def test_compilation_continues_without_a_lost_device(rig: EngineRig) -> None:
    served = await rig.load_on("a", "b")
    served.replicas[1].policy.compile_failure = DeviceGone("b ended")  # type: ignore[attr-defined]
    await rig.engine.compile(served, {"front": (8, 8)})
    rig.engine.replica_manager.retire_device("b", "it ended")
    assert served.is_compiled({"front": (8, 8)})


async def test_devices_that_come_and_go_are_removed_completely(rig: EngineRig) -> None:
    served = await rig.load_on("first")
    before = "first"
    for number in range(50):
        rig.join(f"device {number}")
        await rig.wait_settled()
        await rig.remove(before)
        before = f"device {number}"
    await rig.ask(served)
    facts = rig.engine.get_stats()
    assert facts["devices_failed"] == []
    assert len(facts["devices"]) == len(served.replicas) == 1  # type: ignore[arg-type]
