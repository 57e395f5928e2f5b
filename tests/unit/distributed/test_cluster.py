"""A front and its engines, without Ray: first loads side by side, updates in turn, and copies that failed again."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.testing.peers import skip_reason

pytest.importorskip("ray", reason=skip_reason("ray"))

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from jaxmodels import PolicyFolder
from service.distributed import gateway as gateway_module
from service.distributed import ray_connection
from service.distributed.artifacts import PolicyArtifact
from service.distributed.cluster import Cluster
from service.distributed.gateway import Gateway
from service.distributed.pool import Listed, Listing
from service.distributed.ray_connection import CannotJoin, NoAnswer, call_actor, connect
from service.distributed.scaling import Bounds
from service.engines import engine_set, host_process
from service.engines.messages import Begun, EngineFacts, EngineOptions, Loaded, Refusal
from service.engines.process import serve
from service.engines.remote_loader import RemoteLoader
from service.engines.shared_memory import SharedMemory
from service.errors import PolicyError
from service.inference.device_worker import DeviceGone
from service.inference.engine import Engine
from service.inference.loaded_policy import InferenceResult, LoadedPolicy, Policy
from tests.testing.doubles import SO100_REQUIREMENTS
from tests.testing.pauses import Pauses
from tests.testing.rig import OBSERVATION
from tests.testing.waiting import until

pytestmark = [pytest.mark.needs_peers, pytest.mark.timed]


class Call:
    """What Ray gives for a call: to be awaited, or heard of."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()
        self.answer.set_running_or_notify_cancel()  # whoever gives up waiting does not end it

    def run(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self.answer.set_result(method(*arguments))
        except Exception as error:
            self.answer.set_exception(error)

    def future(self) -> "Future[Any]":
        return self.answer

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self.answer).__await__()


class Actor:
    """Ray's handle of an object: its methods are called by ``remote``. Only loading takes a while, in a thread."""

    def __init__(self, of: Any):
        self._of = of

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._of, name)

        def remote(*arguments: Any) -> Call:
            call = Call()
            if name == "load_sent":
                threading.Thread(target=call.run, args=(method, arguments), name="actor", daemon=True).start()
            else:
                call.run(method, arguments)
            return call

        return SimpleNamespace(remote=remote)


class House:
    """All engines and their pool: what each test makes them answer, and what they were asked."""

    def __init__(self, count: int):
        self.names = [f"robojax-{number}" for number in range(1, count + 1)]
        self.loading: set[str] = set()
        self.most = 0  # engines that were loading at a time
        self.gate: Callable[[], object] = lambda: None  # each engine calls it while it loads
        self.refusals: dict[str, list[Refusal]] = {}  # answers to the next loads of an engine
        self.loads: list[str] = []
        self.is_there = True  # whether the cluster can be joined
        self.store: dict[int, bytes] = {}
        self.load = 0.0  # of each engine
        self.silence: Exception | None = None  # answer to each question to the pool
        self.looks = 0  # questions to the pool
        self.meanwhile: Callable[[], object] = lambda: None  # called during such a question
        self.unreached: dict[str, Exception] = {}  # answer to each question to an engine
        self._lock = threading.Lock()

    def connect(self, address: str, head: str) -> str:
        if not self.is_there:
            raise CannotJoin("nothing answers at head:6379")
        return "head:6379"

    def put(self, piece: bytes) -> int:
        number = len(self.store)
        self.store[number] = piece
        return number

    def begin(self, front: str, options: EngineOptions, bounds: Bounds) -> str:
        return ""

    def part(self, front: str) -> None:
        pass

    def listing(self, front: str) -> Listing:
        self.looks += 1
        self.meanwhile()
        if self.silence is not None:
            raise self.silence
        begun = Begun(version("robojax"), "here", 1)
        return Listing(tuple(Listed(name, Actor(Resident(self, name)), begun) for name in self.names))

    def enter(self, name: str) -> None:
        with self._lock:
            self.loads.append(name.removeprefix("robojax-"))
            self.loading.add(name)
            self.most = max(self.most, len(self.loading))

    def leave(self, name: str) -> None:
        with self._lock:
            self.loading.discard(name)


