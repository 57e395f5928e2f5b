"""Server and its engines without Ray: parallel first loads, sequential updates and retries of failed copies."""

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
    """Result of a Ray call, which can be awaited or turned into a future."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()
        self.answer.set_running_or_notify_cancel()  # Cancelling a waiter does not cancel the call.

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
    """Double of Ray's actor handle, whose methods are called with ``remote``. Only loading runs in a thread."""

    def __init__(self, target: Any):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def remote(*arguments: Any) -> Call:
            call = Call()
            if name == "load_sent":
                threading.Thread(target=call.run, args=(method, arguments), name="actor", daemon=True).start()
            else:
                call.run(method, arguments)
            return call

        return SimpleNamespace(remote=remote)


class FakePool:
    """Double of the pool and its engines, with settable answers and a record of the calls."""

    def __init__(self, count: int):
        self.names = [f"robojax-{number}" for number in range(1, count + 1)]
        self.loading: set[str] = set()
        self.most = 0  # Largest number of engines that load at the same time.
        self.gate: Callable[[], object] = lambda: None  # Each engine calls it during a load.
        self.refusals: dict[str, list[Refusal]] = {}  # Answers to the next loads of each engine.
        self.loads: list[str] = []
        self.is_reachable = True  # Whether the cluster can be joined.
        self.store: dict[int, bytes] = {}
        self.load = 0.0  # Load of each engine.
        self.silence: Exception | None = None  # Error of each request to the pool.
        self.polls = 0  # Requests to the pool.
        self.on_poll: Callable[[], object] = lambda: None  # Called during each request to the pool.
        self.unreached: dict[str, Exception] = {}  # Error of each request to an engine.
        self._lock = threading.Lock()

    def connect(self, address: str, head: str) -> str:
        if not self.is_reachable:
            raise CannotJoin("nothing answers at head:6379")
        return "head:6379"

    def put(self, piece: bytes) -> int:
        number = len(self.store)
        self.store[number] = piece
        return number

    def begin(self, server: str, options: EngineOptions, bounds: Bounds) -> str:
        return ""

    def part(self, server: str) -> None:
        pass

    def listing(self, server: str) -> Listing:
        self.polls += 1
        self.on_poll()
        if self.silence is not None:
            raise self.silence
        begun = Begun(version("robojax"), "here", 1)
        return Listing(tuple(Listed(name, Actor(FakeEngine(self, name)), begun) for name in self.names))

    def enter(self, name: str) -> None:
        with self._lock:
            self.loads.append(name.removeprefix("robojax-"))
            self.loading.add(name)
            self.most = max(self.most, len(self.loading))

    def leave(self, name: str) -> None:
        with self._lock:
            self.loading.discard(name)


class FakeEngine:
    """Double of one engine."""

    def __init__(self, pool: FakePool, name: str):
        self._pool, self._name = pool, name

    def load_sent(self, artifact: PolicyArtifact, like: str | None) -> Loaded | Refusal:
        pool = self._pool
        for piece in (piece for pieces in artifact.pieces.values() for piece in pieces):
            assert piece in pool.store, "the piece belongs to another cluster"
        pool.enter(self._name)
        try:
            pool.gate()
            if refusals := pool.refusals.get(self._name):
                return refusals.pop(0)
            return Loaded(artifact.sha, SO100_REQUIREMENTS, {frozenset(SO100_REQUIREMENTS.cameras.items()): 0.01})
        finally:
            pool.leave(self._name)

    def facts(self, handles: Sequence[str], has_running_robot: bool, needs_batches: bool) -> EngineFacts:
        if error := self._pool.unreached.get(self._name):
            raise error
        return EngineFacts(load=self._pool.load, to_compile=3)

    def act(self, handle: str, observation: Any, due: float | None) -> InferenceResult:
        return InferenceResult(np.zeros((1, 20, 6), np.float32), 0.0, 0.0, 0.001, 0.0, 0.001)


class ServerRig:
    """Cluster and engine as a server has them, and the gateways that it started in this process."""

    def __init__(
        self, pool: FakePool, cluster: Cluster, engine: Engine, stack: AsyncExitStack, gateways: list[Gateway]
    ):
        self.pool, self.cluster, self.engine, self.gateways = pool, cluster, engine, gateways
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
async def begin(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[FakePool], Awaitable[ServerRig]]]:
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
        server_end, gateway_end = socket.socketpair()
        calls, answers = (SharedMemory(SharedMemory.create_descriptor(1 << 20), 1 << 20) for _ in range(2))
        tasks.append(asyncio.create_task(serve(gateway_module.open_gateway, gateway_end.detach(), calls, answers)))
        await cluster.connect(server_end, calls, answers)

    monkeypatch.setattr(gateway_module, "Gateway", KnownGateway)
    monkeypatch.setattr(Cluster, "_start", start)
    async with AsyncExitStack() as stack:

        async def begin(pool: FakePool) -> ServerRig:
            monkeypatch.setattr(gateway_module, "connect", pool.connect)
            monkeypatch.setattr(gateway_module.ray, "put", pool.put)
            monkeypatch.setattr(gateway_module, "get_or_create_pool", lambda options, bounds: Actor(pool))
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
            return ServerRig(pool, cluster, engine, policies, gateways)

        yield begin


