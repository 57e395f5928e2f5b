"""Encoding of the messages between a server and its engines: msgpack, with large arrays in shared memory."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any

import msgpack
import numpy as np

from service.engines.shared_memory import SharedMemory

# Arrays from this size on (bytes) go through the shared memory; smaller ones are part of the message.
SHARED_BYTES = 16384
# Bytes of one message without the arrays in shared memory.
MAX_MESSAGE = 64 << 20
# First bytes of the buffer of an encoder, which grows. The library takes 256 KiB for each, which costs 10 us.
_BUFFER = 1024
_TUPLE, _SET, _RECORD, _ARRAY, _SHARED_ARRAY = range(5)

# Start and bytes of a block of the shared memory.
Block = tuple[int, int]
# An array of the shared memory, and the array that has to be copied to it.
Copy = tuple[np.ndarray, np.ndarray]


class MessageError(ValueError):
    """A message that cannot be encoded or decoded."""


class MessageCodec:
    """Encodes messages of one connection.

    Values are None, bool, int, float, str, bytes, list, tuple, dict, frozenset, NumPy arrays and the records.

    Args:
        records: dataclasses and named tuples that messages may have.
        outgoing: memory for the arrays of encoded messages; None puts all of them into the message.
        incoming: memory with the arrays of decoded messages.
        copies: whether decoded arrays are copies that can be written to; views of the message or the memory otherwise.
    """

    def __init__(
        self,
        records: tuple[type, ...],
        outgoing: SharedMemory | None = None,
        incoming: SharedMemory | None = None,
        *,
        copies: bool = False,
    ):
        self._records: Mapping[str, type] = {record.__name__: record for record in records}
        self._readers = {record: _read_record(record) for record in records}
        self._outgoing, self._incoming, self._copies = outgoing, incoming, copies
        self._blocks: list[Block] = []
        self._copies_left: list[Copy] = []
        self._has_shared = False

    def encode(self, message: Any) -> tuple[bytes, list[Block], list[Copy]]:
        """Return an encoded message, the blocks that are in use until its receiver has read them, and what to copy.

        The caller copies the arrays before it sends the message, because frames take too long for an event loop.

        Raises:
            MessageError: it holds a value of another type, or is too long.
        """
        self._blocks, self._copies_left = blocks, copies = [], []
        try:
            data = self._pack(message)
            if len(data) > MAX_MESSAGE:
                raise MessageError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE} are sent")
        except BaseException:
            self.free(blocks)
            raise
        return data, blocks, copies

    def free(self, blocks: list[Block]) -> None:
        """Free blocks of an encoded message, whose receiver has read them."""
        for start, count in blocks:
            assert self._outgoing is not None, "blocks are in the outgoing memory"
            self._outgoing.free(start, count)
        blocks.clear()

    def decode(self, data: bytes | memoryview) -> tuple[Any, bool]:
        """Return a message, and whether arrays of it were in shared memory.

        Raises:
            MessageError: it is malformed.
        """
        self._has_shared = False
        try:
            return self._unpack(data), self._has_shared
        except MessageError:
            raise
        except Exception as error:
            raise MessageError(f"a malformed message ({type(error).__name__}: {error})") from error

    def _unpack(self, data: bytes | memoryview) -> Any:
        return msgpack.unpackb(data, ext_hook=self._unpack_extension, strict_map_key=False)

    def _pack(self, value: Any) -> bytes:
        packed: Any = msgpack.packb(value, default=self._pack_other, strict_types=True, buf_size=_BUFFER)
        return packed

    def _pack_other(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return self._pack_array(value)
        if (read := self._readers.get(kind)) is not None:
            return msgpack.ExtType(_RECORD, self._pack([kind.__name__, *read(value)]))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, str):
            return str(value[:])
        if isinstance(value, tuple):
            return msgpack.ExtType(_TUPLE, self._pack(list(value)))
        if isinstance(value, frozenset):
            return msgpack.ExtType(_SET, self._pack(list(value)))
        if isinstance(value, Mapping):
            return dict(value)
        raise MessageError(f"a {kind.__name__} cannot be sent")

    def _pack_array(self, array: np.ndarray) -> msgpack.ExtType:
        if array.dtype.hasobject:
            raise MessageError("an array of objects cannot be sent")
        start = None
        if self._outgoing is not None and array.nbytes >= SHARED_BYTES:
            start = self._outgoing.allocate(array.nbytes)
        description = f"{array.dtype.str} {' '.join(map(str, array.shape))}\n".encode()
        if start is None:
            return msgpack.ExtType(_ARRAY, description + array.tobytes())
        assert self._outgoing is not None, "a block is in the outgoing memory"
        self._blocks.append((start, array.nbytes))
        view = np.frombuffer(self._outgoing.view(start, array.nbytes), array.dtype).reshape(array.shape)
        self._copies_left.append((view, array))
        return msgpack.ExtType(_SHARED_ARRAY, description + b"%d" % start)

    def _unpack_extension(self, code: int, data: bytes) -> Any:
        if code in (_ARRAY, _SHARED_ARRAY):
            description, _, content = data.partition(b"\n")
            dtype, *sizes = description.decode().split()
            kind, shape = np.dtype(dtype), tuple(map(int, sizes))
            if kind.hasobject:
                raise MessageError("an array of objects")
            if code == _SHARED_ARRAY:
                if self._incoming is None:
                    raise MessageError("an array in shared memory, which this connection does not have")
                self._has_shared = True
                content = self._incoming.view(int(content), math.prod(shape) * kind.itemsize)
            array = np.frombuffer(content, kind).reshape(shape)
            return array.copy() if self._copies else array
        values = self._unpack(data)
        if code == _TUPLE:
            return tuple(values)
        if code == _SET:
            return frozenset(values)
        if code == _RECORD and values[0] in self._records:
            return self._records[values[0]](*values[1:])
        raise MessageError(f"an unknown extension {code}")


def _read_record(record: Any) -> Callable[[Any], Iterable[Any]]:
    """Return a function that gives the values of a record in the order of its constructor."""
    if not is_dataclass(record):
        return tuple
    names = [field.name for field in fields(record)]
    return attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)