class Resident:
    """One engine."""

    def __init__(self, house: House, name: str):
        self._house, self._name = house, name

    def load_sent(self, artifact: PolicyArtifact, like: str | None) -> Loaded | Refusal:
        house = self._house
        for piece in (piece for pieces in artifact.pieces.values() for piece in pieces):
            assert piece in house.store, "it is another cluster's"
        house.enter(self._name)
        try:
            house.gate()
            if refusals := house.refusals.get(self._name):
                return refusals.pop(0)
            return Loaded(artifact.sha, SO100_REQUIREMENTS, {frozenset(SO100_REQUIREMENTS.cameras.items()): 0.01})
        finally:
            house.leave(self._name)

    def facts(self, handles: Sequence[str], has_running_robot: bool) -> EngineFacts:
        if error := self._house.unreached.get(self._name):
            raise error
        return EngineFacts(load=self._house.load)

    def act(self, handle: str, observation: Any, due: float | None) -> InferenceResult:
        return InferenceResult(np.zeros((1, 20, 6), np.float32), 0.0, 0.0, 0.001, 0.0, 0.001)


class Front:
    """A cluster with its engine, as a server has them, and the gateways that it started in this process."""

    def __init__(self, house: House, cluster: Cluster, engine: Engine, stack: AsyncExitStack, gateways: list[Gateway]):
        self.house, self.cluster, self.engine, self.gateways = house, cluster, engine, gateways
        self._stack = stack

    @property
    def loader(self) -> RemoteLoader:
        return RemoteLoader(self.cluster.engines, self.cluster.share)

    async def load(self, folder: Path, like: Policy | None = None) -> LoadedPolicy:
        return await self._stack.enter_async_context(
            self.engine.policy_cache.open_policy(self.loader, str(folder), None, lambda word: None, like=like)
        )

    @property
    def trouble(self) -> str:
        return str(self.cluster.engines.get_stats()["trouble"] or "")


def where(served: LoadedPolicy) -> list[str]:
    return sorted(replica.policy.device for replica in served.replicas)