@pytest.fixture
def update(tmp_path: Path) -> Path:
    update = tmp_path / "update"
    update.mkdir()
    (update / "config.json").write_text('{"type": "act"}')
    (update / "model.safetensors").write_bytes(b"other weights")
    return update


async def test_a_first_policy_is_loaded_into_all_engines_in_parallel(begin: Any, folder: Path) -> None:
    pool = FakePool(4)
    pool.gate = threading.Barrier(4, timeout=20).wait  # No engine continues before all have begun.
    server = await begin(pool)
    assert where(await server.load(folder)) == ["1", "2", "3", "4"]
    assert server.trouble == ""


async def test_an_update_is_loaded_into_one_engine_at_a_time(begin: Any, folder: Path, update: Path) -> None:
    server = await begin(FakePool(3))
    first = await server.load(folder)
    server.pool.most = 0
    assert where(await server.load(update, like=first.policy)) == ["1", "2", "3"]
    assert server.pool.most == 1


async def test_a_second_policy_of_busy_engines_is_loaded_one_at_a_time(begin: Any, folder: Path) -> None:
    pool = FakePool(3)
    pool.load = 0.2
    server = await begin(pool)
    await until(lambda: all(engine["load"] for engine in server.cluster.engines.get_stats()["engines"]))
    assert server.engine.get_stats()["batch_sizes_to_compile"] == 3
    assert where(await server.load(folder)) == ["1", "2", "3"]
    assert pool.most == 1


async def test_a_failed_copy_is_reported_and_retried(begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_set, "RETRY_PERIOD", 0.05)
    pool = FakePool(3)
    pool.refusals["robojax-2"] = [Refusal("policy", "out of memory")] * 4
    server = await begin(pool)
    served = await server.load(folder)
    assert where(served) == ["1", "3"]
    await until(lambda: "2 is missing policy" in server.trouble)
    assert "which others have: out of memory (tried" in server.trouble
    assert (await server.engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)
    await until(lambda: where(served) == ["1", "2", "3"])
    await until(lambda: server.trouble == "")
    assert pool.loads.count("2") == 5
    assert (pool.loads.count("1"), pool.loads.count("3")) == (1, 1), "engines that have the policy do not load it again"


async def test_a_copy_of_a_closed_policy_is_not_retried(
    begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_set, "RETRY_PERIOD", 0.3)
    pool = FakePool(2)
    pool.refusals["robojax-2"] = [Refusal("policy", "out of memory")] * 1000
    server = await begin(pool)
    async with server.engine.policy_cache.open_policy(server.loader, str(folder), None, lambda word: None):
        await until(lambda: server.trouble)
    await until(lambda: server.trouble == "")
    loads = pool.loads.count("2")
    await asyncio.sleep(0.5)
    assert pool.loads.count("2") == loads


async def test_calls_of_an_engine_that_leaves_fail_at_once(begin: Any, folder: Path) -> None:
    pool, gate = FakePool(2), threading.Event()
    pool.gate = gate.wait
    server = await begin(pool)
    with PolicyFolder(folder) as opened:
        files = await asyncio.to_thread(server.cluster.share, opened, None)
    answer = server.cluster.engines.ask("2", "load", files, None)
    pool.names.remove("robojax-2")
    with pytest.raises(DeviceGone, match="engine 2 is not there any more"):
        await asyncio.wait_for(asyncio.wrap_future(answer), 30)
    gate.set()
    with pytest.raises(DeviceGone, match="engine 2 is not there any more"):
        server.cluster.engines.ask("2", "prepare_task", "0" * 64, "").result(0)


async def test_a_silent_pool_is_reported_and_engines_continue(begin: Any, folder: Path) -> None:
    pool = FakePool(2)
    server = await begin(pool)
    served = await server.load(folder)
    pool.silence = RayError("the head is gone")
    await until(lambda: server.trouble == "the pool of engines does not answer")
    assert (await server.engine.infer(served, OBSERVATION)).chunk.shape == (1, 20, 6)
    pool.silence = None
    await until(lambda: server.trouble == "")


