"""The queue of forward passes, with a scripted model, beside the real engine."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jaxmodels.errors import CheckpointError, InputError
from service.errors import ModelBusy, ModelError, ModelFailed, TooLarge
from service.http.array_formats import ARRAY_FORMATS, ArrayFormat
from service.inference.config import ModelSettings
from service.inference.engine import Engine
from service.inference.loaded_policy import LoadedPolicy
from service.inference.model_server import ForwardRequest, ForwardResult, ModelServer, ServedModel
from tests.testing.doubles import ScriptedPolicy
from tests.testing.rig import OBSERVATION
from tests.testing.waiting import until

pytestmark = pytest.mark.timed

JSON, NPZ = ARRAY_FORMATS[0], ARRAY_FORMATS[1]


@dataclass
class ScriptedModel:
    """Adds one, after the events that a test waits with."""

    seconds: float = 0.0
    memory: int = 0
    answer: int = 4
    failure: Exception | None = None
    gate: threading.Event | None = None
    compile_gate: threading.Event | None = None
    began: threading.Event = field(default_factory=threading.Event)
    compiled: set[tuple[int, ...]] = field(default_factory=set)
    compiles: int = 0
    most_at_once: int = 0
    at_once: int = 0
    threads: set[str] = field(default_factory=set)
    seen: list[float] = field(default_factory=list)
    timings: Any = field(default_factory=lambda: {"to_device": 0.001, "compute": 0.002, "to_host": 0.003})

    @property
    def description(self) -> Mapping[str, Any]:
        return {"parameters": 1, "device": "scripted:0", "inputs": [{"name": "x", "dtype": "float32"}]}

    @property
    def compiled_shapes(self) -> int:
        return len(self.compiled)

    def example(self, batch: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
        return {"x": np.zeros((batch, 1), np.float32)}

    def cost(self, inputs: Mapping[str, np.ndarray]) -> tuple[float, int, int]:
        if "x" not in inputs:
            raise InputError("the input lacks x")
        return self.seconds, self.memory, self.answer

    def is_compiled(self, inputs: Mapping[str, np.ndarray]) -> bool:
        return inputs["x"].shape in self.compiled

    def compile(self, inputs: Mapping[str, np.ndarray]) -> float:
        self.began.set()
        if self.compile_gate is not None:
            assert self.compile_gate.wait(20)
        self.compiles += 1
        self.compiled.add(inputs["x"].shape)
        return 0.5

    def forward(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.began.set()
        self.threads.add(threading.current_thread().name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if self.gate is not None:
            assert self.gate.wait(20)
        self.at_once -= 1
        self.seen.append(float(inputs["x"].flat[0]))
        if self.failure is not None:
            raise self.failure
        return {"sample": inputs["x"] + np.float32(1)}


class Rig:
    """Models beside an engine."""

    def __init__(self, model: ScriptedModel, answer_deadline: float = 20.0, **limits: Any):
        self.model = model
        self.engine = Engine()
        self.is_robot_running = False
        settings = ModelSettings.model_validate({"max_forward_bytes": 1 << 16} | limits)
        options = {"answer_deadline": answer_deadline, "has_running_robot": lambda: self.is_robot_running}
        self.models = ModelServer(self.engine, settings, **options)
        self.policy = ScriptedPolicy()
        self.served_policy = LoadedPolicy(self.policy)

    async def load(self, name: str = "m") -> ServedModel:
        return await self.models.load(name, "a/folder", None, lambda *path, on_progress=None: self.model)

    async def forward(self, value: float = 1.0, size: int = 1, answer: ArrayFormat = JSON) -> ForwardResult:
        body = json.dumps({"inputs": {"x": [[value] * size]}}).encode()
        return await self.raw([body[:5], body[5:]], answer)

    async def raw(self, body: list[bytes], answer: ArrayFormat = JSON) -> ForwardResult:
        with ExitStack() as held:
            held.enter_context(self.models.forwards.reserve_slot())
            return await self.models.forwards.forward(self.models.get("m"), ForwardRequest(body, JSON, answer), held)

    async def until_free(self) -> None:
        """Nothing is done for any request any more."""
        await until(lambda: not self.models.forwards._reserved, within=30.0)

    async def close(self) -> None:
        await self.models.close()
        await self.engine.close()


@pytest.fixture
async def rig_of() -> AsyncIterator[Callable[..., Any]]:
    rigs: list[Rig] = []

    async def make(model: ScriptedModel | None = None, **limits: Any) -> Rig:
        rigs.append(Rig(model or ScriptedModel(), **limits))
        await rigs[-1].load()
        rigs[-1].model.began.clear()
        rigs[-1].model.seen.clear()
        return rigs[-1]

    yield make
    for rig in rigs:
        for gate in (rig.model.gate, rig.model.compile_gate):
            if gate is not None:
                gate.set()
        await rig.close()


async def event(of: threading.Event) -> None:
    assert await asyncio.to_thread(of.wait, 30)


def outputs(forwarded: ForwardResult) -> Any:
    return json.loads(b"".join(forwarded.pieces))["outputs"]["sample"]["data"]


async def test_a_pass_on_the_thread_of_models_tells_its_times_and_compiles(rig_of):
    rig = await rig_of()
    forwarded = await rig.forward(41.0)
    assert outputs(forwarded) == [[42.0]]
    assert rig.model.threads == {"model-loader", "models"}
    assert (forwarded.timings["to_device"], forwarded.timings["compute"], forwarded.timings["to_host"]) == (1, 2, 3)
    assert set(forwarded.timings) == {"queue", "read", "to_device", "compute", "to_host", "total", "compile"}
    assert forwarded.timings["compile"] == 0
    compiles = rig.model.compiles
    assert (await rig.forward(size=3)).timings["compile"] == 500
    assert (await rig.forward(size=3)).timings["compile"] == 0
    assert rig.model.compiles == compiles + 1
    facts = rig.models.get("m").describe()
    assert (facts["source"], facts["stats"]["compiles"], facts["stats"]["forwards"]) == ("a/folder", 1, 3)


async def test_passes_run_one_at_a_time_in_the_order_they_came(rig_of):
    rig = await rig_of()
    await asyncio.gather(*(rig.forward(float(number)) for number in range(4)))
    assert (rig.model.most_at_once, rig.model.seen) == (1, [0.0, 1.0, 2.0, 3.0])


async def test_a_pass_waits_for_the_inferences_of_sessions(rig_of):
    rig = await rig_of()
    hold = threading.Event()
    rig.policy.failures.append(hold)
    inferring = asyncio.create_task(rig.engine.infer(rig.served_policy, OBSERVATION))
    waiting = asyncio.create_task(rig.engine.infer(rig.served_policy, OBSERVATION))
    await until(lambda: rig.policy.acted, within=30.0)
    waits = asyncio.Event()
    until_idle = rig.engine.wait_until_idle

    async def wait() -> None:
        waits.set()
        await until_idle()

    rig.engine.wait_until_idle = wait
    forward = asyncio.create_task(rig.forward())
    await waits.wait()
    await asyncio.sleep(0.1)
    assert not rig.model.began.is_set()
    hold.set()
    await asyncio.gather(inferring, waiting)
    forwarded = await forward
    assert rig.policy.acted == 2
    assert forwarded.timings["queue"] >= 80


async def test_an_inference_does_not_queue_behind_a_pass_that_runs(rig_of):
    rig = await rig_of()
    rig.model.gate = threading.Event()
    forward = asyncio.create_task(rig.forward())
    await event(rig.model.began)
    inference = await asyncio.wait_for(rig.engine.infer(rig.served_policy, OBSERVATION), 15)
    assert inference.queue < 1
    assert not forward.done()
    rig.model.gate.set()
    await forward


async def test_a_place_is_kept_until_an_abandoned_pass_ends(rig_of):
    rig = await rig_of(max_forwards=1)
    rig.model.gate = threading.Event()
    forward = asyncio.create_task(rig.forward())
    await event(rig.model.began)
    forward.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forward
    with pytest.raises(ModelBusy):
        await rig.forward()
    rig.model.gate.set()
    await rig.until_free()
    await rig.forward()


async def test_clients_that_leave_cause_no_second_compile(rig_of):
    rig = await rig_of(max_forwards=4)
    rig.model.compile_gate = threading.Event()
    compiles = rig.model.compiles
    for size in (2, 3, 4):
        forward = asyncio.create_task(rig.forward(size=size))
        await event(rig.model.began)  # the first one
        await asyncio.sleep(0.05)
        forward.cancel()
        await asyncio.gather(forward, return_exceptions=True)
    assert rig.engine.policy_cache.building.locked()
    rig.model.compile_gate.set()
    await rig.until_free()
    # Only the first had begun; those who left while they waited cost nothing.
    assert rig.model.compiles == compiles + 1


async def test_a_pass_does_not_compile_while_a_policy_is_loaded(rig_of):
    rig = await rig_of()
    async with rig.engine.policy_cache.building:
        forward = asyncio.create_task(rig.forward(size=5))
        await asyncio.sleep(0.1)
        assert not rig.model.began.is_set()
    await forward


async def test_a_pass_that_takes_too_long_is_abandoned(rig_of):
    rig = await rig_of(answer_deadline=0.2)
    rig.model.gate = threading.Event()
    with pytest.raises(ModelBusy, match=r"not done in 0\.2 s \(answer_deadline\)"):
        await rig.forward()
    rig.model.gate.set()
    rig.model.gate = None
    await rig.until_free()
    rig.models.forwards.answer_deadline = 20.0
    assert outputs(await rig.forward()) == [[2.0]]


@pytest.mark.parametrize(
    ("limits", "starts", "text"),
    [({"forward_beside_robots": 0.1}, True, "a robot is running"), ({"answer_deadline": 0.2}, False, "not done in")],
    ids=["a robot starts", "robots take too long"],
)
async def test_a_long_pass_that_waits_for_robots_may_never_run(rig_of, limits, starts, text):
    rig = await rig_of(ScriptedModel(seconds=0.15), **limits)
    hold = threading.Event()
    rig.policy.failures.append(hold)
    inferring = asyncio.create_task(rig.engine.infer(rig.served_policy, OBSERVATION))
    await asyncio.sleep(0.02)
    forward = asyncio.create_task(rig.forward())
    await asyncio.sleep(0.05)
    if starts:
        rig.is_robot_running = True
        hold.set()
    with pytest.raises(ModelBusy, match=text):
        await forward
    await rig.until_free()
    hold.set()
    await inferring
    assert not rig.model.began.is_set()


@pytest.mark.parametrize(
    ("more", "answer", "text"),
    [
        ({"seconds": 100.0}, JSON, r"would take about 100 s here, and 20 s are allowed \(answer_deadline\)"),
        ({"memory": 8 << 30}, JSON, r"8192 MB of memory.*max_forward_memory"),
        ({"answer": 1 << 17}, NPZ, r"131072 bytes, and 65536 are allowed \(max_forward_bytes\)"),
    ],
)
async def test_what_would_take_too_much_is_refused_before_it_is_compiled(rig_of, more, answer, text):
    rig = await rig_of(ScriptedModel(**more))
    with pytest.raises(TooLarge, match=text):
        await rig.forward(size=9, answer=answer)
    assert not rig.model.began.is_set()


async def test_a_long_answer_is_refused_in_json_and_given_otherwise(rig_of):
    rig = await rig_of(ScriptedModel(answer=1 << 21), max_forward_bytes=1 << 22)
    with pytest.raises(TooLarge, match=r"524288 numbers, and 262144 are allowed in JSON.*application/x-npz"):
        await rig.forward()
    await rig.forward(answer=NPZ)


async def test_failures_of_a_model_and_of_json_are_told_without_details(rig_of, caplog):
    rig = await rig_of()
    rig.model.failure = RuntimeError("secret of /root")
    with caplog.at_level(logging.ERROR), pytest.raises(ModelFailed, match="RuntimeError") as caught:
        await rig.forward()
    assert "secret" not in str(caught.value)
    assert any(record.exc_info for record in caplog.records)
    rig.model.failure = None
    await rig.forward()
    assert rig.models.get("m").errors == 1
    rig.model.forward = lambda inputs: {"sample": np.full((1, 1), np.inf, np.float32)}
    with pytest.raises(ModelFailed, match="ask for npz"):
        await rig.forward()
    assert (await rig.forward(answer=NPZ)).pieces


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (CheckpointError("config.json: missing"), "model 'm' cannot be loaded: config.json: missing"),
        (MemoryError("/root/secret"), r"model 'm' cannot be loaded \(MemoryError\)"),
    ],
)
async def test_a_model_that_cannot_be_loaded_says_why(failure, text):
    def load(path, revision=None, /, *, on_progress=None):
        raise failure

    engine = Engine()
    models = ModelServer(engine)
    with pytest.raises(ModelError, match=text) as caught:
        await models.load("m", "folder", None, load)
    assert "secret" not in str(caught.value)
    assert models.list() == []
    await models.close()
    await engine.close()


async def test_closing_does_not_wait_for_a_pass_that_hangs(rig_of, pauses):
    rig = await rig_of()
    rig.model.gate = threading.Event()
    forward = asyncio.create_task(rig.forward())
    await event(rig.model.began)
    began = time.monotonic()
    await rig.models.close()
    assert pauses.running(began) < 3
    await asyncio.gather(forward, return_exceptions=True)