@pytest.fixture
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[House], Awaitable[Front]]]:
    monkeypatch.setattr(gateway_module, "POLL_PERIOD", 0.1)
    monkeypatch.setattr(engine_set, "POLL_PERIOD", 0.1)
    monkeypatch.setattr(host_process, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(Cluster, "longest_pause", 0.05)
    monkeypatch.setattr(gateway_module.ray, "shutdown", lambda: None)
    gateways: list[Gateway] = []
    tasks: list[asyncio.Task[None]] = []

    class KnownGateway(Gateway):
        def __init__(self, send_event: Any):
            super().__init__(send_event)
            gateways.append(self)

    async def start(cluster: Cluster) -> None:
        """Start the gateway in this process."""
        ours, theirs = socket.socketpair()
        calls, answers = (SharedMemory(SharedMemory.create_descriptor(1 << 20), 1 << 20) for _ in range(2))
        tasks.append(asyncio.create_task(serve(gateway_module.open_gateway, theirs.detach(), calls, answers)))
        await cluster.connect(ours, calls, answers)

    monkeypatch.setattr(gateway_module, "Gateway", KnownGateway)
    monkeypatch.setattr(Cluster, "_start", start)
    async with AsyncExitStack() as stack:

        async def begin(house: House) -> Front:
            monkeypatch.setattr(gateway_module, "connect", house.connect)
            monkeypatch.setattr(gateway_module.ray, "put", house.put)
            monkeypatch.setattr(gateway_module, "get_or_create_pool", lambda options, bounds: Actor(house))
            cluster = Cluster("auto", "front", EngineOptions(), Bounds())
            engine = Engine(are_remote=True)
            cluster.engines.open(engine)
            running = asyncio.create_task(cluster.run())
            await cluster.is_tried.wait()
            assert cluster.trouble == ""

            async def close() -> None:
                cluster.engines.close()
                running.cancel()
                await asyncio.gather(running, *tasks, return_exceptions=True)

            stack.push_async_callback(engine.close)
            stack.push_async_callback(close)
            policies = await stack.enter_async_context(AsyncExitStack())
            return Front(house, cluster, engine, policies, gateways)

        yield begin


@pytest.fixture
def update(tmp_path: Path) -> Path:
    update = tmp_path / "update"
    update.mkdir()
    (update / "config.json").write_text('{"type": "act"}')
    (update / "model.safetensors").write_bytes(b"other weights")
    return update


async def test_a_first_policy_is_loaded_into_all_engines_at_a_time(begin: Any, folder: Path) -> None:
    house = House(4)
    house.gate = threading.Barrier(4, timeout=20).wait  # none goes on before all have begun
    front = await begin(house)
    assert where(await front.load(folder)) == ["1", "2", "3", "4"]
    assert front.trouble == ""


async def test_an_update_is_loaded_into_one_after_the_other(begin: Any, folder: Path, update: Path) -> None:
    front = await begin(House(3))
    first = await front.load(folder)
    front.house.most = 0
    assert where(await front.load(update, like=first.policy)) == ["1", "2", "3"]
    assert front.house.most == 1


async def test_so_is_another_one_where_robots_ask(begin: Any, folder: Path) -> None:
    house = House(3)
    house.load = 0.2
    front = await begin(house)
    await until(lambda: all(one["load"] for one in front.cluster.engines.get_stats()["engines"]))
    assert where(await front.load(folder)) == ["1", "2", "3"]
    assert house.most == 1


async def test_failed_copy_is_reported_and_retried(begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_set, "RETRY_PERIOD", 0.05)
    house = House(3)
    house.refusals["robojax-2"] = [Refusal("policy", "out of memory")] * 4
    front = await begin(house)
    served = await front.load(folder)
    assert where(served) == ["1", "3"]
    await until(lambda: "2 is missing policy" in front.trouble)
    assert "which others have: out of memory (tried" in front.trouble
    assert (await front.engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)
    await until(lambda: where(served) == ["1", "2", "3"])
    await until(lambda: front.trouble == "")
    assert house.loads.count("2") == 5
    assert (house.loads.count("1"), house.loads.count("3")) == (1, 1), "those that have it are left alone"


async def test_unwanted_copy_is_not_retried(begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_set, "RETRY_PERIOD", 0.3)
    house = House(2)
    house.refusals["robojax-2"] = [Refusal("policy", "out of memory")] * 1000
    front = await begin(house)
    async with front.engine.policy_cache.open_policy(front.loader, str(folder), None, lambda word: None):
        await until(lambda: front.trouble)
    await until(lambda: front.trouble == "")
    loads = house.loads.count("2")
    await asyncio.sleep(0.5)
    assert house.loads.count("2") == loads


async def test_calls_of_an_engine_that_leaves_fail_at_once(begin: Any, folder: Path) -> None:
    house, gate = House(2), threading.Event()
    house.gate = gate.wait
    front = await begin(house)
    with PolicyFolder(folder) as opened:
        files = await asyncio.to_thread(front.cluster.share, opened, None)
    answer = front.cluster.engines.ask("2", "load", files, None)
    house.names.remove("robojax-2")
    with pytest.raises(DeviceGone, match="engine 2 is not there any more"):
        await asyncio.wait_for(asyncio.wrap_future(answer), 30)
    gate.set()
    with pytest.raises(DeviceGone, match="engine 2 is not there any more"):
        front.cluster.engines.ask("2", "prepare_task", "0" * 64, "").result(0)


async def test_a_pool_that_does_not_answer_is_said_and_engines_go_on(begin: Any, folder: Path) -> None:
    house = House(2)
    front = await begin(house)
    served = await front.load(folder)
    house.silence = RayError("the head is gone")
    await until(lambda: front.trouble == "the pool of engines does not answer")
    assert (await front.engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)
    house.silence = None
    await until(lambda: front.trouble == "")


@pytest.mark.parametrize(
    ("error", "why"),
    [(ActorDiedError(), "its process ended"), (ActorUnavailableError("lost", None), "it cannot be reached")],
)
async def test_reason_of_a_lost_engine(
    begin: Any, error: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(2)
    front = await begin(house)
    house.silence = RayError("so that only the engine itself says it")
    house.names.remove("robojax-2")
    house.unreached["robojax-2"] = error
    await until(lambda: "2" in front.engine.devices.health.failed)
    assert f"device 2 is not used any more: {why} ({type(error).__name__})" in caplog.text
    assert tuple(front.engine.devices.health.failed) == ("2",)


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (
            ConnectionError("Could not find any running Ray instance.\nMore of it"),
            "Could not find any running Ray instance.",
        ),
        (
            RuntimeError("Initialization failure from server:\nTraceback\n  x.py\nOSError: no disk"),
            "from server: OSError: no disk",
        ),
        (ValueError(), "ValueError()"),
    ],
)
def test_join_error_has_no_traceback(raised: Exception, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **more: object) -> None:
        raise raised

    monkeypatch.setattr(ray_connection.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(CannotJoin) as error:
        connect("auto")
    assert str(error.value).endswith(told)
    assert "Traceback" not in str(error.value)


def test_what_listens_and_refuses_may_want_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **more: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray_connection.ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(CannotJoin, match=r"Failed to connect to Ray cluster, though something listens.*TOKEN_PATH"):
            connect(f"ray://{address}")
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(CannotJoin, match=r"Failed to connect to Ray cluster, though something listens.*TOKEN_PATH"):
            connect("auto")
    with pytest.raises(CannotJoin, match=rf"^nothing answers at {address} .*RAY_ADDRESS says where it is"):
        connect("auto")


async def test_lost_cluster_is_joined_again_with_its_policies(
    begin: Any, folder: Path, update: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(2)
    front = await begin(house)
    served = await front.load(folder)
    house.silence, house.is_there = RayError("the head is gone"), False
    house.unreached = {name: ActorUnavailableError("lost", None) for name in house.names}
    # Before and after that a machine that stands still has not lost its cluster.
    monkeypatch.setattr(gateway_module, "LOSS_TIMEOUT", 0.3)
    await until(lambda: front.trouble == "nothing answers at head:6379")
    assert front.cluster.engines.get_stats()["engines"] == []
    robot = asyncio.create_task(front.engine.infer(served, OBSERVATION))
    with pytest.raises(PolicyError, match="nothing answers at head:6379"):
        await front.load(update)
    await until(lambda: len(front.gateways) > 3)
    assert not robot.done()

    monkeypatch.setattr(gateway_module, "LOSS_TIMEOUT", 60.0)
    house.silence, house.is_there, house.unreached = None, True, {}
    house.store.clear()  # the new head's
    house.names = ["robojax-1", "robojax-3"]
    async with asyncio.timeout(30):
        assert (await robot).chunk.shape == (1, 20, 6)
    await until(lambda: len(where(served)) == 2)
    await until(lambda: front.trouble == "")
    assert caplog.text.count("cannot be used: nothing answers at head:6379") == 1


async def test_silent_engine_of_a_silent_pool_is_left(
    begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(gateway_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(gateway_module, "ANSWER_TIMEOUT", 60.0)
    house = House(2)
    front = await begin(house)
    await front.load(folder)
    house.unreached = {"robojax-2": TimeoutError()}
    now += 1.2 * gateway_module.SILENCE_TIMEOUT
    looks = house.looks
    await until(lambda: house.looks > looks + 3)
    assert tuple(front.engine.devices.health.failed) == (), "the pool answers, and says that it lives"

    def the_other_one_is_heard_of() -> None:
        nonlocal now
        known = front.gateways[-1]._engines["1"]
        now += 1.2 * gateway_module.SILENCE_TIMEOUT
        end = time.monotonic() + 30
        while known.last_reply_at < now and time.monotonic() < end:
            time.sleep(0.001)

    house.silence, house.meanwhile = TimeoutError(), the_other_one_is_heard_of
    await until(lambda: tuple(front.engine.devices.health.failed) == ("2",))
    looks = house.looks
    await until(lambda: house.looks > looks + 3)
    assert [one["engine"] for one in front.cluster.engines.get_stats()["engines"]] == ["1"]
    house.silence, house.meanwhile, house.unreached = None, lambda: None, {}
    await until(lambda: len(front.cluster.engines.get_stats()["engines"]) == 2)


async def test_changed_folder_is_not_loaded(begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(1)
    front = await begin(house)
    await front.load(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    front.gateways[-1]._files.clear()
    house.names.append("robojax-2")
    await until(lambda: "2 is missing policy" in front.trouble)
    assert "model.safetensors: was changed since it was verified" in front.trouble
    assert house.loads == ["1"]


@pytest.mark.parametrize(
    "error", [RayError("gone"), ConnectionError("reset"), Exception("Ray Client is not connected")]
)
async def test_whatever_ray_raises_where_nobody_answers_is_one_error(error: Exception) -> None:
    house = House(1)
    house.silence = error
    with pytest.raises(NoAnswer):
        await call_actor(Actor(house), 1.0, "listing", "front")
    with pytest.raises(NoAnswer, match="not connected"):
        await call_actor(None, 1.0, "listing", "front")


async def test_what_takes_too_long_is_no_answer(pauses: Pauses) -> None:
    class Silent:
        """Its method is asked, and Ray's client stands still."""

        def __init__(self, until: threading.Event):
            self.listing = SimpleNamespace(remote=lambda front: until.wait(10))

    until = threading.Event()
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="TimeoutError"):
        await call_actor(Silent(until), 0.01, "listing", "front")
    assert pauses.running(began) < 5
    until.set()