@pytest.mark.parametrize(
    ("error", "why"),
    [(ActorDiedError(), "its process ended"), (ActorUnavailableError("lost", None), "it cannot be reached")],
)
async def test_the_log_states_why_an_engine_is_lost(
    begin: Any, error: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FakePool(2)
    server = await begin(pool)
    pool.silence = RayError("the pool is silent")
    pool.names.remove("robojax-2")
    pool.unreached["robojax-2"] = error
    await until(lambda: "2" in server.engine.devices.health.failed)
    assert f"device 2 is not used any more: {why} ({type(error).__name__})" in caplog.text
    assert tuple(server.engine.devices.health.failed) == ("2",)


@pytest.mark.parametrize(
    ("raised", "message"),
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
def test_a_join_error_has_no_traceback(raised: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **more: object) -> None:
        raise raised

    monkeypatch.setattr(ray_connection.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(CannotJoin) as error:
        connect("auto")
    assert str(error.value).endswith(message)
    assert "Traceback" not in str(error.value)


def test_a_refusal_by_a_listening_cluster_suggests_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_a_lost_cluster_is_joined_again_with_its_policies(
    begin: Any, folder: Path, update: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FakePool(2)
    server = await begin(pool)
    served = await server.load(folder)
    pool.silence, pool.is_reachable = RayError("the head is gone"), False
    pool.unreached = {name: ActorUnavailableError("lost", None) for name in pool.names}
    # The short timeout applies only here, because a paused test machine must not lose its cluster elsewhere.
    monkeypatch.setattr(gateway_module, "LOSS_TIMEOUT", 0.3)
    await until(lambda: server.trouble == "nothing answers at head:6379")
    assert server.cluster.engines.get_stats()["engines"] == []
    robot = asyncio.create_task(server.engine.infer(served, OBSERVATION))
    with pytest.raises(PolicyError, match="nothing answers at head:6379"):
        await server.load(update)
    await until(lambda: len(server.gateways) > 3)
    assert not robot.done()

    monkeypatch.setattr(gateway_module, "LOSS_TIMEOUT", 60.0)
    pool.silence, pool.is_reachable, pool.unreached = None, True, {}
    pool.store.clear()
    pool.names = ["robojax-1", "robojax-3"]
    async with asyncio.timeout(30):
        assert (await robot).chunk.shape == (1, 20, 6)
    await until(lambda: len(where(served)) == 2)
    await until(lambda: server.trouble == "")
    assert caplog.text.count("cannot be used: nothing answers at head:6379") == 1


async def test_a_silent_engine_of_a_silent_pool_is_dropped(
    begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(gateway_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(gateway_module, "ANSWER_TIMEOUT", 60.0)
    pool = FakePool(2)
    server = await begin(pool)
    await server.load(folder)
    pool.unreached = {"robojax-2": TimeoutError()}
    now += 1.2 * gateway_module.SILENCE_TIMEOUT
    polls = pool.polls
    await until(lambda: pool.polls > polls + 3)
    assert tuple(server.engine.devices.health.failed) == (), "the pool answers and lists the engine"

    def wait_for_the_other_engine() -> None:
        nonlocal now
        engine = server.gateways[-1]._engines["1"]
        now += 1.2 * gateway_module.SILENCE_TIMEOUT
        end = time.monotonic() + 30
        while engine.last_reply_at < now and time.monotonic() < end:
            time.sleep(0.001)

    pool.silence, pool.on_poll = TimeoutError(), wait_for_the_other_engine
    await until(lambda: tuple(server.engine.devices.health.failed) == ("2",))
    polls = pool.polls
    await until(lambda: pool.polls > polls + 3)
    assert [engine["engine"] for engine in server.cluster.engines.get_stats()["engines"]] == ["1"]
    pool.silence, pool.on_poll, pool.unreached = None, lambda: None, {}
    await until(lambda: len(server.cluster.engines.get_stats()["engines"]) == 2)


async def test_a_changed_folder_is_not_loaded(begin: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool(1)
    server = await begin(pool)
    await server.load(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    server.gateways[-1]._files.clear()
    pool.names.append("robojax-2")
    await until(lambda: "2 is missing policy" in server.trouble)
    assert "model.safetensors: was changed since it was verified" in server.trouble
    assert pool.loads == ["1"]


@pytest.mark.parametrize(
    "error", [RayError("gone"), ConnectionError("reset"), Exception("Ray Client is not connected")]
)
async def test_each_error_of_ray_becomes_no_answer(error: Exception) -> None:
    pool = FakePool(1)
    pool.silence = error
    with pytest.raises(NoAnswer):
        await call_actor(Actor(pool), 1.0, "listing", "front")
    with pytest.raises(NoAnswer, match="not connected"):
        await call_actor(None, 1.0, "listing", "front")


async def test_a_call_that_takes_too_long_is_no_answer(pauses: Pauses) -> None:
    class Silent:
        """Actor whose calls block, as a stuck Ray client does."""

        def __init__(self, until: threading.Event):
            self.listing = SimpleNamespace(remote=lambda server: until.wait(10))

    until = threading.Event()
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="TimeoutError"):
        await call_actor(Silent(until), 0.01, "listing", "front")
    assert pauses.running(began) < 5
    until.set()
