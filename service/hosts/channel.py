"""Messages between a front and a follower: over one TCP connection, each with a code that only these two can make.

Both know a secret, which never travels: each proves that it does by the code of its first message, over numbers that
both have just drawn. What is said can be read on the way, but neither made nor changed nor said again.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np

from service.arrays.limits import DTYPES
from service.hosts.errors import ChannelClosed

# Seconds between signs of life, and without any after which the other side is gone.
BEAT = 1.0
SILENCE = 10.0
GREETING = b"robojax hosts 1\n"
_DRAWN, _CODE = 32, 16
# Bytes of all, and of the part that is no arrays.
_LENGTHS = struct.Struct(">QI")
_NUMBER = struct.Struct(">Q")
LARGEST = 1 << 30

Words = dict[str, Any]
Arrays = Mapping[str, np.ndarray]


class Channel:
    """Sent from several threads, received in one.

    Args:
        sending, receiving: keys of the two directions.

    Attributes:
        heard_at: when the newest message came, monotonic.
    """

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes):
        self._connection = connection
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0
        self.heard_at = time.monotonic()
        self._lock = threading.Lock()
        connection.settimeout(SILENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, words: Words, arrays: Arrays | None = None) -> None:
        """Hand it over; waits when the other side does not take it.

        Raises:
            ChannelClosed: there is no other side any more.
        """
        with self._lock:
            self._send(words, arrays or {})

    def beat(self) -> None:
        """A sign of life, unless something else is being sent.

        Raises:
            ChannelClosed: there is no other side any more.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._send({}, {})
            finally:
                self._lock.release()

    def receive(self) -> tuple[Words, Arrays]:
        """The next message.

        Raises:
            ChannelClosed: the other side is gone, silent, or not who it should be.
        """
        while True:
            head = self._take(_LENGTHS.size)
            length, spoken = _LENGTHS.unpack(head)
            if not spoken <= length <= LARGEST:
                raise ChannelClosed("it sent something that is no message")
            body, code = self._take(length), self._take(_CODE)
            if not hmac.compare_digest(code, _code(self._receiving, self._received, head, body)):
                raise ChannelClosed("it does not know the secret")
            self._received += 1
            self.heard_at = time.monotonic()
            words, shapes = msgpack.unpackb(memoryview(body)[:spoken], strict_map_key=False)
            if words:
                return words, _arrays(body, spoken, shapes)

    def end(self, words: Words) -> None:
        """Say a last thing, if it can be said at once, and close."""
        if self._lock.acquire(timeout=1.0):
            with suppress(OSError, ChannelClosed):
                self._connection.settimeout(1.0)
                self._send(words, {})
            self._lock.release()
        self.close()

    def close(self) -> None:
        """Whoever sends or receives hears that it is closed."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, words: Words, arrays: Arrays) -> None:
        shapes = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
        spoken: Any = msgpack.packb([words, shapes])
        data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
        head = _LENGTHS.pack(len(spoken) + sum(len(piece) for piece in data), len(spoken))
        code = _code(self._sending, self._sent, head, spoken, *data)
        self._sent += 1
        try:
            for piece in (head + spoken, *data, code):
                self._connection.sendall(piece)
        except OSError as error:
            raise ChannelClosed(_why(error)) from error

    def _take(self, length: int) -> bytearray:
        return _exactly(self._connection, length)


def greet_follower(connection: socket.socket, secret: bytes) -> Channel:
    """The front's side of the beginning.

    Raises:
        ChannelClosed: it is no follower, or does not know the secret.
    """
    drawn = secrets.token_bytes(_DRAWN)
    _say(connection, GREETING + drawn)
    theirs = bytes(_exactly(connection, _DRAWN))
    return Channel(connection, _key(secret, b"front", drawn, theirs), _key(secret, b"follower", drawn, theirs))


def greet_front(connection: socket.socket, secret: bytes) -> Channel:
    """The follower's side.

    Raises:
        ChannelClosed: it is no front.
    """
    if bytes(_exactly(connection, len(GREETING))) != GREETING:
        raise ChannelClosed("it is no front of several hosts, or one of another version")
    drawn, mine = bytes(_exactly(connection, _DRAWN)), secrets.token_bytes(_DRAWN)
    _say(connection, mine)
    return Channel(connection, _key(secret, b"follower", drawn, mine), _key(secret, b"front", drawn, mine))


def _key(secret: bytes, who: bytes, *drawn: bytes) -> bytes:
    return hmac.digest(secret, who + b"".join(drawn), "sha256")


def _code(key: bytes, number: int, *pieces: Any) -> bytes:
    code = hashlib.blake2b(_NUMBER.pack(number), key=key, digest_size=_CODE)
    for piece in pieces:
        code.update(piece)
    return code.digest()


def _arrays(body: bytearray, start: int, shapes: list[Any]) -> Arrays:
    found, at = {}, start
    for name, kind, shape in shapes:
        dtype = DTYPES[kind]
        count = int(np.prod(shape, dtype=np.int64))
        found[name] = np.frombuffer(body, dtype, count, at).reshape(shape)
        at += count * dtype.itemsize
    return found


def _say(connection: socket.socket, what: bytes) -> None:
    try:
        connection.sendall(what)
    except OSError as error:
        raise ChannelClosed(_why(error)) from error


def _exactly(connection: socket.socket, length: int) -> bytearray:
    found = bytearray(length)
    view, at = memoryview(found), 0
    while at < length:
        try:
            count = connection.recv_into(view[at:])
        except OSError as error:
            raise ChannelClosed(_why(error)) from error
        if not count:
            raise ChannelClosed("it closed the connection")
        at += count
    return found


def _why(error: OSError) -> str:
    return f"nothing was heard of it for {SILENCE:g} s" if isinstance(error, TimeoutError) else str(error.strerror)
