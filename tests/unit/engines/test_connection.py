"""Messages between a server and an engine, over a socket and shared memory."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import numpy as np
import pytest

from service.engines.codec import MAX_MESSAGE, SHARED_BYTES, MessageError
from service.engines.connection import Connection, ConnectionLost, EngineFault
from service.engines.messages import EngineFacts, LocalFolder, Refusal, make_codec
from service.engines.shared_memory import ALIGNMENT, SharedMemory
from service.inference.loaded_policy import InferenceResult
from tests.testing.doubles import SO100_REQUIREMENTS

SIZE = 1 << 20


def make_memory() -> SharedMemory:
    return SharedMemory(SharedMemory.create_descriptor(SIZE), SIZE)


@asynccontextmanager
async def connect(
    answer: Callable[[str, tuple[Any, ...]], Any],
    answer_now: Callable[[str, tuple[Any, ...]], Any] = lambda method, arguments: None,
    **options: Any,
) -> AsyncIterator[Any]:
    """Connect a server to an engine with these answers; yield both connections and both memories."""
    server_end, engine_end = socket.socketpair()
    calls, answers = make_memory(), make_memory()
    engine = Connection(make_codec(answers, calls, copies=False), answer=answer, answer_now=answer_now)
    server = Connection(make_codec(calls, answers, copies=True), **options)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: engine, sock=engine_end)
    await loop.create_unix_connection(lambda: server, sock=server_end)
    try:
        yield server, engine, calls, answers
    finally:
        server.close()
        engine.close()
        await asyncio.sleep(0)


async def echo(method: str, arguments: tuple[Any, ...]) -> Any:
    return arguments


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "é", b"x", True],
        (1, (2, 3)),
        {"a": {"b": frozenset({("front", (48, 64))})}},
        {frozenset({("front", (48, 64))}): {1: 0.5}},
        SO100_REQUIREMENTS,
        Refusal("policy", "no"),
        LocalFolder("ab", "/x", {"config.json": (1, 2, 3, 4, 5)}),
        EngineFacts(batches={1: 2}),
    ],
)
async def test_values_arrive_as_they_were_sent(value: Any) -> None:
    async with connect(echo) as (server, *_):
        (answer,) = await server.call("any", value)
    assert answer == value
    assert type(answer) is type(value)


@pytest.mark.parametrize("count", [1, SHARED_BYTES // 4, SIZE // 4, 4 * SIZE])
async def test_arrays_arrive_whole_and_leave_the_memory_free(count: int) -> None:
    frames = {"state": np.arange(count, dtype=np.float32).reshape(1, -1), "task": np.array(["pick"], "<U600")}
    async with connect(echo) as (server, _, calls, answers):
        for _ in range(3):
            (answer,) = await server.call("act", frames)
            np.testing.assert_array_equal(answer["state"], frames["state"])
            assert answer["task"][0] == "pick"
            answer["state"][:] = 0.0  # The array is writable.
        await server.call("act")  # This call is answered after the release of the last answer.
        assert [memory.allocate(SIZE) for memory in (calls, answers)] == [0, 0]


async def test_only_a_single_call_is_answered_at_once() -> None:
    def answer_now(method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "raise":
            raise TypeError
        return "now" if method == "now" else None

    async with connect(echo, answer_now) as (server, *_):
        assert [await server.call(method) for method in ("now", "later", "raise")] == ["now", (), ()]
        assert await asyncio.gather(server.call("now"), server.call("now")) == [(), ()]


async def test_result_of_an_inference_does_not_depend_on_shared_memory() -> None:
    chunk = np.ones((1, 50, 32), np.float32)

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        return InferenceResult(chunk, 0.1, 0.2, 0.3, 0.4, 1.0, 2)

    async with connect(answer) as (server, *_):
        first = await server.call("act")
        chunk[:] = 7
        await server.call("act")
    assert isinstance(first, InferenceResult)
    assert (first.chunk == 1).all()
    assert first.batch == 2
    first.chunk[:] = 3.0  # The array is writable.


async def test_unexpected_error_is_a_fault_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        raise ValueError("/home/me/secret")

    async with connect(answer) as (server, *_):
        with pytest.raises(EngineFault, match="act raised ValueError; the server's log says more"):
            await server.call("act")
    assert "/home/me/secret" in caplog.text


async def test_calls_fail_when_the_other_end_is_gone() -> None:
    lost = asyncio.Event()

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        await asyncio.Event().wait()

    async with connect(answer, on_lost=lost.set) as (server, engine, *_):
        call = server.call("act")
        await asyncio.sleep(0.01)
        engine.close()
        with pytest.raises(ConnectionLost):
            await call
        await asyncio.wait_for(lost.wait(), 5)
        with pytest.raises(ConnectionLost):
            await server.call("act")


async def test_events_arrive_in_order() -> None:
    events: list[Any] = []
    async with connect(echo, on_event=lambda name, arguments: events.append((name, arguments))) as (server, engine, *_):
        engine.send_event("log", "a", 20, "x")
        engine.send_event("log", "b", 30, "y")
        await server.call("any")
    assert events == [("log", ("a", 20, "x")), ("log", ("b", 30, "y"))]


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1, 2}, 1 << 80])
async def test_unsupported_values_are_refused_before_they_are_sent(value: Any) -> None:
    async with connect(echo) as (server, _, calls, _):
        with pytest.raises((MessageError, OverflowError)):
            server.call("any", np.zeros(SHARED_BYTES, np.uint8), value)
        assert calls.allocate(SIZE) == 0
        assert await server.call("any") == ()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_MESSAGE + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 1) + msgpack.packb(5),
        struct.pack("<I", 3) + msgpack.packb([1, 77]),
    ],
    ids=["too long", "not msgpack", "not a list", "unknown call"],
)
async def test_malformed_message_closes_the_connection(data: bytes) -> None:
    server_end, engine_end = socket.socketpair()
    lost = asyncio.Event()
    connection = Connection(make_codec(make_memory(), make_memory(), copies=True), on_lost=lost.set)
    await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=server_end)
    with engine_end:
        engine_end.sendall(data)
        await asyncio.wait_for(lost.wait(), 5)
    assert not connection.is_open


def test_memory_is_reused_in_any_order() -> None:
    memory, random = make_memory(), np.random.default_rng(0)
    blocks: list[tuple[int, int]] = []
    for _ in range(2000):
        if blocks and random.random() < 0.5:
            memory.free(*blocks.pop(random.integers(len(blocks))))
        else:
            count = int(random.integers(1, SIZE // 8))
            if (start := memory.allocate(count)) is not None:
                assert start % ALIGNMENT == 0
                assert all(start + count <= other or other + size <= start for other, size in blocks)
                blocks.append((start, count))
    for block in blocks:
        memory.free(*block)
    assert memory.allocate(SIZE) == 0
    assert memory.allocate(1) is None


@pytest.mark.parametrize("span", [(-1, 8), (0, -1), (SIZE - 4, 8)])
def test_a_view_outside_of_the_memory_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is outside of"):
        make_memory().view(*span)
