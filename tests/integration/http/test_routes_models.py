"""A small real model on the real server."""

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

import jaxmodels
from service.engines.model_server import ModelProcess
from tests.testing import rig
from tests.testing.compiling import QUICK
from tests.testing.models import compilation as compilation
from tests.testing.rig import REAL, show, started
from tests.testing.waiting import until
from tests.unit.http.test_array_bodies import to_json, to_npz

JSON, NPZ = "application/json", "application/x-npz"
FORMS = (JSON, NPZ)


@pytest.fixture(scope="module")
def loaded(model_folder) -> jaxmodels.LoadedModel:
    return jaxmodels.load_model(model_folder)


class Server(rig.Server):
    async def forward(
        self, body: Any, form: str, accept: str | None = None, name: str = "dit"
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        headers = {"content-type": form} | ({"accept": accept} if accept else {})
        if isinstance(body, bytes):
            body = io.BytesIO(body)
        async with self.http.post(f"/models/{name}/forward", data=body, headers=headers) as answer:
            return answer.status, await answer.read(), answer

    @property
    def places(self) -> int:
        return self.app.ctx.models._reserved

    async def until_free(self) -> None:
        await until(lambda: not self.places, within=60)


Serve = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serve(loaded) -> Serve:
    def start(model: Any = loaded, **settings: Any) -> AbstractAsyncContextManager[Server]:
        parts = {"load_model": lambda path, revision=None, /, *, on_progress=None: model}
        return started(Server, parts=parts, models={"dit": "folder/of/dit"}, **settings)

    return start


@pytest.fixture
async def server(serve) -> AsyncIterator[Server]:
    async with serve() as server:
        yield server


def write(arrays: dict[str, np.ndarray], form: str) -> bytes:
    return {JSON: to_json, NPZ: to_npz}[form](**arrays)


def read(body: bytes, form: str) -> np.ndarray:
    if form == NPZ:
        return np.load(io.BytesIO(body), allow_pickle=False)["sample"]
    sample = json.loads(body)["outputs"]["sample"]
    return np.array(sample["data"], sample["dtype"])


async def test_loaded_models_are_listed_with_their_inputs(server, loaded):
    status, listed = await server.call("GET", "/models")
    assert (status, len(listed)) == (200, 1)
    reply = listed[0]
    assert (reply["name"], reply["class"], reply["kind"]) == ("dit", "Transformer2DModel", "patches")
    assert reply["config"]["num_embeds_ada_norm"] == 7
    assert reply["parameters"] == loaded.description["parameters"]
    assert [entry["name"] for entry in reply["inputs"]][:3] == ["hidden_states", "timestep", "class_labels"]
    assert reply["inputs"][0]["shape"] == ["batch", 4, "height", "width"]
    assert (await server.call("GET", "/models/dit"))[1] == reply
    status, reply = await server.call("GET", "/models/other")
    assert (status, reply["code"], "loaded: dit" in reply["detail"]) == (404, "unknown_model", True)


@pytest.mark.parametrize("answer", FORMS)
@pytest.mark.parametrize("form", FORMS)
async def test_forward_over_http_equals_forward_in_process(server, loaded, form, answer):
    inputs = loaded.example(2, seed=5)
    expected = loaded.forward(inputs)["sample"]
    status, body, head = await server.forward(write(inputs, form), form, accept=None if form == answer else answer)
    assert (status, head.content_type) == (200, answer)
    np.testing.assert_array_equal(read(body, answer), expected)
    stages = dict(re.findall(r"(\w+);dur=([\d.e-]+)", head.headers["server-timing"]))
    assert set(stages) == {"queue", "read", "to_device", "compute", "to_host", "total", "compile"}
    assert 0 < float(stages["compute"]) <= float(stages["total"])
    if answer != NPZ:
        assert {stage: f"{spent:g}" for stage, spent in json.loads(body)["timings_ms"].items()} == stages


async def test_plain_json_numbers_are_accepted(server, loaded):
    x = loaded.example()["hidden_states"]
    by_hand = {"inputs": {"hidden_states": x.tolist(), "timestep": 250, "class_labels": [3]}}
    status, body, _ = await server.forward(json.dumps(by_hand), JSON)
    expected = loaded.forward({"hidden_states": x, "timestep": np.float32(250), "class_labels": np.array([3])})
    assert status == 200
    np.testing.assert_array_equal(read(body, JSON), expected["sample"])


async def test_long_response_arrives_complete(server, loaded):
    inputs = loaded.example() | {"hidden_states": np.ones((64, 4, 32, 32), np.float32)}
    inputs |= {"timestep": np.zeros(64, np.float32), "class_labels": np.zeros(64, np.int32)}
    status, body, head = await server.forward(write(inputs, NPZ), NPZ)
    assert (status, read(body, NPZ).shape) == (200, (64, 4, 32, 32))
    assert int(head.headers["content-length"]) == len(body) > 1 << 20
    assert "x-request-id" in head.headers
    assert (await server.call("GET", "/health"))[0] == 200


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_states": np.ones((1, 3, 8, 8), np.float32)}, "wants (batch, 4, height, width)"),
        ({"hidden_states": np.ones((1, 4, 8), np.float32)}, "wants (batch, 4, height, width)"),
        ({"class_labels": np.array([8])}, "class_labels 8 is out of range; wanted 0 to 7"),
        ({"class_labels": np.array([0.5])}, "wanted integers"),
        ({"images": np.ones(3)}, "has 'images', which this model does not take"),
        ({"timestep": np.array([np.nan])}, "NaN"),
    ],
)
async def test_invalid_arrays_are_422_with_the_expected_form(server, loaded, change, text):
    status, body, _ = await server.forward(write(loaded.example() | change, NPZ), NPZ)
    [entry] = json.loads(body)["detail"]
    assert (status, entry["loc"][:2], entry["type"]) == (422, ["body", "inputs"], "invalid")
    assert text in entry["msg"]


