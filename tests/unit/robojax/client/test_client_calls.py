"""Requests, responses and messages as values, and the repetition of requests."""

import asyncio
import contextlib
import inspect
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import httpx2
import msgpack
import numpy as np
import pytest

from robojax.client import (
    AsyncClient,
    AsyncSession,
    AsyncStream,
    Client,
    Command,
    InvalidArgument,
    ProtocolError,
    RequestRefused,
    ServerUnreachable,
    Session,
    Stream,
    http,
    stream,
)
from robojax.client.answers import read_chunk
from robojax.client.client import RobotOptions
from robojax.client.codec import pack_array, pack_observation, unpack_array
from robojax.client.fields import ActFields, Overlap, SessionChanges, SessionFields, StreamedFields
from service.api.schemas import AdjustRequest, NewSessionRequest
from service.control.aggregation import AGGREGATIONS
from service.sessions.request import SessionRequest
from service.streaming.acts import ACT_FIELDS
from service.streaming.observation import OBSERVATION_FIELDS
from service.transport.client.robot import connect_robot

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def test_observation_is_packed_for_the_client_protocol() -> None:
    found = pack_observation({"front": PICTURE, "top": b"jpeg"}, {"Rotation": 1}, number=7, prompt=None)
    assert found == {
        "images": {"front": {"dtype": "uint8", "shape": [4, 6, 3], "data": PICTURE.tobytes()}, "top": b"jpeg"},
        "state": {"Rotation": 1.0},
        "number": 7,
    }
    compressed = pack_observation({"front": PICTURE}, is_compressed=True)["images"]
    assert isinstance(compressed, dict)
    assert compressed["front"][:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize(
    ("images", "state", "message"),
    [
        ({"front": PICTURE.astype(np.float32)}, None, "expected uint8"),
        ({"front": PICTURE[..., 0]}, None, "expected uint8"),
        (None, [1.0, float("nan")], "state 1 is nan"),
        (None, np.array([np.inf]), "not finite numbers"),
        (None, {"a": True}, "is not a number"),
        (None, np.array(["x"], object), "not finite numbers"),
    ],
)
def test_invalid_observation_is_refused_before_sending(images, state, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        pack_observation(images, state)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "float32", "float64", "bool"])
def test_arrays_survive_packing(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    np.testing.assert_array_equal(unpack_array(msgpack.unpackb(msgpack.packb(pack_array(array)))), array)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {"dtype": "object", "shape": [1], "data": b"x"},
        {"dtype": "float32", "shape": [2], "data": b"1234"},
        {"dtype": "float32", "shape": [-1], "data": b""},
        {"dtype": ["float32"], "shape": [1], "data": b"1234"},
        [["x"]],
        [[1.0], [1.0, 2.0]],
    ],
)
def test_invalid_array_is_refused(bad) -> None:
    with pytest.raises((ProtocolError, TypeError)):
        unpack_array(bad)


def test_non_finite_actions_are_never_returned() -> None:
    call = http.act("arm", {}, "chunk", read_chunk)
    body = msgpack.packb({"actions": pack_array(np.array([[np.nan]], np.float32)), "joint_names": ["a"]})
    with pytest.raises(ProtocolError, match="not finite"):
        http.read_result(call, 200, {"content-type": "application/msgpack"}, body or b"")
    with pytest.raises(ProtocolError, match="not finite"):
        stream.decode_message(msgpack.packb({"kind": "command", "joints": {"a": float("inf")}}) or b"")


def test_stream_messages_are_read_in_both_formats() -> None:
    assert stream.decode_message('{"kind": "command", "joints": {"a": 1}, "number": 3}') == Command({"a": 1.0}, 3)
    assert stream.decode_message(stream.encode_message("news", {})) is None
    for bad in (b"\xc1", b"\x01", "[", '{"kind": "command"}', '{"kind": "welcome"}'):
        with pytest.raises(ProtocolError):
            stream.decode_message(bad)


def test_refusal_has_the_code_and_text_of_the_server() -> None:
    found = http.build_refusal(409, {"retry-after": "2"}, b'{"detail": "it runs", "code": "move_refused"}')
    assert (found.status, found.code, found.text, found.retry_after) == (409, "move_refused", "it runs", 2.0)
    found = http.build_refusal(422, {}, b'{"detail": [{"loc": ["body", "rate"], "msg": "too low", "type": "x"}]}')
    assert (found.code, found.text) == ("invalid", "rate: too low")
    assert http.build_refusal(502, {}, b"<html>").text == "status 502"
    assert "final address" in http.build_refusal(302, {"location": "http://else"}, b"").text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(({"url": url}, None) for url in ("ftp://x", "http://", "http://a:b@x", "http://x/?key=1", "http://x:0")),
        *(({"url": url}, f"try http://{url}$") for url in ("localhost:8001", "gpu-box:9001")),
        ({"key": "a\r\nx-evil: 1"}, "the key has invalid characters"),
    ],
)
def test_invalid_address_or_key_is_refused(given: dict[str, str], message: str | None) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Client(**given)


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, "http://127.0.0.1:8001"),
        ({"ROBOJAX_PORT": "9001"}, "http://127.0.0.1:9001"),
        ({"ROBOJAX_PORT": "9001", "ROBOJAX_SERVER": "http://gpu-box:8001/"}, "http://gpu-box:8001"),
        *(({"ROBOJAX_PORT": port}, None) for port in ("x", "0", "70000")),
        ({"ROBOJAX_SERVER": "gpu-box:8001"}, None),
    ],
)
def test_server_of_the_environment(
    environment: dict[str, str], url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROBOJAX_PORT", "ROBOJAX_SERVER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if url is None:
        with pytest.raises(InvalidArgument, match=next(iter(environment.values()))):
            Client()
    else:
        with Client() as client:
            assert client.url == url


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("dry_runn", "did you mean 'dry_run'?"),
        ("DRY_RUN", "did you mean 'dry_run'?"),
        ("max_relative_traget", "did you mean 'max_relative_target'?"),
        ("someday", "a session has overlap, temporal_ensemble_coeff"),
    ],
)
def test_create_refuses_unknown_fields_before_sending(field: str, message: str) -> None:
    fields: dict[str, Any] = {field: True}
    # No server listens there, so a request would end in ServerUnreachable.
    with (
        Client("http://127.0.0.1:1") as client,
        pytest.raises(InvalidArgument, match=rf"unknown field '{field}'; ") as refused,
    ):
        client.create("arm", "policies/act", **fields)
    assert message in str(refused.value)

    async def create() -> None:
        async with AsyncClient("http://127.0.0.1:1") as client:
            await client.create("arm", "policies/act", **fields)

    with pytest.raises(InvalidArgument, match="Nothing was sent"):
        asyncio.run(create())


