"""Arrays in msgpack: ``{"inputs": {name: {"dtype", "shape", "data"}}}`` with raw little-endian numbers as data.

The msgpack package would copy all of it and build whatever is nested in it while all other threads wait. So would
msgspec 0.22, which is quicker for an observation (5 us; 31 here), but
has no limit on values (2 MB of empty maps keep it for 240 ms), takes the last of two equal names, and shows data
where it lies only to a type that has no text beside it.

Data is neither copied on the way in nor on the way out: the msgpack package would, and keep all other threads waiting.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np

from service.errors import InvalidRequest, TooLarge
from service.http.array_limits import (
    Allowance,
    ArrayLimits,
    array_error,
    check_finite,
    check_name,
    read_dtype,
    read_shape,
)

_MAP_HEADER = 4096  # bytes of a text
_MAX_DEPTH = 8
_NUMBERS: dict[int, struct.Struct] = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_B, _H, _I = struct.Struct(">B"), struct.Struct(">H"), struct.Struct(">I")
# First byte to what it is, and how its length is written, or what that is.
_KINDS: dict[int, tuple[str, struct.Struct | None, int]] = {
    **{0x80 + count: ("map", None, count) for count in range(16)},
    **{0x90 + count: ("list", None, count) for count in range(16)},
    **{0xA0 + count: ("text", None, count) for count in range(32)},
    **{first: ("data", size, 0) for first, size in ((0xC4, _B), (0xC5, _H), (0xC6, _I))},
    **{first: ("text", size, 0) for first, size in ((0xD9, _B), (0xDA, _H), (0xDB, _I))},
    **{first: ("list", size, 0) for first, size in ((0xDC, _H), (0xDD, _I))},
    **{first: ("map", size, 0) for first, size in ((0xDE, _H), (0xDF, _I))},
}


class MsgpackReader:
    """Reader of a msgpack body, value by value.

    Args:
        made: what becomes of a map that was read (arrays are written as maps), with the key that it stands under.
        wanted: the error for what is cut off or malformed.
        most: values altogether, so that none are built for long.
    """

    def __init__(
        self,
        body: bytes | memoryview,
        *,
        convert_map: Callable[[object, dict[Any, Any]], Any] = lambda key, found: found,
        create_error: Callable[[], InvalidRequest] = lambda: InvalidRequest("the body is cut off or no msgpack"),
        max_values: int = 4096,
    ):
        self._body = memoryview(body)
        self._position, self._end = 0, len(self._body)
        self._convert_map = convert_map
        self._create_error = create_error
        self._values_left = max_values

    @property
    def is_at_end(self) -> bool:
        """Whether the whole body was read."""
        return self._position == self._end

    @property
    def is_map(self) -> bool:
        """Whether a map begins at the current position."""
        return self._position < self._end and _KINDS.get(self._body[self._position], (None,))[0] == "map"

    def read_map_size(self) -> int:
        """Read the head of a map; returns its number of entries.

        Raises:
            InvalidRequest: none does.
        """
        return self._read_size("map")

    def read_data(self) -> memoryview:
        """Read binary data, as a view of the body.

        Raises:
            InvalidRequest: here are none, or not all of them.
        """
        length = self._read_size("data")
        if length > self._end - self._position:
            raise InvalidRequest("the msgpack is cut off", ("body",))
        return self._take(length)

    def read_value(self, key: object = None, depth: int = 0) -> Any:
        """Read the next value: text, a number, data, or a list or map of them.

        Raises:
            InvalidRequest: it is malformed, an extension, or nested deeply.
            TooLarge: it is too many values.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise TooLarge("the msgpack has too many values; send arrays as arrays")
        at = self._position
        if at >= self._end:
            raise self._create_error()
        first = self._body[at]
        if first < 0x80:
            self._position = at + 1
            return first
        if first >= 0xE0:
            self._position = at + 1
            return first - 0x100
        kind = _KINDS.get(first, ("", None, 0))[0]
        if kind == "text":
            return self._read_text(self._read_size("text"))
        if kind == "data":
            return self.read_data()
        if kind == "map" or kind == "list":
            if depth >= _MAX_DEPTH:
                raise self._create_error()
            if kind == "map":
                return self._read_map(key, depth)
            count = self._read_size("list")
            return [self.read_value(key, depth + 1) for _ in range(min(count, self._values_left + 1))]
        self._position = at + 1
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        number = _NUMBERS.get(first)
        if number is None:
            raise self._create_error()
        return number.unpack(self._take(number.size))[0]

    def _read_map(self, key: object, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for _ in range(min(self._read_size("map"), self._values_left + 1)):
            name = self.read_value(depth=_MAX_DEPTH)
            if isinstance(name, memoryview) and len(name) <= 64:
                name = bytes(name)
            if not isinstance(name, str | bytes) or name in found:
                raise self._create_error()
            found[name] = self.read_value(name, depth + 1)
        return self._convert_map(key, found)

    def _read_text(self, length: int) -> str:
        if length > _MAP_HEADER:
            raise self._create_error()
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError:
            raise self._create_error() from None

    def _read_size(self, expected: str) -> int:
        """Read a length, of a value that has to be of the expected kind."""
        at = self._position
        if at >= self._end:
            raise self._create_error()
        kind, packed, known = _KINDS.get(self._body[at], ("", None, 0))
        if kind != expected:
            raise self._create_error()
        self._position = at + 1
        return known if packed is None else packed.unpack(self._take(packed.size))[0]

    def _take(self, length: int) -> memoryview:
        start, end = self._position, self._position + length
        if end > self._end:
            raise self._create_error()
        self._position = end
        return self._body[start:end]


_BINARY_32 = struct.Struct(">BI")
_KEYS = ("dtype", "shape", "data")


def decode(body: bytes, limits: ArrayLimits, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Decode arrays by name; a plain number may stand for an array of a single number.

    Args:
        dtypes: by name, for plain numbers.

    Raises:
        InvalidRequest: it is not msgpack of this form, or holds something else than arrays of finite numbers.
        TooLarge: it holds more than is allowed.
    """
    reader, allowance = MsgpackReader(body, create_error=_format_error), Allowance(limits)
    if reader.read_map_size() != 1 or reader.read_value() != "inputs":
        raise _format_error()
    found = {}
    for _ in range(min(reader.read_map_size(), limits.arrays + 1)):
        name = check_name(reader.read_value())
        array = _read(reader, name, allowance) if reader.is_map else _number(reader, name, allowance, dtypes.get(name))
        found[name] = check_finite(name, array)
    if not reader.is_at_end:
        raise InvalidRequest("the msgpack goes on after its end", ("body",))
    return found


def encode(outputs: Mapping[str, np.ndarray], timings: Mapping[str, float]) -> list[bytes | memoryview]:
    """Encode arrays as ``{"outputs": {name: {"dtype", "shape", "data"}}, "timings_ms": {stage: number}}`` in pieces."""
    packer = msgpack.Packer()
    head = [packer.pack_map_header(2), packer.pack("outputs"), packer.pack_map_header(len(outputs))]
    pieces: list[bytes | memoryview] = []
    for name, array in outputs.items():
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        head += [packer.pack(name), packer.pack_map_header(3)]
        head += [packer.pack("dtype"), packer.pack(array.dtype.name)]
        head += [packer.pack("shape"), packer.pack(list(array.shape))]
        head += [packer.pack("data"), _BINARY_32.pack(0xC6, data.nbytes)]
        pieces += [b"".join(head), data.reshape(-1).view(np.uint8).data]
        head = []
    pieces.append(b"".join([*head, packer.pack("timings_ms"), packer.pack(dict(timings))]))
    return pieces


def _read(reader: MsgpackReader, name: str, allowance: Allowance) -> np.ndarray:
    parts: dict[str, Any] = {}
    for _ in range(min(reader.read_map_size(), len(_KEYS) + 1)):
        key = reader.read_value()
        if key not in _KEYS or key in parts:
            raise array_error(name, "is no array; wanted dtype, shape and data, each once")
        parts[key] = reader.read_data() if key == "data" else reader.read_value()
    dtype, shape = read_dtype(name, parts.get("dtype")), read_shape(name, parts.get("shape"))
    size = allowance.take(name, shape, dtype)
    data = parts.get("data", b"")
    if len(data) != size:
        raise array_error(name, f"has shape {list(shape)} of {dtype.name}, {size} bytes, but {len(data)} bytes of data")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)


def _number(reader: MsgpackReader, name: str, allowance: Allowance, usual: str | None) -> np.ndarray:
    value = reader.read_value()
    if not isinstance(value, int | float) or not math.isfinite(value) or abs(value) >= 2**63:
        raise array_error(name, "is no array; wanted a number, or a map of dtype, shape and data")
    is_float = isinstance(value, float) or (usual or "").startswith("float")
    array = np.asarray(value, np.float64 if is_float else None)
    allowance.take(name, array.shape, array.dtype)
    return array


def _format_error() -> InvalidRequest:
    form = '{"inputs": {name: {"dtype", "shape", "data": binary}}}'
    return InvalidRequest(f"the body is cut off or of another form; wanted msgpack of {form}", ("body", "inputs"))