@pytest.mark.parametrize(
    ("body", "form"),
    [(b"", JSON), (b"", NPZ), (b"{", JSON), (b"PK\x03\x04", NPZ), (b'{"inputs": {"hidden_states": NaN}}', JSON)],
)
async def test_unreadable_bodies_are_422(server, body, form):
    status, reply, _ = await server.forward(body, form)
    assert (status, json.loads(reply)["detail"][0]["loc"][0]) == (422, "body")


async def test_unknown_content_type_is_415_and_unknown_accept_406(server):
    for form, accept, expected, code in (
        ("text/plain", None, 415, "unknown_form"),
        ("application/octet-stream", None, 415, "unknown_form"),
        (JSON, "text/html", 406, "not_acceptable"),
    ):
        status, body, _ = await server.forward(b"x" * 3_000_000, form, accept)
        reply = json.loads(body)
        assert (status, reply["code"]) == (expected, code)
        assert all(name in reply["detail"] for name in FORMS)


async def test_unknown_model_is_404_even_for_a_long_body(server):
    status, body, _ = await server.forward(b"x" * 3_000_000, NPZ, name="other")
    assert (status, json.loads(body)["code"]) == (404, "unknown_model")
    # The server read the whole body and keeps serving the connection.
    assert (await server.call("GET", "/health"))[0] == 200


async def test_model_bodies_have_separate_limits(serve):
    async with serve(max_body=2000, max_forward_bytes=100_000) as server:
        status, body, _ = await server.forward(b"x" * 2001, JSON)
        assert (status, "max_body; an npz" in json.loads(body)["detail"]) == (413, True)
        status, body, _ = await server.forward(b"x" * 100_001, NPZ)
        assert (status, "100000 bytes (max_forward_bytes)" in json.loads(body)["detail"]) == (413, True)
        assert (await server.forward(b"x" * 99_000, NPZ))[0] == 422
        # A much larger body gets the same response while the client is still sending.
        assert (await server.forward(b"x" * 190_000, NPZ))[0] == 413
        assert (await server.call("POST", "/sessions", data=b"x" * 2001))[0] == 413
        assert not server.places


async def test_body_without_a_length_is_counted_on_arrival(serve):
    async with serve(max_forward_bytes=100_000) as server:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 10_000

        try:
            status, body, _ = await server.forward(endless(), NPZ)
            assert (status, json.loads(body)["code"]) == (413, "too_large")
        except aiohttp.ClientError:
            pass  # The connection was cut while the client was sending.
        await server.until_free()


async def half_sent(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"POST /models/dit/forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-npz\r\n")
    writer.write(b"Content-Length: 5000\r\n\r\nPK")
    await until(lambda: server.places == 1)
    return reader, writer


async def test_slow_body_is_cut_and_releases_its_slot(serve):
    async with serve(request_deadline=2.0, max_forwards=1) as server:
        reader, writer = await half_sent(server)
        assert (await server.forward(b"x", NPZ))[0] == 503
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b" 408 " in head
        writer.close()
        await server.until_free()


async def test_disconnected_client_releases_its_slot(serve):
    async with serve(max_forwards=1) as server:
        _, writer = await half_sent(server)
        writer.close()
        await server.until_free()