REQUIRED = {"session_id", "policy_path", "transport_server_url"}  # explicit parameters of ``create``
# Explicit parameters of the calls, other names of ``prompt``, and the kind of a message.
OTHER_PARAMETERS = {"images", "state", "want", "language_instruction", "task", "kind"}


@pytest.mark.parametrize(
    ("fields", "server"),
    [
        (SessionFields, {*NewSessionRequest.model_fields} - REQUIRED),
        (SessionChanges, {*AdjustRequest.model_fields}),
        (ActFields, {*ACT_FIELDS} - OTHER_PARAMETERS | {"is_compressed"}),
        (StreamedFields, {*OBSERVATION_FIELDS, "age_ms"} - OTHER_PARAMETERS | {"is_compressed"}),
        (RobotOptions, {*inspect.signature(connect_robot).parameters} - {"url", "rooms", "key"}),
    ],
)
def test_client_and_server_have_the_same_fields(fields: type, server: set[str]) -> None:
    assert set(fields.__annotations__) == server


def test_client_and_server_have_the_same_choices() -> None:
    assert set(get_args(Overlap)) == set(AGGREGATIONS)
    for name in ("auto_update", "prompt_cut"):
        client, server = (get_type_hints(each)[name] for each in (SessionFields, SessionRequest))
        assert get_args(get_args(client)[0]) == get_args(server)


@pytest.mark.parametrize(
    ("blocking", "suspending"), [(Client, AsyncClient), (Session, AsyncSession), (Stream, AsyncStream)]
)
def test_shared_calls_have_signatures_and_docstrings_in_both_clients(blocking: type, suspending: type) -> None:
    shared = [name for name in dir(blocking) if not name.startswith("_") and name in dir(suspending)]
    calls = [name for name in shared if inspect.iscoroutinefunction(getattr(suspending, name)) and name != "next"]
    assert len(calls) >= 6
    for name in calls:
        one, other = getattr(blocking, name), getattr(suspending, name)
        assert not inspect.iscoroutinefunction(one)
        assert inspect.signature(one) == inspect.signature(other)
        assert one.__doc__
        assert one.__doc__ == other.__doc__


@contextlib.asynccontextmanager
async def closing_server():
    """Yield a server that reads a request, records its first line, and closes the connection."""
    requests: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readline()).decode().split(" HTTP")[0])
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


async def test_only_reads_and_stops_are_repeated() -> None:
    async with closing_server() as (url, requests), AsyncClient(url) as client:
        arm = client.session("arm")
        for call, times in ((arm.status, 3), (arm.start, 1), (arm.restart, 1), (arm.emergency_stop, 3)):
            requests.clear()
            with pytest.raises(ServerUnreachable) as lost:
                await call()
            assert lost.value.may_have_arrived
            assert len(requests) == times, requests
        requests.clear()
        with pytest.raises(ServerUnreachable, match="check before you repeat it"):
            await arm.act({"front": PICTURE})
        assert requests == ["POST /sessions/arm/act"]


def test_unreachable_server_did_nothing() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServerUnreachable, match="robojax serve") as lost:
        client.session("arm").start()
    assert not lost.value.may_have_arrived


async def test_failed_stop_is_noted_on_the_original_error() -> None:
    async with closing_server() as (url, _), AsyncClient(url) as client:
        with pytest.raises(KeyError) as failed:
            async with client.session("arm"):
                raise KeyError("mine")
    assert "could not be stopped" in failed.value.__notes__[0]
    assert "409 move_refused" in str(RequestRefused(409, "move_refused", "no"))


def test_certificates_are_verified_and_redirects_ignored() -> None:
    found = http.build_client_options(httpx2, "https://robots.example", {})
    assert (found["verify"], found["trust_env"], found["follow_redirects"]) == (True, False, False)


def test_client_import_is_fast() -> None:
    program = "import time; began = time.process_time(); import robojax.client; print(time.process_time() - began)"
    looks = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(3)]
    assert min(looks) < 0.15  # Seconds of processor time.
