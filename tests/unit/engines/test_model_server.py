"""Queue of forward passes and host of the models, with a scripted model in this process."""

import asyncio
import io
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
from service.engines.model_host import PIECE_BYTES
from service.engines.model_server import ForwardRequest, ForwardResult, ModelServer
from service.errors import ModelBusy, ModelError, ModelFailed, TooLarge
from service.http.array_formats import ARRAY_FORMATS, ArrayFormat
from service.inference.config import ModelSettings, PolicySettings
from tests.testing.waiting import until

pytestmark = pytest.mark.timed

JSON, NPZ = ARRAY_FORMATS[0], ARRAY_FORMATS[1]


@dataclass
class ScriptedModel:
    """Model that adds one, after the events that a test sets."""

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
    inputs: list[float] = field(default_factory=list)
    timings: Mapping[str, float] = field(
        default_factory=lambda: {"to_device": 0.001, "compute": 0.002, "to_host": 0.003}
    )

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
        self.inputs.append(float(inputs["x"].flat[0]))
        if self.failure is not None:
            raise self.failure
        return {"sample": inputs["x"] + np.float32(1)}


class Rig:
    """Model server with one scripted model in this process."""

    def __init__(self, model: ScriptedModel, answer_deadline: float = 20.0, **limits: Any):
        self.model = model
        values = {"max_forward_bytes": 1 << 16, "models": {"m": ("a/folder", None)}} | limits
        settings = ModelSettings.model_validate(values)
        self.models = ModelServer(settings, PolicySettings(), answer_deadline, self.load)

    def load(self, path: str, revision: str | None = None, /, *, on_progress: Any = None) -> Any:
        return self.model

    async def forward(self, value: float = 1.0, size: int = 1, answer: ArrayFormat = JSON) -> ForwardResult:
        body = json.dumps({"inputs": {"x": [[value] * size]}}).encode()
        return await self.raw([body[:5], body[5:]], answer)

    async def raw(self, body: list[bytes], answer: ArrayFormat = JSON) -> ForwardResult:
        with ExitStack() as stack:
            stack.enter_context(self.models.reserve_slot())
            return await self.models.forward(self.models.get("m"), ForwardRequest(body, JSON, answer), stack)

    async def until_free(self) -> None:
        """Wait until no request holds a slot."""
        await until(lambda: not self.models._reserved, within=30.0)

    async def close(self) -> None:
        await self.models.close()


@pytest.fixture
async def rig_of() -> AsyncIterator[Callable[..., Any]]:
    rigs: list[Rig] = []

    async def make(model: ScriptedModel | None = None, **limits: Any) -> Rig:
        rigs.append(Rig(model or ScriptedModel(), **limits))
        await rigs[-1].models.load()
        rigs[-1].model.began.clear()
        rigs[-1].model.inputs.clear()
        return rigs[-1]

    yield make
    for rig in rigs:
        for gate in (rig.model.gate, rig.model.compile_gate):
            if gate is not None:
                gate.set()
        await rig.close()


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 30)


def outputs(forwarded: ForwardResult) -> Any:
    return json.loads(b"".join(forwarded.pieces))["outputs"]["sample"]["data"]


async def test_an_answer_has_the_time_of_each_stage(rig_of):
    rig = await rig_of()
    forwarded = await rig.forward(41.0)
    assert outputs(forwarded) == [[42.0]]
    assert rig.model.threads == {"models"}
    assert (forwarded.timings["to_device"], forwarded.timings["compute"], forwarded.timings["to_host"]) == (1, 2, 3)
    assert set(forwarded.timings) == {"queue", "read", "to_device", "compute", "to_host", "total", "compile"}
    assert forwarded.timings["compile"] == 0


async def test_new_shapes_are_compiled_once(rig_of):
    rig = await rig_of()
    compiles = rig.model.compiles
    assert (await rig.forward(size=3)).timings["compile"] == 500
    assert (await rig.forward(size=3)).timings["compile"] == 0
    assert rig.model.compiles == compiles + 1
    facts = rig.models.get("m").describe()
    assert (facts["source"], facts["stats"]["compiles"], facts["stats"]["forwards"]) == ("a/folder", 1, 2)


async def test_forward_passes_run_one_at_a_time_in_order(rig_of):
    rig = await rig_of()
    await asyncio.gather(*(rig.forward(float(number)) for number in range(4)))
    assert (rig.model.most_at_once, rig.model.inputs) == (1, [0.0, 1.0, 2.0, 3.0])