class Verbose:
    """Model with an output of 32 MB, which exceeds any socket buffer."""

    description: Mapping[str, Any] = {"parameters": 0, "device": "none", "inputs": []}
    timings: Mapping[str, float] = {}
    compiled_shapes = 0

    def example(self, batch: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
        return {}

    def cost(self, inputs: Mapping[str, np.ndarray]) -> tuple[float, int, int]:
        return 0.0, 0, 0

    def is_compiled(self, inputs: Mapping[str, np.ndarray]) -> bool:
        return True

    def compile(self, inputs: Mapping[str, np.ndarray]) -> float:
        return 0.0

    def forward(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"sample": np.zeros(8 << 20, np.float32)}


async def test_client_that_does_not_read_a_long_response_is_cut(serve):
    async with serve(Verbose(), answer_deadline=3.0, max_forwards=1) as server:
        body = write({"x": np.zeros(1)}, NPZ)
        reader, writer = await asyncio.open_connection(*server.address, limit=1024)
        head = f"POST /models/dit/forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: {NPZ}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
        assert (await server.forward(body, NPZ))[0] == 503
        await server.until_free()
        status, answer, _ = await server.forward(body, NPZ)
        assert (status, read(answer, NPZ).size) == (200, 8 << 20)
        writer.close()


async def test_expect_continue_is_answered_at_once(server):
    reader, writer = await asyncio.open_connection(*server.address)
    for name, expected in (("other", b" 404 "), ("dit", b"HTTP/1.1 100 ")):
        writer.write(f"POST /models/{name}/forward HTTP/1.1\r\nHost: localhost\r\nContent-Type: {NPZ}\r\n".encode())
        writer.write(b"Content-Length: 50000000\r\nExpect: 100-continue\r\n\r\n")
        lines = [await asyncio.wait_for(reader.readline(), 30)]
        if name == "other" and b" 100 " in lines[0]:
            await reader.readline()
            lines.append(await asyncio.wait_for(reader.readline(), 30))
        assert any(expected in line for line in lines)
        writer.close()
        reader, writer = await asyncio.open_connection(*server.address)
    writer.close()


async def test_health_metrics_and_system_show_models_without_folders(server, loaded):
    await server.forward(write(loaded.example(), NPZ), NPZ)
    await server.forward(b"nonsense", NPZ)
    reply = (await server.call("GET", "/health"))[1]
    assert (reply["models"], reply["device"]) == (["dit"], loaded.device)
    async with server.http.get("/metrics") as answer:
        text = await answer.text()
    assert 'robojax_model_forwards_total{model="dit"} 1.0' in text
    assert 'robojax_model_errors_total{model="dit"} 1.0' in text
    assert re.search(r'robojax_model_forward_seconds_total\{model="dit"\} 0\.\d', text)
    assert "robojax_models 1.0" in text
    system = (await server.call("GET", "/debug/system"))[1]
    assert system["models"] == ["dit"]
    listed = (await server.call("GET", "/models"))[1]
    assert "folder/of" not in json.dumps(system)
    assert listed[0]["stats"]["forwards"] == 1
    assert listed[0]["stats"]["stages_ms"]["compute"]["p50"] > 0


@pytest.mark.timed
async def test_ticks_are_on_time_during_forwards(serve, loaded):
    """Long bodies are read, computed and answered while a robot moves at 50 Hz."""
    async with serve() as server:
        assert (await server.create(rate=50))[0] == 200
        inputs = loaded.example() | {"hidden_states": np.ones((512, 4, 16, 16), np.float32)}
        inputs |= {"timestep": np.zeros(512, np.float32), "class_labels": np.zeros(512, np.int32)}
        body = write(inputs, NPZ)
        assert (await server.forward(body, NPZ))[0] == 200
        robot_io = server.app.ctx.sessions.get("arm").robot_io
        robot_task = asyncio.create_task(show(server.transport.link, period=0.02))
        assert (await server.call("POST", "/sessions/arm/start"))[0] == 200
        statuses = [(await server.forward(body, NPZ))[0] for _ in range(4)]
        robot_task.cancel()
        assert statuses == [200] * 4
        # A generous limit for busy machines: on the loop, each of these passes would take many ticks.
        assert robot_io.controller.lateness.percentile(90) < 0.02
        assert robot_io.controller.lateness.count > 10


async def test_killed_model_process_is_503_and_restarts(model_folder, loaded, monkeypatch):
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ModelProcess, "niceness", 1)  # Other test processes would starve a process of low priority.
    inputs = loaded.example(64) | {"hidden_states": np.ones((64, 4, 64, 64), np.float32)}
    long, short = write(inputs, NPZ), write(loaded.example(), NPZ)
    async with started(Server, load=REAL, models={"dit": str(model_folder)}) as server:
        _, [reply] = await server.call("GET", "/models")
        assert (reply["name"], reply["source"], reply["kind"]) == ("dit", "transformer", "patches")
        assert str(model_folder) not in json.dumps(reply)
        children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
        [models] = [child for child in children if "service.engines.model_process" in child.cmdline()]
        assert models.nice() == min(psutil.Process().nice() + 1, 19)
        status, body, _ = await server.forward(short, NPZ)
        np.testing.assert_allclose(read(body, NPZ), loaded.forward(loaded.example())["sample"], atol=1e-6)
        status, body, _ = await server.forward(write({"hidden_states": np.ones(3)}, NPZ), NPZ)
        assert (status, json.loads(body)["detail"][0]["loc"]) == (422, ["body", "inputs"])
        forward = asyncio.create_task(server.forward(long, NPZ))
        await until(lambda: server.places, within=30)
        await asyncio.sleep(0.2)
        models.kill()
        status, body, head = await forward
        reply = json.loads(body)
        assert (status, reply["code"], head.headers["retry-after"]) == (503, "model_busy", "1")
        assert "the process of the models ended and is started again" in reply["detail"]
        deadline = time.monotonic() + 60
        while (await server.forward(short, NPZ))[0] != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
