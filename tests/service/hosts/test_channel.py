"""Messages between hosts: whole, in order, and only from whoever knows the secret."""

import socket
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from service.hosts.channel import _CODE, _LENGTHS, Channel, _exactly, greet_follower, greet_front
from service.hosts.errors import ChannelClosed

SECRET = b"a secret of some length"


def meet(front: socket.socket, follower: socket.socket, secret: bytes = SECRET) -> tuple[Channel, Channel]:
    found: list[Channel] = []
    thread = threading.Thread(target=lambda: found.append(greet_front(follower, secret)))
    thread.start()
    channel = greet_follower(front, SECRET)
    thread.join(30)
    return channel, found[0]


def taken(connection: socket.socket) -> bytearray:
    """One message as it came, in however many pieces."""
    head = _exactly(connection, _LENGTHS.size)
    length, _ = _LENGTHS.unpack(head)
    return head + _exactly(connection, length + _CODE)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    server = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    with server, one, other:
        yield one, other


def test_words_and_arrays_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    front, follower = meet(*pair)
    rng = np.random.default_rng(0)
    arrays = {
        "picture": rng.integers(0, 255, (2, 48, 64, 3), dtype=np.uint8)[:, ::2],
        "state": rng.standard_normal((2, 6)).astype(np.float32),
        "number": np.array(7, np.int64),
        "half": np.ones((1, 3), ml_dtypes.bfloat16),
        "none": np.zeros((0, 3), np.float32),
    }
    front.beat()
    front.send({"do": "act", "texts": {"task": ["lift the cube"]}, "none": None}, arrays)
    follower.send({"is": "answer"})
    words, found = follower.receive()
    assert words == {"do": "act", "texts": {"task": ["lift the cube"]}, "none": None}
    assert {name: array.dtype for name, array in found.items()} == {name: a.dtype for name, a in arrays.items()}
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    assert front.receive() == ({"is": "answer"}, {})


def test_whoever_does_not_know_the_secret_is_not_heard(pair: tuple[socket.socket, socket.socket]) -> None:
    front, stranger = meet(*pair, secret=b"another secret, as long")
    stranger.send({"versions": {}})
    with pytest.raises(ChannelClosed, match="does not know the secret"):
        front.receive()
    front.send({"do": "end"})
    with pytest.raises(ChannelClosed, match="does not know the secret"):
        stranger.receive()


@pytest.mark.parametrize("change", ["said again", "changed", "turned around"])
def test_what_is_changed_on_the_way_is_refused(pair: tuple[socket.socket, socket.socket], change: str) -> None:
    front, follower = meet(*pair)
    front.send({"do": "act"}, {"state": np.ones(6, np.float32)})
    raw = taken(pair[1])
    if change == "turned around":
        pair[1].sendall(raw)
        listener = front
    else:
        listener = follower
        if change == "changed":
            raw[-20] ^= 1
        pair[0].sendall(raw)
        if change == "said again":
            assert follower.receive()[0] == {"do": "act"}
            pair[0].sendall(raw)
    with pytest.raises(ChannelClosed, match="does not know the secret"):
        listener.receive()


def test_a_stranger_and_an_end_are_told(pair: tuple[socket.socket, socket.socket]) -> None:
    front, follower = meet(*pair)
    front.end({"do": "end", "why": None})
    assert follower.receive()[0] == {"do": "end", "why": None}
    with pytest.raises(ChannelClosed, match="closed the connection"):
        follower.receive()
    with pytest.raises(ChannelClosed):
        front.send({"do": "act"})


def test_something_that_is_no_front_is_known_as_such(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ChannelClosed, match="no front of several hosts"):
        greet_front(pair[1], SECRET)