async def test_an_abandoned_pass_keeps_its_slot_until_it_ends(rig_of):
    rig = await rig_of(max_forwards=1)
    rig.model.gate = threading.Event()
    forward = asyncio.create_task(rig.forward())
    await wait_for(rig.model.began)
    forward.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forward
    with pytest.raises(ModelBusy, match="requested already"):
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
        await wait_for(rig.model.began)
        await asyncio.sleep(0.05)
        forward.cancel()
        await asyncio.gather(forward, return_exceptions=True)
    rig.model.compile_gate.set()
    await rig.until_free()
    # Only the first pass has begun. The other passes are dropped from the queue.
    assert rig.model.compiles == compiles + 1


async def test_a_pass_that_takes_too_long_is_abandoned(rig_of):
    rig = await rig_of(answer_deadline=0.2)
    rig.model.gate = threading.Event()
    with pytest.raises(ModelBusy, match=r"not done in 0\.2 s \(answer_deadline\)"):
        await rig.forward()
    rig.model.gate.set()
    rig.model.gate = None
    await rig.until_free()
    rig.models.answer_deadline = 20.0
    assert outputs(await rig.forward()) == [[2.0]]


async def test_the_process_of_a_pass_that_does_not_end_is_killed(rig_of):
    rig = await rig_of(answer_deadline=0.1)
    rig.model.gate = threading.Event()
    kills: list[str] = []
    rig.models._host.kill_process = kills.append
    with pytest.raises(ModelBusy, match="not done in"):
        await rig.forward()
    await rig.until_free()
    assert kills == ["a forward pass of model m did not end in 0.3 s"]


async def test_a_long_answer_arrives_in_pieces(rig_of):
    rig = await rig_of(answer_deadline=20.0, max_forward_bytes=1 << 22)
    sample = np.arange(PIECE_BYTES, dtype=np.float32)
    rig.model.forward = lambda inputs: {"sample": sample}
    pieces = (await rig.forward(answer=NPZ)).pieces
    assert [len(piece) for piece in pieces[:-1]] == [PIECE_BYTES] * 4
    np.testing.assert_array_equal(np.load(io.BytesIO(b"".join(pieces)))["sample"], sample)


@pytest.mark.parametrize(
    ("more", "answer", "text"),
    [
        ({"seconds": 100.0}, JSON, r"would take about 100 s here, and 20 s are allowed \(answer_deadline\)"),
        ({"memory": 8 << 30}, JSON, r"8192 MB of memory.*max_forward_memory"),
        ({"answer": 1 << 17}, NPZ, r"131072 bytes, and 65536 are allowed \(max_forward_bytes\)"),
    ],
)
async def test_a_request_over_a_limit_is_refused_before_the_compilation(rig_of, more, answer, text):
    rig = await rig_of(ScriptedModel(**more))
    with pytest.raises(TooLarge, match=text):
        await rig.forward(size=9, answer=answer)
    assert not rig.model.began.is_set()


async def test_a_long_answer_is_refused_in_json_but_not_in_npz(rig_of):
    rig = await rig_of(ScriptedModel(answer=1 << 21), max_forward_bytes=1 << 22)
    with pytest.raises(TooLarge, match=r"524288 numbers, and 262144 are allowed in JSON.*application/x-npz"):
        await rig.forward()
    await rig.forward(answer=NPZ)


async def test_an_error_of_a_model_shows_its_type_and_the_log_has_details(rig_of, caplog):
    rig = await rig_of()
    rig.model.failure = RuntimeError("secret of /root")
    with caplog.at_level(logging.ERROR), pytest.raises(ModelFailed, match="RuntimeError") as caught:
        await rig.forward()
    assert "secret" not in str(caught.value)
    assert any(record.exc_info for record in caplog.records)
    rig.model.failure = None
    await rig.forward()
    assert rig.models.get("m").errors == 1


async def test_values_that_json_cannot_express_are_sent_as_npz(rig_of):
    rig = await rig_of()
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
async def test_a_model_that_cannot_be_loaded_states_the_reason(failure, text):
    rig = Rig(ScriptedModel())

    def example(batch: int = 1, seed: int = 0) -> Any:
        raise failure

    rig.model.example = example
    with pytest.raises(ModelError, match=text) as caught:
        await rig.models.load()
    assert "secret" not in str(caught.value)
    assert rig.models.list() == []
    await rig.close()


async def test_closing_does_not_wait_for_a_pass_that_hangs(rig_of, pauses):
    rig = await rig_of()
    rig.model.gate = threading.Event()
    forward = asyncio.create_task(rig.forward())
    await wait_for(rig.model.began)
    began = time.monotonic()
    await rig.models.close()
    assert pauses.running(began) < 3
    await asyncio.gather(forward, return_exceptions=True)
