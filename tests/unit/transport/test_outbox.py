"""Outbox of frames to sockets: in order, bounded for each peer, and in slices for many peers."""

import asyncio
from typing import Any

import pytest
from sanic.exceptions import WebsocketClosed
from websockets.protocol import State

from service.transport.server.websocket import Outbox, OutboxLimits, WriteQueue

pytestmark = pytest.mark.timed

WRITE = 0.0001  # Seconds of the test's clock per write, so that ten writes fit into one slice.
PER_SLICE = round(WriteQueue.SLICE / WRITE)


class Socket:
    """Double of the parts of Sanic's WebSocket and its connection that an outbox uses."""

    def __init__(self, wire: "Wire"):
        self.wire = wire
        self.io_proto = self.transport = self.ws_proto = self
        self.state = State.OPEN
        self.unread = 0
        self.got: list[str] = []
        self.ending: str | None = None
        self._sending: list[bytes] = []

    def is_closing(self) -> bool:
        return self.ending is not None

    def get_write_buffer_size(self) -> int:
        return self.unread

    def send_text(self, text: bytes) -> None:
        self._sending.append(text)

    def data_to_send(self) -> list[bytes]:
        sending, self._sending = self._sending, []
        return sending

    def write(self, data: bytes) -> None:
        self.wire.count(self)
        self.got.append(data.decode())

    async def send(self, text: str) -> None:
        while self.unread:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if self.state is not State.OPEN:
            raise WebsocketClosed
        self.got.append(text)

    async def close(self, code: int, reason: str) -> None:
        self.ending = reason

    async def wait_for_connection_lost(self) -> None: ...

    def abort(self) -> None:
        self.ending = "aborted"


class Wire:
    """All sockets of a server, and a clock that only writes advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turn = 0
        self.writes: list[tuple[int, Socket]] = []  # Turn of the event loop and socket of each write.
        self.queue = WriteQueue(lambda: self.now)
        self.tasks: list[asyncio.Task[None]] = []

    def count(self, socket: Socket) -> None:
        self.now += WRITE
        self.writes.append((self.turn, socket))

    def peer(self, **limits: Any) -> tuple[Socket, Outbox]:
        socket = Socket(self)
        outbox = Outbox(socket, OutboxLimits(**limits), self.queue)  # pyright: ignore[reportArgumentType]
        self.tasks.append(asyncio.create_task(outbox.run()))
        return socket, outbox

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@pytest.fixture
async def wire():
    wire = Wire()
    wire.tasks.append(asyncio.create_task(wire.count_turns()))
    yield wire
    for task in wire.tasks:
        task.cancel()
    await asyncio.gather(*wire.tasks, return_exceptions=True)


async def test_a_broadcast_to_a_thousand_is_written_in_slices(wire: Wire):
    peers = [wire.peer() for _ in range(1000)]
    robot, to_robot = wire.peer()
    await asyncio.sleep(0)
    for _, outbox in peers:
        outbox.put("a flood", is_urgent=False)
    assert not wire.writes
    waited = asyncio.create_task(wire.queue.wait_written())
    await asyncio.sleep(0.005)
    assert not waited.done()
    to_robot.put("a command")
    assert robot.got == ["a command"]
    async with asyncio.timeout(30):
        await waited
    assert all(socket.got == ["a flood"] for socket, _ in peers)
    turns = [turn for turn, socket in wire.writes if socket is not robot]
    assert max(map(turns.count, set(turns))) <= PER_SLICE + 1
    # A pause of the length of a slice follows each slice, so that other work has several turns.
    assert turns[-1] - turns[0] >= 2 * len(peers) / PER_SLICE


async def test_frames_of_a_peer_keep_their_order_on_every_path(wire: Wire):
    socket, outbox = wire.peer()
    for number in range(4):
        outbox.put(str(number), is_urgent=number != 1)
    assert socket.got == ["0"]
    await wire.queue.wait_written()
    outbox.put("4")
    assert socket.got == list("01234")
    socket.unread = 1
    for number in range(5, 8):
        outbox.put(str(number))
    await asyncio.sleep(0.01)
    assert len(socket.got) == 5
    socket.unread = 0
    await asyncio.sleep(0.01)
    outbox.put("8", is_urgent=False)
    outbox.close("over")
    async with asyncio.timeout(30):
        await wire.tasks[-1]
    assert socket.got == list("012345678")
    assert socket.ending == "over"


async def test_a_peer_that_does_not_read_is_disconnected_at_its_limit(wire: Wire):
    slow, to_slow = wire.peer(messages=3)
    other, to_other = wire.peer()
    slow.unread = 1
    for number in range(3):
        to_slow.put(str(number), is_urgent=False)
    to_other.put("on time", is_urgent=False)
    async with asyncio.timeout(30):
        await wire.queue.wait_written()
    assert other.got == ["on time"]
    assert not to_slow.is_aborted
    await asyncio.sleep(0.01)
    to_slow.put("3", is_urgent=False)  # One frame is being written and three frames wait.
    to_slow.put("4", is_urgent=False)
    assert to_slow.is_aborted
    assert slow.ending == "aborted"
